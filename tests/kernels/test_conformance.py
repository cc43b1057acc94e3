"""The conformance kit itself: its reference against torch's attention, its traps, and a kernel with
a mistake that it must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.conformance import dense_reference, deviation, lse_deviation, paged_case
from kernels.torch_reference import paged_decode

ROOT = Path(__file__).resolve().parents[2]
CHILD = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
"""Of a child process: pytest must not take itself for one of several workers."""
FORGETS_WINDOW = """
from kernels.torch_reference import paged_decode


def decode(q, k_cache, v_cache, page_table, context_lens, scale, window=None):
    return paged_decode(q, k_cache, v_cache, page_table, context_lens, scale)
"""


def test_dense_reference_equals_torch():
    case = paged_case([70, 5], [33, 5], heads=(6, 2), dtype=torch.float64, seed=1)
    out, lse = dense_reference(case)
    part = case.part(0)
    positions = torch.arange(70)
    seen = positions <= positions[37:, None]
    q, k, v = case.q[part], case.keys[0], case.values[0]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, seen, scale=case.scale, enable_gqa=True)
    torch.testing.assert_close(out[part], expected.transpose(0, 1))
    scores = q[4] @ k[1].T * case.scale
    torch.testing.assert_close(lse[part][:, 4], scores.masked_fill(~seen, -torch.inf).logsumexp(1))


def test_dense_reference_in_blocks_of_queries_is_the_same(monkeypatch):
    case = paged_case([90, 3, 0], [50, 3, 2], seed=2)
    for options in ({}, {"window": 16}, {"softcap": 2.0}):
        whole = dense_reference(case, **options)
        with monkeypatch.context() as patch:
            patch.setattr("kernels.conformance.SCORES_AT_ONCE", 90 * 4 * 7)
            blocks = dense_reference(case, **options)
        for one, other in zip(whole, blocks, strict=True):
            torch.testing.assert_close(one, other)
    assert (whole[0][-2:] == 0).all()
    assert (whole[1][-2:] == -torch.inf).all()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_pool_is_nan_wherever_no_row_has_a_token(kv_dtype):
    case = paged_case([20, 0, 5], page_size=4, kv_dtype=kv_dtype, garbage_tails=True)
    for cache in (case.k_cache, case.v_cache):
        finite = cache.float().isfinite().flatten(2).all(2).flatten()
        assert finite.sum() == 25
        assert finite[torch.cat([case.slots(row) for row in range(3)])].all()


def test_nan_and_infinity_in_the_wrong_place_never_pass():
    expected = torch.zeros(3, 2, 4, dtype=torch.float64)
    out = torch.zeros(3, 2, 4)
    assert deviation(out, expected).within
    out[1, 1, 1] = torch.nan
    assert not deviation(out, expected).within
    sums = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    assert lse_deviation(sums.float(), sums).within
    assert not lse_deviation(torch.zeros(1, 2), sums).within
    assert not lse_deviation(torch.full((1, 2), -torch.inf), sums).within


def test_half_precision_may_be_off_twice_as_far_as_torch():
    expected = torch.ones(8, dtype=torch.float64)
    same = torch.full((8,), 1.001953125, dtype=torch.float16)  # two units in the last place
    allowed = deviation(same, expected, same).limit
    assert allowed == 2e-3  # the cap
    exact = deviation(same, expected, expected.half())
    assert exact.limit == pytest.approx(2 * 2**-10)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.03, False)])
def test_caps_leave_room_for_the_rounding_of_large_results(factor, passes):
    # A result of 2.3 lies up to half a unit of 2**-6 from its nearest bfloat16.
    case = paged_case([2], [1], heads=(6, 2), head_dim=64, dtype=torch.bfloat16, seed=22)
    expected, _ = dense_reference(case)
    same, _ = dense_reference(case, dtype=torch.bfloat16)
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens)
    for out in (paged_decode(*arguments, case.scale), same):
        wrong = (out.double() * factor).bfloat16()
        assert deviation(wrong, expected, same).within == passes


def test_kernel_that_cannot_be_loaded_is_one_usage_error():
    spec = "kernels.nosuch:f"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--kernel", spec]
    done = subprocess.run(command, cwd=ROOT, env=CHILD, capture_output=True, text=True, timeout=120)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith(f"ERROR: --kernel {spec}: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout.strip()


def test_kit_finds_the_mistake_of_a_users_kernel_and_prints_the_table(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FORGETS_WINDOW)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "test_window or test_group"]
    command += ["--kernel", f"{file}:decode", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=CHILD, capture_output=True, text=True, timeout=120)
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines["group"][1:3] == ["7", "0"]
    assert int(lines["window"][2]) > 0
    assert "declares no capabilities" not in lines  # the -k left those checks out
