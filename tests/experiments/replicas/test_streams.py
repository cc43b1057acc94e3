"""What clients count in the bytes that they read, and the tables made of it."""

import json
import re
from types import SimpleNamespace

import pytest

from core.errors import ConfigError
from experiments.replicas import run
from experiments.replicas.streams import BIN_S, Seen, Shape, take, token_times

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def event(text):
    body = f"data: {json.dumps({'choices': [{'text': text}]}, separators=(',', ':'))}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


def test_tokens_count_when_the_last_byte_of_their_event_came():
    first, second = event("17 "), event("4 8 ")
    cut = len(second) - 9  # within the text
    parts = [(1.0, HEAD + first + second[:20]), (2.0, second[20:cut]), (3.0, second[cut:] + DONE)]
    times, counts = token_times(parts)
    assert counts.tolist() == [1, 2]
    assert times == [1.0, 3.0]


@pytest.mark.parametrize(
    ("parts", "tokens", "fault"),
    [
        ([HEAD, event("1 "), event("2 3 "), DONE], 3, ""),
        ([HEAD, event("1 "), DONE], 3, "1 of 3 tokens"),
        ([HEAD, event("1 "), event("2 3 ")], 3, "3 of 3 tokens, then"),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}"], 3, "refused"),
        ([], 3, "refused"),
    ],
)
def test_a_stream_is_whole_with_all_of_its_tokens_and_an_end(parts, tokens, fault):
    found = take(Seen(), [(1.0, part) for part in parts], tokens, 0.0)
    assert found.startswith(fault)
    assert bool(found) is bool(fault)


def test_tokens_a_second_are_those_of_the_bins_between():
    seen = Seen()
    for number in range(20):  # one token each 50 ms
        part = 5.0 + 0.05 * number + 0.01, HEAD + event(f"{number} ") + DONE
        assert take(seen, [part], 1, 4.0) == ""
    assert seen.bins.sum() == 20
    assert seen.tokens_a_second(1.0, 2.0) == pytest.approx(20.0)
    assert seen.tokens_a_second(1.0, 1.0 + BIN_S) == pytest.approx(2 / BIN_S)


def test_every_call_is_its_own_and_within_the_shape():
    shape = Shape(8, (5, 9))
    calls = [shape.request(number) for number in range(50)]
    assert len({raw for raw, _ in calls}) == 50
    assert {tokens for _, tokens in calls} == {5, 6, 7, 8, 9}
    raw, tokens = calls[0]
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["max_tokens"] == tokens


def test_report_divides_by_one_replica():
    common = {"model": "m", "streams": 4, "whole": 9, "faults": 1, "main_cores": 0.5}
    common |= {"main_us_a_token": 2.0, "busiest_front_cores": 0.25, "devices": {}}
    lines = [common | {"replicas": n, "tokens_s": rate} for n, rate in ((1, 100.0), (2, 195.0))]
    rows = run.report(lines).splitlines()
    assert rows[2].startswith("| m | 1 | 4 | 100 | 1.000 | 1 of 10 |")
    assert rows[3].startswith("| m | 2 | 4 | 195 | 1.950 | 1 of 10 |")


def test_waits_of_who_lived_through_a_death_are_apart():
    seen = Seen(waits=[(0.0, 1.9, 0.1), (1.0, 5.0, 2.0), (2.5, 6.0, 0.3)])
    seen.bins[20:40] = 7
    death = {"killed_at_s": 2.0, "back_at_s": 4.0, "killed": "0", "had": 1, "moved": 1}
    found = run.after_death(seen, death)
    assert (found["lived_through"], found["wait_s"][-1]) == (1, 2.0)
    assert found["wait_of_others_s"][-1] == 0.3
    assert found["tokens_s_meanwhile"] == pytest.approx(70.0)


def test_a_replica_that_does_not_come_back_is_no_result(monkeypatch):
    told = {"id": "0", "requests": 5, "process_id": 77, "state": "dead"}
    killed = []
    monkeypatch.setattr(run, "workers", lambda server: [told])
    monkeypatch.setattr(run, "is_back", lambda server, before: False)
    monkeypatch.setattr(run.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(run, "PATIENCE_S", 0.0)
    server = SimpleNamespace(messages="what it wrote")
    with pytest.raises(TimeoutError, match="replica 0 is not back; what it wrote"):
        run.killed(server, SimpleNamespace(now_s=lambda: 1.0))
    assert killed == [(77, run.signal.SIGKILL)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--streams", "0"], "--streams must be >= 1, got 0"),
        (["--replicas", "1", "0"], "--replicas must be >= 1, got [1, 0]"),
        (["--output", "9", "3"], "--output must be two numbers >= 1, ascending, got [9, 3]"),
        (["--seconds", "0"], "--seconds must be > 0, got 0.0"),
    ],
)
def test_numbers_that_nobody_can_serve_are_refused_before_a_server_starts(words, said, monkeypatch):
    monkeypatch.setattr(run, "serving", None)
    monkeypatch.setattr(run.sys, "argv", ["run", *words])
    with pytest.raises(ConfigError, match=re.escape(said)):
        run.main()
