"""plugins/shared/calibration.py: what a form says of many steps and of one."""

import numpy as np
import pytest

from plugins.shared.calibration import TERMS, Form

COSTS = dict(zip(TERMS, (1.1e-6, 3e-7, 2.6e-8, 9e-9, 3e-10, 4.5e-7), strict=True))


@pytest.mark.parametrize(
    "form",
    [
        Form([1, 2, 4, 8, 16, 24], [1.24e-3, 1.2e-3, 1.19e-3, 1.15e-3, 1.2e-3, 1.3e-3], COSTS),
        Form([32, 512, 8192], [2.1e-3, 2.7e-3, 1.7e-2], COSTS),
        Form([9], [1e-3], COSTS),
    ],
    ids=["decode", "other", "one node"],
)
def test_numbers_and_arrays_give_the_same_bits(form: Form):
    """Steps that go in one must end when single ones do."""
    rng = np.random.default_rng(0)
    rows, more = rng.integers(1, 300, 2000), rng.integers(0, 9000, 2000)
    tokens = np.where(rng.random(2000) < 0.5, rows + more, rows)
    kv_tokens = tokens + rng.integers(0, 10**6, 2000)
    facts = rows, tokens, kv_tokens, kv_tokens + rng.integers(0, 10**7, 2000)
    one_by_one = zip(*(fact.tolist() for fact in facts), strict=True)
    assert form.seconds(*facts).tolist() == [form.seconds(*one) for one in one_by_one]
    grown = form.seconds(8, 16, kv_tokens, kv_tokens)
    assert grown.tolist() == [form.seconds(8, 16, one, one) for one in kv_tokens.tolist()]
