"""What sampling and log-probabilities share: a row of logits as ordered keys, in groups of 32.

Order. A logit is compared through its key, an int32 in the order of floats; -0 and 0 have one key.
A NaN counts as -inf, and +inf as the largest finite number, so that peaks and keys are in order;
only the sum of exponentials keeps them: it is finite if and only if all logits are, or -inf.

Groups. One pass over the row (`scan`) writes the maximum of each group of 32 tokens, and per chunk
the maximum and the sum of exponentials. The few largest tokens are then found by looking into the
few groups with large maxima, without a second pass or a sort. A chunk is worked on alike whichever
rows stand beside it, so a row's result does not depend on its batch.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_runs, require
from kernels.jit import LOG2E
from kernels.philox import gumbel_of_blocks

GROUP: tl.constexpr = tl.constexpr(32)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
NEG_INF_KEY: tl.constexpr = tl.constexpr(-2139095040)
BOTTOM: tl.constexpr = tl.constexpr(-2139095041)
"""Below every logit's key."""
COLDEST: tl.constexpr = tl.constexpr(1e-30)
HOTTEST: tl.constexpr = tl.constexpr(1e30)
"""Bounds of the temperature: its reciprocal stays finite and 0 * inf never arises."""
MOST_TOKENS = 1 << 20
PARAMETERS = (
    "p_temperature",
    "p_top_k",
    "p_top_p",
    "p_min_p_log",
    "p_seed",
    "p_position",
    "p_choice",
)
"""The kernels' names of what they read once a row: slices of a launch's one upload, so that a form
compiled for each alignment would be one of many."""


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """Launch parameters of `scan`: tokens a program reads, and its warps."""

    chunk: int = 4096
    num_warps: int = 4


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """Of rows [n] in C chunks: maxima float32 [n, C * chunk / 32] of the groups; peaks and sums
    float32, best int32 [n, C] of the chunks: largest logit, sum of exp((logit - peak) /
    temperature) and the token that wins the chunk's draw."""

    maxima: Tensor
    peaks: Tensor
    sums: Tensor
    best: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """How rows [n] are drawn: every column a tensor [n] on the logits' device, contiguous, floats
    of any type, seed, position and choice int64.

    temperature: 0 = greedy; others are kept in 1e-30 .. 1e30. top_k: <= 0 or >= the vocabulary =
    off. top_p: >= 1 = off. min_p_log: natural logarithm of min_p, -inf = off; above 0 it counts as
    0, which keeps the best alone. seed, position, choice: what the row's noise is made of
    (kernels/philox.py)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p_log: Tensor
    seed: Tensor
    position: Tensor
    choice: Tensor

    def columns(self) -> tuple[Tensor, ...]:
        """All of them, in the kernels' order."""
        shape = (self.temperature, self.top_k, self.top_p, self.min_p_log)
        return *shape, self.seed, self.position, self.choice


