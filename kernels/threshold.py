"""The least token that a filter keeps, found without sorting a row.

Both filters ask for the smallest key v such that the weight of the tokens above v is below a
target: weight 1 and target k for top-k, weight exp((logit - peak) / temperature) and target
top_p * mass for top-p. So ties with the threshold are kept, and the order of equal values does not
matter. The weight above v falls as v grows, hence a search in a bracket (low, high] of keys:

1. The maxima of the row's groups (kernels/vocabulary.py) weigh at most what the row weighs: the
   search over them alone bounds the threshold from below.
2. Groups whose maximum is above the bound hold all tokens in the bracket. If they fit, these are
   collected, and the search over them ends exactly.
3. Otherwise passes over the row narrow the bracket, several pivots at a time, until what is left
   fits or is one key. The first pass has its pivots around the threshold of a sample, one token of
   each group, as far as the sample may err; most often that leaves few enough. Later ones have
   them alternately evenly spaced in value (quick for usual logits) and in key (ends for any).

Weights are summed in float32: thresholds agree with an exact sum's except where the weight above a
token equals the target within 1e-6 of it.
"""

import triton
import triton.language as tl

from kernels.vocabulary import BOTTOM, GROUP, NEG_INF_KEY, clean, key_of, value_of

FANOUT: tl.constexpr = tl.constexpr(4)
"""Pivots of a search in registers: more cost comparisons, fewer cost reductions."""

DEVIATIONS: tl.constexpr = tl.constexpr(4.0)
"""Standard errors of the sample on each side of its threshold that the first pass covers."""


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
def _append(p_keys, key, inside, count, CAPACITY: tl.constexpr):
    """Write the keys [R, C] that are `inside` to p_keys from place count on, in order; returns the
    new count. Beyond CAPACITY they are counted only."""
    ones = inside.to(tl.int32)
    in_row = tl.sum(ones, 1)
    place = count + (tl.cumsum(in_row, 0) - in_row)[:, None] + tl.cumsum(ones, 1) - 1
    tl.store(p_keys + place, key, mask=inside & (place < CAPACITY))
    return count + tl.sum(in_row, 0)


@triton.jit
def listed_groups(p_list, first, num_groups, TILE: tl.constexpr):
    """Listed groups [TILE] from place `first` on, -1 past the last."""
    i = first + tl.arange(0, TILE)
    return tl.load(p_list + i, mask=i < num_groups, other=-1)


@triton.jit
def tokens_of(groups, VOCAB: tl.constexpr):
    """Tokens [R, 32] of groups [R], and whether they are tokens."""
    o = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return o, (groups >= 0)[:, None] & (o < VOCAB)


@triton.jit
def load_groups(p_row, groups, VOCAB: tl.constexpr):
    """Logits [R, 32] of groups [R], not cleaned; -inf where there is no token."""
    o, real = tokens_of(groups, VOCAB)
    return tl.load(p_row + o, mask=real, other=float("-inf")).to(tl.float32)


