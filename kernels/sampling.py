"""Draws a token for each row of logits: greedy, by temperature, or after top-k, top-p and min-p.

A draw is Gumbel-max: argmax((logit - peak) / temperature + noise), which equals a draw from the
softmax; the noise is a function of the row's seed, position and choice (kernels/philox.py). Filters
as in plugins/executor/filters.py: top-k, then top-p over what is left, then min-p; each is a
threshold on the scaled difference from the peak, and ties with it stay.

Two launches, no wait for the device, nothing that depends on other rows: `scan` (kernels/
vocabulary.py) passes over the logits once, by many programs a row, and decides greedy and
unfiltered rows but for the choice among the chunks' winners; then one program a row finishes. For a
filtered row that program finds the threshold (kernels/threshold.py) and draws among the groups that
hold survivors.

A row that holds a NaN or +inf, or -inf alone, yields NO_TOKEN: there is nothing to draw from.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_column
from kernels.jit import LOG2E
from kernels.philox import gumbel_of_blocks, gumbel_of_tokens
from kernels.threshold import (
    list_groups,
    listed_groups,
    load_groups,
    load_keys,
    search_keys,
    search_row,
    tokens_of,
    weigh_row,
)
from kernels.vocabulary import (
    GROUP,
    NEG_INF_KEY,
    PARAMETERS,
    Parameters,
    ScanConfig,
    check_logits,
    clean,
    key_of,
    peak_and_sum,
    scan,
    settings,
    value_of,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NO_TOKEN: tl.constexpr = tl.constexpr(-1)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Launch parameters. capacity: keys that a search holds in registers; tile: groups read at a
    time; pivots: thresholds tried in one pass over a row, width: tokens that a warp reads at a time
    in such a pass, stages: reads under way. Eight pivots of 128 tokens spill registers."""

    scan: ScanConfig = field(default_factory=ScanConfig)
    capacity: int = 4096
    tile: int = 128
    pivots: int = 8
    width: int = 64
    stages: int = 8
    num_warps: int = 16


