"""Log-probabilities of chosen tokens and of the best ones beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.launch import TokenLogprobs
from plugins.executor.sampling import SamplingKernels
from plugins.executor.upload import download

CHUNK_ROWS = 256
"""Rows of logits worked on at a time: bounds the memory of a long prompt's scores."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """chosen float32 [n]; top_ids int64 and top_logprobs float32 [n, m], best first. On their way
    to the host: read them when the launch has been waited for."""

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One entry a row, with the first num_top[i] of the best."""
        ids, logprobs = self.top_ids.int().numpy(), self.top_logprobs.numpy()
        return [
            TokenLogprobs(chosen, ids[i, : num_top[i]], logprobs[i, : num_top[i]])
            for i, chosen in enumerate(self.chosen.tolist())
        ]


def score(
    logits: Tensor, tokens: Tensor, num_top: int, kernels: SamplingKernels | None = None
) -> Entries:
    """Entries for tokens int64 [n] under logits [n, vocab_size]; a masked token gets -inf,
    and every token of a row that holds a NaN or +inf gets NaN."""
    if kernels is not None:
        return Entries(*map(download, kernels.score(logits.float(), tokens, num_top)))
    parts = [
        _score(
            logits[begin : begin + CHUNK_ROWS].float(), tokens[begin : begin + CHUNK_ROWS], num_top
        )
        for begin in range(0, len(tokens), CHUNK_ROWS)
    ]
    chosen, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return Entries(download(chosen), download(top_ids), download(top_logprobs))


def _score(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    # A row with every token masked has no distribution: log_softmax yields NaN, -inf is the answer.
    masked = logits.amax(-1, keepdim=True) == -torch.inf
    logprobs = logits.log_softmax(-1).masked_fill_(masked, -torch.inf)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best = logprobs.topk(num_top, dim=-1)
    return chosen, best.indices, best.values
