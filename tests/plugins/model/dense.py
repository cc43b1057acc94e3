"""A plain contiguous KV cache as the `attend` of model tests, and greedy decoding over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass
class DenseCache:
    """KV of any number of sequences, one tensor a layer and sequence. `begin` names the rows of a
    pass."""

    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (sequence, tokens) of this pass
    calls: list[int] = field(default_factory=list)
    stored: tuple[int, Tensor, Tensor] | None = None  # layer, K and V that the next call is about

    def begin(self, rows: list[tuple[int, int]]) -> None:
        """Declare the sequences of the next forward pass and how many tokens each brings."""
        self.rows = rows
        self.calls = []

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Kept by the call that must follow."""
        assert self.stored is None, "K and V were stored twice"
        self.stored = (layer, k, v)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        assert self.stored is not None, "nothing was stored"
        assert self.stored[0] == layer
        assert torch.equal(self.stored[1], k)
        assert torch.equal(self.stored[2], v)
        self.stored = None
        self.calls.append(layer)
        outputs, start = [], 0
        for sequence, num_tokens in self.rows:
            part = slice(start, start + num_tokens)
            outputs.append(self._one(layer, sequence, q[part], k[part], v[part], scale, window))
            start += num_tokens
        assert start == q.shape[0], "rows do not cover the packed tokens"
        return torch.cat(outputs)

    def _one(
        self,
        layer: int,
        sequence: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        key = (layer, sequence)
        if key in self.keys:
            k, v = torch.cat((self.keys[key], k)), torch.cat((self.values[key], v))
        self.keys[key], self.values[key] = k, v
        past = k.shape[0] - q.shape[0]
        distance = torch.arange(past, k.shape[0])[:, None] - torch.arange(k.shape[0])[None, :]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale).transpose(0, 1)


@torch.inference_mode()
def prompt_logits(model: Any, prompt: Sequence[int]) -> Tensor:
    """Logits of every position of one prompt, float32 [len, vocab]."""
    cache = DenseCache()
    cache.begin([(0, len(prompt))])
    rows = torch.arange(len(prompt))
    logits: Tensor = model.forward(torch.tensor(prompt), rows, cache, rows)
    return logits


@torch.inference_mode()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    chunk: int | None = None,
    end_token_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Greedy tokens of several prompts, all rows packed in each pass, prompts in pieces of
    `chunk`."""
    ends = model.end_token_ids if end_token_ids is None else end_token_ids
    cache = DenseCache()
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    done = [False] * len(prompts)
    while not all(done):
        rows = [
            (i, min(chunk or len(ids), len(ids) - computed[i]))
            for i, ids in enumerate(known)
            if not done[i]
        ]
        cache.begin(rows)
        ids = [known[i][computed[i] : computed[i] + n] for i, n in rows]
        positions = [torch.arange(computed[i], computed[i] + n) for i, n in rows]
        last = torch.tensor([n for _, n in rows]).cumsum(0) - 1
        packed = torch.tensor([token for part in ids for token in part])
        logits = model.forward(packed, torch.cat(positions), cache, last)
        assert cache.calls == list(range(model.num_layers))
        assert logits.shape == (len(rows), model.vocab_size)
        assert logits.dtype == torch.float32
        for (i, n), token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            computed[i] += n
            if computed[i] == len(known[i]):
                known[i].append(token)
                new = len(known[i]) - len(prompts[i])
                done[i] = token in ends or new == max_new_tokens
    return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]


def load(path: Any, **settings: Any) -> Any:
    """The model that HuggingFaceModel builds on the CPU."""
    from core.queries import ModelQuery
    from plugins.model.loader import HuggingFaceModel

    query = ModelQuery(device="cpu", seed=0, progress=False)
    return HuggingFaceModel(None if path is None else str(path), **settings).build_model(query)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Apply `change` to the dict of tensors of a saved single-file model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
