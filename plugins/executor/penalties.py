"""Repetition, presence and frequency penalties from token counts that stay on the device.

presence and frequency count output tokens, repetition a token of prompt or output once. Counts grow
with each sampled token as it leaves the sampler, so that tokens still in flight to the host are
counted too."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.launch import RowSetup
from plugins.executor.upload import upload


class PenaltyCounts:
    """Counts over [num_rows, vocab_size], allocated when the first row with a penalty arrives."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._outputs: Tensor | None = None  # int32: how often a row's output holds a token
        self._prompts: Tensor | None = None  # bool: whether its prompt does

    def reset(self, setups: Sequence[RowSetup]) -> None:
        """Count from the known tokens of rows that start or resume."""
        if self._outputs is None or self._prompts is None:
            self._outputs = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._prompts = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        known = upload(_known_tokens(setups), self._device)
        self._prompts.index_fill_(0, known["rows"], False)
        prompts = (known["prompt_rows"], known["prompt_tokens"])
        self._prompts.index_put_(prompts, torch.ones_like(prompts[0], dtype=torch.bool))
        self._outputs.index_fill_(0, known["rows"], 0)
        outputs = (known["output_rows"], known["output_tokens"])
        ones = torch.ones_like(outputs[0], dtype=torch.int32)
        self._outputs.index_put_(outputs, ones, accumulate=True)

    def apply(
        self, logits: Tensor, rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """Penalised logits float32 [n, vocab_size]; rows int64 [n], factors float32 [n, 1]."""
        outputs, prompts = self.tables()
        counts = outputs[rows]
        produced = counts > 0
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(prompts[rows] | produced, scaled, logits)
        return logits - frequency * counts - presence * produced

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """One more token for each of the distinct rows; both int64 [n]."""
        self.tables()[0][rows, tokens] += 1

    def tables(self) -> tuple[Tensor, Tensor]:
        """How often each row's output holds each token, int32 [num_rows, vocab_size], and whether
        its prompt does, bool."""
        assert self._outputs is not None, "no row was reset"
        assert self._prompts is not None, "no row was reset"
        return self._outputs, self._prompts


def _known_tokens(setups: Sequence[RowSetup]) -> dict[str, NDArray[Any]]:
    rows = np.array([setup.row for setup in setups])
    prompt_lens = np.array([setup.prompt_len for setup in setups])
    output_lens = np.array([len(setup.tokens) for setup in setups]) - prompt_lens
    return {
        "rows": rows,
        "prompt_rows": rows.repeat(prompt_lens),
        "prompt_tokens": np.concatenate([setup.tokens[: setup.prompt_len] for setup in setups]),
        "output_rows": rows.repeat(output_lens),
        "output_tokens": np.concatenate([setup.tokens[setup.prompt_len :] for setup in setups]),
    }
