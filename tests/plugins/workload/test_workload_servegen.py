"""plugins/workload/servegen.py: as many requests as published, of the published shapes."""

import ast
import gzip
import json
import logging
from collections import Counter

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.common import TRACES
from plugins.workload.servegen import ServeGen
from plugins.workload.servegen_clients import Window, _lengths


def published(dataset):
    """client -> windows and distributions as in the file."""
    with gzip.open(TRACES / "servegen" / f"{dataset}.jsonl.gz") as lines:
        entries = [json.loads(line) for line in lines]
    return {entry["client"]: entry for entry in entries}


def test_a_client_sends_as_many_requests_as_published():
    file = published("deepseek-r1_1day")
    expected = {
        f"client-{number}": round(600 * rate)
        for number, entry in file.items()
        for at, rate, *_ in entry["windows"]
        if at == 43_200 and rate > 0
    }
    workload = ServeGen()
    requests = list(workload.requests(None, 1000, 0))
    assert Counter(r.client for r in requests) == expected
    assert len(requests) == 6216
    assert workload.describe()["clients"] == 22
    times = [r.arrival_s for r in requests]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 590 < times[-1] < 600


def test_lengths_are_of_the_published_distribution():
    """client-35 has half of the requests; six hours from noon."""
    dists = published("deepseek-r1_1day")[35]["dists"]["43200"]
    requests = [r for r in ServeGen().requests(None, 1000, 0) if r.client == "client-35"]
    for field, drawn in (
        ("input_tokens", [len(r.prompt) for r in requests]),
        ("output_tokens", [r.forced_output for r in requests]),
    ):
        shares = ast.literal_eval(dists[field])
        assert set(drawn) <= set(shares)
        mean = sum(length * share for length, share in shares.items())
        spread = sum(length**2 * share for length, share in shares.items()) - mean**2
        assert abs(np.mean(drawn) - mean) < 5 * (spread / len(drawn)) ** 0.5


def test_drawn_shares_are_the_published_ones():
    lengths = _lengths("{7: 0.25, 3: 0.5, 0: 0.25}")
    drawn = lengths.draw(40_000, np.random.default_rng(0))
    counts = Counter(drawn.tolist())
    assert set(counts) == {1, 3, 7}  # a length of 0 counts as 1
    shares = [counts[length] / 40_000 for length in (1, 3, 7)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


@pytest.mark.parametrize(
    ("family", "shape", "cv"),
    [
        ("Gamma", 0.25, 2.0),  # 1 / sqrt(shape)
        ("Gamma", 4.0, 0.5),
        ("Weibull", 1.0, 1.0),
        ("Weibull", 0.5, 5**0.5),  # sqrt(gamma(5) / gamma(3)^2 - 1)
    ],
)
def test_gaps_have_the_family_s_variation_and_fill_the_window(family, shape, cv):
    times = Window(1200.0, 50_000, family, shape).arrivals(np.random.default_rng(0))
    assert len(times) == 50_000
    assert times.min() > 1200.0
    assert times.max() < 1800.0
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(600 / 50_000, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_part_of_the_day_is_the_same_whatever_is_taken_beside_it():
    short = list(ServeGen(start_s=43_800).requests(None, 1000, 5))
    long = list(ServeGen(start_s=43_200, window_s=1200).requests(None, 1000, 5))
    first = len(long) - len(short)
    assert first > 0
    facts = [(r.client, len(r.prompt), r.forced_output) for r in short]
    assert [(r.client, len(r.prompt), r.forced_output) for r in long[first:]] == facts
    other = [
        (r.client, len(r.prompt), r.forced_output)
        for r in ServeGen(start_s=43_800).requests(None, 1000, 6)
    ]
    assert sorted(facts) != sorted(other)


def test_heaviest_clients_can_be_taken_alone_and_the_rate_scaled():
    requests = list(ServeGen(num_clients=2, rate_scale=2.0).requests(None, 1000, 0))
    assert Counter(r.client for r in requests) == {"client-35": 3032, "client-48": 588}
    assert 290 < requests[-1].arrival_s < 300


def test_clients_without_published_lengths_are_left_out_and_counted(caplog):
    file = published("m-large_day1")
    counts = {
        number: round(600 * rate)
        for number, entry in file.items()
        for at, rate, *_ in entry["windows"]
        if at == 43_200 and rate > 0
    }
    without = {number: num for number, num in counts.items() if file[number]["dists"] is None}
    workload = ServeGen("m-large")
    with caplog.at_level(logging.WARNING):
        requests = workload.requests(None, 1000, 0)
    assert len(requests) == sum(counts.values()) - sum(without.values()) == 43_077
    facts = workload.describe()
    assert facts["clients_without_lengths"] == len(without) == 12
    assert facts["requests_of_clients_without_lengths"] == sum(without.values()) == 85_292
    assert "12 clients without published lengths are left out, 85292 requests" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "m-small"}, r"workload.dataset must be one of deepseek-r1, m-large"),
        ({"start_s": 86_400}, r"workload.start_s must be in \[0, 86400\), got 86400"),
        ({"window_s": 0}, r"workload.window_s must be > 0, got 0"),
        ({"num_clients": 0}, r"workload.num_clients must be >= 1 or null, got 0"),
    ],
)
def test_bad_argument_names_field_rule_and_value(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ServeGen(**arguments)
