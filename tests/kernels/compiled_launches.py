"""Launches that test_compiled.py compiles: of kernels on CPU tensors, with nothing run."""

import re
import subprocess
from tempfile import NamedTemporaryFile

import torch
import triton

from kernels import extend_hopper
from kernels.declare import Rows
from kernels.extend import extend, plan_extend
from kernels.extend_tma import DenseConfig
from kernels.rms_norm import rms_norm
from kernels.rotary_store import RotaryStoreConfig, StoreTarget, rotary_store
from kernels.shared_prefix import HOPPER, SMALLER, SharedPrefix
from kernels.split_kv import SplitKV
from kernels.split_launch import DecodeConfig
from kernels.swiglu import swiglu

KV_HEADS = 8


def _tensors(rows, tokens, head_dim, kv_dtype, page_size, group):
    cache_dtype = getattr(torch, kv_dtype)
    dtype = torch.bfloat16 if cache_dtype.itemsize == 1 else cache_dtype
    q = torch.zeros(tokens, KV_HEADS * group, head_dim, dtype=dtype)
    cache = torch.zeros(4, page_size, KV_HEADS, head_dim, dtype=cache_dtype)
    table = torch.zeros(rows, 128, dtype=torch.int32)
    return q, cache, cache.clone(), table, torch.ones(rows, dtype=torch.int32)


def decode(
    head_dim=128, kv_dtype="bfloat16", page_size=16, group=4, rows=64, config=None, splits="auto"
):
    tensors = _tensors(rows, rows, head_dim, kv_dtype, page_size, group)
    chosen = None if config is None else DecodeConfig(**config)
    SplitKV(splits, config=chosen)(*tensors, head_dim**-0.5)


def shared(head_dim=128, kv_dtype="bfloat16", page_size=16, group=4, rows=64, smaller=False):
    tensors = _tensors(rows, rows, head_dim, kv_dtype, page_size, group)
    key = tensors[1].itemsize, 128 if head_dim <= 128 else 256
    config = (SMALLER if smaller else HOPPER)[key]
    kernel = SharedPrefix(prefix_config=config, min_prefix_tokens=16, min_saved_bytes=0)
    kernel(*tensors, head_dim**-0.5)


def rotary(head_dim=128, kv_dtype="bfloat16", group=4, tokens=16, config=None, norm=False):
    q, cache = _tensors(1, tokens, head_dim, kv_dtype, 1, group)[:2]
    qkv = torch.zeros(tokens, (group + 2) * KV_HEADS, head_dim, dtype=q.dtype)
    slots = cache.new_zeros(4, KV_HEADS, head_dim)
    target = StoreTarget(slots, slots.clone(), torch.zeros(tokens, dtype=torch.int64))
    cos = torch.zeros(tokens, head_dim // 2, dtype=q.dtype)
    chosen = None if config is None else RotaryStoreConfig(**config)
    norms = (qkv.new_zeros(head_dim), qkv.new_zeros(head_dim)) if norm else None
    rotary_store(qkv, KV_HEADS * group, target, cos, cos.clone(), norms, config=chosen)


def norm_and_gate(width=1024):
    x = torch.zeros(16, width, dtype=torch.bfloat16)
    rms_norm(x, x[0].clone(), 1e-6, x.clone())
    swiglu(x)


def prefill(head_dim=128, kv_dtype="bfloat16", page_size=16, group=4, tokens=2048):
    q, k, v, table, lens = _tensors(1, tokens, head_dim, kv_dtype, page_size, group)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    shape = (KV_HEADS * group, KV_HEADS, head_dim)
    plan = plan_extend(Rows(table, lens, starts, [tokens], [tokens], page_size, *shape))
    extend(q, k, v, table, lens, starts, head_dim**-0.5, plan=plan)


def dense(form):
    """(products, products that end a group, registers, stack bytes) of dense prefill on sm_90,
    compiled here (Gluon has a compiler entry of its own)."""
    kernel = extend_hopper.compiled(90, "bf16", 128, DenseConfig(form))
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass, usage = (_dump(option, file.name) for option in ("-sass", "-res-usage"))
    products = re.findall(r"HGMMA[^;]*;", sass)
    ends = [one for one in products if "gsb0" in one]
    numbers = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return len(products), len(ends), *numbers


def _dump(option, file):
    command = [triton.knobs.nvidia.cuobjdump.path, option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
