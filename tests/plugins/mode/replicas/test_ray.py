"""`python run.py mode=serve replicas=2` on Ray, with a small model: what clients see of deaths.

One server for the file; every test leaves it with both replicas ready."""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from experiments.serving.chaos import TINY, all_of, is_back, model, wait_for_ready, workers
from experiments.serving.sampled_client import Asked, Got
from experiments.serving.server_process import ServerProcess, idle, serving
from tests.patience import SOON_S

STREAMS, TOKENS, VOCAB = 16, 400, 128
ASKED = [Asked(number, TOKENS, VOCAB) for number in range(STREAMS)]
DEAD_S = 4.0
OPTIONS = (
    "replicas=2",
    "+router=round_robin",
    "engine.deterministic=true",
    "router.suspect_after_s=2",
    f"router.dead_after_s={DEAD_S}",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("ray"), *TINY, *OPTIONS) as server:
        wait_for_ready(server, 2)
        yield server
        assert "Traceback" not in server.messages


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> dict[int, Any]:
    return answers(asyncio.run(all_of(server.port, ASKED, model(server), STREAMS)))


def answers(got: list[Got]) -> dict[int, Any]:
    """Of all calls; none may have failed."""
    assert [one.fault for one in got if one.fault] == []
    return {one.number: one.answer for one in got}


class Calls(threading.Thread):
    """All calls at once, in a thread."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self.server = server
        self.got: list[Got] = []
        self.start()
        until(lambda: all(line["requests"] > 2 for line in workers(server)))

    def run(self) -> None:
        self.got = asyncio.run(all_of(self.server.port, ASKED, model(self.server), STREAMS))

    def answers(self) -> dict[int, Any]:
        self.join(SOON_S)
        assert not self.is_alive(), "the calls did not end"
        return answers(self.got)


def until(holds: Any) -> None:
    until_s = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until_s, "it did not come to hold"
        time.sleep(0.02)


def send(server: ServerProcess, one: str, what: signal.Signals) -> dict[str, Any]:
    """Send a signal to a replica's process; how it stood before."""
    line = next(line for line in workers(server) if line["id"] == one)
    os.kill(line["process_id"], what)
    return line


def moved(server: ServerProcess) -> int:
    count: int = server.engine()["totals"].get("failovers", 0)
    return count


def test_replicas_are_listed_with_their_reports(server: ServerProcess) -> None:
    lines = workers(server)
    assert [line["id"] for line in sorted(lines, key=lambda line: line["id"])] == ["0", "1"]
    for line in lines:
        assert (line["state"], line["restarts"]) == ("ready", 0)
        assert line["report"]["pages_free"] == line["report"]["pool_pages"] == 65536 // 16
        assert line["device"]["temperature_c"] is None, "a CPU does not say"
    assert len({line["process_id"] for line in lines}) == 2
    assert server.engine()["pool"]["total"] == 2 * 65536 // 16


def test_no_client_notices_a_killed_replica(
    server: ServerProcess, undisturbed: dict[int, Any]
) -> None:
    before = moved(server)
    calls = Calls(server)
    line = send(server, "0", signal.SIGKILL)
    assert calls.answers() == undisturbed
    assert moved(server) > before
    until(lambda: is_back(server, line))
    server.wait_for(idle, SOON_S)


def test_no_client_notices_a_replica_that_stops_answering(
    server: ServerProcess, undisturbed: dict[int, Any]
) -> None:
    """R05, R16: neither do those whom it does not concern wait for it."""
    before = moved(server)
    calls = Calls(server)
    line = send(server, "1", signal.SIGSTOP)
    assert status(server, "/v1/models")[0] == 200
    assert calls.answers() == undisturbed
    assert moved(server) > before
    until(lambda: is_back(server, line))
    server.wait_for(idle, SOON_S)


def test_without_replicas_there_is_503_and_everything_comes_back(
    server: ServerProcess, undisturbed: dict[int, Any]
) -> None:
    """R01, R02, R04: calls that run wait; new ones are told when to come again."""
    calls = Calls(server)
    lines = [send(server, one, signal.SIGKILL) for one in ("0", "1")]
    until(lambda: status(server, "/ready")[0] == 503)
    code, headers = status(server, "/v1/completions", {"prompt": [5], "max_tokens": 1})
    assert (code, int(headers["Retry-After"]) >= 1) == (503, True)
    assert status(server, "/v1/models")[0] == 200
    assert calls.answers() == undisturbed
    until(lambda: all(is_back(server, line) for line in lines))
    assert status(server, "/v1/completions", {"prompt": [5], "max_tokens": 1})[0] == 200
    server.wait_for(idle, SOON_S)


def test_a_drained_replica_ends_what_it_has_and_gets_nothing_more(
    server: ServerProcess, undisturbed: dict[int, Any]
) -> None:
    before = moved(server)
    calls = Calls(server)
    steer(server, "0", "drain")
    until(lambda: states(server)["0"] == "draining")
    assert calls.answers() == undisturbed
    again = asyncio.run(all_of(server.port, ASKED[:4], model(server), 4))
    assert answers(again) == {number: undisturbed[number] for number in range(4)}
    assert moved(server) == before
    steer(server, "0", "undrain")
    until(lambda: states(server)["0"] == "ready")


def status(
    server: ServerProcess, path: str, body: dict[str, Any] | None = None
) -> tuple[int, Mapping[str, str]]:
    """Status and headers of a GET, or of a call."""
    raw = None if body is None else json.dumps({"model": model(server)} | body).encode()
    request = urllib.request.Request(server.url + path, raw, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SOON_S) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def steer(server: ServerProcess, one: str, word: str) -> None:
    url = f"{server.url}/v1/workers/{one}/{word}"
    with urllib.request.urlopen(urllib.request.Request(url, b"", {}), timeout=SOON_S) as answer:
        assert answer.status == 202


def states(server: ServerProcess) -> dict[str, str]:
    return {line["id"]: line["state"] for line in workers(server)}
