"""What a model calls for attention during one launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.protocols import AttentionBackend, KVTarget
from plugins.executor.pool import KVPool


class LaunchAttention:
    """core.protocols.Attend for one launch. slots: int64 [num_tokens], where its new K and V go;
    plan: the backend's metadata; num_decode: rows of one token, which come first; has_chunks:
    longer ones follow, else only padding does, which gets zeros. side: a stream of a CUDA device,
    on which longer rows are served while those are: one kernel keeps the matrix units busy, the
    other the memory. None = one after the other."""

    def __init__(
        self,
        pool: KVPool,
        backend: AttentionBackend,
        slots: Tensor,
        plan: Any,
        num_decode: int,
        has_chunks: bool,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._slots = slots
        self._plan = plan
        self._num_decode = num_decode
        self._has_chunks = has_chunks
        self._side = side

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

        def decode() -> Tensor:
            out: Tensor = self._backend.decode(queries[:split], *cache, plan, scale, window)
            return out

        def extend() -> Tensor:
            new = (one[split:].to(queries.dtype) for one in (k, v))
            out: Tensor = self._backend.extend(queries[split:], *cache, plan, scale, window, *new)
            return out

        if not split:
            out = extend()
        elif not self._has_chunks:
            out = pad(decode(), (0, 0, 0, 0, 0, len(queries) - split))
        else:
            out = torch.cat(at_once(decode, extend, self._side))
        return out.to(q.dtype)


def at_once(
    main: Callable[[], Tensor], beside: Callable[[], Tensor], side: torch.cuda.Stream | None
) -> tuple[Tensor, Tensor]:
    """Results of both, `beside` enqueued first and on the stream `side`; None = on the current one.

    Every use of `side` begins and ends by waiting, so that tensors may be freed on either stream
    without a record."""
    if side is None:
        return main(), beside()
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        second = beside()
    first = main()
    current.wait_stream(side)
    return first, second
