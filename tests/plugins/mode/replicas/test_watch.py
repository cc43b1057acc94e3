"""The terminal's view of replicas."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from plugins.mode.replicas import watch

READY = {
    "id": "0",
    "state": "ready",
    "process_id": 17,
    "restarts": 1,
    "requests": 5,
    "report": {
        "pages_free": 60,
        "pages_evictable": 15,
        "pool_pages": 100,
        "pages_promised": 1234,
        "running": 3,
        "waiting": 2,
        "step_s": 0.0125,
    },
    "device": {
        "temperature_c": 61.0,
        "memory_used_bytes": 30 << 30,
        "memory_bytes": 140 << 30,
        "utilisation": 0.75,
    },
}
DEAD = {"id": "1", "state": "dead", "process_id": None, "restarts": 0, "requests": 0}
STATE = {
    "ready": True,
    "reason": "",
    "model": "llama",
    "policy": "default",
    "requests": 5,
    "totals": {"sampled_tokens": 4321, "failovers": 2},
}


def drawn(what: Any) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(what)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_a_row_tells_load_memory_and_device() -> None:
    lines = drawn(watch.table([DEAD, READY])).splitlines()
    names = "id state requests running waiting KV free KV to come step device memory load"
    assert " ".join(lines[0].split()) == f"{names} process restarts"
    told = "0 ready 5 3 2 75% of 100 1,234 12.5 ms 61 °C 30 of 140 GiB 75% 17 1"
    assert " ".join(lines[1].split()) == told


def test_what_is_not_known_is_a_dash() -> None:
    lines = drawn(watch.table([DEAD])).splitlines()
    assert lines[1].split() == ["1", "dead", "0", *["–"] * 9, "0"]


def test_the_headline_says_why_nothing_is_served() -> None:
    assert (
        drawn(watch.headline(STATE)) == "llama  default  5 requests, 4,321 tokens so far, 2 moved\n"
    )
    idle = STATE | {"ready": False, "reason": "no replica is ready", "totals": {}}
    assert "0 tokens so far\nno replica is ready" in drawn(watch.headline(idle))


def test_a_server_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(url: str) -> dict[str, Any]:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(watch, "asked", refuses)
    assert drawn(watch.picture("http://x")) == "http://x: nobody listens\n"


def test_both_endpoints_make_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"http://x/v1/engine": STATE, "http://x/v1/workers": {"data": [READY]}}
    monkeypatch.setattr(watch, "asked", lambda url: json.loads(json.dumps(answers[url])))
    text = drawn(watch.picture("http://x"))
    assert text.startswith("llama")
    assert "75% of 100" in text
