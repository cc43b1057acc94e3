"""What a model calls for attention during one launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plugins.executor.pool import KVPool
from plugins.shared.model_protocols import AttentionBackend, KVTarget


class LaunchAttention:
    """model_protocols.Attend for one launch. slots: int64 [num_tokens], where its new K and V
    go; plan: the backend's metadata; num_decode: rows of one token, which come first, in a graph
    the most of them; has_chunks:
    longer ones follow, else only padding does, which gets zeros. side: a stream of a CUDA device,
    on which longer rows are served while those are: one kernel keeps the matrix units busy, the
    other the memory. None = one after the other. out: where results go if they are of its type.
    in_graph: as of the plan's AttentionBatch."""

    def __init__(
        self,
        pool: KVPool,
        backend: AttentionBackend,
        slots: Tensor,
        plan: Any,
        num_decode: int,
        has_chunks: bool,
        side: torch.cuda.Stream | None = None,
        out: Tensor | None = None,
        in_graph: bool = False,
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._slots = slots
        self._plan = plan
        self._num_decode = num_decode
        self._has_chunks = has_chunks
        self._side = side
        self._out = out
        self._in_graph = in_graph

    def target(self, layer: int) -> KVTarget:
        """Where the layer's K and V go."""
        return self._pool.target(layer, self._slots)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the layer's K and V into the pool."""
        self._pool.store(layer, self._slots, k, v)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend over the pool, which holds k and v already. See model_protocols.Attend."""
        cache, plan = self._pool.layer(layer), self._plan
        queries, split = self._pool.as_queries(q), self._num_decode

        out = self._out
        if out is None or out.dtype != queries.dtype:
            out = queries.new_empty(queries.shape)

        def decode() -> None:
            self._backend.decode(queries[:split], *cache, plan, scale, window, out[:split])

        def extend() -> None:
            new_k, new_v = (one[split:].to(queries.dtype) for one in (k, v))
            given = queries[split:], *cache, plan, scale, window
            self._backend.extend(*given, new_k, new_v, out[split:])

        if self._in_graph:
            decode()
            self._backend.extend(queries, *cache, plan, scale, window, out=out)
        elif not self._has_chunks:
            decode()
            out[split:].zero_()
        elif not split:
            extend()
        else:
            at_once(decode, extend, self._side)
        return out.to(q.dtype)


def at_once(
    main: Callable[[], None], beside: Callable[[], None], side: torch.cuda.Stream | None
) -> None:
    """Run both, `beside` enqueued first and on the stream `side`; None = on the current one.

    Every use of `side` begins and ends by waiting, so that tensors may be freed on either stream
    without a record."""
    if side is None:
        main()
        beside()
        return
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        beside()
    main()
    current.wait_stream(side)
