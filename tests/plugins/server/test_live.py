"""`python run.py mode=serve` with two front ends under load and faults, over real sockets."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from experiments.serving.server_process import FAKE, ServerProcess, idle, serving
from experiments.serving.stream_client import (
    Answer,
    check,
    expected_text,
    faults,
    kill_clients,
    request_bytes,
    run_streams,
)
from tests.patience import SOON_S

pytestmark = pytest.mark.live

QUICK = (*FAKE, "executor.step_s=0.002")
STALLED_TOKENS = 1500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("server.workers=2", "server.stuck_s=2", "engine.max_num_seqs=128")
    with serving(tmp_path_factory.mktemp("serve"), *QUICK, *options) as process:
        yield process
        assert "Traceback" not in process.messages


def test_of_200_streams_none_is_lost_or_mixed_up(server: ServerProcess) -> None:
    answers = asyncio.run(run_streams(server.port, range(200), 40))
    assert faults(answers) == []
    server.wait_for(lambda state: idle(state) and state["totals"]["sampled_tokens"] == 8000, SOON_S)


def test_memory_stays_flat_over_rounds(server: ServerProcess) -> None:
    def rounds(number: int) -> None:
        for _ in range(number):
            assert faults(asyncio.run(run_streams(server.port, range(100), 20))) == []

    rounds(3)
    before = server.rss_mib()
    rounds(6)
    grown = [now - then for now, then in zip(server.rss_mib(), before, strict=True)]
    assert max(grown) < 8, f"MiB of engine and front ends grew by {grown}"


def test_killed_clients_leave_no_owner_of_a_page(server: ServerProcess) -> None:
    def all_came(state: dict) -> bool:
        return state["requests"] == 60 and state["pool"]["request"] > 0

    kill_clients(server.port, 60, 3000, lambda: server.wait_for(all_came, SOON_S))
    server.wait_for(idle, SOON_S)
    assert faults(asyncio.run(run_streams(server.port, range(8), 20))) == []


def test_clients_that_stop_reading_slow_nobody(server: ServerProcess) -> None:
    before = shared_chunks(server)
    connections = [stalled(server.port, seed) for seed in range(8)]
    try:
        server.wait_for(lambda state: state["running"] == 8, SOON_S)
        assert faults(asyncio.run(run_streams(server.port, range(30), 40))) == []
        server.wait_for(idle, SOON_S)  # the engine has given the stalled ones all their tokens
        for seed, connection in enumerate(connections):
            answer = Answer(seed)
            check(answer, read_all(connection), STALLED_TOKENS)
            assert answer.fault == "", answer.detail
        assert shared_chunks(server) >= before + len(connections)
    finally:
        for connection in connections:
            connection.close()


def test_the_openai_package_is_served(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        asked = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 12, "seed": 5}
        plain = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert plain.choices[0].text == text == expected_text(5, 12)
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model="fake", prompt="no tokenizer here")


def test_stopped_engine_turns_ready_red_and_recovers(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as thread:
        streams = thread.submit(asyncio.run, run_streams(server.port, range(20), 200))
        server.wait_for(lambda state: state["running"] == 20, SOON_S)
        server.process.send_signal(signal.SIGSTOP)
        try:
            server.wait_for(lambda state: not state["ready"], SOON_S)
            ready = httpx.get(f"{server.url}/ready", timeout=SOON_S)
            assert (ready.status_code, "stuck" in ready.json()["reason"]) == (503, True)
            body = {"model": "fake", "prompt": [1], "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SOON_S)
            assert answer.status_code == 503
        finally:
            server.process.send_signal(signal.SIGCONT)
        server.wait_for(lambda state: state["ready"], SOON_S)
        assert faults(streams.result(2 * SOON_S)) == []


def test_killed_processes_end_their_streams_and_no_others(tmp_path: Path) -> None:
    ended = pytest.raises(RuntimeError, match="exit code -9")
    with ended, serving(tmp_path, *QUICK, "server.workers=2") as server:
        wrong = streams_during(server, 200, lambda: os.kill(server.fronts[0], signal.SIGKILL))
        # Either front end may have taken any number of them.
        assert {answer.fault for answer in wrong} <= {"lost"}
        server.wait_for(idle, SOON_S)
        assert faults(asyncio.run(run_streams(server.port, range(20), 20))) == []
        wrong = streams_during(server, 3000, server.process.kill)
        assert len(wrong) == 40
        assert {answer.fault for answer in wrong} == {"lost"}
        assert all("the engine's process is gone" in answer.detail for answer in wrong)


def test_killed_front_ends_are_replaced_and_the_engine_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, *QUICK, "server.workers=2") as server:
        assert faults(asyncio.run(run_streams(server.port, range(20), 20))) == []
        for pid in server.fronts:
            os.kill(pid, signal.SIGKILL)
        assert faults(asyncio.run(run_streams(server.port, range(20), 20))) == []
        server.wait_for(lambda state: state["totals"]["sampled_tokens"] == 800, SOON_S)
        assert server.messages.count("died (exit code -9)") == 2


def streams_during(server: ServerProcess, tokens: int, act: Callable[[], object]) -> list[Answer]:
    """What is wrong with 40 streams after `act` while they run."""
    with ThreadPoolExecutor(1) as thread:
        streams = thread.submit(asyncio.run, run_streams(server.port, range(40), tokens))
        server.wait_for(lambda state: state["running"] == 40, SOON_S)
        act()
        return faults(streams.result(2 * SOON_S))


def stalled(port: int, seed: int) -> socket.socket:
    """A client that asks and does not read; its buffer holds a fraction of the answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(SOON_S)
    connection.connect(("127.0.0.1", port))
    connection.sendall(request_bytes(seed, STALLED_TOKENS))
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def shared_chunks(server: ServerProcess) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=SOON_S).text
    name = 'tritium_stream_chunks_total{kind="shared"} '
    return sum(float(line[len(name) :]) for line in page.splitlines() if line.startswith(name))
