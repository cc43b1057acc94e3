"""Sampling by hand-made logits: filters, penalties, edits, log-probabilities and independent
rows."""

import itertools

import numpy as np
import pytest
import torch

from core.errors import RequestError
from core.launch import RowSetup
from core.request import SamplingParams
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.rows import SamplingRows
from plugins.executor.sampler import NO_TOKEN, plan_samples, sample
from plugins.executor.upload import upload

CPU = torch.device("cpu")


class Rows:
    """Rows with their sampling state, as the executor keeps it."""

    def __init__(self, vocab_size, num_rows=8):
        self.rows = SamplingRows(num_rows, vocab_size)
        self.penalties = PenaltyCounts(num_rows, vocab_size, CPU)
        self.outputs = {}

    def set(self, row, params, seed=0, choice=0, prompt=(0,), outputs=(), ends=()):
        tokens = np.array([*prompt, *outputs], np.int32)
        setup = RowSetup(row, params, len(prompt), tokens, seed, choice, tuple(ends))
        self.rows.set(setup)
        if self.rows.penalised[row]:
            self.penalties.reset([setup])
        self.outputs[row] = len(outputs)
        return self

    def sample(self, logits, rows, positions=None):
        positions = [self.outputs[row] for row in rows] if positions is None else positions
        plan = plan_samples(self.rows, np.array(rows), np.array(list(positions)))
        inputs = upload(plan.arrays, CPU)
        for row in rows:
            self.outputs[row] += 1
        return sample(logits.clone(), plan, inputs, self.penalties)

    def tokens(self, logits, rows, positions=None):
        return self.sample(logits, rows, positions).tokens.tolist()


def one_row(params, logits, num_draws, **setup):
    """num_draws tokens at successive output positions under the same logits, without penalties."""
    state = Rows(logits.shape[-1]).set(0, params, **setup)
    logits = logits.reshape(1, -1).expand(num_draws, -1)
    return state.tokens(logits, [0] * num_draws, range(num_draws))


