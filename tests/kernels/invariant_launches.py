"""Launches that test_compiled_invariant.py compiles: of kernels on CPU tensors, nothing is run."""

import torch

from kernels.invariant import InvariantDecode
from kernels.matmul import CONFIGS, matmul

KV_HEADS = 8


def decode(head_dim=128, dtype="bfloat16", kv_dtype=None, page_size=16, group=2, rows=64, pages=64):
    """pages: of a row, which decides how many splits there may be."""
    cache_dtype = getattr(torch, kv_dtype or dtype)
    q = torch.zeros(rows, KV_HEADS * group, head_dim, dtype=getattr(torch, dtype))
    cache = torch.zeros(4, page_size, KV_HEADS, head_dim, dtype=cache_dtype)
    table = torch.zeros(rows, pages, dtype=torch.int32)
    lens = torch.ones(rows, dtype=torch.int32)
    InvariantDecode()(q, cache, cache.clone(), table, lens, head_dim**-0.5)


def product(config, dtype="bfloat16"):
    x, weight = (torch.zeros(256, 2048, dtype=getattr(torch, dtype)) for _ in range(2))
    matmul(x, weight, x[0, :256].clone(), CONFIGS[config])
