"""RMSNorm with residual addition against the decoder's torch operations."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kernels import rms_norm as module
from kernels.rms_norm import RmsNormConfig, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One unit in the last place of a half type, several of float32 (order of the sum, rsqrt).
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-5


def rounds_as_torch(dtype):
    """The interpreter cuts a float32 off where it makes a bfloat16."""
    return DEVICE == "cuda" or dtype != torch.bfloat16


def reference(x, weight, delta):
    total = x if delta is None else x + delta
    return F.rms_norm(total, total.shape[-1:], None, EPS) * weight, total


def tensors(rows, width, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * width, generator=random)[:, :width] * 3
    delta = torch.randn(rows, width, generator=random)
    weight = 1 + 0.3 * torch.randn(width, generator=random)
    return [one.to(DEVICE, dtype) for one in (x, weight, delta)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 48, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 5])
def test_norm_and_sum_equal_torch(dtype, width, rows):
    x, weight, delta = tensors(rows, width, dtype)
    for with_delta in (delta, None):
        out, total = rms_norm(x, weight, EPS, with_delta)
        expected, expected_total = reference(x, weight, with_delta)
        tolerance = TOLERANCE[dtype]
        if rounds_as_torch(dtype):
            assert torch.equal(total, expected_total)
        else:
            torch.testing.assert_close(total, expected_total, rtol=tolerance, atol=0)
            tolerance *= 4  # the sum, its norm and the product, each cut off
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance / 100)


def test_widest_row():
    x, weight, delta = tensors(1, 16_384, torch.float32)
    out, _ = rms_norm(x, weight, EPS, delta)
    torch.testing.assert_close(out, reference(x, weight, delta)[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("config", [RmsNormConfig(1, 1), RmsNormConfig(4, 2), RmsNormConfig(3, 8)])
def test_configuration_changes_nothing(config):
    x, weight, delta = tensors(7, 100, torch.float16)
    out, total = rms_norm(x, weight, EPS, delta, config)
    expected, expected_total = reference(x, weight, delta)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-5)
    assert torch.equal(total, expected_total)


def test_rows_do_not_mix():
    x, weight, _ = tensors(3, 64, torch.float32)
    clean = rms_norm(x, weight, EPS)[0]
    x[1] = torch.nan
    out = rms_norm(x, weight, EPS)[0]
    assert torch.equal(out[::2], clean[::2])
    assert out[1].isnan().all()


def test_no_rows_give_none():
    x, weight, delta = tensors(2, 64, torch.float32)
    out, total = rms_norm(x[:0], weight, EPS, delta[:0])
    assert out.shape == total.shape == (0, 64)


def test_eps_reaches_the_kernel_as_a_float(monkeypatch):
    """An int would be compiled as one, and launched later with a float."""
    launch = Mock()
    monkeypatch.setattr(module, "_run", launch)
    x, weight, _ = tensors(2, 64, torch.float32)
    rms_norm(x, weight, 1)
    _, _, arguments, _ = launch.call_args.args
    assert type(arguments[-1]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, d: (x[:, :32], w, d[:, :32]), r"weight must be of shape \(32,\)"),
        (lambda x, w, d: (x.double(), w, d), "x dtype must be float32, float16 or bfloat16"),
        (lambda x, w, d: (x, w.half(), d), "weight dtype must be torch.float32"),
        (lambda x, w, d: (x.T, w, d), "x strides must be 1 in the last"),
        (lambda x, w, d: (x, w, d[:1]), "delta must be shaped as x"),
        (lambda x, w, d: (x.repeat(1, 257), w, d), "x width must be between 1 and 16384"),
    ],
)
def test_bad_input_is_refused(change, message):
    x, weight, delta = change(*tensors(64, 64, torch.float32))
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, EPS, delta)
