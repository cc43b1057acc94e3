"""Shared-prefix decode against dense attention, and which rows the device puts together."""

from dataclasses import replace

import pytest
import torch

from kernels.conformance import (
    dense_reference,
    deviation,
    fill_nan,
    lse_deviation,
    paged_case,
)
from kernels.prefix_groups import PrefixShape, group_rows
from kernels.shared_prefix import PrefixConfig, SharedPrefix, SharedTable
from kernels.split_kv import SplitKV
from tests.kernels.conformance.kit import DEVICE

SMALL = PrefixConfig(block_m=32 if DEVICE == "cpu" else 64, block_n=32, num_warps=4, num_stages=3)
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def shared_case(contexts, groups, page_size=16, **options):
    """A case in which rows share their leader's first pages; groups: {leader: (rows, pages)}. The
    pages that they had there are NaN then."""
    options = {"dtype": DTYPE, "device": DEVICE, "garbage_tails": True} | options
    case = paged_case(contexts, page_size=page_size, **options)
    for leader, (rows, pages) in groups.items():
        tokens = pages * page_size
        for row in rows:
            freed = case.page_table[row, :pages].long()
            for cache, kept in ((case.k_cache, case.keys), (case.v_cache, case.values)):
                raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
                nothing = torch.empty_like(cache[:1])
                fill_nan(nothing)
                raw[freed] = nothing.view(raw.dtype)
                kept[row][:tokens] = kept[leader][:tokens]
            case.page_table[row, :pages] = case.page_table[leader, :pages]
    return case


def eager(**options):
    """Shares however little it saves."""
    options = {"prefix_config": SMALL, "min_prefix_tokens": 16, "min_saved_bytes": 0} | options
    return SharedPrefix(**options)


def call(kernel, case, window=None, softcap=None, plan=None):
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens, case.scale)
    return kernel(*arguments, window, plan=plan, softcap=softcap, return_lse=True, **scales)


def groups_of(plan):
    prefixes = plan.read()["None"]["prefixes"]
    return {
        tuple(rows): tokens
        for rows, tokens in zip(prefixes["rows"], prefixes["prefix_tokens"], strict=True)
    }


def check(kernel, case, expected_groups, **options):
    plan = kernel.plan(case.rows())
    out, lse = call(kernel, case, plan=plan, **options)
    assert groups_of(plan) == expected_groups
    expected, sums = dense_reference(case, **options)
    same, _ = dense_reference(case, dtype=case.q.dtype, **options)
    found = deviation(out, expected, same)
    assert found.within, found
    assert lse_deviation(lse, sums).within


