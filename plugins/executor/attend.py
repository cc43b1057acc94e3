"""What a model calls for attention during one launch."""

from typing import Any

import torch
from torch import Tensor

from core.protocols import AttentionBackend
from plugins.executor.pool import KVPool


class LaunchAttention:
    """core.protocols.Attend for one launch. slots: int64 [num_tokens], where its new K and V go;
    plan: the backend's metadata; num_decode: rows of one token, which come first."""

    def __init__(
        self, pool: KVPool, backend: AttentionBackend, slots: Tensor, plan: Any, num_decode: int
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._slots = slots
        self._plan = plan
        self._num_decode = num_decode

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Store the layer's K and V, then attend. See core.protocols.Attend."""
        self._pool.store(layer, self._slots, k, v)
        cache = self._pool.layer(layer)
        queries, split = q.to(cache[0].dtype), self._num_decode
        parts = []
        if split:
            parts.append(self._backend.decode(queries[:split], *cache, self._plan, scale, window))
        if split < len(queries):
            parts.append(self._backend.extend(queries[split:], *cache, self._plan, scale, window))
        out: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.to(q.dtype)
