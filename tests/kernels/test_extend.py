"""Ragged prefill over a paged cache against dense attention in float64, over shuffled pages in a
pool that is NaN but for the rows' own tokens."""

import pytest
import torch

from kernels.extend import ExtendConfig, extend, plan_extend
from kernels.extend_plan import make_tiles
from tests.kernels.extend_case import DEVICE, TOLERANCE, Case

MIXED = [(150, 30), (1, 1), (0, 3), (65, 65), (70, 1), (64, 17)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_extend_equals_dense_attention(dtype):
    case = Case(MIXED, (4, 2), dtype=dtype, num_padding=3)
    case.check(*extend(*case.inputs(), return_lse=True))


@pytest.mark.parametrize("page_size", [1, 2, 128])
def test_extend_takes_page_sizes(page_size):
    case = Case(MIXED, page_size=page_size)
    case.check(*extend(*case.inputs(), return_lse=True))


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_extend_takes_head_dims(head_dim):
    case = Case([(70, 40), (33, 33)], head_dim=head_dim)
    case.check(*extend(*case.inputs(), return_lse=True))


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (7, 1), (12, 2), (12, 1), (16, 1)])
def test_extend_takes_head_ratios(heads):
    case = Case([(70, 10), (17, 17), (5, 1)], heads=heads)
    case.check(extend(*case.inputs()))


@pytest.mark.parametrize("head_fast", [True, False])
def test_extend_without_packed_heads(head_fast):
    case = Case([(70, 40), (33, 33), (5, 1)], (6, 2))
    config = ExtendConfig(pack_heads=False, head_fast=head_fast)
    case.check(extend(*case.inputs(), config=config))


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (20, 4), (64, 1), (100, 2)])
def test_extend_with_window_sees_latest_positions(window, splits):
    case = Case(MIXED, window=window, dtype=torch.float32)
    config = ExtendConfig(64, 32, splits=splits)
    case.check(*extend(*case.inputs(), window, config=config, return_lse=True))


@pytest.mark.parametrize("splits", [2, 8])
def test_extend_merges_splits(splits):
    case = Case([(150, 30), (0, 3), (65, 1)], num_padding=2)
    config = ExtendConfig(splits=splits)
    case.check(*extend(*case.inputs(), config=config, return_lse=True))


def test_extend_splits_few_rows_over_long_context():
    case = Case([(1100, 20)], heads=(2, 1), dtype=torch.float32)
    plan = plan_extend(case.plan_rows())
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))


@pytest.mark.parametrize("window", [None, 30])
def test_extend_caps_scores(window):
    case = Case([(90, 70), (65, 65)], softcap=2.0, window=window)
    case.check(*extend(*case.inputs(), window, softcap=2.0, return_lse=True))