@pytest.mark.parametrize(("heads", "page_size"), [((4, 2), 16), ((6, 2), 1), ((7, 1), 16)])
def test_two_groups_among_rows_of_their_own(heads, page_size):
    contexts = [150, 0, 97, 70, 200, 33, 120, 65, 49]
    pages = 64 // page_size
    groups = {0: ([4, 6], 2 * pages - pages // 2), 2: ([3, 7], pages)}
    case = shared_case(contexts, groups, page_size, heads=heads)
    expected = {(0, 4, 6): 96, (2, 3, 7): 64}
    check(eager(), case, expected)


def test_more_rows_than_a_tile_and_several_splits_of_a_prefix(monkeypatch):
    monkeypatch.setattr("kernels.prefix_groups.MIN_SPLIT_TOKENS", 32)
    monkeypatch.setattr("kernels.shared_prefix.num_sms", lambda device, on_cpu: 64)
    contexts = [97 + row for row in range(5)]
    case = shared_case(contexts, {0: (range(1, 5), 6)}, heads=(6, 1))
    kernel = eager(prefix_config=replace(SMALL, block_m=16 if DEVICE == "cpu" else 64))
    check(kernel, case, {tuple(range(5)): 96})
    plan = kernel.plan(case.rows())
    call(kernel, case, plan=plan)
    prefixes = plan.tables[None].prefixes.read()
    tiles = 3 if DEVICE == "cpu" else 1
    assert prefixes["splits"] == [3]
    assert prefixes["num_items"] == 3 * tiles


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_keeps_its_last_token(page_size):
    pages = 64 // page_size
    # Rows hold exactly the shared pages, one token more, and a page that they do not share.
    case = shared_case([64, 65, 80 + page_size, 64], {0: ([1, 2, 3], pages)}, page_size)
    check(eager(), case, {(0, 1, 2, 3): 64 - page_size})


@pytest.mark.parametrize("head_dim", [80, 128])
def test_softcap_and_padded_head(head_dim):
    case = shared_case([100, 90, 81], {0: ([1, 2], 5)}, head_dim=head_dim)
    case.scale *= 8
    check(eager(), case, {(0, 1, 2): 80}, softcap=5.0)


def test_float8_cache_with_scales():
    options = {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn, "scales": (0.5, 0.03)}
    check(eager(), shared_case([100, 90, 81], {0: ([1, 2], 5)}, **options), {(0, 1, 2): 80})


def test_bfloat16():
    case = shared_case([100, 90, 81], {0: ([1, 2], 5)}, dtype=torch.bfloat16)
    check(eager(), case, {(0, 1, 2): 80})


@pytest.mark.parametrize("window", [None, 40])
def test_without_sharing_it_equals_split_kv(window):
    shared = {} if window is None else {0: ([1, 2], 5)}
    case = shared_case([100, 1, 0, 90, 81], {0: ([3, 4], 5)} if shared else {})
    for result, expected in zip(
        call(eager(), case, window), call(SplitKV(), case, window), strict=True
    ):
        assert torch.equal(result, expected)


def test_little_saved_is_not_shared():
    case = shared_case([100, 90, 81], {0: ([1, 2], 5)})
    token_bytes = 2 * 2 * 64 * case.q.element_size()
    kernel = eager(min_saved_bytes=160 * token_bytes)
    plan = kernel.plan(case.rows())
    call(kernel, case, plan=plan)
    assert groups_of(plan) == {(0, 1, 2): 80}
    kernel = eager(min_saved_bytes=161 * token_bytes)
    plan = kernel.plan(case.rows())
    out, _ = call(kernel, case, plan=plan)
    assert groups_of(plan) == {}
    assert torch.equal(out, call(SplitKV(), case)[0])
    # One row has nobody to share with: nothing is launched for it.
    plan = kernel.plan(case.alone(0).rows())
    call(kernel, case.alone(0), plan=plan)
    assert not isinstance(plan.tables[None], SharedTable)


def test_last_program_merges_prefix_and_splits(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr("kernels.split_kv.num_sms", lambda device, on_cpu: 5)
    contexts = [70 + 3 * row for row in range(6)]
    case = shared_case(contexts, {0: (range(1, 6), 4)})
    kernel = eager()
    plan = kernel.plan(case.rows())
    expected = [dense_reference(case, dtype=dtype)[0] for dtype in (torch.float64, DTYPE)]
    for _ in range(2):
        out, _ = call(kernel, case, plan=plan)
        assert deviation(out, *expected).within
        assert not plan.tables[None].arrivals.any()
        for partial in plan.partials:
            fill_nan(partial)


def tables(rows):
    width = max(map(len, rows))
    table = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.int32, device=DEVICE)


def grouped(rows, lens, page_size=1, min_tokens=1, tile_rows=4):
    shape = PrefixShape(2, 16, tile_rows, 8, min_tokens, 0)
    lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    table = group_rows(tables(rows), lens, page_size, shape)
    found = table.read()
    check_items(table, tile_rows)
    members = zip(found["rows"], found["prefix_tokens"], strict=True)
    return {tuple(rows): tokens for rows, tokens in members}


def check_items(table, tile_rows):
    """Every row of a group in one tile of each split, every position of the prefix in one split."""
    seen = {}
    order, lens = table.order.tolist(), table.lens.tolist()
    assert sorted(order) == list(range(len(order)))
    for place, count, begin, end, split, *_ in table.items[: int(table.num_items)].tolist():
        assert 1 <= count <= tile_rows
        for row in order[place : place + count]:
            seen.setdefault(row, {})[split] = (begin, end)
    for row, prefix in enumerate(lens):
        cuts = seen.pop(row, {})
        assert len(cuts) == int(table.parts[row])
        assert len(cuts) <= table.max_parts
        edges = [cuts[split] for split in range(len(cuts))]
        assert [token for cut in edges for token in range(*cut)] == list(range(prefix))
    assert not seen


def test_equal_pages_later_are_no_shared_prefix():
    # The tables agree in their second half only, then nowhere but in garbage beyond a row's tokens.
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 4, 5, 6], [10, 11, 12, 4, 5, 6]]
    assert grouped(rows, [7, 7, 7]) == {}
    assert grouped([[1, 2, 3, 4]] * 3, [1, 1, 1]) == {}


