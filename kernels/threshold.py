"""The least token that a filter keeps, found without sorting a row.

Both filters ask for the smallest key v such that the weight of the tokens above v is below a
target: weight 1 and target k for top-k, weight exp((logit - peak) / temperature) and target
top_p * mass for top-p. So ties with the threshold are kept, and the order of equal values does not
matter. The weight above v falls as v grows, hence a search in a bracket (low, high] of keys:

1. The maxima of the row's groups (kernels/vocabulary.py) weigh at most what the row weighs: the
   search over them alone bounds the threshold from below.
2. Groups whose maximum is above the bound hold all tokens in the bracket. If they fit, these are
   collected, and the search over them ends exactly.
3. Otherwise passes over the row narrow the bracket, several pivots at a time, alternately evenly
   spaced in value (quick for usual logits) and in key (ends for any), until what is left fits or is
   one key.

Weights are summed in float32: thresholds agree with an exact sum's except where the weight above a
token equals the target within 1e-6 of it.
"""

import triton
import triton.language as tl

from kernels.vocabulary import BOTTOM, GROUP, NEG_INF_KEY, clean, key_of, value_of

FANOUT: tl.constexpr = tl.constexpr(4)
"""Pivots of a search in registers: more cost comparisons, fewer cost reductions."""


@triton.jit
def weigh_keys(keys, peak, scale, BY_COUNT: tl.constexpr):
    """Weights of keys; BOTTOM weighs nothing."""
    real = keys > BOTTOM
    weights = tl.where(real, 1.0, 0.0)
    if not BY_COUNT:
        x = value_of(tl.where(real, keys, NEG_INF_KEY))
        weights = tl.exp2((x - peak) * scale)
    return weights


@triton.jit
def search_keys(keys, weights, base, target, low, high):
    """Smallest key v in (low, high] with base + (weight of keys above v) < target, and that weight;
    `high` where none is below. keys, weights [N] in registers."""
    o = tl.arange(0, FANOUT) + 1
    while low + 1 < high:
        step = (high.to(tl.int64) - low + FANOUT) // (FANOUT + 1)
        pivots = tl.minimum(low + step * o, high).to(tl.int32)
        above = tl.sum(tl.where(keys[None, :] > pivots[:, None], weights[None, :], 0.0), 1) + base
        reached = tl.sum((above >= target).to(tl.int32), 0)
        upper = tl.minimum(low + step * (reached + 1), high).to(tl.int32)
        low = tl.minimum(low + step * reached, high).to(tl.int32)
        high = upper
    return high, tl.sum(tl.where(keys > high, weights, 0.0), 0) + base


@triton.jit
def list_groups(p_list, active, o):
    """Write the indices o [G] where `active` to p_list in order; returns their number."""
    tl.debug_barrier()  # an earlier list may still be read
    count = active.to(tl.int32)
    tl.store(p_list + tl.cumsum(count, 0) - 1, o, mask=active)
    tl.debug_barrier()
    return tl.sum(count, 0)


