"""Counter-based random numbers in Triton: Philox4x32-10 and the Gumbel noise made of its words.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A word
is a pure function of key and counter: here key = the request's seed, counter = (vocabulary index
// 4, output position, choice, 0), and vocabulary index % 4 picks one of the four words. The words
are the same on every device, bit for bit; the noise, computed from them in float32, differs from
another device's in the last digits (below 4e-6).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_runs
from kernels.jit import INTERPRETED, LN2

MULTIPLIER_0: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLIER_1: tl.constexpr = tl.constexpr(0xCD9E8D57)
WEYL_0: tl.constexpr = tl.constexpr(0x9E3779B9)
WEYL_1: tl.constexpr = tl.constexpr(0xBB67AE85)
ROUNDS: tl.constexpr = tl.constexpr(10)
BELOW_ONE: tl.constexpr = tl.constexpr(1 - 2.0**-24)
APPROXIMATE: tl.constexpr = tl.constexpr(not INTERPRETED)
"""Whether logarithms are the hardware's, whose error of 2^-22 is below what a draw can show."""


@triton.jit
def philox(c0, c1, c2, k0, k1):
    """Four uint32 words for counters (c0, c1, c2, 0) and keys (k0, k1), uint32; the counters
    have one shape."""
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(ROUNDS):
        high_0, low_0 = tl.umulhi(c0, MULTIPLIER_0), c0 * MULTIPLIER_0
        high_1, low_1 = tl.umulhi(c2, MULTIPLIER_1), c2 * MULTIPLIER_1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 += WEYL_0
        k1 += WEYL_1
    return c0, c1, c2, c3


@triton.jit
def log2(x):
    """Base-2 logarithm of positive normal float32: absolute error 2^-22."""
    if APPROXIMATE:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def gumbel(words):
    """Standard Gumbel noise float32, finite, of uint32 words: -log(e) of e = -log(1 - u),
    u = (word + 1/2) / 2^32, kept below 1."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, BELOW_ONE)
    # -log(1 - u) / u as a series: near u = 0, where 1 - u has lost u's digits. Its twelve terms
    # leave 1e-8 at u = 1/4.
    series = u * 0.0 + 1.0 / 12.0
    for i in tl.static_range(11, 0, -1):
        series = series * u + 1.0 / i
    e = tl.where(u < 0.25, series * u, log2(1.0 - u) * -LN2)
    return log2(e) * -LN2


@triton.jit
def gumbel_of_blocks(blocks, seed, position, choice):
    """Noise for whole blocks of four tokens: blocks int32 [R, B], seed, position, choice int64
    scalars; float32 [R, 4 * B]."""
    c0 = blocks.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + choice.to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return gumbel(tl.reshape(words, [blocks.shape[0], blocks.shape[1] * 4]))


@triton.jit
def gumbel_of_tokens(tokens, seed, position, choice):
    """Noise for single tokens int32 [N]: float32 [N]."""
    c0 = (tokens // 4).to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + choice.to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, k0, k1)
    lane = tokens % 4
    return gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _rows_kernel(
    p_seed, p_position, p_choice, p_words, p_noise, VOCAB: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    seed = tl.load(p_seed + row)
    position = tl.load(p_position + row)
    choice = tl.load(p_choice + row)
    c0 = o.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + choice.to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS * 4])
    noise = tl.reshape(gumbel_of_blocks(o[None, :], seed, position, choice), [BLOCKS * 4])
    token = tl.program_id(1) * BLOCKS * 4 + tl.arange(0, BLOCKS * 4)
    tl.store(p_words + row * VOCAB + token, words.to(tl.int64), mask=token < VOCAB)
    tl.store(p_noise + row * VOCAB + token, noise, mask=token < VOCAB)


def noise_rows(
    seeds: Tensor, positions: Tensor, choices: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The words (int64) and the noise (float32) of every token, both [rows, vocab_size]; seeds,
    positions, choices int64 [rows]. For tests and inspection: the sampler makes its noise in
    place."""
    check_runs(seeds)
    shape = (len(seeds), vocab_size)
    words = torch.empty(shape, dtype=torch.int64, device=seeds.device)
    noise = torch.empty(shape, dtype=torch.float32, device=seeds.device)
    blocks = 1024
    grid = (len(seeds), triton.cdiv(vocab_size, 4 * blocks))
    _rows_kernel[grid](seeds, positions, choices, words, noise, vocab_size, blocks, num_warps=8)
    return words, noise