def test_a_group_is_cut_at_its_shortest_agreement():
    rows = [[1, 2, 3, 4, 9], [8, 8, 8, 8, 8], [1, 2, 3, 4, 7], [1, 2, 3, 4, 6], [1, 2, 3, 5, 9]]
    found = grouped(rows, [6, 6, 6, 6, 6])
    assert [row for group in found for row in group if row == 1] == []
    for group, tokens in found.items():
        first = rows[group[0]][:tokens]
        assert all(rows[row][:tokens] == first for row in group)
    assert sum(tokens * (len(group) - 1) for group, tokens in found.items()) >= 8


def test_nested_prefixes_take_the_depth_that_saves_most():
    deep = [[*range(1, 41), 100 + row] for row in range(3)]
    wide = [[*range(1, 9), *range(200 + 50 * row, 230 + 50 * row)] for row in range(3)]
    found = grouped(deep + wide, [41] * 3 + [38] * 3)
    assert found == {(0, 1, 2): 40, (3, 4, 5): 8}


def test_many_rows_in_any_order(monkeypatch):
    monkeypatch.setattr("kernels.split_plan.BLOCKS_OF_ROWS", (16,))
    generator = torch.Generator().manual_seed(0)
    owner = torch.randint(0, 4, (18,), generator=generator).tolist()
    rows = [
        [1000 * group + at for at in range(12)] + [5000 + row] for row, group in enumerate(owner)
    ]
    found = grouped(rows, [13] * 18, min_tokens=2)
    expected = {
        tuple(row for row, group in enumerate(owner) if group == one): 12 for one in range(4)
    }
    assert found == expected


@pytest.mark.gpu
def test_graph_replay_follows_sharing_that_comes_and_goes():
    """A captured step with its plan, over tables, lengths and caches that change meanwhile."""
    contexts = [700, 650, 900, 640, 513, 1200, 30, 800]
    options = {"heads": (8, 2), "head_dim": 128}
    shared = shared_case(contexts, {0: (range(1, 5), 32)}, **options)
    shorter = replace(shared, context_lens=shared.context_lens - 25)
    apart = shared_case(contexts, {}, **options)
    names = ("page_table", "context_lens", "k_cache", "v_cache")
    step = replace(shared, **{name: getattr(shared, name).clone() for name in names})
    kernel = eager()

    def run():
        plan = kernel.plan(step.rows())
        return [call(kernel, step, plan=plan) for _ in range(3)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
    for case in (shared, apart, shorter, shared):
        for name in names:
            getattr(step, name).copy_(getattr(case, name))
        for tensor in (tensor for result in results for tensor in result):
            fill_nan(tensor)
        graph.replay()
        torch.cuda.synchronize()
        eagerly = call(kernel, case)
        for result in results:
            assert all(map(torch.equal, result, eagerly))
    expected = [dense_reference(shared, dtype=dtype)[0] for dtype in (torch.float64, DTYPE)]
    assert deviation(results[0][0], *expected).within


def test_tiles_smaller_than_a_group_are_refused():
    case = shared_case([100, 90], {}, heads=(32, 2))
    with pytest.raises(ValueError, match="block_m must be at least a group"):
        call(eager(prefix_config=PrefixConfig(8, 32)), case)


def test_refuses_splits_that_would_promise_independence_of_the_batch():
    with pytest.raises(ValueError, match="splits must be auto or a number"):
        SharedPrefix(splits="invariant")
    assert not SharedPrefix(splits=2).capabilities.batch_invariant
