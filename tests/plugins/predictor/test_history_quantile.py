"""history_quantile: what came lately, of the same client where that is known."""

import numpy as np
import pytest

from core.errors import ConfigError
from core.records import ChoiceRecord, RequestRecord
from core.request import Request, SamplingParams
from plugins.predictor.history_quantile import HistoryQuantile, Window
from tests.engine_harness import Arrival, make_engine, run


def request(client="", **params):
    return Request("A", np.ones(3, np.int32), SamplingParams(**params), client=client)


def ended(length, client="", reason="stop"):
    record = RequestRecord("A", client, 0.0, 3)
    record.choices = [ChoiceRecord(finish_reason=reason)]
    record.choices[0].token_ids.extend([7] * length)
    return record


def predictor(lengths=(), client="", **settings):
    built = HistoryQuantile(**{"min_observations": 3, **settings}).build_length_predictor(None)
    for length in lengths:
        built.observe(ended(length, client))
    return built


def test_the_prior_stands_until_enough_was_seen():
    assert predictor([5, 5], prior_share=0.25).predict(request(max_tokens=40)) == 10.0
    assert predictor([5, 5, 5]).predict(request(max_tokens=40)) == 5.0


@pytest.mark.parametrize(
    ("share", "expected"), [(0.1, 1), (0.5, 5), (0.51, 6), (0.9, 9), (0.91, 10), (1.0, 10)]
)
def test_quantile_is_the_least_length_that_the_share_does_not_exceed(share, expected):
    lengths = [7, 2, 10, 5, 1, 9, 3, 8, 4, 6]
    assert predictor(lengths, quantile=share).predict(request(max_tokens=40)) == expected


def test_only_the_last_lengths_count():
    built = predictor([100, 100, 100, 100, 2, 2, 2], window=3)
    assert built.predict(request(max_tokens=400)) == 2.0


def test_window_agrees_with_numpy_on_random_lengths():
    rng = np.random.default_rng(0)
    window, lengths = Window(50), rng.integers(1, 30, 400)
    for count, length in enumerate(lengths.tolist(), 1):
        window.add(length)
        share = float(rng.uniform(0.01, 1))
        kept = lengths[max(count - 50, 0) : count]
        assert window.quantile(share) == np.quantile(kept, share, method="inverted_cdf")


def test_a_client_with_enough_lengths_of_its_own_is_predicted_from_them():
    built = predictor([2] * 20, client="a")
    for _ in range(2):
        built.observe(ended(50, "b"))
    assert built.predict(request("b", max_tokens=100)) == 2.0
    built.observe(ended(50, "b"))
    assert built.predict(request("b", max_tokens=100)) == 50.0
    assert built.predict(request("a", max_tokens=100)) == 2.0


def test_no_prediction_exceeds_the_limit_and_one_that_ignores_end_tokens_reaches_it():
    built = predictor([50] * 5)
    assert built.predict(request(max_tokens=8)) == 8.0
    assert built.predict(request(max_tokens=90, ignore_eos=True)) == 90.0


@pytest.mark.parametrize("reason", ["abort", "capacity", "error"])
def test_outputs_that_were_cut_off_are_not_learnt(reason):
    built = predictor([9, 9, 9])
    for _ in range(9):
        built.observe(ended(1, reason=reason))
    assert built.predict(request(max_tokens=40)) == 9.0


def test_two_runs_of_one_plugin_share_no_history():
    plugin = HistoryQuantile(min_observations=1)
    first, second = (plugin.build_length_predictor(None) for _ in range(2))
    first.observe(ended(3))
    assert first.predict(request(max_tokens=40)) == 3.0
    assert second.predict(request(max_tokens=40)) == 20.0


def test_it_learns_from_the_requests_of_a_run():
    plugin = HistoryQuantile(min_observations=4)
    engine = make_engine(predictor=plugin)
    fields = {"forced_output": 6}
    run(engine, [Arrival(i, f"r{i}", 8, 30, None, {"ignore_eos": False}, fields) for i in range(5)])
    assert engine.state.predictor.predict(request(max_tokens=30)) == 6.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantile", 0),
        ("quantile", 1.1),
        ("window", 0),
        ("min_observations", 0),
        ("min_observations", 1001),
        ("prior_share", 0),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} must be .*, got {value}"):
        HistoryQuantile(**{field: value})
