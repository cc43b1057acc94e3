"""What ranks of a tensor-parallel model do together, over torch.distributed: NCCL between GPUs,
gloo between CPUs.

The group is an object of its own, not the process's default group: two engines of one process do
not meet. NCCL's collectives run on the current stream, so that nothing waits for another stream and
a CUDA graph captures them like kernels.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

TIMEOUT_S = 120.0
"""How long one rank waits for the others in a collective: compiling a kernel may hold one up."""
LOOPBACK = "127.0.0.1"


class DistributedGroup:
    """A model_protocols.RankGroup over a process group of torch. in_rank_order: sums are of fixed
    order, so that a token's do not depend on how many stand beside it."""

    def __init__(self, group: Any, in_rank_order: bool = False) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        # Of two numbers there is but one sum.
        self._in_rank_order = in_rank_order and self.size > 2
        self._group = group
        self._sum, self._gather, self._take = (
            _on_current_stream(options())
            for options in (AllreduceOptions, AllgatherOptions, BroadcastOptions)
        )

    def sum(self, x: Tensor) -> Tensor:
        """x added up over the ranks, in place."""
        if self._in_rank_order:
            parts = self.gather(x)
            x.copy_(parts[0])
            for part in parts[1:]:
                x += part
        elif x.numel():
            _wait(self._group.allreduce([x], self._sum))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], rank by rank; to all ranks, which takes links no longer than to one."""
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        if x.numel():
            _wait(self._group._allgather_base(parts, x.contiguous(), self._gather))
        return parts.view(self.size, *x.shape)

    def take_first(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place."""
        if x.numel():
            _wait(self._group.broadcast([x], self._take))
        return x

    def abort(self) -> None:
        """Let go of whoever waits in a collective; nothing can be computed together any more."""
        self._group.abort()


def connect(
    store: Store, rank: int, size: int, device: torch.device, in_rank_order: bool
) -> DistributedGroup:
    """Meet the other ranks, who share the store. Waits for them all."""
    timeout = timedelta(seconds=TIMEOUT_S)
    group: Any
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(range(size))
        group = ProcessGroupNCCL(store, rank, size, options)
    else:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        group = gloo(store, rank, size, options)
    found = DistributedGroup(group, in_rank_order)
    found.sum(torch.zeros(1, device=device))  # NCCL connects at the first use
    return found


def _on_current_stream(options: Any) -> Any:
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    """On a GPU the stream waits, not the host; NCCL on the current stream may return nothing."""
    if work is not None:
        work.wait()
