"""Attention whose bits depend neither on the batch nor on how a context was cut: against dense
attention in float64, and bit for bit between one call for all tokens, chunks, and single tokens."""

import pytest
import torch

from kernels import invariant, torch_invariant
from kernels.invariant import InvariantConfig, InvariantDecode, InvariantExtend
from tests.kernels.extend_case import DEVICE, Case
from tests.kernels.ordered_dot import ordered_dot  # noqa: F401

MIXED = [(150, 30), (1, 1), (0, 3), (65, 65), (70, 1), (64, 17)]
FORMS = {"fold": 0, "parts": 4}  # programs to a multiprocessor, at most


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def cut(kernel, case, begin, end, **options):
    """Tokens begin .. end of a case of one row that is all new, over the tokens before them."""
    tensors = case.q[begin:end], *case.caches, case.table, lengths(end), lengths(0, end - begin)
    return kernel(*tensors, case.scale, **options, return_lse=True)


def single(kernel, case, position, **options):
    """The token at a position as a row of decode."""
    tensors = case.q[position : position + 1], *case.caches, case.table, lengths(position + 1)
    return kernel(*tensors, case.scale, **options, return_lse=True)


def same(results, whole, begin, end):
    return all(torch.equal(a, b[begin:end]) for a, b in zip(results, whole, strict=True))


def compare(case, extend, decode, singles, cuts, **options):
    """All tokens at once, correct, and with the same bits otherwise."""
    whole = extend(*case.inputs(), **options, return_lse=True)
    case.check(*whole)
    for position in singles:
        found = single(decode, case, position, **options)
        assert same(found, whole, position, position + 1), position
    for begin, end in cuts:
        assert same(cut(extend, case, begin, end, **options), whole, begin, end), (begin, end)
    return whole


@pytest.mark.parametrize(
    ("dtype", "split_tokens"), [(torch.float32, 64), (torch.bfloat16, 4096)], ids=str
)
def test_extend_equals_dense_attention(dtype, split_tokens):
    case = Case(MIXED, (4, 2), dtype=dtype, num_padding=3)
    kernel = InvariantExtend(split_tokens)
    case.check(*kernel(*case.inputs(), plan=kernel.plan(case.plan_rows()), return_lse=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "window": 70},
        {"dtype": torch.float32, "window": 20, "softcap": 3.0, "head_dim": 80, "page_size": 1},
        {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn},
    ],
    ids=str,
)
def test_tokens_have_the_same_bits_alone_and_in_any_chunk(settings):
    case = Case([(140, 140)], (2, 1), **settings)
    options = {name: settings.get(name) for name in ("window", "softcap")}
    singles, cuts = (0, 63, 64, 139), ((0, 30), (30, 31), (31, 140))
    compare(case, InvariantExtend(64), InvariantDecode(64), singles, cuts, **options)


def test_forms_of_the_kernel_give_the_same_bits(monkeypatch):
    case = Case([(150, 150), (70, 20)], (2, 1), num_padding=2)
    results = []
    for rounds in FORMS.values():
        monkeypatch.setattr(invariant, "ROUNDS", rounds)
        results.append(InvariantExtend(64)(*case.inputs(), return_lse=True))
    assert same(*results, 0, len(case.q))
    # Where there is one split, neither form is needed.
    short = Case([(60, 60)], (4, 2))
    results = [InvariantExtend(split)(*short.inputs(), return_lse=True) for split in (64, 128)]
    assert same(*results, 0, 60)


def test_rows_have_the_same_bits_beside_others():
    case = Case([(90, 1), (33, 1), (130, 1)], (4, 2), dtype=torch.float32)
    kernel = InvariantDecode(64)
    tensors = case.q, *case.caches, case.table, case.lens
    together = kernel(*tensors, case.scale, return_lse=True)
    case.check(*together)
    for row in range(3):
        part = slice(row, row + 1)
        alone = case.q[part], *case.caches, case.table[part], case.lens[part]
        found = kernel(*alone, case.scale, return_lse=True)
        assert same(found, together, row, row + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "heads", "page_size"), [(128, (4, 2), 16), (64, (8, 2), 1), (256, (2, 2), 16)]
)
def test_card_gives_the_same_bits_for_any_cut(dtype, head_dim, heads, page_size, monkeypatch):
    options = {"head_dim": head_dim, "page_size": page_size}
    for window, softcap in ((None, None), (300, None), (None, 20.0)):
        case = Case([(1500, 1500)], heads, dtype=dtype, window=window, softcap=softcap, **options)
        given = {"window": window, "softcap": softcap}
        singles = (*range(0, 1500, 37), 255, 256, 511, 512, 513, 1499)
        cuts = ((0, 1), (0, 700), (1, 300), (300, 1500), (500, 517), (511, 1023))
        wholes = []
        for rounds in FORMS.values():
            monkeypatch.setattr(invariant, "ROUNDS", rounds)
            kernels = InvariantExtend(256), InvariantDecode(256)
            wholes.append(compare(case, *kernels, singles, cuts, **given))
        assert same(*wholes, 0, 1500)
        one = InvariantExtend(2048), InvariantDecode(2048)
        compare(case, *one, singles, cuts, **given)


@pytest.mark.gpu
def test_card_gives_the_same_bits_for_many_rows_beside_others():
    rows = [(1 + 29 * i % 1400, 1) for i in range(300)]
    case = Case(rows, (8, 2), head_dim=128, dtype=torch.bfloat16)
    kernel = InvariantDecode(512)
    tensors = case.q, *case.caches, case.table, case.lens
    together = kernel(*tensors, case.scale, return_lse=True)
    for row in range(0, 300, 11):
        part = slice(row, row + 1)
        alone = case.q[part], *case.caches, case.table[part], case.lens[part]
        assert same(kernel(*alone, case.scale, return_lse=True), together, row, row + 1)


@pytest.mark.skipif(DEVICE != "cpu", reason="for a CPU")
@pytest.mark.parametrize("settings", [{}, {"window": 20}, {"softcap": 3.0}], ids=str)
def test_torch_gives_the_same_bits_alone_and_in_any_chunk(settings):
    case = Case([(140, 140)], (4, 2), dtype=torch.float32, **settings)
    extend, decode = torch_invariant.extend, torch_invariant.decode
    compare(case, extend, decode, range(0, 140, 9), ((0, 30), (30, 31), (31, 140)), **settings)


def test_orders_are_declared_and_differ_where_bits_do():
    assert invariant.decode.capabilities.batch_invariant
    orders = [
        kernel.capabilities.reduction_order for kernel in (invariant.decode, invariant.extend)
    ]
    assert orders[0] == orders[1]
    assert InvariantExtend(128).capabilities.reduction_order != orders[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_tokens": 100}, "split_tokens must be a positive multiple of 64, got 100"),
        ({"config": InvariantConfig(block_n=48)}, "config.block_n must be a divisor of 64"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        InvariantDecode(**arguments)
