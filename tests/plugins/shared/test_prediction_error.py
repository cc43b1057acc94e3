"""The error of predictions, by hand and over a run."""

import numpy as np
import pytest

from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.predictor.oracle import Oracle
from plugins.shared.prediction_error import MeasuredPredictor, prediction_error, rank_correlation
from tests.engine_harness import Arrival, make_engine, run


def floats(*values):
    return np.array(values, np.float64)


def test_mean_absolute_error_and_bias_by_hand():
    error = prediction_error(floats(10, 10, 4), floats(7, 16, 4))
    assert (error.count, error.mean_absolute_tokens, error.bias_tokens) == (3, 3.0, -1.0)
    assert error.mean_tokens == 9.0


def test_no_predictions_have_no_error():
    error = prediction_error(floats(), floats())
    assert error.count == 0
    assert error.mean_absolute_tokens is error.bias_tokens is error.rank_correlation is None


def test_rank_correlation_sees_order_alone():
    assert rank_correlation(floats(1, 2, 3), floats(10, 11, 500)) == pytest.approx(1.0)
    assert rank_correlation(floats(1, 2, 3), floats(9, 5, 1)) == pytest.approx(-1.0)
    assert rank_correlation(floats(2, 2, 2), floats(9, 5, 1)) is None


def test_rank_correlation_gives_ties_their_mean_rank():
    # Ranks 1.5 1.5 3 4 and 1 2 3.5 3.5; deviations -1 -1 .5 1.5 and -1.5 -.5 1 1.
    expected = (1.5 + 0.5 + 0.5 + 1.5) / 4.5
    assert rank_correlation(floats(1, 1, 2, 9), floats(3, 4, 8, 8)) == pytest.approx(expected)


def measured(predictor, arrivals):
    engine = make_engine()
    measure = MeasuredPredictor(predictor)
    engine.state.predictor = measure
    return run(engine, arrivals), measure.error()


def forced(name, length, **params):
    params = {"ignore_eos": False, **params}
    return Arrival(0, name, 8, 20, None, params, {"forced_output": length})


def test_error_of_a_run_is_taken_over_its_outputs():
    arrivals = [forced("A", 4), forced("B", 16), forced("C", 10, n=2)]
    _, error = measured(MaxTokensShare(0.5), arrivals)
    assert error == {
        "count": 4,
        "mean_absolute_tokens": 3.0,
        "bias_tokens": 0.0,
        "rank_correlation": None,
        "mean_tokens": 10.0,
    }


def test_a_request_that_is_refused_at_once_has_no_sample():
    _, error = measured(MaxTokensShare(0.5), [forced("A", 4), Arrival(0, "huge", 900, 4)])
    assert error["count"] == 1


def test_the_oracle_is_never_wrong():
    engine = make_engine(predictor=Oracle())
    engine.state.predictor = measure = MeasuredPredictor(engine.state.predictor)
    run(engine, [forced(f"r{i}", 3 + i) for i in range(6)])
    error = measure.error()
    assert (error["count"], error["mean_absolute_tokens"]) == (6, 0.0)
    assert error["rank_correlation"] == pytest.approx(1.0)