@triton.jit
def collect(
    p_row, p_list, p_keys, num_groups, low, high,
    VOCAB: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write the keys in (low, high] of the listed groups to p_keys; returns their number. Beyond
    CAPACITY they are counted only."""
    count, first = 0, 0
    while first < num_groups:
        i = first + tl.arange(0, TILE)
        group = tl.load(p_list + i, mask=i < num_groups, other=0)
        o = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        real = (i < num_groups)[:, None] & (o < VOCAB)
        key = key_of(clean(tl.load(p_row + o, mask=real, other=float("-inf"))))
        inside = tl.reshape(real & (key > low) & (key <= high), [TILE * GROUP])
        place = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(p_keys + place, tl.reshape(key, [TILE * GROUP]), mask=inside & (place < CAPACITY))
        count += tl.sum(inside.to(tl.int32), 0)
        first += TILE
    tl.debug_barrier()
    return count


@triton.jit
def weigh_row(
    p_row, pivots, peak, scale,
    BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, LANES: tl.constexpr, PIVOTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Weight of the row's tokens above each of float32 pivots [PIVOTS], by one pass."""
    above = tl.zeros([PIVOTS, LANES], tl.float32)
    for first in tl.range(0, VOCAB, LANES, num_stages=STAGES):
        o = first + tl.arange(0, LANES)
        x = clean(tl.load(p_row + o, mask=o < VOCAB, other=float("-inf")))
        weight = tl.exp2((x - peak) * scale)
        if BY_COUNT:
            weight = tl.full([LANES], 1.0, tl.float32)
        above += tl.where(x[None, :] > pivots[:, None], weight[None, :], 0.0)
    return tl.sum(above, 1)


@triton.jit
def _place_pivots(low, high, floor, by_value, PIVOTS: tl.constexpr):
    """Keys [PIVOTS] in low + 1 .. high, ascending; the first is low + 1, which ends the search
    where all that is left ties with the bound."""
    i = tl.arange(0, PIVOTS)
    part = i.to(tl.float32) / PIVOTS
    bottom = tl.where(low > NEG_INF_KEY, value_of(tl.maximum(low, NEG_INF_KEY)), floor)
    even = key_of(tl.minimum(bottom, value_of(high)) * (1.0 - part) + value_of(high) * part)
    spaced = (low + (high.to(tl.int64) - low) * i // PIVOTS).to(tl.int32)
    pivots = tl.minimum(tl.maximum(tl.where(by_value, even, spaced), low + 1), high)
    return tl.where(i == 0, low + 1, pivots)


@triton.jit
def _bound_from_maxima(
    p_maxima, target, low, high, peak, scale,
    BY_COUNT: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """A key below the threshold, from the groups' maxima alone, and the least finite maximum."""
    o = tl.arange(0, MAXIMA)
    maxima = tl.load(p_maxima + o, mask=o < GROUPS, other=float("-inf"))
    keys = tl.where(o < GROUPS, key_of(maxima), BOTTOM)
    weights = weigh_keys(keys, peak, scale, BY_COUNT)
    bound, _ = search_keys(keys, weights, 0.0, target, low, high)
    return bound - 1, tl.min(tl.where(maxima > float("-inf"), maxima, peak), 0)


@triton.jit
def list_above(p_maxima, p_list, low, GROUPS: tl.constexpr, MAXIMA: tl.constexpr):
    """List the groups that hold a key above low; returns their number."""
    o = tl.arange(0, MAXIMA)
    maxima = tl.load(p_maxima + o, mask=o < GROUPS, other=float("-inf"))
    return list_groups(p_list, (o < GROUPS) & (key_of(maxima) > low), o)


@triton.jit
def load_keys(p_keys, count, peak, scale, BY_COUNT: tl.constexpr, CAPACITY: tl.constexpr):
    """The collected keys [CAPACITY] and their weights, padded with BOTTOM and 0."""
    o = tl.arange(0, CAPACITY)
    keys = tl.load(p_keys + o, mask=o < count, other=BOTTOM)
    return keys, weigh_keys(keys, peak, scale, BY_COUNT)


@triton.jit
def search_row(
    p_row, p_maxima, p_list, p_keys, target, whole, low, high, peak, scale,
    BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr,
    LANES: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Smallest key v in (low, high] with the weight above v below target, that weight, and how many
    keys p_keys holds if these are all from v up, else 0. whole: at least the weight above low.
    high: the peak's key."""
    low, floor = _bound_from_maxima(
        p_maxima, target, low, high, peak, scale, BY_COUNT, GROUPS, MAXIMA
    )
    top, over, under = high, 0.0, whole
    count = tl.full((), CAPACITY + 1, tl.int32)
    num_groups = list_above(p_maxima, p_list, low, GROUPS, MAXIMA)
    if num_groups <= CAPACITY:  # every listed group holds at least one
        count = collect(p_row, p_list, p_keys, num_groups, low, high, VOCAB, TILE, CAPACITY)
    step = 0
    while (count > CAPACITY) & (low + 1 < high):
        pivots = _place_pivots(low, high, floor, step % 2 == 0, PIVOTS)
        step += 1
        above = weigh_row(
            p_row, value_of(pivots), peak, scale, BY_COUNT, VOCAB, LANES, PIVOTS, STAGES
        )
        i = tl.arange(0, PIVOTS)
        reached = tl.sum((above >= target).to(tl.int32), 0)
        upper = tl.sum(tl.where(i == reached, pivots, 0), 0)
        lower = tl.sum(tl.where(i == reached - 1, pivots, 0), 0)
        over = tl.where(reached < PIVOTS, tl.sum(tl.where(i == reached, above, 0.0), 0), over)
        under = tl.where(reached > 0, tl.sum(tl.where(i == reached - 1, above, 0.0), 0), under)
        high = tl.where(reached < PIVOTS, upper, high)
        low = tl.where(reached > 0, tl.minimum(lower, high), low)
        # No token in the bracket weighs less than one at its lower end.
        least = 1.0
        if not BY_COUNT:
            least = tl.exp2((value_of(tl.maximum(low, NEG_INF_KEY)) - peak) * scale)
        if (under - over <= CAPACITY * least) & (low + 1 < high):
            num_groups = list_above(p_maxima, p_list, low, GROUPS, MAXIMA)
            count = collect(p_row, p_list, p_keys, num_groups, low, high, VOCAB, TILE, CAPACITY)
    held = 0
    if count <= CAPACITY:
        keys, weights = load_keys(p_keys, count, peak, scale, BY_COUNT, CAPACITY)
        held = tl.where(high == top, count, 0)
        high, over = search_keys(keys, weights, over, target, low, high)
    return high, over, held