def random_logits(rows, vocab_size, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def survivors(params, logits, num_draws=400):
    return set(one_row(params, logits, num_draws))


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -3.0, 0.0])
    num_draws = 4000
    rows = Rows(8, num_rows=num_draws)
    for row in range(num_draws):
        rows.set(row, SamplingParams(temperature=1.3), seed=row)
    tokens = rows.tokens(logits.expand(num_draws, 8), list(range(num_draws)))
    expected = (logits / 1.3).softmax(-1).numpy() * num_draws
    statistic = ((np.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum()
    assert statistic < 24.3  # chi-square with 7 degrees of freedom, p = 0.001


def test_draws_at_successive_positions_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    counts = np.bincount(one_row(SamplingParams(), logits, 4000, seed=3), minlength=5)
    expected = logits.softmax(-1).numpy() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p = 0.001


def test_zero_temperature_is_greedy():
    logits = random_logits(1, 100)
    assert set(one_row(SamplingParams(temperature=0), logits, 20)) == {int(logits.argmax())}
    assert set(one_row(SamplingParams(temperature=1e-9), logits, 20)) == {int(logits.argmax())}
    assert set(one_row(SamplingParams(temperature=5e-324), logits, 20)) == {int(logits.argmax())}


def test_top_k_keeps_the_k_best():
    logits = random_logits(1, 60)
    best = logits[0].topk(5).indices.tolist()
    assert survivors(SamplingParams(top_k=5, temperature=9.0), logits) == set(best)
    assert survivors(SamplingParams(top_k=1, temperature=9.0), logits) == {best[0]}


def test_top_k_above_the_vocabulary_is_off():
    logits = random_logits(1, 30)
    huge = one_row(SamplingParams(top_k=9_999_999), logits, 50)
    assert (
        huge
        == one_row(SamplingParams(), logits, 50)
        == one_row(SamplingParams(top_k=30), logits, 50)
    )


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0, {3}), (1e-9, {3}), (0.4, {3}), (0.41, {1, 3}), (0.75, {0, 1, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    logits = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    assert survivors(SamplingParams(top_p=top_p), logits) == kept


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    assert survivors(SamplingParams(top_k=2, top_p=0.55), logits) == {3}  # 4/7 > 0.55
    assert survivors(SamplingParams(top_p=0.55), logits) == {1, 3}


def test_top_p_beyond_the_first_thousand_tokens_sorts_everything():
    logits = torch.zeros(5000) - torch.arange(5000) * 1e-4
    weights = logits.double().softmax(-1)
    kept = int((weights.cumsum(0) - weights < 0.9).sum())
    assert kept > 2000
    tokens = one_row(SamplingParams(top_p=0.9), logits, 300)
    assert 0.9 * kept < max(tokens) < kept


def test_min_p_is_relative_to_the_best():
    logits = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()
    assert survivors(SamplingParams(min_p=0.6), logits) == {1, 3}
    assert survivors(SamplingParams(min_p=1.0), logits) == {3}


def test_filtered_rows_keep_their_draws():
    logits = random_logits(1, 500)
    plain = one_row(SamplingParams(), logits, 200, seed=9)
    best = set(logits[0].topk(50).indices.tolist())
    narrow = one_row(SamplingParams(top_k=50), logits, 200, seed=9)
    same = [a == b for a, b in zip(plain, narrow, strict=True) if a in best]
    assert all(same)
    assert 100 < len(same) < 200


def test_row_is_independent_of_neighbours_and_order():
    logits = random_logits(6, 300)
    makes = [
        (SamplingParams(temperature=0.9), 11),
        (SamplingParams(temperature=0), 1),
        (SamplingParams(top_k=5), 2),
        (SamplingParams(top_p=0.8, repetition_penalty=1.3), 3),
        (SamplingParams(min_p=0.05, top_k=200, top_p=0.9), 4),
        (SamplingParams(logit_bias={7: 3.0}, temperature=1.5), 5),
    ]

    def state():
        rows = Rows(300)
        for row, (params, seed) in enumerate(makes):
            rows.set(row, params, seed=seed, prompt=(1, 2, 3))
        return rows

    together, alone, mixed = state(), state(), state()
    order = [4, 2, 0, 5, 1, 3]
    for _ in range(8):
        expected = together.tokens(logits, list(range(6)))
        shuffled = mixed.tokens(logits[order], order)
        assert [shuffled[order.index(row)] for row in range(6)] == expected
        assert [alone.tokens(logits[row : row + 1], [row])[0] for row in range(6)] == expected


def test_choices_and_seeds_draw_apart_and_repeat():
    logits = random_logits(1, 1000) / 6
    first = one_row(SamplingParams(), logits, 30, seed=4)
    assert first == one_row(SamplingParams(), logits, 30, seed=4)
    assert first != one_row(SamplingParams(), logits, 30, seed=4, choice=1)
    assert first != one_row(SamplingParams(), logits, 30, seed=5)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 0.5}, [1.0, 0.5, 0.5]),
        ({"frequency_penalty": 0.5}, [1.0, 0.5, 0.0]),
        ({"repetition_penalty": 2.0}, [0.5, 0.5, 0.5]),
    ],
)
def test_penalties_count_the_right_tokens(params, expected):
    """Prompt [5, 5, 6], output [6, 7, 7]; logits all 1; tokens 5, 6, 7."""
    params = SamplingParams(temperature=0, logprobs=8, logit_bias={0: 100.0}, **params)
    state = Rows(8).set(0, params, prompt=(5, 5, 6), outputs=(6, 7, 7))
    entry = state.sample(torch.ones(1, 8), [0]).logprobs.to_host([8])[0]
    logprobs = dict(zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True))
    given = [logprobs[token] - logprobs[1] + 1.0 for token in (5, 6, 7)]
    np.testing.assert_allclose(given, expected, atol=1e-5)


def test_negative_logits_are_multiplied_by_the_repetition_penalty():
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    state = Rows(3).set(0, params, prompt=(0,))
    assert state.tokens(torch.tensor([[-1.0, -1.5, -3.0]]), [0]) == [1]


def test_sampled_tokens_are_counted_before_the_host_sees_them():
    params = SamplingParams(temperature=0, presence_penalty=5.0)
    state = Rows(6).set(2, params)
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    drawn = [state.tokens(logits, [2])[0] for _ in range(4)]
    assert drawn == [0, 1, 2, 3]
    resumed = Rows(6).set(5, params, outputs=drawn)
    assert resumed.tokens(logits, [5]) == state.tokens(logits, [2]) == [4]
    resumed.set(5, params)  # the row's next owner starts clean
    assert resumed.tokens(logits, [5]) == [0]


