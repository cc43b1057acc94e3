"""Decode merged by the last program to arrive: a path that a GPU takes with many rows, and that the
interpreter takes only if it is told of more multiprocessors."""

import pytest

from kernels import split_kv
from kernels.conformance import dense_reference, deviation, fill_nan, lse_deviation, paged_case
from kernels.jit import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's own number decides there")
def test_last_arriver_merges_and_leaves_its_counters_at_zero(monkeypatch):
    monkeypatch.setattr(split_kv, "num_sms", lambda device, on_cpu: 8)
    case = paged_case([1, 300, 0, 1, 2, 200, 1, 1], heads=(6, 2), garbage_tails=True)
    kernel = split_kv.SplitKV()
    plan = kernel.plan(case.rows())
    out, sums = dense_reference(case)
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens, case.scale)
    for _ in range(2):
        result, lse = kernel(*arguments, plan=plan, return_lse=True)
        assert deviation(result, out).within
        assert lse_deviation(lse, sums).within
        table = plan.tables[None]
        assert max(table.read()["splits"]) > 1
        assert not table.arrivals.any()
        for partial in plan.partials:
            fill_nan(partial)
