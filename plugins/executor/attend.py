"""What a model calls for attention during one launch."""

from typing import Any

import torch
from torch import Tensor

from core.protocols import AttentionBackend, KVTarget
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

    def target(self, layer: int) -> KVTarget:
        """Where the layer's K and V go."""
        return self._pool.target(layer, self._slots)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the layer's K and V into the pool."""
        self._pool.store(layer, self._slots, k, v)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend over the pool, which holds k and v already. See core.protocols.Attend."""
        cache, plan = self._pool.layer(layer), self._plan
        queries, split = self._pool.as_queries(q), self._num_decode
        parts = []
        if split:
            parts.append(self._backend.decode(queries[:split], *cache, plan, scale, window))
        if split < len(queries):
            new = (one[split:].to(queries.dtype) for one in (k, v))
            rest = queries[split:]
            parts.append(self._backend.extend(rest, *cache, plan, scale, window, *new))
        out: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.to(q.dtype)