def test_min_tokens_mask_end_and_stop_tokens():
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=9, stop_token_ids=(1, 900))
    state = Rows(4).set(0, params, ends=(0,))
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    assert [state.tokens(logits, [0])[0] for _ in range(5)] == [2, 2, 2, 0, 0]


def test_logit_bias_moves_single_tokens():
    logits = torch.zeros(2, 10)
    state = Rows(10).set(0, SamplingParams(temperature=0, logit_bias={4: 1.0, 5: 2.0, 6: -9.0}))
    state.set(1, SamplingParams(temperature=0, logit_bias={3: 1e300}))
    assert state.tokens(logits, [1, 0]) == [3, 5]


def test_logit_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="logit_bias must name tokens < 10, got 99999999"):
        Rows(10).set(0, SamplingParams(logit_bias={2: 1.0, 99999999: 5.0}))


def test_logprobs_are_of_adjusted_logits_before_temperature_and_filters():
    logits = random_logits(3, 40)
    state = Rows(40).set(0, SamplingParams(temperature=0.5, top_k=1, logprobs=5))
    state.set(1, SamplingParams(temperature=0))
    state.set(2, SamplingParams(temperature=0, logprobs=0, logit_bias={7: 50.0}))
    samples = state.sample(logits, [0, 1, 2])
    first, last = samples.logprobs.to_host([5, 0])
    expected = logits[0].log_softmax(-1)
    best = expected.topk(5)
    assert first.top_ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(first.top_logprobs, best.values, atol=1e-5)
    assert first.logprob == pytest.approx(best.values[0].item(), abs=1e-5)
    assert samples.tokens[2] == 7
    assert len(last.top_ids) == 0
    assert last.logprob == pytest.approx(0.0, abs=1e-5)


def test_masked_logprobs_are_minus_infinity_and_never_nan():
    params = SamplingParams(logprobs=9, min_tokens=1, stop_token_ids=(0, 1))
    some = Rows(4).set(0, params).sample(torch.zeros(1, 4), [0]).logprobs.to_host([4])[0]
    assert np.isneginf(some.top_logprobs).tolist() == [False, False, True, True]
    params = SamplingParams(logprobs=2, min_tokens=1, stop_token_ids=(0, 1))
    every = Rows(2).set(0, params).sample(torch.zeros(1, 2), [0])
    entry = every.logprobs.to_host([2])[0]
    assert np.isneginf([entry.logprob, *entry.top_logprobs]).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_yields_no_token_and_others_theirs(value):
    makes = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0.7, frequency_penalty=0.5, logprobs=2),
        SamplingParams(top_k=5, top_p=0.9),
        SamplingParams(top_p=0.9, min_p=0.01, logit_bias={3: 1.0}),
    ]
    logits = random_logits(4, 50)
    for kinds in (makes, makes[1:]):  # with a greedy row, and rows that all draw
        rows = range(len(kinds))
        places = [slice(50)] if value == -torch.inf else [0, 49, slice(50)]
        for broken, place in itertools.product(rows, places):
            states = [Rows(50), Rows(50)]
            for row, params in enumerate(kinds):
                for state in states:
                    state.set(row, params, seed=row)
            wrong = logits[: len(kinds)].clone()
            wrong[broken, place] = value
            expected = states[0].tokens(logits[: len(kinds)], list(rows))
            samples = states[1].sample(wrong, list(rows))
            expected[broken] = NO_TOKEN
            assert samples.tokens.tolist() == expected
            asked = [params.logprobs is not None for params in kinds]
            for row, entry in zip(
                np.flatnonzero(asked), samples.logprobs.to_host([2, 2]), strict=False
            ):
                assert np.isfinite(entry.logprob) == (row != broken)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 100.0},
        {"repetition_penalty": 1e308, "temperature": 1e-300},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {1: -1e308, 2: 1e308}},
        {"top_k": 3, "top_p": 1e-12, "min_p": 1.0},
    ],
)
def test_extreme_parameters_yield_tokens_and_numbers(params):
    logits = torch.tensor([[0.0, -1e4, 1e4, 50.0], [0.0, 0.0, 0.0, 0.0]])
    state = Rows(4).set(0, SamplingParams(logprobs=4, **params))
    state.set(1, SamplingParams(logprobs=4, **params))
    samples = state.sample(logits, [0, 1])
    assert all(0 <= token < 4 for token in samples.tokens.tolist())
    for entry in samples.logprobs.to_host([4, 4]):
        assert not np.isnan([entry.logprob, *entry.top_logprobs]).any()
