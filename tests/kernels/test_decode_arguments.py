"""What the decode kernels and their reference refuse or take to its end, and how they are built."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.conformance import dense_reference, deviation, paged_case
from kernels.flat_indices import FlatIndices
from kernels.fused import FusedOps
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from kernels.split_launch import Scores
from kernels.split_plan import fixed_count, fixed_length
from kernels.torch_reference import paged_decode, paged_extend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = {
    "split_kv": SplitKV(),
    "flat_indices": FlatIndices(),
    "shared_prefix": SharedPrefix(min_prefix_tokens=16, min_saved_bytes=0),
}
ALL = KERNELS | {"reference": paged_decode}


def call(kernel, case, *window, **options):
    tensors = (case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens)
    return kernel(*tensors, case.scale, *window, **options)


def small_case(**options):
    return paged_case([37, 5, 1], head_dim=16, device=DEVICE, **options)


def strided(column):
    return torch.stack([column, column.flip(0)], 1)[:, 0]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("window", [0, -3, 2**31, 2.0])
@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_window_out_of_range_is_refused(kernel, window, planned):
    case = small_case()
    options = {"plan": kernel.plan(case.rows())} if planned else {}
    call(kernel, case, None, **options)
    with pytest.raises(ValueError, match=r"window must be None or an integer in 1 .. 2\*\*31 - 1"):
        call(kernel, case, window, **options)


@pytest.mark.parametrize("window", [1, 2**31 - 1])
@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_windows_at_the_ends_of_the_range(kernel, window):
    case = small_case()
    assert deviation(call(kernel, case, window), dense_reference(case, window)[0]).within


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("softcap", [0, -5.0, float("inf"), float("nan")])
@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_softcap_out_of_range_is_refused(kernel, softcap, planned):
    case = small_case()
    options = {"plan": kernel.plan(case.rows())} if planned else {}
    call(kernel, case, softcap=5, **options)
    with pytest.raises(ValueError, match="softcap must be None or finite and > 0"):
        call(kernel, case, softcap=softcap, **options)


def test_reference_of_extend_refuses_what_that_of_decode_does():
    case = paged_case([37, 5], [4, 5], head_dim=16)
    tensors = (case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens)
    tensors = (*tensors, case.query_starts)
    with pytest.raises(ValueError, match="window must be"):
        paged_extend(*tensors, case.scale, 0)
    with pytest.raises(ValueError, match="softcap must be"):
        paged_extend(*tensors, case.scale, softcap=0.0)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_strided_lengths_are_refused(kernel):
    case = small_case()
    call(kernel, case)  # accepted forms must tell them apart
    case.context_lens = strided(case.context_lens)
    with pytest.raises(ValueError, match="context_lens strides must be contiguous"):
        call(kernel, case)
    with pytest.raises(ValueError, match="context_lens strides must be contiguous"):
        kernel.plan(case.rows())


@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_page_table_without_columns_is_refused(kernel):
    case = small_case()
    case = replace(case, page_table=case.page_table[:, :0])
    with pytest.raises(ValueError, match="page_table columns must be >= 1, got 0"):
        call(kernel, case)


@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_cache_without_heads_is_refused(kernel):
    case = small_case()
    case = replace(case, k_cache=case.k_cache[:, :, :0], v_cache=case.v_cache[:, :, :0])
    with pytest.raises(ValueError, match="k_cache heads must be >= 1, got 0"):
        call(kernel, case)


@pytest.mark.parametrize("kernel", ALL.values(), ids=ALL)
def test_no_rows(kernel):
    case = small_case()
    tables = (case.page_table[:0], case.context_lens[:0])
    arguments = (case.q[:0], case.k_cache, case.v_cache, *tables, case.scale)
    out, lse = kernel(*arguments, return_lse=True)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_lists_that_the_kernel_cannot_read_are_refused():
    case = small_case()
    slots = torch.cat([case.slots(row) for row in range(3)]).int()
    starts = torch.tensor([0, 37, 42], device=DEVICE)
    caches = [cache.flatten(0, 1) for cache in (case.k_cache, case.v_cache)]

    def over(slots=slots, starts=starts, lens=case.context_lens):
        return FlatIndices().over_list(case.q, *caches, slots, starts, lens, 37, Scores(case.scale))

    assert deviation(over(), dense_reference(case)[0]).within
    with pytest.raises(ValueError, match="starts strides must be contiguous"):
        over(starts=strided(starts))
    with pytest.raises(ValueError, match="slots strides must be contiguous"):
        over(slots=strided(slots))
    with pytest.raises(ValueError, match="slots must be at least 1 long"):
        over(slots=slots[:0])
    with pytest.raises(ValueError, match="context_lens strides must be contiguous"):
        over(lens=strided(case.context_lens))


@pytest.mark.parametrize("kernel", [SplitKV, FlatIndices, SharedPrefix])
@pytest.mark.parametrize("splits", [0, -1, 2.5, "x", True, None, 1025])
def test_splits_out_of_range_are_refused(kernel, splits):
    rule = "splits must be auto, invariant or a number in 1 .. 1024"
    for planner in (None, fixed_count):
        with pytest.raises(ValueError, match=rule):
            kernel(splits, planner)


@pytest.mark.parametrize("kernel", [SplitKV, FlatIndices, SharedPrefix])
def test_planner_must_be_callable_and_is_named(kernel):
    with pytest.raises(ValueError, match="planner must be None or a callable"):
        kernel(planner="foo")

    class Planner:
        def __call__(self, contexts, shape):
            return fixed_length(contexts, shape)

    names = {
        fixed_length: "kernels.split_plan.fixed_length",
        partial(fixed_count, splits=2): "kernels.split_plan.fixed_count",
        Planner(): f"{__name__}.{Planner.__qualname__}",
    }
    for planner, name in names.items():
        described = kernel(planner=planner).describe(DEVICE, 64, "float32", 16, 2)
        assert described["splits"] == name
    assert kernel(4).describe(DEVICE, 64, "float32", 16, 2)["splits"] == 4


def test_numbers_reach_the_kernel_as_floats(monkeypatch):
    """An int would be compiled as one, and launched later with a float."""
    kernel, numbers = SplitKV(), []
    launch = kernel._launch.first

    def first(key, tensors, partials, table, address, scores, *rest):
        numbers.extend((scores.scale, scores.softcap, scores.k_scale, scores.v_scale))
        return launch(key, tensors, partials, table, address, scores, *rest)

    monkeypatch.setattr(kernel._launch, "first", first)
    case = replace(small_case(), scale=1)
    call(kernel, case, softcap=2, k_scale=1, v_scale=1)
    assert [type(number) for number in numbers] == [float] * 4


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match=r"activation must be one of .*'mish'"):
        FusedOps().gate(torch.zeros(1, 4, device=DEVICE), "mish")


def test_reference_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import kernels.torch_reference"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
