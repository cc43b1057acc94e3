"""plugins/workload/synthetic.py and the distributions of common.py."""

from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.common import arrival_times, lengths
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
