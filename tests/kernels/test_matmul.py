"""The batch-invariant matrix product against float64, and bit for bit against itself."""

import pytest
import torch

from kernels import matmul as module
from kernels.matmul import CONFIGS, FLOAT32, default_config, matmul
from tests.kernels.ordered_dot import ordered_dot  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest
LARGE = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (960, 200))  # depth, columns


def operands(rows, depth, columns, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, depth, generator=random) for n in (rows, columns))
    bias = torch.randn(columns, generator=random)
    return [one.to(DEVICE, dtype) for one in (x, weight * depth**-0.5, bias)]


def check(out, x, weight, bias):
    expected = x.double() @ weight.double().t()
    expected = expected if bias is None else expected + bias.double()
    limit = TOLERANCE[x.dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(out.double(), expected, atol=limit, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 64, 48), (37, 72, 50), (130, 8, 1)])
def test_matmul_equals_float64(dtype, rows, depth, columns):
    x, weight, bias = operands(rows, depth, columns, dtype)
    check(matmul(x, weight), x, weight, None)
    check(matmul(x, weight, bias), x, weight, bias)


def test_matmul_takes_strided_rows_and_none():
    x, weight, bias = operands(6, 32, 16, torch.float32)
    wide = torch.full((6, 100), torch.nan, device=DEVICE)
    wide[:, :32] = x
    assert torch.equal(matmul(wide[:, :32], weight, bias), matmul(x, weight, bias))
    assert matmul(x[:0], weight).shape == (0, 16)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rows_have_the_same_bits_in_any_batch(dtype):
    x, weight, _ = operands(70, 96, 80, dtype)
    whole = matmul(x, weight)
    for begin, end in ((0, 1), (5, 6), (3, 36), (64, 70), (1, 70)):
        assert torch.equal(matmul(x[begin:end].clone(), weight), whole[begin:end])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tiles_of_half_types_give_the_same_bits(config):
    x, weight, bias = operands(70, 160, 80, torch.bfloat16)
    assert torch.equal(matmul(x, weight, bias, config), matmul(x, weight, bias, CONFIGS[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("depth", "columns"), LARGE)
def test_card_gives_the_same_bits_for_any_rows_and_tile(dtype, depth, columns):
    x, weight, bias = operands(1200, depth, columns, dtype)
    x *= torch.logspace(-3, 3, depth, device=DEVICE, dtype=torch.float32).to(dtype)
    whole = matmul(x, weight, bias)
    check(whole, x, weight, bias)
    for config in CONFIGS:
        assert torch.equal(matmul(x, weight, bias, config), whole), config
    for rows in (*range(1, 70), 100, 127, 128, 129, 191, 255, 256, 257, 384, 511, 512):
        begin = 7 * rows % (1200 - rows)
        part = matmul(x[begin : begin + rows].clone(), weight, bias)
        assert torch.equal(part, whole[begin : begin + rows]), rows


@pytest.mark.gpu
def test_card_gives_the_same_bits_in_float32():
    x, weight, _ = operands(300, 1000, 500, torch.float32)
    whole = matmul(x, weight)
    for rows in (1, 2, 17, 64, 255):
        assert torch.equal(matmul(x[-rows:].clone(), weight), whole[-rows:])


def test_few_rows_take_small_tiles_and_many_take_large_ones():
    assert default_config(torch.bfloat16, 8192, 4096, 132) == CONFIGS[0]
    assert default_config(torch.bfloat16, 64, 1024, 132) == CONFIGS[-1]
    assert default_config(torch.bfloat16, 64, 151936, 132).block_m == 64
    assert default_config(torch.float32, 8192, 4096, 132) == FLOAT32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(weight=a["weight"][:, :8]), "weight depth must be x's 16"),
        (lambda a: a.update(x=a["x"].double()), "x dtype must be"),
        (lambda a: a.update(bias=a["bias"][:3]), r"bias must be \[4\]"),
        (lambda a: a.update(weight=a["weight"].half()), "weight dtype must be torch.float32"),
        (lambda a: a.update(x=a["x"].t().contiguous().t()), "x strides must be 1"),
    ],
)
def test_matmul_refuses(change, message):
    arguments = dict(zip(("x", "weight", "bias"), operands(2, 16, 4, torch.float32), strict=True))
    change(arguments)
    with pytest.raises(ValueError, match=message):
        matmul(**arguments)


def test_checked_forms_are_kept(monkeypatch):
    x, weight, _ = operands(2, 16, 4, torch.float32)
    matmul(x, weight)
    monkeypatch.setattr(module, "_check", None)
    matmul(x, weight)