@triton.jit
def clean(x):
    """float32 logits without NaN and +inf."""
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def key_of(x):
    """Ordered int32 keys of clean float32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -2147483648 - bits)


@triton.jit
def value_of(key):
    """float32 of a key above BOTTOM."""
    bits = tl.where(key >= 0, key, -2147483648 - key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def settings(p_temperature, p_top_k, p_top_p, p_min_p_log, row, VOCAB: tl.constexpr):
    """A row's temperature (1 if greedy), top_k, top_p, min_p_log, and whether it is greedy and
    whether it is filtered."""
    b_temperature = tl.load(p_temperature + row).to(tl.float32)
    # Cut to the vocabulary in 64 bits: the low half of a larger number is another number.
    b_top_k = tl.load(p_top_k + row).to(tl.int64)
    b_top_k = tl.minimum(tl.maximum(b_top_k, 0), VOCAB).to(tl.int32)
    b_top_p = tl.load(p_top_p + row).to(tl.float32)
    b_min_p = tl.minimum(tl.load(p_min_p_log + row).to(tl.float32), 0.0)
    greedy = b_temperature == 0.0
    by_k = (b_top_k > 0) & (b_top_k < VOCAB)
    filtered = (by_k | (b_top_p < 1.0) | (b_min_p > float("-inf"))) & (b_temperature != 0.0)
    kept = tl.minimum(tl.maximum(b_temperature, COLDEST), HOTTEST)
    return tl.where(greedy, 1.0, kept), b_top_k, b_top_p, b_min_p, greedy, filtered


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def _scan_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p_log,
    p_seed,
    p_position,
    p_choice,
    p_maxima,
    p_peaks,
    p_sums,
    p_best,
    row_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAWS: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    GROUPS: tl.constexpr = CHUNK // GROUP
    o_group = chunk * GROUPS + tl.arange(0, GROUPS)
    o = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(p_logits + row * row_stride + o, mask=o < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    maxima = clean(tl.max(x, 1))
    tl.store(p_maxima + row * num_chunks * GROUPS + o_group, maxima)
    peak = tl.max(maxima, 0)
    # A chunk of -inf alone: every difference from 0 is -inf, and so is every exponent.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    temperature = 1.0
    key = x
    if DRAWS:
        temperature, _, _, _, greedy, filtered = settings(
            p_temperature, p_top_k, p_top_p, p_min_p_log, row, VOCAB
        )
        if (not greedy) & (not filtered):
            seed, position = tl.load(p_seed + row), tl.load(p_position + row)
            choice = tl.load(p_choice + row)
            o_block = o_group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
            noise = gumbel_of_blocks(o_block, seed, position, choice)
            key = (x - base) * (1.0 / temperature) + noise
        best = tl.max(tl.max(key, 1), 0)
        token = tl.min(tl.min(tl.where(key == best, o, VOCAB), 1), 0)
        tl.store(p_best + row * num_chunks + chunk, tl.minimum(token, VOCAB - 1))
    total = tl.sum(tl.sum(tl.exp2((x - base) * (LOG2E / temperature)), 1), 0)
    tl.store(p_peaks + row * num_chunks + chunk, peak)
    tl.store(p_sums + row * num_chunks + chunk, total)


@triton.jit
def peak_and_sum(p_peaks, p_sums, row, scale, num_chunks: tl.constexpr, CHUNKS: tl.constexpr):
    """The row's largest logit and its sum of exp2((logit - peak) * scale), of chunks' results."""
    o = tl.arange(0, CHUNKS)
    peaks = tl.load(p_peaks + row * num_chunks + o, mask=o < num_chunks, other=float("-inf"))
    sums = tl.load(p_sums + row * num_chunks + o, mask=o < num_chunks, other=0.0)
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    return peak, tl.sum(sums * tl.exp2((peaks - base) * scale), 0)


def scan(
    logits: Tensor, parameters: Parameters | None = None, config: ScanConfig | None = None
) -> Scan:
    """One pass over logits [n, vocab_size] of a type that `draw` takes. Without parameters the
    temperature is 1 and `best` stays unset."""
    config = config or ScanConfig()
    rows, vocab_size = logits.shape
    chunks = num_chunks(vocab_size, config)
    groups = chunks * config.chunk // GROUP.value
    empty = partial(torch.empty, dtype=torch.float32, device=logits.device)
    out = Scan(
        maxima=empty((rows, groups)),
        peaks=empty((rows, chunks)),
        sums=empty((rows, chunks)),
        best=torch.empty(rows, chunks, dtype=torch.int32, device=logits.device),
    )
    columns = (logits,) * 7 if parameters is None else parameters.columns()
    _scan_kernel[(chunks, rows)](
        logits,
        *columns,
        out.maxima,
        out.peaks,
        out.sums,
        out.best,
        logits.stride(0),
        VOCAB=vocab_size,
        CHUNK=config.chunk,
        DRAWS=parameters is not None,
        num_warps=config.num_warps,
    )
    return out


def num_chunks(vocab_size: int, config: ScanConfig) -> int:
    """Chunks of a row."""
    return -(-vocab_size // config.chunk)


def check_logits(logits: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
    """[n, vocab_size] of one of `dtypes`, any row stride. Raises ValueError."""
    names = ", ".join(map(str, dtypes))
    require(logits.dtype in dtypes, "logits dtype", f"one of {names}", str(logits.dtype))
    require(logits.dim() == 2, "logits", "[rows, vocab_size]", tuple(logits.shape))
    fits = 1 <= logits.shape[1] <= MOST_TOKENS
    require(fits, "vocab_size", f"in 1 .. {MOST_TOKENS}", logits.shape[1])
    require(len(logits) <= 65535, "rows", "at most 65535", len(logits))
    one = logits.stride(1) == 1 or logits.shape[1] == 1
    require(one, "logits strides", "1 along a row", logits.stride())
    check_runs(logits)
