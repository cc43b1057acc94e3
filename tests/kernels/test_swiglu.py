"""The gated activation against torch's."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kernels.swiglu import ACTIVATIONS, SwigluConfig, swiglu

# In the interpreter numpy warns where a GPU silently goes to infinity.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
# Float32: exp and division to their last bits. Half types: the activation may round to its
# neighbour, and the product with it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def gate_up(rows, width, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 2 * width, generator=random) * 4).to(DEVICE, dtype)


def reference(x, activation):
    gate, up = x.chunk(2, -1)
    return TORCH[activation](gate) * up


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 1000), (65, 520)])
def test_product_equals_torch(dtype, activation, rows, width):
    if rows > 3 and activation != "silu":
        rows = 2
    x = gate_up(rows, width, dtype)
    got, expected = swiglu(x, activation), reference(x, activation)
    # gelu cancels far below zero: there float32 leaves an absolute error.
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_values_equal_torch(activation):
    values = [-torch.inf, -1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4, torch.inf, torch.nan]
    gate = torch.tensor([values], device=DEVICE)
    x = torch.cat((gate, torch.ones_like(gate)), -1)
    got = swiglu(x, activation)
    # One at a time: torch's gelu of infinity is NaN among others on CPUs with AVX-512.
    pairs = torch.stack((gate[0], torch.ones_like(gate[0])), -1)
    expected = torch.cat([reference(pair[None], activation) for pair in pairs], -1)
    torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-6, rtol=2e-6)


def test_strided_rows_and_configuration_change_nothing():
    x = gate_up(4, 2 * 100, torch.float32)[:, :200]
    assert not x.is_contiguous()
    expected = swiglu(x.contiguous())
    for config in (SwigluConfig(32, 1), SwigluConfig(256, 4)):
        assert torch.equal(swiglu(x, config=config), expected)


def test_no_rows_give_none():
    assert swiglu(gate_up(1, 64, torch.float32)[:0]).shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "activation", "message"),
    [
        (lambda x: x, "swish", "activation must be one of .*, got 'swish'"),
        (lambda x: x[:, :63], "silu", "columns must be even and positive, got 63"),
        (lambda x: x[:, :0], "silu", "columns must be even and positive, got 0"),
        (lambda x: x.T, "silu", "strides must be 1 in the last"),
        (lambda x: x.double(), "silu", "dtype must be float32, float16 or bfloat16"),
        (lambda x: x[0], "silu", r"gate_up must be \[rows, 2 \* width\]"),
    ],
)
def test_bad_input_is_refused(change, activation, message):
    with pytest.raises(ValueError, match=message):
        swiglu(change(gate_up(4, 64, torch.float32)), activation)
