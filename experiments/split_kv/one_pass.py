"""Decode attention in a single pass, a program a row and KV head, for experiments.kernels.bench
--peers: the split kernel told to cut nothing (`+kernel=single_pass`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.kernels.cases import HEAD_DIM, HEADS, KV_HEADS, SCALE
from kernels.declare import Rows
from kernels.split_kv import SplitKV

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int]]


def one_pass(
    inputs: Inputs, new: list[int], context: list[int], page_size: int
) -> tuple[Callable[[], object], Tensor]:
    """A call planned beforehand, and where it writes. Raises ValueError for rows that do not
    decode."""
    if max(new) > 1:
        raise ValueError("it decodes alone")
    q, k_cache, v_cache, table, starts, lens, _, _ = inputs
    rows = Rows(table, lens, starts, context, new, page_size, HEADS, KV_HEADS, HEAD_DIM)
    kernel, out = SplitKV(splits=1), torch.empty_like(q)
    plan = kernel.plan(rows)
    return lambda: kernel(q, k_cache, v_cache, table, lens, SCALE, plan=plan, out=out), out


IMPL = {"one_pass": one_pass}
