"""Launches that test_compiled.py compiles: of kernels on CPU tensors, with nothing run."""

import torch

from kernels.declare import Rows
from kernels.extend import extend, plan_extend
from kernels.split_kv import SplitKV
from kernels.split_launch import DecodeConfig

KV_HEADS = 8


def _tensors(rows, tokens, head_dim, kv_dtype, page_size, group):
    cache_dtype = getattr(torch, kv_dtype)
    dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
    q = torch.zeros(tokens, KV_HEADS * group, head_dim, dtype=dtype)
    cache = torch.zeros(4, page_size, KV_HEADS, head_dim, dtype=cache_dtype)
    table = torch.zeros(rows, 128, dtype=torch.int32)
    return q, cache, cache.clone(), table, torch.ones(rows, dtype=torch.int32)


def decode(head_dim=128, kv_dtype="bfloat16", page_size=16, group=4, rows=64, config=None):
    tensors = _tensors(rows, rows, head_dim, kv_dtype, page_size, group)
    chosen = None if config is None else DecodeConfig(**config)
    SplitKV(config=chosen)(*tensors, head_dim**-0.5)


def prefill(head_dim=128, kv_dtype="bfloat16", page_size=16, group=4, tokens=2048):
    q, k, v, table, lens = _tensors(1, tokens, head_dim, kv_dtype, page_size, group)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    shape = (KV_HEADS * group, KV_HEADS, head_dim)
    plan = plan_extend(Rows(table, lens, starts, [tokens], [tokens], page_size, *shape))
    extend(q, k, v, table, lens, starts, head_dim**-0.5, plan=plan)
