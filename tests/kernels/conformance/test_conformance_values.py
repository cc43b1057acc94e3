"""Every head size, group, page size, dtype, window and length against dense attention, over pools
of NaN."""

import pytest
import torch

from kernels.conformance import fill_nan
from tests.kernels.conformance.kit import DEVICE, FLOAT8

thorough = pytest.mark.thorough
LONG = 300 if DEVICE == "cpu" else 20_000


def edges(page_size):
    """Lengths around a page's and a tile's ends, in batches of a few rows."""
    sizes = {page_size - 1, page_size, page_size + 1, 0, 1}
    return [sorted(sizes - {-1}), [63, 64, 65], [127, 0, 129, 128]]


def heads_of(group):
    """Two KV heads, so that a wrong stride between them shows; one where the group is large."""
    return (group * 2, 2) if group <= 8 else (group, 1)


def test_head_dim(kernel, head_dim, agrees):
    """sgl-project/sglang#1159, #1281: head size 96 not supported (N06)."""
    agrees(kernel, kernel.case([37, 1], head_dim=head_dim, seed=head_dim))


def test_energy_in_late_columns(kernel, head_dim, agrees):
    """triton-lang/triton#621: only the first 64 columns of a head are used (N08)."""
    case = kernel.case([40 if kernel.quick else 70], head_dim=head_dim, seed=1)
    first = min(64, head_dim // 2)
    for tensor in (case.q, case.keys[0], case.values[0]):
        tensor[..., :first] = 0
    case.k_cache[..., :first] *= 0  # what nobody owns stays NaN
    case.v_cache[..., :first] *= 0
    agrees(kernel, case)


def test_group(kernel, group, agrees):
    """Sandermage/genesis-vllm-patches#7, paiml/aprender#559: ratios that are no power of two
    (N09)."""
    agrees(kernel, kernel.case([33, 1], heads=heads_of(group), seed=group))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the NaN
def test_neighbours_of_a_group_stay_untouched(kernel, odd_group, agrees):
    """vllm-project/vllm#47248: padded heads read the next group (N09)."""
    case = kernel.case([33], heads=(3 * odd_group, 3), seed=2)
    before, _ = agrees(kernel, case)
    middle = slice(odd_group, 2 * odd_group)
    case.q[:, middle] = torch.nan
    case.k_cache[:, :, 1] = torch.nan
    case.v_cache[:, :, 1] = torch.nan
    after, _ = kernel(case)
    assert torch.equal(after[:, : middle.start], before[:, : middle.start])
    assert torch.equal(after[:, middle.stop :], before[:, middle.stop :])
    assert after[:, middle].isnan().all(), "NaN in q and K was swallowed"


def test_lengths_at_page_and_tile_edges(kernel, page_size, agrees):
    batches = edges(page_size)
    if kernel.quick:  # the page's edges at the usual size, a tile's at the others
        batches = batches[:1] if page_size == kernel.page_size else batches[1:2]
    for lengths in batches:
        agrees(kernel, kernel.case(lengths, page_size=page_size, garbage_tails=True, seed=3))


def test_dtype(kernel, dtype, agrees):
    agrees(kernel, kernel.case([0, 100], dtype=dtype, seed=4))


def test_float8_cache_with_scales(kernel, float8_query, agrees):
    options = {"dtype": float8_query, "kv_dtype": getattr(torch, FLOAT8), "scales": (0.5, 0.03)}
    agrees(kernel, kernel.case([1, 100], **options, seed=5))


@pytest.mark.parametrize(
    "contexts",
    [
        pytest.param([100, 17, 0], id="mixed"),
        pytest.param([64, 129, 40], marks=thorough, id="edges"),
    ],
)
def test_window(kernel, window, contexts, agrees):
    agrees(kernel, kernel.case(contexts, seed=6), window)


def test_pages_outside_the_window_are_never_read(kernel, page_size, agrees):
    """vllm-project/vllm#30887: garbage outside the window leaks in. The pages are NaN and, as after
    they were freed, the table points at page 0 (N11)."""
    if not kernel.takes("window"):
        pytest.skip("takes no window")
    window, contexts = 16, [80]
    queries = {"queries": [3]} if kernel.kind == "extend" else {}
    case = kernel.case(contexts, page_size=page_size, **queries, seed=7)
    for row, context in enumerate(contexts):
        first = max(0, context - case.queries[row] - window + 1)
        outside = case.slots(row)[:first]
        for cache in (case.k_cache, case.v_cache):
            cache.view(-1, *cache.shape[2:])[outside] = torch.nan
        case.page_table[row, : first // page_size] = 0
    agrees(kernel, case, window)


def test_softcap(kernel, softcap, agrees):
    case = kernel.case([65, 1], seed=8)
    case.scale *= 8  # scores that the cap bends
    agrees(kernel, case, softcap=softcap)


@thorough
def test_softcap_within_a_window(kernel, softcap, window, agrees):
    agrees(kernel, kernel.case([90, 17], seed=9), window, softcap)


def test_more_splits_than_tokens(kernel, agrees):
    """vllm-project/vllm#39148: a split without tokens gives -inf minus -inf (N03)."""
    mixed = [0, 1, 2, 7, 8, 9, LONG]
    for contexts in [[0, 1, 2, 9, 130]] if kernel.quick else ([0], [1], [2], [9], mixed):
        out, _ = agrees(kernel, kernel.case(contexts, seed=10))
        assert out.isfinite().all()


@thorough
def test_long_row_among_rows_of_one_token(kernel, agrees):
    agrees(kernel, kernel.case([1, 1, LONG, 1, 1], seed=11))


def test_batch_of_empty_rows(kernel, agrees):
    case = kernel.case([0, 0, 0], seed=12)
    fill_nan(case.k_cache)
    agrees(kernel, case)


@thorough
def test_odd_lengths(kernel, agrees):
    agrees(kernel, kernel.case([211, 3, 97], seed=13))
    agrees(kernel, kernel.case([251], seed=14))


@thorough
@pytest.mark.parametrize("large", [30.0, 200.0])
def test_large_scores_stay_finite(kernel, large):
    """Exponentials overflow where the maximum is not subtracted."""
    case = kernel.case([70, 5], seed=15)
    case.q *= large
    assert kernel(case)[0].isfinite().all()