def test_extend_scales_fp8_cache():
    dtype = torch.float16
    case = Case([(90, 70), (65, 65)], dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    case.check(*extend(*case.inputs(), return_lse=True))
    case.q *= 2.0
    out, lse = extend(*case.inputs(), k_scale=0.5, v_scale=3.0, return_lse=True)
    case.check(out / 3.0, lse)


def test_extend_takes_strided_queries_and_reuses_a_plan():
    case = Case(MIXED, dtype=torch.float32)
    packed = torch.full((len(case.q), 8, 64), torch.nan, device=DEVICE)
    packed[:, :2] = case.q
    case.q = packed[:, :2]
    plan = plan_extend(case.plan_rows())
    for _ in range(2):
        case.check(extend(*case.inputs(), plan=plan))
    assert len(plan.tiles) == 1


def test_extend_leaves_tokens_before_the_first_row_alone():
    """In a graph they are another kernel's; rows without tokens are padding."""
    case = Case([(40, 40), (70, 10), (33, 7), (0, 0), (0, 0)], num_padding=3)
    q, k_cache, v_cache, table, lens, starts, scale = case.inputs()
    out = torch.full_like(q, 7.0)
    rest = table[1:].contiguous(), lens[1:].contiguous(), starts[1:].contiguous()
    found = extend(q, k_cache, v_cache, *rest, scale, out=out)
    assert torch.equal(found[:40], torch.full_like(q[:40], 7.0))
    expected = case.expected.to(q.device)[40:]
    assert (found[40:].double() - expected).abs().max() <= TOLERANCE[q.dtype]


def test_extend_addresses_beyond_32_bits():
    # A slot of 2 x 64 values beyond the 2**31st: a virtual pool, of which few pages are touched.
    pool = torch.empty(2, 2**20 + 300, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    case = Case([(90, 40)], (2, 2))
    pages = case.table[0, :6].long()
    pool[:, pages + 2**20 + 1] = torch.stack(case.caches)[:, pages]
    case.table[0, :6] += 2**20 + 1
    case.caches = list(pool)
    case.check(extend(*case.inputs()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(q=a["q"][..., :40]), "k_cache head_dim"),
        (lambda a: a.update(starts=a["starts"].long()), "query_starts dtype must be int32"),
        (lambda a: a.update(starts=a["starts"][:-1]), "query_starts must be 3 long"),
        (lambda a: a.update(scale=-1.0), "scale, k_scale must be > 0"),
        (lambda a: a.update(window=0), "window must be None or"),
    ],
)
def test_extend_refuses(change, message):
    case = Case([(20, 10), (5, 5)])
    names = "q", "k_cache", "v_cache", "table", "lens", "starts", "scale"
    arguments = dict(zip(names, case.inputs(), strict=True)) | {"window": None}
    change(arguments)
    with pytest.raises(ValueError, match=message):
        extend(*arguments.values())


@pytest.mark.parametrize(("pack", "block_m"), [(1, 16), (3, 64)])
def test_tiles_cover_each_query_once_longest_first(pack, block_m):
    random = torch.Generator().manual_seed(1)
    new = torch.randint(0, 100, (150,), generator=random)
    context = new + torch.randint(0, 50, (150,), generator=random)
    context[20] = 0
    starts = torch.tensor([0, *new.tolist()]).cumsum(0)
    total = int(starts[-1]) + 5
    starts, lens = (x.to(DEVICE, torch.int32) for x in (starts, context))
    tiles = make_tiles(starts, lens, total, pack, block_m)
    real = [tuple(tile) for tile in tiles.tolist() if tile[0] >= 0]
    lengths = [*new.tolist(), 5]
    contexts = [*context.tolist(), 0]
    wanted = {
        (row, first) for row in range(151) for first in range(0, lengths[row] * pack, block_m)
    }
    assert set(real) == wanted
    assert len(real) == len(wanted)
    assert all(row == -1 for row, _ in tiles[len(real) :].tolist())
    keys = [
        (contexts[row] - lengths[row]) * pack + min(first + block_m, lengths[row] * pack)
        for row, first in real
    ]
    assert keys == sorted(keys, reverse=True)
    some = make_tiles(starts, lens, total, pack, block_m, min_tokens=40, below_tokens=60)
    rows = {row for row, _ in some.tolist() if row >= 0}
    assert rows == {row for row in range(150) if 40 <= lengths[row] < 60}


def test_results_that_do_not_fit_are_refused():
    case = Case([(20, 4), (3, 3)])
    tokens, heads, dim = case.q.shape
    short = torch.empty(tokens - 1, heads, dim, dtype=case.q.dtype, device=DEVICE)
    wide = torch.empty(tokens, heads, 2 * dim, dtype=case.q.dtype, device=DEVICE)
    lse = torch.empty(tokens, heads, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match="out must be of shape"):
        extend(*case.inputs(), out=short)
    with pytest.raises(ValueError, match="out strides must be contiguous"):
        extend(*case.inputs(), out=wide[..., :dim])
    with pytest.raises(ValueError, match=r"lse dtype must be torch\.float32, got 'torch\.float16'"):
        extend(*case.inputs(), return_lse=True, lse=lse)