@triton.jit
def _threshold(
    p_row, p_maxima, p_list, p_keys, top_k, top_p, peak, total, scale,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr, LANES: tl.constexpr,
    PIVOTS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Key of the least logit that top-k and top-p keep. total: the row's sum of exponentials."""
    top = key_of(peak)
    least = tl.full((), NEG_INF_KEY, tl.int32)
    held = tl.zeros((), tl.int32)
    above, mass = total, total  # weight above `least`, and what top-p is a share of
    if (top_k > 0) & (top_k < VOCAB):
        least, better, held = search_row(
            p_row, p_maxima, p_list, p_keys, top_k.to(tl.float32), 1.0 * VOCAB, least - 1,
            least - 1, top, peak, scale, True, VOCAB, GROUPS, MAXIMA, LANES, PIVOTS, STAGES, TILE,
            CAPACITY,
        )  # fmt: skip
        if top_p < 1.0:
            if held > 0:
                keys, weights = load_keys(p_keys, held, peak, scale, False, CAPACITY)
                above = tl.sum(tl.where(keys > least, weights, 0.0), 0)
            else:
                pivots = tl.zeros([PIVOTS], tl.float32) + value_of(least)
                weighed = weigh_row(p_row, pivots, peak, scale, False, VOCAB, LANES, PIVOTS, STAGES)
                above = tl.max(weighed, 0)
            # Of tokens that tie with the k-th, top-p counts as many as there are places.
            tied = tl.exp2((value_of(least) - peak) * scale)
            mass = above + (top_k.to(tl.float32) - better) * tied
    if top_p < 1.0:
        target = top_p * mass
        if above >= target:
            if held > 0:
                keys, weights = load_keys(p_keys, held, peak, scale, False, CAPACITY)
                least, _more = search_keys(keys, weights, 0.0, target, least, top)
            else:
                # Tokens that weigh less than their share of what may be cut cannot reach it.
                cut = tl.log2((1.0 - top_p) * mass / (2.0 * VOCAB)) / scale
                bound = tl.minimum(tl.maximum(least, key_of(clean(peak + cut)) - 1), top - 1)
                least, _more, _count = search_row(
                    p_row, p_maxima, p_list, p_keys, target, above, least, bound, top, peak, scale,
                    False, VOCAB, GROUPS, MAXIMA, LANES, PIVOTS, STAGES, TILE, CAPACITY,
                )  # fmt: skip
    return least


@triton.jit
def _draw(
    p_row, p_list, num_groups, threshold, peak, temperature, seed, position, choice,
    VOCAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token drawn among those of the listed groups whose score reaches the threshold."""
    best, token = float("-inf"), tl.zeros((), tl.int32)
    first = 0
    # Logits are read a tile ahead, the list two, so that no load waits for another.
    groups = listed_groups(p_list, 0, num_groups, TILE)
    following = listed_groups(p_list, TILE, num_groups, TILE)
    x = load_groups(p_row, groups, VOCAB)
    while first < num_groups:
        x_following = load_groups(p_row, following, VOCAB)
        later = listed_groups(p_list, first + 2 * TILE, num_groups, TILE)
        o, real = tokens_of(groups, VOCAB)
        score = tl.div_rn(clean(x) - peak, tl.zeros_like(x) + temperature)
        o_block = groups[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
        noisy = score + gumbel_of_blocks(o_block, seed, position, choice)
        noisy = tl.where(real & (score >= threshold), noisy, float("-inf"))
        winner = tl.max(tl.max(noisy, 1), 0)
        found = tl.min(tl.min(tl.where(noisy == winner, o, VOCAB), 1), 0)
        token = tl.where(winner > best, found, token)  # groups ascend: the first of equals stays
        best = tl.maximum(winner, best)
        x, groups, following = x_following, following, later
        first += TILE
    return token


@triton.jit
def _choose(
    p_row, p_best, peak, temperature, greedy, seed, position, choice,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best of the chunks' winners, scored again from the row's peak."""
    o = tl.arange(0, CHUNKS)
    there = o < NUM_CHUNKS
    winners = tl.load(p_best + o, mask=there, other=0)
    x = clean(tl.load(p_row + winners, mask=there, other=float("-inf")).to(tl.float32))
    noisy = tl.div_rn(x - peak, tl.zeros_like(x) + temperature)
    if not greedy:
        noisy += gumbel_of_tokens(winners, seed, position, choice)
    noisy = tl.where(there, noisy, float("-inf"))
    best = tl.max(noisy, 0)
    return tl.min(tl.where(there & (noisy == best), winners, VOCAB), 0)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def _finish_kernel(
    p_logits, p_temperature, p_top_k, p_top_p, p_min_p_log, p_seed, p_position, p_choice,
    p_maxima, p_peaks, p_sums, p_best, p_list, p_keys, p_tokens, p_thresholds, row_stride,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr, LANES: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr,
    TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p_log, greedy, filtered = settings(
        p_temperature, p_top_k, p_top_p, p_min_p_log, row, VOCAB
    )
    seed, position = tl.load(p_seed + row), tl.load(p_position + row)
    choice = tl.load(p_choice + row)
    p_row = p_logits + row * row_stride
    scale = LOG2E / temperature
    peak, total = peak_and_sum(p_peaks, p_sums, row, scale, NUM_CHUNKS, CHUNKS)
    token = tl.full((), NO_TOKEN, tl.int32)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (peak > float("-inf")) & (total < float("inf")):
        if filtered:
            p_maxima += row * GROUPS
            p_list += row * MAXIMA
            least = _threshold(
                p_row, p_maxima, p_list, p_keys + row * CAPACITY, top_k, top_p, peak, total, scale,
                VOCAB, GROUPS, MAXIMA, LANES, PIVOTS, STAGES, TILE, CAPACITY,
            )  # fmt: skip
            threshold = tl.maximum(tl.div_rn(value_of(least) - peak, temperature), min_p_log)
            o = tl.arange(0, MAXIMA)
            maxima = tl.load(p_maxima + o, mask=o < GROUPS, other=float("-inf"))
            scores = tl.div_rn(maxima - peak, tl.zeros_like(maxima) + temperature)
            num_groups = list_groups(p_list, (scores >= threshold) & (o < GROUPS), o)
            token = _draw(
                p_row, p_list, num_groups, threshold, peak, temperature, seed, position, choice,
                VOCAB, TILE,
            )  # fmt: skip
        else:
            token = _choose(
                p_row, p_best + row * NUM_CHUNKS, peak, temperature, greedy, seed, position, choice,
                VOCAB, NUM_CHUNKS, CHUNKS,
            )  # fmt: skip
    tl.store(p_tokens + row, token.to(tl.int64))
    tl.store(p_thresholds + row, threshold)


def draw(logits: Tensor, parameters: Parameters, config: SamplingConfig | None = None) -> Tensor:
    """Tokens int64 [n] for logits [n, vocab_size] of one of DTYPES (rows may be strided), each row
    by its own parameters; NO_TOKEN for a row that holds a NaN or +inf, or -inf alone. May be
    captured in a CUDA graph. Raises ValueError for what it cannot take."""
    return draw_and_thresholds(logits, parameters, config)[0]


def draw_and_thresholds(
    logits: Tensor, parameters: Parameters, config: SamplingConfig | None = None
) -> tuple[Tensor, Tensor]:
    """What `draw` returns, and float32 [n]: the least (logit - peak) / temperature that a row's
    filters keep, -inf without filters."""
    config = config or SamplingConfig()
    check_logits(logits, DTYPES)
    _check_parameters(logits, parameters)
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, thresholds
    passed = scan(logits, parameters, config.scan)
    groups, chunks = passed.maxima.shape[1], passed.peaks.shape[1]
    maxima = triton.next_power_of_2(groups)
    listed = torch.empty(rows, maxima, dtype=torch.int32, device=logits.device)
    keys = torch.empty(rows, config.capacity, dtype=torch.int32, device=logits.device)
    _finish_kernel[(rows,)](
        logits,
        *parameters.columns(),
        passed.maxima,
        passed.peaks,
        passed.sums,
        passed.best,
        listed,
        keys,
        tokens,
        thresholds,
        logits.stride(0),
        VOCAB=vocab_size,
        GROUPS=groups,
        MAXIMA=maxima,
        NUM_CHUNKS=chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        LANES=config.width * config.num_warps,
        PIVOTS=config.pivots,
        STAGES=config.stages,
        TILE=config.tile,
        CAPACITY=config.capacity,
        num_warps=config.num_warps,
        # A product that a reduction adds to another lane's would be rounded once in one lane and
        # twice in the other: lanes would disagree on a search's target, and wait for each other.
        enable_fp_fusion=False,
    )
    return tokens, thresholds


def _check_parameters(logits: Tensor, parameters: Parameters) -> None:
    names = ("temperature", "top_k", "top_p", "min_p_log", "seed", "position", "choice")
    for i, (name, column) in enumerate(zip(names, parameters.columns(), strict=True)):
        check_column(name, column, len(logits), logits, None if i < 4 else torch.int64)
