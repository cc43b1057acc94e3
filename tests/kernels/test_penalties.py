"""Penalties, edits and counts by kernels, beside the torch ones."""

import pytest
import torch

from core.request import SamplingParams
from kernels import jit
from kernels.penalties import count_tokens, edit, penalise
from tests.kernels.sampling_case import DEVICE, Case, random_logits

PARAMS = (
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=0.7, frequency_penalty=-0.2),
    SamplingParams(repetition_penalty=1e30, frequency_penalty=0.3),
)


def test_penalised_rows_equal_the_torch_sampler_and_others_stay():
    logits = random_logits(5, 501)
    logits[0, 7] = -torch.inf
    case = Case(logits, PARAMS, prompt=(5, 5, 6, 7), outputs=(7, 7, 500, 9))
    at, rows = torch.tensor([0, 2, 3]), torch.tensor([4, 0, 1, 2, 3])
    factors = [
        torch.from_numpy(column[[0, 1, 2]])
        for column in (case.rows.repetition, case.rows.presence, case.rows.frequency)
    ]
    counts = case.penalties(torch.device("cpu"))
    expected = logits.clone()
    columns = [factor.float().unsqueeze(1) for factor in factors]
    expected[at] = counts.apply(logits[at], rows[at], *columns)
    storage = torch.zeros(5, 608, device=DEVICE)
    given = storage[:, :501]
    given.copy_(logits)
    tables = case.penalties(DEVICE).tables()
    penalise(given, *(t.to(DEVICE) for t in (at, rows)), *tables, *(f.to(DEVICE) for f in factors))
    torch.testing.assert_close(given.cpu(), expected, atol=1e-6, rtol=2e-7)
    assert torch.equal(given[[1, 4]].cpu(), logits[[1, 4]])
    assert not storage[:, 501:].any()


def test_edits_add_up_and_mask():
    logits = random_logits(3, 70)
    at = torch.tensor([0, 0, 2, 2, 2])
    tokens = torch.tensor([0, 69, 5, 5, 6])
    values = torch.tensor([1.5, -2.0, 3.0, -torch.inf, -torch.inf], dtype=torch.float64)
    expected = logits.index_put((at, tokens), values.float(), accumulate=True)
    given = logits.to(DEVICE)
    edit(given, *(column.to(DEVICE) for column in (at, tokens, values)))
    assert torch.equal(given.cpu(), expected)


def test_counts_grow_by_the_sampled_tokens():
    outputs = torch.zeros(6, 50, dtype=torch.int32, device=DEVICE)
    outputs[3, 9] = 4
    at, rows = torch.tensor([0, 2], device=DEVICE), torch.tensor([3, 1, 5], device=DEVICE)
    count_tokens(outputs, at, rows, torch.tensor([9, 8, 49], device=DEVICE))
    assert outputs[3, 9] == 5
    assert outputs[5, 49] == 1
    assert outputs.sum() == 6


def test_misfit_counts_are_refused():
    logits = torch.zeros(2, 40, device=DEVICE)
    at = torch.tensor([0], device=DEVICE)
    counts = torch.zeros(2, 41, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"outputs must be \[rows, 40\], got \(2, 41\)"):
        penalise(logits, at, at, counts, counts.bool(), at, at, at)


CALLS = {
    penalise: ("logits", "at", "rows", "outputs", "prompts", "repetition", "presence", "frequency"),
    edit: ("logits", "at", "tokens", "values"),
    count_tokens: ("outputs", "at", "rows", "tokens"),
}
INDICES, FACTORS = ("at", "rows", "tokens"), ("repetition", "presence", "frequency", "values")
MISFITS = {
    "strided": (lambda x: x.repeat_interleave(2)[::2], "strides must be contiguous"),
    "of two dimensions": (lambda x: x[:, None], r"must be \[3\], got \(3, 1\)"),
    "long": (lambda x: x.repeat(2), r"must be \[\d\], got \(\d,\)"),
    "int32": (lambda x: x.int(), "dtype must be int64, got 'int32'"),
}


def misfits():
    """A length that one column alone has shows in another's message."""
    for call, names in CALLS.items():
        for name in names:
            for wrong in MISFITS if name in INDICES else [*MISFITS][:3] * (name in FACTORS):
                if (call, name, wrong) != (count_tokens, "at", "long"):  # any rows may be counted
                    yield call, name, wrong


@pytest.mark.parametrize(("call", "name", "wrong"), [*misfits()])
def test_misfit_columns_are_refused(call, name, wrong):
    arguments = {
        "logits": torch.zeros(3, 40, device=DEVICE),
        "outputs": torch.zeros(3, 40, dtype=torch.int32, device=DEVICE),
        "prompts": torch.zeros(3, 40, dtype=torch.bool, device=DEVICE),
    }
    arguments |= dict.fromkeys(INDICES, torch.arange(3, device=DEVICE))
    arguments |= dict.fromkeys(FACTORS, torch.ones(3, dtype=torch.float64, device=DEVICE))
    call(*(arguments[each] for each in CALLS[call]))
    change, message = MISFITS[wrong]
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        call(*(arguments[each] for each in CALLS[call]))


def test_counts_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(jit, "INTERPRETED", False)
    index = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="device must be cuda"):
        count_tokens(torch.zeros(1, 4, dtype=torch.int32), index, index, index)
