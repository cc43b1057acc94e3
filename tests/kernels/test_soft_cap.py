"""Soft-capped scores of any size: the conformance kit tries usual caps alone."""

import pytest
import torch

from kernels.conformance import dense_reference, deviation, paged_case
from kernels.extend import extend, plan_extend
from kernels.split_kv import SplitKV

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("cap", [0.3, 30.0, 1e3, 1e6, 1e30])
def test_cap_keeps_the_precision_of_scores_far_below_it(cap):
    case = paged_case([70, 5], device=DEVICE, seed=3)
    expected = dense_reference(case, softcap=cap)[0]
    tensors = case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens
    assert deviation(SplitKV()(*tensors, case.scale, softcap=cap), expected).within
    rows = extend(
        *tensors, case.query_starts, case.scale, softcap=cap, plan=plan_extend(case.rows())
    )
    assert deviation(rows, expected).within
