"""Log-probabilities by kernels, beside torch's log_softmax and topk."""

import numpy as np
import pytest
import torch

from kernels.logprobs import logprobs
from kernels.vocabulary import ScanConfig
from tests.kernels.sampling_case import DEVICE, random_logits

SMALL = ScanConfig(chunk=256)


def entries(logits, tokens, num_top):
    out = logprobs(logits.to(DEVICE), torch.tensor(tokens, device=DEVICE), num_top, SMALL)
    return [column.cpu() for column in out]


@pytest.mark.parametrize(("vocab_size", "num_top"), [(37, 37), (300, 5), (1003, 20), (64, 0)])
def test_entries_equal_torch(vocab_size, num_top):
    logits = random_logits(3, vocab_size)
    chosen, ids, values = entries(logits, [0, 5, vocab_size - 1], num_top)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(
        chosen, expected[[0, 1, 2], [0, 5, vocab_size - 1]], atol=1e-5, rtol=0
    )
    best = expected.topk(num_top)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(values, best.values, atol=1e-5, rtol=0)


def test_equal_logits_come_in_order_of_token():
    logits = torch.zeros(1, 200)
    logits[0, [40, 41, 150]] = 2.0
    logits[0, 60] = 1.0
    _, ids, values = entries(logits, [0], 7)
    assert ids.tolist() == [[40, 41, 150, 60, 0, 1, 2]]
    assert values[0].diff().max() <= 0


def test_masked_tokens_get_minus_infinity_and_nothing_is_nan():
    logits = torch.full((2, 90), -torch.inf)
    logits[0, [3, 80]] = 1.0
    chosen, ids, values = entries(logits, [4, 4], 4)
    assert ids.tolist() == [[3, 80, 0, 1], [0, 1, 2, 3]]
    assert torch.isneginf(chosen).all()
    assert values[0, :2].tolist() == pytest.approx([-0.6931472] * 2)
    assert torch.isneginf(values[0, 2:]).all()
    assert torch.isneginf(values[1]).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # of the interpreter
def test_a_row_that_is_not_finite_has_nan_for_every_token():
    logits = random_logits(5, 290)
    logits[0, 289] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = torch.nan
    logits[3, 7] = torch.inf
    logits[3, 8] = -torch.inf
    expected = logits[4].log_softmax(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        chosen, _, values = entries(logits, [0, 0, 0, 8, 0], 4)
    assert chosen[:4].isnan().all()
    assert values[:4].isnan().all()
    assert chosen[4] == pytest.approx(expected[0].item(), abs=1e-5)


def test_strided_tokens_are_refused():
    tokens = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)[:, 0]
    with pytest.raises(ValueError, match="tokens strides must be contiguous"):
        logprobs(torch.zeros(2, 40, device=DEVICE), tokens, 1)


def test_more_entries_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"num_top must be in 0 .. 40, got 41"):
        entries(torch.zeros(1, 40), [0], 41)
