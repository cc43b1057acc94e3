"""The interpreter's matrix product in the order of a matrix instruction.

NumPy's library sums a row of a product in an order that depends on where the row stands; a card's
instruction does not. Bits can be compared in the interpreter only with a product that keeps to one
order too."""

import pytest
from triton.runtime import interpreter


def _ordered(self, a, b, acc, input_precision, max_num_imprecise_acc):
    """acc + a @ b, one step of the depth after the other."""
    left, right = (x.data.astype(acc.data.dtype) for x in (a, b))
    out = acc.data.copy()
    for k in range(left.shape[-1]):
        out += left[..., :, k, None] * right[..., None, k, :]
    return interpreter.TensorHandle(out, acc.dtype.scalar)


@pytest.fixture(scope="module", autouse=True)
def ordered_dot():
    """For every test of a module that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _ordered)
        yield
