"""The fused neighbours of matrix products and attention on one card: checked, then timed.

    python -m experiments.kernels.try_neighbours

Every kernel is checked against torch in a process of its own, all at the same time, which also
compiles every variant; one more process then times them. bfloat16; Llama-8B's shapes. Large inputs:
cold L2, medians, bytes that must move and the share of a plain copy of as many bytes in the same
run. Small inputs: microseconds of one call out of 32 in a captured graph, beside torch's
operations."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from experiments.kernels.cases import graph_us
from kernels.page_table import step_tables, update_table
from kernels.rms_norm import RmsNormConfig, rms_norm
from kernels.rotary_store import RotaryStoreConfig, StoreTarget, rotary_store
from kernels.swiglu import SwigluConfig, swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # exact in the interpreter
CHECK_S, TIME_S = 40.0, 50.0
EPS = 1e-5
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
PAGE, MAX_PAGES = 16, 512
ULP = 2**-7 if DEVICE == "cuda" else 2**-9

RMS = [RmsNormConfig(*one) for one in ((1, 4), (1, 8), (1, 16), (2, 4), (4, 4), (4, 8), (8, 8))]
SWIGLU = [
    SwigluConfig(*one)
    for one in ((512, 1), (512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 4))
]
ROTARY = [RotaryStoreConfig(*one) for one in ((4, 1), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8))]
SMALL = (1, 16, 128, 256)
SMALL_BLOCKS = ((256, 1), (1024, 4), (2048, 4))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


class Rotary:
    """Inputs of rotary_store for T tokens; `torch_ops` is the same by torch."""

    def __init__(
        self, tokens: int, norm: bool = False, fp8: bool = False, heads: int = HEADS
    ) -> None:
        self.heads = heads
        self.qkv = randn(tokens, heads + 2 * KV_HEADS, DIM)
        angles = torch.randn(tokens, DIM // 2, device=DEVICE) * 10
        self.cos, self.sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
        self.norms = (1 + 0.1 * randn(DIM), 1 + 0.1 * randn(DIM)) if norm else None
        kind = torch.float8_e4m3fn if fp8 else DTYPE
        caches = [
            torch.zeros(2 * tokens, KV_HEADS, DIM, device=DEVICE, dtype=kind) for _ in range(2)
        ]
        self.slots = torch.randperm(2 * tokens, device=DEVICE)[:tokens]
        self.target = StoreTarget(*caches, self.slots)
        cached = 2 * KV_HEADS * caches[0].element_size()
        moved = (2 * (heads + KV_HEADS) + KV_HEADS) * self.qkv.element_size() + cached
        self.bytes = tokens * DIM * (moved + self.qkv.element_size())

    def fused(self, config: RotaryStoreConfig | None = None) -> None:
        inputs = self.qkv, self.heads, self.target, self.cos, self.sin, self.norms
        rotary_store(*inputs, EPS, config=config)

    def torch_ops(self) -> tuple[torch.Tensor, torch.Tensor]:
        qk, v = self.qkv.split([self.heads + KV_HEADS, KV_HEADS], 1)
        if self.norms:
            parts = zip(qk.split([self.heads, KV_HEADS], 1), self.norms, strict=True)
            qk = torch.cat([F.rms_norm(one, (DIM,), None, EPS) * w for one, w in parts], 1)
        cos, sin = torch.cat((self.cos,) * 2, -1), torch.cat((-self.sin, self.sin), -1)
        qk = qk * cos[:, None] + qk.roll(DIM // 2, -1) * sin[:, None]
        if self.target.k_cache.dtype == DTYPE:
            self.target.k_cache.index_copy_(0, self.slots, qk[:, self.heads :])
            self.target.v_cache.index_copy_(0, self.slots, v)
        return qk, v


def close(got: torch.Tensor, expected: torch.Tensor, ulps: int) -> None:
    torch.testing.assert_close(got.float(), expected.float(), rtol=ulps * ULP, atol=ulps * ULP)


def check_rms() -> None:
    tokens = 300 if DEVICE == "cuda" else 3
    x, delta, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), 1 + 0.1 * randn(HIDDEN)
    total = x + delta
    expected = F.rms_norm(total, (HIDDEN,), None, EPS) * weight
    for config in (None, *RMS):
        out, summed = rms_norm(x, weight, EPS, delta, config)
        assert torch.equal(summed, total), config
        close(out, expected, 1)


def check_swiglu() -> None:
    x = randn(300 if DEVICE == "cuda" else 2, 2 * INNER)
    gate, up = x.chunk(2, -1)
    for config in (None, *SWIGLU):
        close(swiglu(x, config=config), F.silu(gate) * up, 2)


def check_rotary() -> None:
    for norm in (False, True):
        for config in (None, *ROTARY):
            case = Rotary(300 if DEVICE == "cuda" else 2, norm)
            qk, v = case.torch_ops()
            k_cache, v_cache = case.target.k_cache.clone(), case.target.v_cache.clone()
            case.target.k_cache.zero_(), case.target.v_cache.zero_()
            case.fused(config)
            close(case.qkv[:, : HEADS + KV_HEADS], qk, 4)
            assert torch.equal(case.qkv[:, HEADS + KV_HEADS :], v), config
            close(case.target.k_cache, k_cache, 4)
            assert torch.equal(case.target.v_cache, v_cache), config
            used = case.qkv[:, HEADS : HEADS + KV_HEADS]
            assert torch.equal(case.target.k_cache[case.slots], used), config


def tables(rows: int, resets: int, updates: int) -> dict[str, torch.Tensor]:
    """A step with one token a row."""

    def ints(*shape: int, below: int = 100) -> torch.Tensor:
        return torch.randint(below, shape, device=DEVICE)

    places = torch.randperm(rows * MAX_PAGES, device=DEVICE)[:updates]
    every = torch.arange(rows + 1, device=DEVICE)
    lens = ints(rows, below=PAGE * MAX_PAGES - 1) + 1
    return {
        "table": ints(rows, MAX_PAGES).int(),
        "resets": torch.randperm(rows, device=DEVICE)[:resets],
        "updates": torch.stack((places // MAX_PAGES, places % MAX_PAGES, ints(updates)), 1),
        "rows": every[:-1],
        "lens": lens,
        "starts": every,
        "positions": lens - 1,
    }


def fused_tables(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    update_table(t["table"], t["resets"], t["updates"])
    made = step_tables(
        t["table"], t["rows"], t["lens"], t["starts"], t["rows"], t["positions"], PAGE
    )
    return made.page_table, made.context_lens, made.query_starts, made.slots


def torch_tables(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    table, updates, positions = t["table"], t["updates"], t["positions"]
    table.index_fill_(0, t["resets"], 0)
    table[updates[:, 0], updates[:, 1]] = updates[:, 2].int()
    slots = table[t["rows"], positions // PAGE].long() * PAGE + positions % PAGE
    return table[t["rows"]], t["lens"].int(), t["starts"].int(), slots


def check_tables() -> None:
    for rows, resets, updates in ((1, 1, 1), (16, 0, 3), (64, 17, 5000), (256, 256, 300)):
        case = tables(rows, resets, updates)
        other = case | {"table": case["table"].clone()}
        for one, two in zip(fused_tables(case), torch_tables(other), strict=True):
            assert torch.equal(one, two), (rows, resets, updates)
        assert torch.equal(case["table"], other["table"]), (rows, resets, updates)


@triton.jit
def copy_kernel(p_from, p_to, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, N803
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_to + o, tl.load(p_from + o))


def microseconds(call: Callable[[], object]) -> float:
    return 1e3 * triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median")


def copy_bandwidth(moved: int) -> float:
    """TB/s of the best of three copies that read and write `moved` bytes in all."""
    count = moved // 4 // 8192 * 8192
    source, to = (torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def kernel(block: int, warps: int) -> Callable[[], object]:
        return lambda: copy_kernel[(count // block,)](source, to, BLOCK=block, num_warps=warps)

    calls = (lambda: to.copy_(source), kernel(2048, 4), kernel(8192, 8))
    return max(4 * count / microseconds(call) / 1e6 for call in calls)


def report(name: str, moved: int, copied: float, call: Callable[[], object]) -> None:
    took = microseconds(call)
    rate = moved / took / 1e6
    print(
        f"{name:44s}{took:9.1f} us{rate:8.2f} TB/s{100 * rate / copied:7.1f} % of copy", flush=True
    )


def time_large() -> None:
    for rows in (8192, 16384):
        x, delta, weight = randn(rows, HIDDEN), randn(rows, HIDDEN), 1 + 0.1 * randn(HIDDEN)
        moved = 4 * rows * HIDDEN * 2
        copied = copy_bandwidth(moved)
        print(f"copy of {moved / 1e6:.0f} MB: {copied:.2f} TB/s")
        for config in (None, *RMS):
            name = f"rms_norm + residual {rows}x{HIDDEN} {_label(config)}"
            report(name, moved, copied, partial(rms_norm, x, weight, EPS, delta, config))
    x = randn(8192, 2 * INNER)
    moved = 3 * 8192 * INNER * 2
    copied = copy_bandwidth(moved)
    print(f"copy of {moved / 1e6:.0f} MB: {copied:.2f} TB/s")
    for config in (None, *SWIGLU):
        report(
            f"swiglu 8192x{INNER} {_label(config)}",
            moved,
            copied,
            partial(swiglu, x, config=config),
        )
    del x
    shapes = ((False, False, HEADS), (True, False, HEADS // 2), (False, True, HEADS))
    for norm, fp8, heads in shapes:
        case = Rotary(8192, norm, fp8, heads)
        copied = copy_bandwidth(case.bytes)
        print(f"copy of {case.bytes / 1e6:.0f} MB: {copied:.2f} TB/s")
        for config in (None, *ROTARY):
            name = f"rope + store 8192 {heads} {norm=:d} {fp8=:d} {_label(config)}"
            report(name, case.bytes, copied, partial(case.fused, config))


def _label(config: object) -> str:
    if config is None:
        return "default"
    return " ".join(str(getattr(config, name)) for name in config.__slots__)


Pair = tuple[Callable[[], object], Callable[[], object]]
"""A fused call, and the same by torch."""


def small_rms(config: RmsNormConfig | None, tokens: int) -> Pair:
    x, delta, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), 1 + 0.1 * randn(HIDDEN)

    def plain() -> torch.Tensor:
        return F.rms_norm(x + delta, (HIDDEN,), None, EPS) * weight

    return partial(rms_norm, x, weight, EPS, delta, config), plain


def small_swiglu(config: SwigluConfig | None, tokens: int) -> Pair:
    x = randn(tokens, 2 * INNER)
    gate, up = x.chunk(2, -1)
    return partial(swiglu, x, config=config), lambda: F.silu(gate) * up


def small_rotary(config: RotaryStoreConfig | None, tokens: int, norm: bool = False) -> Pair:
    case = Rotary(tokens, norm)
    return partial(case.fused, config), case.torch_ops


def small_tables(_: None, tokens: int) -> Pair:
    case = tables(tokens, tokens // 8, tokens)
    return partial(fused_tables, case), partial(torch_tables, case)


small_us = partial(graph_us, repeats=21, calls=32)


def time_small() -> None:
    print(f"{'us a call in a graph, fused / torch, T =':44s}" + "".join(f"{t:>15d}" for t in SMALL))
    families: tuple[tuple[str, Callable[..., Pair], tuple], ...] = (
        ("rms_norm + residual", small_rms, (None, RmsNormConfig(1, 4), RmsNormConfig(1, 16))),
        ("swiglu", small_swiglu, (None, *(SwigluConfig(b, w) for b, w in SMALL_BLOCKS))),
        ("rope + store", small_rotary, (None, RotaryStoreConfig(8, 2), RotaryStoreConfig(64, 8))),
        ("norm + rope + store", partial(small_rotary, norm=True), (None,)),
        ("block table, two launches", small_tables, (None,)),
    )
    for name, make, configs in families:
        for config in configs:
            cells = []
            for tokens in SMALL:
                fused, plain = make(config, tokens)
                cells.append(f"{small_us(fused):.2f} / {small_us(plain):.2f}")
            label = f"{name} {_label(config)}"
            print(f"{label:44s}" + "".join(f"{cell:>15s}" for cell in cells), flush=True)


CHECKS = {"rms": check_rms, "swiglu": check_swiglu, "rotary": check_rotary, "tables": check_tables}


def _start(task: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.kernels.try_neighbours", task]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def main() -> int:
    """Returns the exit code: 0 only if every check passed."""
    failed = False
    for name, child in {name: _start(name) for name in CHECKS}.items():
        try:
            text, _ = child.communicate(timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            child.kill()
            text = "took too long"
        failed |= child.returncode != 0
        print(f"check {name}: {'ok' if child.returncode == 0 else text[-3000:]}", flush=True)
    if DEVICE == "cuda":
        command = [sys.executable, "-m", "experiments.kernels.try_neighbours", "time"]
        try:
            subprocess.run(command, cwd=Path(__file__).parents[2], timeout=TIME_S, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(error)
            failed = True
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    torch.manual_seed(0)
    if sys.argv[1] == "time":
        time_small()
        time_large()
    else:
        CHECKS[sys.argv[1]]()