@triton.jit
def collect(
    p_row, p_list, p_keys, num_groups, low, high,
    VOCAB: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write the keys in (low, high] of the listed groups to p_keys; returns their number. Beyond
    CAPACITY they are counted only."""
    count, first = 0, 0
    # Logits are read a tile ahead, the list two, so that no load waits for another.
    groups = listed_groups(p_list, 0, num_groups, TILE)
    following = listed_groups(p_list, TILE, num_groups, TILE)
    x = load_groups(p_row, groups, VOCAB)
    while first < num_groups:
        x_following = load_groups(p_row, following, VOCAB)
        later = listed_groups(p_list, first + 2 * TILE, num_groups, TILE)
        key = key_of(clean(x))
        _, real = tokens_of(groups, VOCAB)
        count = _append(p_keys, key, real & (key > low) & (key <= high), count, CAPACITY)
        x, groups, following = x_following, following, later
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
        x = clean(tl.load(p_row + o, mask=o < VOCAB, other=float("-inf")).to(tl.float32))
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
def _spread_pivots(first, last, PIVOTS: tl.constexpr):
    """Keys [PIVOTS] from first to last, evenly spaced in value."""
    part = tl.arange(0, PIVOTS).to(tl.float32) / (PIVOTS - 1)
    bottom = value_of(tl.maximum(first, NEG_INF_KEY + 1))
    even = key_of(bottom * (1.0 - part) + value_of(last) * part)
    return tl.minimum(tl.maximum(even, first), last)


@triton.jit
def _predict(
    p_row, target, whole, origin, low, high, peak, scale,
    BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """From a sample, one token of each group: about how many tokens the bracket (low, high] holds,
    and between which keys the threshold should lie. whole: the weight above origin."""
    o = tl.arange(0, MAXIMA)
    token = o * GROUP + o % GROUP
    real = (o < GROUPS) & (token < VOCAB)
    x = clean(tl.load(p_row + token, mask=real, other=float("-inf")).to(tl.float32))
    keys = tl.where(real & (key_of(x) > origin), key_of(x), BOTTOM)
    weights = weigh_keys(keys, peak, scale, BY_COUNT)
    held = tl.sum(((keys > low) & (keys <= high)).to(tl.int32), 0) * GROUP
    # Of the weights above and below the threshold the sample knows the smaller one better.
    few_above = 2.0 * target < whole
    aim = target / GROUP
    if not few_above:
        aim = tl.sum(weights, 0) - (whole - target) / GROUP
    middle, _above = search_keys(keys, weights, 0.0, aim, low, high)
    counted = tl.where(few_above, keys > middle, keys <= middle)
    error = DEVIATIONS * tl.sqrt(tl.sum(tl.where(counted, weights * weights, 0.0), 0))
    error += tl.max(tl.where(keys <= middle, weights, 0.0), 0)  # where it counts next to none
    first, _above = search_keys(keys, weights, 0.0, aim + error, low, high)
    last, _above = search_keys(keys, weights, 0.0, aim - error, low, high)
    return held, first, last


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
    p_row, p_maxima, p_list, p_keys, target, whole, origin, low, high, peak, scale,
    BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr,
    LANES: tl.constexpr, PIVOTS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Smallest key v in (low, high] with the weight above v below target, that weight, and how many
    keys p_keys holds if these are all from v up, else 0. whole: the weight above origin, which is
    at most low. high: the peak's key."""
    low, floor = _bound_from_maxima(
        p_maxima, target, low, high, peak, scale, BY_COUNT, GROUPS, MAXIMA
    )
    top, over, under = high, 0.0, whole
    count = tl.full((), CAPACITY + 1, tl.int32)
    num_groups = list_above(p_maxima, p_list, low, GROUPS, MAXIMA)
    first, last = low + 1, high
    guided = num_groups > CAPACITY // 8
    if guided:
        held, first, last = _predict(
            p_row, target, whole, origin, low, high, peak, scale, BY_COUNT, VOCAB, GROUPS, MAXIMA
        )
        guided = held > CAPACITY
    fits = (not guided) & (num_groups <= CAPACITY)  # every listed group holds at least one
    step = 0
    while (count > CAPACITY) & (low + 1 < high):
        if fits:
            if step > 0:
                num_groups = list_above(p_maxima, p_list, low, GROUPS, MAXIMA)
            count = collect(p_row, p_list, p_keys, num_groups, low, high, VOCAB, TILE, CAPACITY)
            fits = count <= CAPACITY
        else:
            pivots = _place_pivots(low, high, floor, step % 2 == guided.to(tl.int32), PIVOTS)
            if guided & (step == 0):
                pivots = _spread_pivots(first, last, PIVOTS)
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
            fits = under - over <= CAPACITY * least
    held = 0
    if count <= CAPACITY:
        keys, weights = load_keys(p_keys, count, peak, scale, BY_COUNT, CAPACITY)
        held = tl.where(high == top, count, 0)
        high, over = search_keys(keys, weights, over, target, low, high)
    return high, over, held
