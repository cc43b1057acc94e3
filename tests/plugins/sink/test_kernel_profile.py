"""plugins/sink/kernel_profile.py on made-up kernels."""

import ast
from pathlib import Path

import pytest

from plugins.sink.kernel_profile import (
    BY_NAME,
    COPIES,
    LAYERS,
    OTHER,
    KernelEvent,
    busy_us,
    group_of,
    launches_of,
    times_of,
)
from plugins.sink.step_work import DECODE, EXTEND, GEMM
from tests.plugins.sink.kernel_run import DECODES, MIXED, launch

KERNELS = Path(__file__).parents[3] / "kernels"


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("decode_kernel", DECODE),
        ("merge_kernel", DECODE),
        ("_merge_kernel", EXTEND),
        ("nvjet_hsh_128x8_64x12_4x1_v_bz_TNN", GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", GEMM),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", GEMM),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later>", OTHER),
        ("void at::native::index_elementwise_kernel<128, 4>", COPIES),
        ("Memset (Device)", COPIES),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", OTHER),
        ("rms_norm_kernel", LAYERS),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_every_triton_kernel_has_a_group() -> None:
    found = set()
    for file in KERNELS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found |= {node.name for one in node.decorator_list if "jit" in ast.unparse(one)}
    assert found == set(BY_NAME)


def test_busy_time_is_the_union_over_streams() -> None:
    spans = [(10, 5, 0), (0, 4, 0), (2, 1, 1), (3, 3, 1), (12, 8, 1), (6, 1, 0)]
    events = [KernelEvent("k", start, length, stream) for start, length, stream in spans]
    assert busy_us(events) == 7 + 10
    assert busy_us([]) == 0


def test_launches_are_told_apart_by_uploads_that_follow_downloads() -> None:
    """The second: two uploads, three downloads."""
    second = [KernelEvent("Memcpy HtoD (Pageable -> Device)", 15, 1, 7), *launch(17, *DECODES)]
    second += [KernelEvent("Memcpy DtoH (Device -> Pinned)", end, 1, 7) for end in (30, 32)]
    launches = [launch(0, *DECODES), second, launch(40, *MIXED)]
    mixed_up = [event for one in reversed(launches) for event in one]
    assert launches_of(mixed_up) == launches


def test_times_of_a_launch_add_up_to_the_step() -> None:
    launches = [launch(0, *DECODES), launch(12, *DECODES), launch(21, *MIXED)]
    second, third = times_of(launches)
    assert (second.between_us, second.within_us, second.busy_us) == (3, 1, 8)
    assert second.step_us == 12  # from 9 to 21
    assert (third.between_us, third.within_us, third.busy_us) == (0, 0, 11)
