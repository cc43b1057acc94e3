"""plugins/workload/synthetic.py and the distributions of common.py."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.common import arrival_times, arrivals, lengths
from plugins.workload.synthetic import Synthetic


def draw(spec: dict[str, Any], num: int = 4000) -> Any:
    return lengths(spec, num, "workload.output", np.random.default_rng(0))


def test_lengths_follow_their_distribution() -> None:
    assert set(draw({"kind": "fixed", "value": 7})) == {7}
    uniform = draw({"kind": "uniform", "low": 3, "high": 5})
    assert set(uniform) == {3, 4, 5}
    skewed = {"kind": "lognormal", "median": 100, "sigma": 1.0, "low": 10, "high": 2000}
    drawn = draw(skewed)
    assert 90 < np.median(drawn) < 110
    assert drawn.mean() > 130  # exp(sigma^2 / 2) above the median, less the clipping
    assert drawn.min() >= 10
    assert drawn.max() <= 2000
    mixed = draw({"kind": "choice", "values": [10, 500], "weights": [4, 1]})
    assert set(mixed) == {10, 500}
    assert 0.77 < (mixed == 10).mean() < 0.83


def test_mixture_draws_lengths_and_distributions_in_their_shares() -> None:
    both = draw({"kind": "mixture", "values": [10, 500], "weights": [0.8, 0.2]})
    assert set(both) == {10, 500}
    assert 0.78 < (both == 10).mean() < 0.82
    wide = {"kind": "uniform", "low": 100, "high": 103}
    mixed = draw({"kind": "mixture", "values": [7, wide], "weights": [1, 3]})
    assert set(mixed) == {7, 100, 101, 102, 103}
    assert 0.73 < (mixed >= 100).mean() < 0.77


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "gauss"}, "workload.output.kind must be one of fixed, uniform"),
        ({"kind": "fixed"}, "workload.output.value must be given"),
        ({"kind": "fixed", "value": 0}, "workload.output.value must be >= 1, got 0"),
        ({"kind": "fixed", "value": 1, "low": 2}, "workload.output.low must be absent"),
        ({"kind": "uniform", "low": 5, "high": 4}, r"high must be >= low \(5\), got 4"),
        ({"kind": "choice", "values": [1, 2], "weights": [1]}, "weights must be >= 0, one a value"),
        ({"kind": "choice", "values": [0], "weights": [1]}, "values must be >= 1 each"),
        ({"kind": "mixture", "values": [], "weights": []}, "values must be at least one"),
        ({"kind": "mixture", "values": [1], "weights": [0]}, "weights must be >= 0, one a value"),
        (
            {"kind": "mixture", "values": [9, {"kind": "fixed", "value": 0}], "weights": [1, 1]},
            r"workload.output.values\[1\].value must be >= 1, got 0",
        ),
    ],
)
def test_bad_distribution_names_field_rule_and_value(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(spec)


def test_poisson_arrivals_have_their_rate() -> None:
    times = np.array(arrival_times(4000, 8.0, seed=0))
    assert (np.diff(times) > 0).all()
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.05)
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert arrival_times(3, None, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("cv", [0.25, 3.0])
def test_gamma_arrivals_have_their_rate_and_variation(cv: float) -> None:
    gaps = np.diff(arrivals(40_000, 8.0, seed=0, cv=cv))
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(8.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    with pytest.raises(ConfigError, match=r"workload.arrival_cv must be > 0, got 0"):
        Synthetic(1, rate=1.0, arrival_cv=0).requests(None, 50, 0)


def test_a_million_requests_are_built_one_at_a_time() -> None:
    tracemalloc.start()
    requests = Synthetic(1_000_000, rate=100.0).requests(None, 1000, 0)
    assert len(requests) == 1_000_000
    assert requests[-1].request_id == "synthetic-999999"
    assert np.array_equal(requests[5].prompt, requests[5].prompt)
    assert [r.request_id for r in requests[2:6:2]] == ["synthetic-2", "synthetic-4"]
    bytes_held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bytes_held < 32e6  # three columns and one array of ids
    with pytest.raises(IndexError):
        requests[1_000_000]


def test_bad_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload.rate must be > 0 or null, got 0"):
        arrival_times(1, 0, seed=0)


def test_forced_lengths_bind_and_free_ones_only_limit() -> None:
    output = {"kind": "uniform", "low": 2, "high": 9}
    forced = Synthetic(8, output=output, forced=True).requests(None, 50, 0)
    free = Synthetic(8, output=output, forced=False).requests(None, 50, 0)
    for one, other in zip(forced, free, strict=True):
        assert one.output_limit == one.forced_output == other.output_limit
        assert other.forced_output is None
    assert len({one.params.max_tokens for one in forced}) == 1  # the truth is not told
    with pytest.raises(ConfigError, match=r"workload.max_tokens must be >= 9, got 4"):
        Synthetic(99, output=output, max_tokens=4).requests(None, 50, 0)


def test_requests_repeat_under_a_seed_and_stay_in_the_vocabulary() -> None:
    workload = Synthetic(30, rate=4.0, num_clients=3)
    first, again = workload.requests(None, 50, 7), workload.requests(None, 50, 7)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, again, strict=True))
    assert {r.client for r in first} == {"client-0", "client-1", "client-2"}
    assert max(int(r.prompt.max()) for r in first) < 50
    assert any(
        not np.array_equal(a.prompt, b.prompt)
        for a, b in zip(first, workload.requests(None, 50, 8), strict=True)
    )


def test_prompt_lengths_do_not_depend_on_output_lengths() -> None:
    short = Synthetic(9, output={"kind": "fixed", "value": 1}).requests(None, 50, 0)
    long = Synthetic(9, output={"kind": "uniform", "low": 9, "high": 99}).requests(None, 50, 0)
    assert [len(r.prompt) for r in short] == [len(r.prompt) for r in long]
