"""The HTTP side over a fake client: what the cases of requests.jsonl do not reach."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from plugins.server.client import Busy, State, Unavailable
from plugins.server.replies import ChatChunk, ChatCompletion, Completion
from tests.plugins.server.asking import facts, with_facts
from tests.plugins.server.live import Live, events, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = "Hello world  two  é👩‍🚀 spaces"
LONG_STOP = "d  tw"
MESSAGES = [{"role": "user", "content": "Say hi in one word."}]


@pytest.fixture(scope="module")
def patient() -> Iterator[Live]:
    """A server with the default settings."""
    with serving(facts()) as server:
        yield server


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(facts(), keepalive_s=0.05, request_timeout_s=1.0, max_body_bytes=10_000) as server:
        yield server


def ask(**changes: Any) -> dict[str, Any]:
    return {"model": "MODEL", "prompt": "Hello", "max_tokens": 6, **changes}


def talk(**changes: Any) -> dict[str, Any]:
    return {"model": "MODEL", "messages": MESSAGES, "max_tokens": 6, **changes}


def ids_of(text: str) -> list[int]:
    return list(facts().tokenizer(text)["input_ids"])


def total(live: Live, name: str, **labels: str) -> float:
    wanted = "".join(f'{key}="{value}"' for key, value in labels.items())
    start = f"tritium_{name}{{{wanted}}} " if wanted else f"tritium_{name} "
    lines = [line for line in live.get("/metrics").text.splitlines() if line.startswith(start)]
    return float(lines[0].split()[-1]) if lines else 0.0


@pytest.mark.parametrize("lag_s", [0.0, 0.002])
@pytest.mark.parametrize("stop", [None, [LONG_STOP], ["nowhere"]])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_stream_equals_plain_whatever_stops_it(
    live: Live, stop: list[str] | None, logprobs: int | None, lag_s: float
) -> None:
    body = ask(prompt=["a", "b"], n=2, stop=stop, logprobs=logprobs, echo=True, max_tokens=40)
    with live.scripted(script=lambda *_: ids_of(LONG), step_s=lag_s):
        plain = live.post(TEXT, body).json()
        stream = events(live.post(TEXT, {**body, "stream": True}).text)
    Completion.model_validate(plain)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    for choice in plain["choices"]:
        same = (choice["text"], choice["logprobs"], choice["finish_reason"])
        assert stream.joined(choice["index"]) == same
        cut = "Hello worl" if stop == [LONG_STOP] else LONG
        assert choice["text"] == "aabb"[choice["index"]] + cut


def test_a_stop_string_ends_the_request_in_the_engine(live: Live) -> None:
    with live.scripted(script=lambda *_: ids_of("one two three four five"), step_s=0.05) as client:
        client.aborted.clear()
        answer = live.post(TEXT, ask(stop=" thr", max_tokens=64)).json()
        assert answer["choices"][0]["text"] == "one two"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3
        assert client.aborted == [answer["id"]]


def test_an_end_token_with_text_is_left_out_of_the_text_alone(live: Live) -> None:
    ids = ids_of("one two three")
    body = ask(stop_token_ids=[ids[-1]], logprobs=0, max_tokens=9)
    with live.scripted(script=lambda *_: ids):
        answer = live.post(TEXT, body).json()
        kept = live.post(TEXT, {**body, "include_stop_str_in_output": True}).json()
    assert answer["choices"][0]["text"] == "one two"
    assert kept["choices"][0]["text"] == "one two three"
    for one in (answer, kept):
        assert one["choices"][0]["logprobs"]["tokens"] == ["one", " two", " three"]
        assert one["usage"]["completion_tokens"] == 3
        assert one["choices"][0]["finish_reason"] == "stop"


def test_chat_chunks_follow_the_models_of_the_openapi_page(live: Live) -> None:
    body = talk(n=2, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(live.post(CHAT, body).json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    read = events(live.post(CHAT, body | options).text)
    for chunk in read.chunks:
        ChatChunk.model_validate(chunk)
    assert {choice["delta"].get("role") for choice in read.choices(1)} == {"assistant", None}
    assert read.chunks[-1]["usage"]["completion_tokens"] == 12


def test_a_prompt_is_scored_without_an_answer(live: Live) -> None:
    body = ask(prompt="Is water wet? Yes", max_tokens=0, echo=True, logprobs=1)
    answer = live.post(TEXT, body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "Is water wet? Yes" == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_silence_is_filled_with_comments_and_headers_come_at_once(live: Live) -> None:
    start_s = time.monotonic()
    with (
        live.scripted(delay_s=0.4),
        live.http.stream("POST", live.url + CHAT, json=talk(stream=True)) as answer,
    ):
        assert time.monotonic() - start_s < 0.3
        text = answer.read().decode()
    read = events(text)
    assert 3 <= read.lines.count(": keep-alive") <= 9
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


def test_a_request_that_takes_too_long_is_ended(live: Live) -> None:
    with live.scripted(step_s=0.3, aborted=[]) as client:
        plain = live.post(TEXT, ask())
        read = events(live.post(TEXT, ask(stream=True)).text)
        assert len(client.aborted) == 2
        live.until(lambda: not client.live)
    assert plain.status_code == 408
    assert read.chunks[-1]["error"]["code"] == "request_timeout"
    assert 3 <= len(read.choices(0)) < 6
    assert total(live, "requests_total", reason="timeout") == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("delay_s", "step_s"), [(30.0, 0.0), (0.0, 0.1)])
def test_a_client_that_leaves_ends_its_request(
    live: Live, stream: bool, delay_s: float, step_s: float
) -> None:
    left = total(live, "requests_total", reason="abort")
    with live.scripted(delay_s=delay_s, step_s=step_s) as client:
        body = json.dumps(ask(prompt=["a", "b"], stream=stream, max_tokens=64)).encode()
        with raw_call(live, body):
            live.until(lambda: len(client.live) == 2)
        assert live.until(lambda: not client.live) < 0.5
    assert total(live, "requests_total", reason="abort") == left + 2


def raw_call(live: Live, body: bytes, length: int | None = None) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.connect((host, int(port)))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection


def test_a_client_that_leaves_within_its_body_is_no_failure(live: Live) -> None:
    with raw_call(live, b'{"model":', length=500):
        time.sleep(0.05)
    assert live.post(TEXT, ask()).status_code == 200
    assert live.failures == []


def test_a_slow_reader_slows_nobody_and_loses_nothing(patient: Live) -> None:
    live = patient
    shared = total(live, "stream_chunks_total", kind="shared")
    ids = ids_of("one two three four " * 2000)[:6000]
    body = json.dumps(ask(stream=True, max_tokens=6000)).encode()
    with live.scripted(script=lambda *_: ids) as client, raw_call(live, body) as slow:
        live.until(lambda: bool(client.live))
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
    assert total(live, "stream_chunks_total", kind="shared") > shared


def test_a_client_that_never_reads_is_let_go_when_its_time_is_up(live: Live) -> None:
    ended = total(live, "requests_total", reason="timeout")
    ids = ids_of("one two three four " * 2000)[:6000]
    body = json.dumps(ask(stream=True, max_tokens=6000, logprobs=5)).encode()
    with live.scripted(script=lambda *_: ids, step_s=1e-4) as client, raw_call(live, body) as slow:
        live.until(lambda: bool(client.live))
        live.until(lambda: not client.live)
        time.sleep(2.2)
        slow.settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(1 << 16):  # what was on its way; then the connection ends
                pass
    assert total(live, "requests_total", reason="timeout") == ended + 1


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


def test_unknown_paths_and_methods_have_the_error_shape(live: Live) -> None:
    assert live.post("/v1/nothing", {}).json()["error"]["code"] == "not_found"
    answer = live.get(TEXT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


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


def test_tokens_and_text_go_both_ways(live: Live) -> None:
    text = "Hello  wörld"
    made = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert made["tokens"] == ids_of(text)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert live.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = live.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat["count"] == live.post(CHAT, talk()).json()["usage"]["prompt_tokens"]


def test_engine_state_is_shown_as_json_and_as_metrics(live: Live) -> None:
    report = State(True, waiting=3, running=2, pool={"pages_free": 9}, totals={"steps": 4})
    with live.scripted(report=report):
        shown = live.get("/v1/engine").json()
        assert (shown["waiting"], shown["policy"], shown["pool"]) == (3, "fcfs", {"pages_free": 9})
        assert total(live, "waiting") == 3
        assert total(live, "pool_pages_free") == 9
        assert total(live, "engine_steps_total") == 4


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


def test_the_openai_package_is_served(live: Live) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["MODEL"]
    plain = client.chat.completions.create(model="MODEL", messages=MESSAGES, max_tokens=5)
    chunks = client.chat.completions.create(
        model="MODEL",
        messages=MESSAGES,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = list(chunks)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == plain.choices[0].message.content
    assert last.usage == plain.usage
    scored = client.completions.create(model="MODEL", prompt=[5, 6], max_tokens=3, logprobs=2)
    assert len(scored.choices[0].logprobs.tokens) == 3
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="MODEL", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with live.scripted(error="it broke", error_after=1), pytest.raises(openai.APIError):
        list(client.completions.create(model="MODEL", prompt="x", stream=True))
    client.close()


def test_an_engine_without_a_tokenizer_answers_in_ids() -> None:
    with serving(with_facts(tokenizer=None)) as live:
        with live.scripted(script=lambda *_: [7, 11]):
            answer = live.post(TEXT, ask(prompt=[5, 6], logprobs=0, max_tokens=2)).json()
        assert answer["choices"][0]["text"] == "7 11 "
        assert live.post(TEXT, ask()).status_code == 400


def test_the_openapi_page_names_all_endpoints(live: Live) -> None:
    page = live.get("/openapi.json").json()
    assert set(page["paths"]) >= {TEXT, CHAT, "/tokenize", "/detokenize", "/v1/models", "/metrics"}
    body = page["paths"][TEXT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rpartition("/")[2] in page["components"]["schemas"]
    assert live.get("/docs").status_code == 200
