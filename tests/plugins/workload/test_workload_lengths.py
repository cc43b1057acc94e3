"""Traces of lengths: plugins/workload/vtc_fairness.py, arxiv_lengths.py and burstgpt.py."""

import gzip
import hashlib
from collections import Counter

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.arxiv_lengths import ArxivLengths
from plugins.workload.burstgpt import SHA256, BurstGpt
from plugins.workload.vtc_fairness import VtcFairness

VOCAB = 1000


def test_vtc_trace_is_whole_with_its_clients():
    workload = VtcFairness()
    requests = list(workload.requests(None, VOCAB, 0))
    assert len(requests) == 1500
    assert sum(len(r.prompt) for r in requests) == 204_398
    assert sum(r.forced_output for r in requests) == 384_297
    assert {r.client for r in requests} == {f"client-{number}" for number in range(27)}
    first = requests[0]
    assert (first.client, len(first.prompt), first.forced_output) == ("client-13", 13, 199)
    assert requests[1].arrival_s == pytest.approx(0.207938)
    assert requests[-1].arrival_s == pytest.approx(600.0)
    times = [r.arrival_s for r in requests]
    assert times == sorted(times)
    assert {r.params.max_tokens for r in requests} == {977}
    assert workload.describe()["requests"] == 1500


def test_arxiv_lengths_are_whole_and_arrivals_drawn_at_the_rate():
    requests = list(ArxivLengths(num_requests=None, rate=4.0).requests(None, VOCAB, 0))
    assert len(requests) == 28_257
    assert sum(len(r.prompt) for r in requests) == 73_131_321
    assert sum(r.forced_output for r in requests) == 8_234_948
    assert (len(requests[0].prompt), requests[0].forced_output) == (3772, 54)
    assert (len(requests[1].prompt), requests[1].forced_output) == (2015, 156)
    assert 28_257 / requests[-1].arrival_s == pytest.approx(4.0, rel=0.03)
    gaps = np.diff([r.arrival_s for r in requests])
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)


def test_arxiv_part_and_what_is_skipped_keep_the_rate():
    some = ArxivLengths(start=10, num_requests=4000, rate=4.0, max_prompt=3000, arrival_cv=2.0)
    requests = some.requests(None, VOCAB, 0)
    assert some.describe()["skipped"] == 4000 - len(requests) > 500
    assert all(len(r.prompt) <= 3000 for r in requests)
    gaps = np.diff([r.arrival_s for r in requests])
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.15)
    (tenth,) = ArxivLengths(start=10, num_requests=1).requests(None, VOCAB, 0)
    assert tenth.request_id == "arxiv_lengths-10"
    with pytest.raises(ConfigError, match=r"workload.start must be < 28257, the rows"):
        ArxivLengths(start=28_257)


BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
46,ChatGPT,17,0,17,API log
118,GPT-4,417,276,693,Conversation log
"""


@pytest.fixture
def burst(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(BURST)
    return str(path), hashlib.sha256(BURST.encode()).hexdigest()


def test_burstgpt_takes_answered_calls_and_counts_the_others(burst):
    workload = BurstGpt(*burst)
    requests = list(workload.requests(None, VOCAB, 0))
    facts = [(r.request_id, r.arrival_s, len(r.prompt), r.forced_output) for r in requests]
    assert facts == [
        ("burstgpt-0", 0.0, 472, 18),
        ("burstgpt-1", 40.0, 1087, 230),
        ("burstgpt-3", 113.0, 417, 276),
    ]
    assert Counter(r.client for r in requests) == {"ChatGPT": 2, "GPT-4": 1}
    assert workload.describe()["failed_calls_of_the_trace"] == 1
    only = list(BurstGpt(*burst, service="GPT-4").requests(None, VOCAB, 0))
    assert [r.request_id for r in only] == ["burstgpt-3"]
    with pytest.raises(ConfigError, match=r"workload.service must be one of ChatGPT, GPT-4 or"):
        BurstGpt(*burst, service="Claude").requests(None, VOCAB, 0)


def test_copy_may_be_gzipped_and_its_content_is_checked(burst, tmp_path):
    path = tmp_path / "mine.csv.gz"
    path.write_bytes(gzip.compress(BURST.encode()))
    assert len(BurstGpt(str(path), burst[1]).requests(None, VOCAB, 0)) == 3


def test_another_file_is_refused_with_what_was_expected_and_found(burst):
    path, found = burst
    with pytest.raises(ConfigError) as caught:
        BurstGpt(path).requests(None, VOCAB, 0)
    text = str(caught.value)
    assert all(digest in text and name in text for name, digest in SHA256.items())
    assert f"got sha256 {found}" in text


def test_other_columns_are_named(tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text("Timestamp,Model\n1,GPT-4\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=r"a CSV with the columns .* got \['Request tokens'"):
        BurstGpt(str(path), digest).requests(None, VOCAB, 0)
