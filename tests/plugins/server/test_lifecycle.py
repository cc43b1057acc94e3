"""Calls that wait, fail, are refused or abandoned; slow readers; bodies that cannot be read."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from plugins.server.client import Busy, State, Unavailable
from tests.patience import SOON_S
from tests.plugins.server.asking import facts
from tests.plugins.server.calls import CHAT, TEXT, ask, ids_of, raw_call, talk, total
from tests.plugins.server.live import Live, events, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(facts(), keepalive_s=0.05, max_body_bytes=10_000) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Live]:
    """A server of little patience."""
    with serving(facts(), request_timeout_s=0.5) as server:
        yield server


def test_silence_is_filled_with_comments_and_headers_come_at_once(live: Live) -> None:
    """H18."""
    with (
        live.scripted(held_at=0) as client,
        live.http.stream("POST", live.url + CHAT, json=talk(stream=True)) as answer,
    ):
        lines = answer.iter_lines()
        silence = [next(line for line in lines if line.startswith(":")) for _ in range(3)]
        assert silence == [": keep-alive"] * 3
        client.held_at = None
        read = events("\n".join(lines))
    assert len("".join(read.joined(0)[0])) == 6
    assert read.done


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_429_and_nothing_of_the_call_runs(live: Live, stream: bool) -> None:
    with live.scripted(refuse=Busy(5, 5, 3.0), refuse_after=1, submitted=[]) as client:
        answer = live.post(TEXT, ask(prompt=["a", "b"], stream=stream))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert len(client.submitted) == 1
        live.until(lambda: not client.live)


def test_nothing_is_served_while_draining(live: Live) -> None:
    reason = "the server is shutting down"
    with live.scripted(refuse=Unavailable(reason), report=State(False, reason)):
        answer = live.post(CHAT, talk(stream=True))
        ready = live.get("/ready")
        assert live.get("/health").status_code == 200
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == reason
    assert ready.status_code == 503
    assert ready.json()["reason"] == reason


@pytest.mark.parametrize(
    ("reason", "message", "status"),
    [
        ("error", "the engine stopped", 500),
        ("capacity", "no page is free", 503),
        ("abort", "the server is shutting down", 503),
        ("error", "min_p must be in [0, 1], got 7", 400),
    ],
)
def test_an_error_is_a_status_or_an_event(
    live: Live, reason: str, message: str, status: int
) -> None:
    with live.scripted(error=message, error_reason=reason, error_after=3):
        plain = live.post(TEXT, ask())
        read = events(live.post(TEXT, ask(stream=True)).text)
    assert plain.status_code == status
    assert plain.json()["error"]["message"] == message
    assert read.chunks[-1] == plain.json()
    assert not read.done
    assert len(read.choices(0)) == 3
    assert [choice["finish_reason"] for choice in read.choices(0)] == [None] * 3


def test_a_request_that_takes_too_long_is_ended(hasty: Live) -> None:
    ended = total(hasty, "requests_total", reason="timeout")
    with hasty.scripted(held_at=3, aborted=[]) as client:
        plain = hasty.post(TEXT, ask())
        read = events(hasty.post(TEXT, ask(stream=True)).text)
        assert len(client.aborted) == 2
        hasty.until(lambda: not client.live)
    assert plain.status_code == 408
    assert read.chunks[-1]["error"]["code"] == "request_timeout"
    assert len(read.choices(0)) <= 3
    assert not read.done
    assert total(hasty, "requests_total", reason="timeout") == ended + 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("held_at", [0, 3])
def test_a_client_that_leaves_ends_its_request(live: Live, stream: bool, held_at: int) -> None:
    left = total(live, "requests_total", reason="abort")
    with live.scripted(held_at=held_at, aborted=[]) as client:
        body = json.dumps(ask(prompt=["a", "b"], stream=stream, max_tokens=64)).encode()
        with raw_call(live, body):
            live.until(lambda: len(client.live) == 2)
        live.until(lambda: not client.live)
        assert len(client.aborted) == 2
    assert total(live, "requests_total", reason="abort") == left + 2


def test_a_client_that_leaves_within_its_body_is_no_failure(live: Live) -> None:
    with raw_call(live, b'{"model":', length=500):
        assert live.post(TEXT, ask()).status_code == 200
    assert live.post(TEXT, ask()).status_code == 200
    assert live.failures == []


def test_a_slow_reader_slows_nobody_and_loses_nothing() -> None:
    with serving(facts()) as live:
        read_late(live)


def read_late(live: Live) -> None:
    ids = ids_of("one two three four " * 2000)[:6000]
    body = json.dumps(ask(stream=True, max_tokens=6000)).encode()
    with live.scripted(script=lambda *_: ids) as client, raw_call(live, body) as slow:
        live.until(lambda: bool(client.submitted))
        live.until(lambda: not client.live)  # the engine is done, the reader has not begun
        assert live.post(TEXT, ask(max_tokens=1)).status_code == 200
        raw = b""
        while not raw.endswith(b"0\r\n\r\n"):
            raw += slow.recv(1 << 16)
    text = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in raw.decode().split("\n")
        if line.startswith("data: {")
    )
    assert text == facts().tokenizer.decode(ids)
    assert total(live, "stream_chunks_total", kind="shared") > 0


def test_a_client_that_never_reads_is_let_go_when_its_time_is_up(
    hasty: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugins.server.stream.LAST_WORD_S", 0.05)
    ended = total(hasty, "requests_total", reason="timeout")
    ids = ids_of("one two three four " * 2000)[:6000]
    body = json.dumps(ask(stream=True, max_tokens=6000, logprobs=5)).encode()
    changes = {"script": lambda *_: ids, "submitted": []}
    with hasty.scripted(**changes) as client, raw_call(hasty, body) as slow:
        hasty.until(lambda: bool(client.submitted))
        hasty.until(lambda: not hasty.app.open)
        slow.settimeout(SOON_S)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(1 << 16):  # what was on its way; then the connection ends
                pass
    assert total(hasty, "requests_total", reason="timeout") == ended + 1


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"content": b"x" * 10_001}, 413, "body_too_large"),
        ({"content": b"x" * 30_000}, 413, "body_too_large"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 400, None),
        ({"content": b"\xff\xfe"}, 400, "invalid_json"),
        ({"content": b"[1]"}, 400, None),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(
    live: Live, options: dict[str, Any], status: int, code: str | None
) -> None:
    answer = live.post(TEXT, **options)
    assert answer.status_code == status
    assert code in (None, answer.json()["error"]["code"])


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with serving(facts(), api_key="s3cr3t") as live:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cr3t"}):
            answer = live.post(TEXT, ask(), headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert live.get("/v1/models").status_code == 401
        assert live.get("/health").status_code == live.get("/ready").status_code == 200
        good = {"authorization": "Bearer s3cr3t"}
        assert live.post(TEXT, ask(), headers=good).status_code == 200
        assert 'path="/v1/models",status="401"} 1.0' in live.get("/metrics").text


def test_step_records_are_fed_until_the_client_leaves(live: Live) -> None:
    with (
        live.scripted(feed=[{"step": 1}, {"step": 2, "lost": 5}]),
        live.http.stream("GET", live.url + "/v1/engine/steps") as answer,
    ):
        lines = answer.iter_lines()
        data = [line for line in (next(lines) for _ in range(3)) if line]
        assert [json.loads(line[6:]) for line in data] == [{"step": 1}, {"step": 2, "lost": 5}]
        assert next(line for line in lines if line) == ": keep-alive"


def test_every_accepted_request_is_counted_once() -> None:
    with serving(facts()) as live:
        live.post(TEXT, ask(prompt=["a", "b"]))
        live.post(TEXT, ask(n=0))
        with live.scripted(error="it broke"):
            live.post(CHAT, talk(stream=True))
        page = live.get("/metrics").text
        counted = [line for line in page.splitlines() if line.startswith("tritium_requests_total")]
        assert sum(float(line.split()[-1]) for line in counted) == len(live.client.submitted) == 3
        assert total(live, "tokens_total", kind="output") == 12
        assert total(live, "ttft_seconds_count") == 1
