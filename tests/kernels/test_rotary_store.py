"""Norms, rotary embedding and KV store against plain torch in float32."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kernels import pinned
from kernels import rotary_store as module
from kernels.rotary_store import (
    RotaryStoreConfig,
    StoreTarget,
    default_config,
    pinned_choice,
    rotary_store,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
# A unit in the last place; with norms two, since the normalised value is rounded in between.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-6


def rounded(x, dtype):
    return x.to(dtype).float()


def normed(x, weight, dtype):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return rounded(rounded(x * scale, dtype) * weight.float(), dtype)


def rotated(x, cos, sin, interleaved):
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
    else:
        a, b = x.chunk(2, -1)
    parts = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


class Case:
    """Random inputs and what must come of them. The caches are poisoned, slots are shuffled and
    every third token is padding."""

    def __init__(self, dtype=torch.float32, heads=(4, 2), dim=16, tokens=4, cache=None, **flags):
        self.dtype, self.num_q, self.flags = dtype, heads[0], flags
        random = torch.Generator().manual_seed(dim + tokens)

        def randn(*shape):
            return torch.randn(*shape, generator=random)

        width = heads[0] + 2 * heads[1]
        packed = randn(tokens, width * dim + 8) * 2  # rows are strided
        self.qkv = packed.to(DEVICE, dtype)[:, : width * dim].unflatten(1, (width, dim))
        angles = randn(tokens, dim // 2) * 30
        table = torch.float32 if flags.get("wide_tables") else dtype
        self.cos, self.sin = angles.cos().to(DEVICE, table), angles.sin().to(DEVICE, table)
        self.norms = [(1 + 0.3 * randn(dim)).to(DEVICE, dtype) for _ in range(2)]
        slots = torch.randperm(3 * tokens, generator=random)[:tokens]
        slots[1::3] = -1
        shape = (3 * tokens, heads[1], dim)
        caches = [torch.full(shape, torch.nan).to(DEVICE, cache or dtype) for _ in range(2)]
        scales = (0.37, 1.7) if cache == FP8 else (1.0, 1.0)
        self.target = StoreTarget(*caches, slots.to(DEVICE), *scales)

    def expected(self):
        """q, k, v [tokens, heads, dim] in float32, not rounded at the end."""
        parts = self.qkv.float().split(
            [self.num_q, *[(self.qkv.shape[1] - self.num_q) // 2] * 2], dim=1
        )
        q, k, v = (part.clone() for part in parts)
        if self.flags.get("norm"):
            q, k = (normed(x, w, self.dtype) for x, w in zip((q, k), self.norms, strict=True))
        if self.flags.get("rope", True):
            turns = (self.cos, self.sin, self.flags.get("interleaved", False))
            q, k = rotated(q, *turns), rotated(k, *turns)
        return q, k, v

    def run(self, config=None):
        tables = (self.cos, self.sin) if self.flags.get("rope", True) else (None, None)
        norms = tuple(self.norms) if self.flags.get("norm") else None
        interleaved = self.flags.get("interleaved", False)
        rotary_store(self.qkv, self.num_q, self.target, *tables, norms, EPS, interleaved, config)


def check(case, config=None):
    expected = case.expected()
    case.run(config)
    tolerance = TOLERANCE[case.dtype]
    sizes = [case.num_q, *[(case.qkv.shape[1] - case.num_q) // 2] * 2]
    parts = case.qkv.split(sizes, dim=1)
    for part, wanted in zip(parts, expected, strict=True):
        torch.testing.assert_close(part.float(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(parts[2].float(), expected[2])
    stored = case.target.slots >= 0
    slots = case.target.slots[stored]
    free = torch.ones(len(case.target.k_cache), dtype=torch.bool, device=DEVICE)
    free[slots] = False
    sides = (
        (case.target.k_cache, parts[1], case.target.k_scale),
        (case.target.v_cache, parts[2], case.target.v_scale),
    )
    for cache, part, scale in sides:
        wanted = part[stored]
        if cache.dtype == FP8:
            wanted = (wanted.float() / scale).clamp(-448, 448)
        wanted = wanted.to(cache.dtype)
        # From the value in qkv, rounded already, so to the bit.
        assert torch.equal(cache.float()[slots], wanted.float())
        assert cache.float()[free].isnan().all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("norm", [False, True])
def test_head_dims(dim, norm):
    check(Case(torch.float16, (3, 1), dim, norm=norm))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_dtypes_and_layouts(dtype, interleaved, norm):
    check(Case(dtype, interleaved=interleaved, norm=norm))
    check(Case(dtype, (7, 1), 24, interleaved=interleaved, norm=norm, wide_tables=True))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layer_without_rotation(dtype, norm):
    case = Case(dtype, norm=norm, rope=False)
    before = case.qkv.clone()
    check(case)
    assert norm or torch.equal(case.qkv, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_float8_cache(dtype):
    check(Case(dtype, cache=FP8, norm=True))


def stored_in_float8(values):
    """The first elements of a stored K and V head, as lists."""
    case = Case(cache=FP8, rope=False, tokens=2)
    case.qkv[0, 4:, : len(values)] = torch.tensor(values, device=DEVICE)
    case.run()
    slot, count = case.target.slots[0], len(values)
    caches = (case.target.k_cache, case.target.v_cache)
    return [cache[slot, 0, :count].float().tolist() for cache in caches]


def test_cache_narrower_than_the_model():
    check(Case(torch.float32, cache=torch.float16))


def test_float8_cache_clamps():
    k, v = stored_in_float8([1e6, -torch.inf, 448 * 0.37])
    assert k == [448.0, -448.0, 448.0]
    assert v == [448.0, -448.0, 96.0]  # 448 * 0.37 / 1.7 = 97.5, in steps of 8


@pytest.mark.gpu  # the interpreter casts NaN to a number
def test_float8_cache_keeps_nan():
    assert all(np.isnan(values).all() for values in stored_in_float8([torch.nan, -torch.nan]))


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (28, 4)])
def test_head_counts_and_tokens(tokens, heads):
    check(Case(torch.float32, heads, 8, tokens))


@pytest.mark.parametrize("config", [(1, 1), (4, 2), (2, 1), (8, 1)])
@pytest.mark.parametrize("flags", [{"norm": True}, {}, {"rope": False}])
@pytest.mark.parametrize("heads", [(4, 2), (8, 8), (3, 1)])
def test_configuration_changes_nothing(config, flags, heads):
    # Blocks of heads that are all queries, all keys or all values, and mixed ones.
    check(Case(torch.float16, heads, 64, **flags), RotaryStoreConfig(*config))


def test_measured_configuration_serves_batches_of_its_size(monkeypatch, tmp_path):
    shape = {"head_dim": 128, "dtype": "bfloat16", "page_size": 1, "group": 4}
    entries = [
        {"kernel": kernel, "device": "Card", "shape": shape, "configuration": configuration}
        for kernel, configuration in (
            ("rotary_store", {"heads": 32, "num_warps": 8}),
            ("rotary_store_few", {"heads": 2, "num_warps": 1}),
        )
    ]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(pinned, "TABLE", tmp_path / "pinned.json")
    pinned.TABLE.write_text(json.dumps(entries))
    pinned._table.cache_clear()
    pinned_choice.cache_clear()

    def chosen(few, counts=(32, 8, 128), device="cuda"):
        return pinned_choice(torch.device(device), counts, torch.bfloat16, few).config

    try:
        assert chosen(few=False) == RotaryStoreConfig(32, 8)
        assert chosen(few=True) == RotaryStoreConfig(2, 1)
        assert chosen(False, (2, 1, 96)) == RotaryStoreConfig(4, 8)  # no more heads than there are
        assert chosen(False, device="cpu") == default_config(48, 64)
    finally:
        pinned._table.cache_clear()
        pinned_choice.cache_clear()


def test_slots_far_into_the_cache_are_64_bit():
    # 2^31 elements and more, of which only touched pages take memory.
    heads, dim = 64, 256
    slots = 2**31 // (heads * dim) + 2
    case = Case(torch.float16, (1, heads), dim, 1)
    caches = [torch.empty(slots, heads, dim, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    case.target = StoreTarget(*caches, torch.tensor([slots - 1], device=DEVICE))
    case.run()
    assert torch.equal(caches[0][-1], case.qkv[0, 1 : 1 + heads])
    assert torch.equal(caches[1][-1], case.qkv[0, 1 + heads :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": lambda x: x.double()}, "qkv dtype must be float32"),
        ({"qkv": lambda x: x.transpose(0, 1)}, "qkv strides must be contiguous over heads"),
        ({"qkv": lambda x: x[:, :7]}, "num_q_heads must be >= 0 and less than all heads"),
        ({"cos": lambda x: x[:, :4]}, r"cos must be of shape \(4, 8\)"),
        ({"sin": lambda x: None}, "cos and sin must be both given"),
        ({"slots": lambda x: x.int()}, "slots dtype must be int64"),
        ({"k_cache": lambda x: x.double()}, "k_cache dtype must be one of"),
        ({"v_cache": lambda x: x.half()}, "v_cache dtype must be torch.float32"),
        ({"v_cache": lambda x: x[:, :1]}, r"v_cache must be \[slots, 2, 16\]"),
        ({"v_cache": lambda x: x[:-1]}, r"v_cache must be shaped as k_cache \(12, 2, 16\)"),
        (
            {"k_cache": lambda x: x.repeat(1, 1, 2)[..., ::2]},
            "k_cache strides must be contiguous over heads and elements",
        ),
        ({"sin": lambda x: None}, r"got \[\(4, 8\), None\]"),
        ({"num_q_heads": lambda x: -2}, "num_q_heads must be >= 0"),
        ({"norms": lambda x: x[:1]}, "norms must be weights of q and of k, got '1 of them'"),
        ({"qkv": lambda x: x[..., :0]}, "head_dim must be even, in 2 .. 256, got 0"),
    ],
)
def test_bad_input_is_refused(change, message):
    case = Case()
    values = {"qkv": case.qkv, "cos": case.cos, "sin": case.sin, "slots": case.target.slots}
    values |= {"k_cache": case.target.k_cache, "v_cache": case.target.v_cache}
    values |= {"num_q_heads": 4, "norms": tuple(case.norms)}
    rotary_store(case.qkv.clone(), 4, case.target, case.cos, case.sin, values["norms"])
    for name, alter in change.items():
        values[name] = alter(values[name])
    target = StoreTarget(values["k_cache"], values["v_cache"], values["slots"])
    with pytest.raises(ValueError, match=message):
        rotary_store(
            *(values["qkv"], values["num_q_heads"], target),
            *(values["cos"], values["sin"], values["norms"]),
        )


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_that_is_not_finite_and_positive_is_refused(scale):
    case = Case()
    target = StoreTarget(case.target.k_cache, case.target.v_cache, case.target.slots, v_scale=scale)
    with pytest.raises(ValueError, match=f"v_scale must be finite and > 0, got {scale}"):
        rotary_store(case.qkv, 4, target)


def test_numbers_reach_the_kernel_as_floats(monkeypatch):
    """An int would be compiled as one, and launched later with an equal float."""
    launch = Mock()
    monkeypatch.setattr(module, "_run", launch)
    case = Case()
    target = StoreTarget(case.target.k_cache, case.target.v_cache, case.target.slots, 1, 2)
    rotary_store(case.qkv, 4, target, eps=1)
    _, _, arguments, _ = launch.call_args.args
    assert [type(number) for number in arguments[-3:]] == [float] * 3
