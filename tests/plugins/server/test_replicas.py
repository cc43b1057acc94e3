"""What HTTP tells of replicas, and how it steers them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.server.channel import EngineEnd
from plugins.server.client import State, Unavailable
from plugins.server.hub import Hub
from plugins.server.signals import StopSignals
from plugins.server.workers import Workers
from plugins.shared.server_protocol import Steer
from tests.patience import SOON_S
from tests.plugins.server.asking import facts
from tests.plugins.server.calls import CHAT, TEXT, ask, talk
from tests.plugins.server.live import Live, serving
from tests.plugins.server.rig import Rig, served, until
from tests.plugins.server.rig import ask as request_of

WORKERS = [{"id": "0", "state": "ready"}, {"id": "1", "state": "dead"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(facts()) as server:
        yield server


def test_workers_are_listed(live: Live) -> None:
    assert live.get("/v1/workers").json() == {"object": "list", "data": []}
    with live.scripted(report=State(ready=True, workers=WORKERS)):
        assert live.get("/v1/workers").json() == {"object": "list", "data": WORKERS}
        assert live.get("/v1/engine").json()["workers"] == WORKERS


def test_metrics_count_workers_where_there_are_any(live: Live) -> None:
    assert "workers" not in live.get("/metrics").text
    with live.scripted(report=State(ready=True, workers=WORKERS)):
        page = live.get("/metrics").text
    assert "tritium_workers 2.0" in page
    assert "tritium_workers_ready 1.0" in page


@pytest.mark.parametrize(("word", "on"), [("drain", True), ("undrain", False)])
def test_a_worker_is_drained_by_its_id(live: Live, word: str, on: bool) -> None:
    with live.scripted(report=State(ready=True, workers=WORKERS), drained=[]) as client:
        answer = live.post(f"/v1/workers/1/{word}")
        assert (answer.status_code, answer.json()) == (202, {"id": "1", "draining": on})
        assert client.drained == [("1", on)]
        wrong = live.post(f"/v1/workers/7/{word}")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "worker_not_found")
        assert live.get(f"/v1/workers/1/{word}").status_code == 405
        assert client.drained == [("1", on)]


def test_an_engine_alone_has_no_worker_to_drain(live: Live) -> None:
    assert live.post("/v1/workers/0/drain").status_code == 404


@pytest.mark.parametrize(("path", "body"), [(TEXT, ask()), (CHAT, talk(stream=True))])
def test_without_a_replica_clients_are_told_when_to_come_again(live: Live, path, body) -> None:
    """R01, R02: 503 for what a replica must do, answers to all else."""
    with live.scripted(refuse=Unavailable("no replica is ready", 5.0)):
        answer = live.post(path, body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["message"] == "no replica is ready"
        assert live.get("/v1/models").status_code == 200
    with live.scripted(refuse=Unavailable("the server is shutting down")):
        assert "retry-after" not in live.post(path, body).headers


def test_steering_and_the_time_to_wait_cross_the_channel(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        came: list[object] = []
        poll, report = rig.hub.poll, rig.hub.report
        changes: dict[str, object] = {"workers": WORKERS}

        def watched(timeout_s: float) -> list[object]:
            items = poll(timeout_s)
            came.extend(items)
            return items

        rig.hub.poll = watched  # type: ignore[method-assign, assignment]
        rig.hub.report = lambda state: report(state | changes)  # type: ignore[method-assign]
        client = await rig.client()
        assert client.state().workers == WORKERS
        client.drain("1", True)
        client.drain("1", False)
        await until(lambda: came == [Steer("1", True), Steer("1", False)])
        changes |= {"ready": False, "reason": "no replica is ready", "retry_after_s": 7.0}
        await until(lambda: not client.state().ready)
        with pytest.raises(Unavailable) as told:
            client.submit(request_of("a"))
        assert (told.value.reason, told.value.retry_after_s) == ("no replica is ready", 7.0)

    served(test, tmp_path)


def test_a_descriptor_wakes_the_engines_side(tmp_path: Path) -> None:
    hub = Hub(EngineEnd(f"ipc://{tmp_path}/c"), Workers(), StopSignals(catch=False), drain_s=1.0)
    ours, theirs = os.pipe()
    hub.watch(ours)
    os.write(theirs, b".")
    start_s = time.monotonic()
    assert hub.poll(SOON_S) == []
    assert time.monotonic() - start_s < SOON_S / 2, "it did not wait for a message"
    hub.close()
    os.close(ours)
    os.close(theirs)
