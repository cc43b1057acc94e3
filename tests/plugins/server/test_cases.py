"""Every line of requests.jsonl against a live server over a fake client."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.plugins.server.asking import CASES, facts
from tests.plugins.server.live import TIMEOUT_S, Live, events, serving

LINES = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
CANARY = {"model": "MODEL", "prompt": "The capital of France is", "max_tokens": 4}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(facts()) as server:
        yield server


@pytest.mark.parametrize("line", LINES, ids=[line["id"] for line in LINES])
def test_line_gives_its_status_and_passes_its_checks(live: Live, line: dict[str, Any]) -> None:
    if "client" in line:
        return leave_early(live, line)
    body = expanded(line)
    beside = start_beside(live, line)
    answers = [send(live, line, body) for _ in range(line.get("repeat", 1))]
    beside.join()
    accepted = line["expect"]["status"]
    for answer in answers:
        assert answer.status_code in (accepted if isinstance(accepted, list) else [accepted])
    for check in line["expect"]["checks"]:
        apply(check, live, line, body, answers)
    return None


def test_every_line_was_read() -> None:
    assert len(LINES) == 96
    named = {check for line in LINES for check in line["expect"]["checks"]}
    unknown = {name for name in named if "=" not in name} - CHECKS.keys()
    assert not unknown


def leave_early(live: Live, line: dict[str, Any]) -> None:
    with live.scripted(held_at=3, submitted=[], aborted=[]) as client:
        url, body = live.url + line["path"], line["body"]
        if body.get("stream"):
            with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=httpx.Timeout(TIMEOUT_S, read=0.3))
        live.until(lambda: bool(client.submitted) and not client.live)
        assert len(client.aborted) == 1
    check_canary(live)


def expanded(line: dict[str, Any]) -> Any:
    if "raw_body" in line:
        return line["raw_body"] * line.get("expand_raw", {}).get("times", 1)
    body = json.loads(json.dumps(line.get("body")))
    if "expand" in line:
        *path, last = line["expand"]["at"].strip("/").split("/")
        place = body
        for key in path:
            place = place[int(key) if isinstance(place, list) else key]
        last = int(last) if isinstance(place, list) else last
        place[last] = line["expand"]["unit"] * line["expand"]["times"]
    return body


def send(live: Live, line: dict[str, Any], body: Any) -> httpx.Response:
    if line["method"] == "GET":
        return live.get(line["path"])
    if isinstance(body, str):
        return live.post(line["path"], content=body.encode())
    return live.post(line["path"], body)


def start_beside(live: Live, line: dict[str, Any]) -> threading.Thread:
    bodies = [line["concurrent_with"]] if "concurrent_with" in line else []
    thread = threading.Thread(target=lambda: [live.post(line["path"], one) for one in bodies])
    thread.start()
    return thread


def apply(check: str, live: Live, line: dict[str, Any], body: Any, answers: list) -> None:
    answer = answers[-1]
    name, _, value = check.partition("<=" if "<=" in check else "=")
    if answer.status_code != 200 and name not in ("error_shape", "canary", "closes", "fast"):
        return
    if name == "canary":
        check_canary(live)
    elif name == "repeat_equal":
        assert len({json.dumps(one.json()["choices"]) for one in answers}) == 1
    elif name == "stream_equals_plain":
        plain = live.post(line["path"], {**body, "stream": False}).json()
        for choice in plain["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            same = (text, choice["logprobs"], choice["finish_reason"])
            assert events(answer.text).joined(choice["index"]) == same
    elif name == "stop_absent":
        assert not [stop for stop in body["stop"] if stop in events(answer.text).joined(0)[0]]
    elif value:
        check_value(name, value, answer, at_most="<=" in check)
    else:
        CHECKS[name](answer)


def check_canary(live: Live) -> None:
    assert live.post("/v1/completions", CANARY).status_code == 200


def check_value(name: str, value: str, answer: httpx.Response, at_most: bool) -> None:
    if name == "indices" and answer.headers["content-type"].startswith("text/event-stream"):
        chunks = events(answer.text).chunks
        found = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
        assert sorted(found) == [int(one) for one in value.split(",")]
        return
    body = answer.json()
    found = {
        "finish": lambda: body["choices"][0]["finish_reason"],
        "completion_tokens": lambda: body["usage"]["completion_tokens"],
        "usage_prompt": lambda: body["usage"]["prompt_tokens"],
        "choices": lambda: len(body["choices"]),
        "indices": lambda: ",".join(str(choice["index"]) for choice in body["choices"]),
        "logprobs_len": lambda: len(body["choices"][0]["logprobs"]["tokens"]),
    }[name]()
    assert found <= int(value) if at_most else str(found) == value


def check_error_shape(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert "pydantic" not in error["message"].lower()


def check_sse(answer: httpx.Response) -> None:
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events(answer.text).done


def check_usage_final(answer: httpx.Response) -> None:
    chunks = events(answer.text).chunks
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def check_usage_sums(answer: httpx.Response) -> None:
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    whole = events(answer.text).chunks[-1] if streamed else answer.json()
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check_no_usage(answer: httpx.Response) -> None:
    assert all(chunk["choices"] for chunk in events(answer.text).chunks)


def check_role_first(answer: httpx.Response) -> None:
    deltas = [choice["delta"] for choice in events(answer.text).choices(0)]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)


def check_finish_key(answer: httpx.Response) -> None:
    for chunk in events(answer.text).chunks:
        assert all("finish_reason" in choice for choice in chunk["choices"])


def check_one_finish(answer: httpx.Response) -> None:
    read = events(answer.text)
    for index in {choice["index"] for chunk in read.chunks for choice in chunk["choices"]}:
        reasons = [choice["finish_reason"] for choice in read.choices(index)]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] in ("stop", "length")


def check_finite(answer: httpx.Response) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the answer")

    body = json.loads(answer.text, parse_constant=refuse)
    for choice in body["choices"]:
        found = choice["logprobs"] or {}
        entries = found.get("token_logprobs", [])
        entries += [entry["logprob"] for entry in found.get("content", [])]
        assert all(entry is None or math.isfinite(entry) for entry in entries)


def check_no_replacement(answer: httpx.Response) -> None:
    assert "\ufffd" not in events(answer.text).joined(0)[0]


def check_idle(answer: httpx.Response) -> None:
    raise AssertionError("lines with idle_soon have a client that leaves")


CHECKS: dict[str, Callable[[httpx.Response], None]] = {
    "error_shape": check_error_shape,
    "sse": check_sse,
    "stream_usage_final": check_usage_final,
    "usage_sums": check_usage_sums,
    "no_usage_chunk": check_no_usage,
    "role_first": check_role_first,
    "finish_key_always": check_finish_key,
    "one_finish_per_index": check_one_finish,
    "json_finite": check_finite,
    "fast": lambda answer: None,  # httpx returned within its time
    "closes": lambda answer: None,  # and so the answer ended
    "no_replacement_char": check_no_replacement,
    "idle_soon": check_idle,
    **dict.fromkeys(("canary", "repeat_equal", "stream_equals_plain", "stop_absent"), partial),
}
