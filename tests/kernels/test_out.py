"""Kernels that write where the caller says."""

import pytest
import torch

from kernels import extend, extend_dense
from kernels.flat_indices import FlatIndices
from kernels.invariant import InvariantDecode, InvariantExtend
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from tests.kernels.extend_case import Case

ONE = [(40, 1), (7, 1), (90, 1)]
MANY = [(40, 33), (7, 7), (90, 60)]
DECODES = [SplitKV(), FlatIndices(), SharedPrefix(), InvariantDecode(64)]
EXTENDS = [extend.extend, extend_dense.extend, InvariantExtend(64)]
EVERY = [*((one, ONE) for one in DECODES), *((one, MANY) for one in EXTENDS)]


def name(value):
    return getattr(value, "__module__", "rows").rpartition(".")[2]


def calls(kernel, case, **options):
    """With a plan, two in turn: what comes again may take another way."""
    q, k, v, table, lens, starts, scale = case.inputs()
    plan = kernel.plan(case.plan_rows())
    args = (q, k, v, table, lens, starts, scale) if case.rows is MANY else (q, k, v, table, lens)
    args = args if case.rows is MANY else (*args, scale)
    return (kernel(*args, plan=plan, **options) for _ in range(2))


@pytest.mark.parametrize(("kernel", "rows"), EVERY, ids=name)
def test_result_lies_in_the_given_tensor(kernel, rows):
    case = Case(rows, (4, 2))
    whole = torch.full((len(case.q) + 5, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype)
    whole = whole.to(case.q.device)
    out = whole[3 : 3 + len(case.q)]
    assert kernel.capabilities.takes_out
    for found in calls(kernel, case, out=out):
        assert found.data_ptr() == out.data_ptr()
        case.check(out)
        out.fill_(torch.nan)
    assert whole.isnan().all(), "nothing beside it was written"


@pytest.mark.parametrize(("kernel", "rows"), EVERY, ids=name)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.new_empty(len(q) + 1, *q.shape[1:]), "out must be of shape"),
        (lambda q: q.float(), "out dtype must be torch.float16, got 'torch.float32'"),
        (lambda q: q.new_empty(len(q), q.shape[1], 2 * q.shape[2])[..., ::2], "out strides must"),
        (lambda q: q.new_empty(q.numel() + 1)[1:].view(q.shape), "out address must be aligned"),
    ],
)
def test_a_tensor_that_cannot_hold_it_is_refused(kernel, rows, change, message):
    case = Case(rows, (4, 2))
    with pytest.raises(ValueError, match=message):
        next(calls(kernel, case, out=change(case.q)))
