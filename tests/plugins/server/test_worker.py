"""Front-end processes over HTTP, with an engine on scripted tokens behind them."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from plugins.executor.fake import Fake
from plugins.mode.serve_loop import ServeLoop
from plugins.server.settings import Settings
from plugins.server.sse import start
from tests.plugins.server.live import TIMEOUT_S, events
from tests.plugins.server.rig import FACTS, SLOW_S, fake_of, real_engine

TEXT = "/v1/completions"


def served(
    play: Callable[[str], None], workers: int = 1, fake: Fake | None = None
) -> dict[str, int]:
    """How requests ended, by reason: an engine served from this thread while `play` (url) runs in
    another; it ends by SIGTERM."""
    settings = Settings(port=0, workers=workers, drain_s=2 * TIMEOUT_S, stuck_s=TIMEOUT_S)
    hub, url, _ = start(settings, FACTS)
    loop = ServeLoop(real_engine(executor=fake or fake_of(0.002)), hub, report_s=0.02)

    def play_then_stop() -> None:
        try:
            play(url)
        finally:
            if not hub.draining:
                os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:
        played = thread.submit(play_then_stop)
        try:
            loop.run()
        finally:
            hub.close()
        played.result()
    return dict(loop.finished)


def body(seed: int, max_tokens: int = 20, **fields: object) -> dict[str, object]:
    asked = {"model": FACTS.model, "prompt": [seed, 5, 6], "max_tokens": max_tokens}
    return {**asked, "ignore_eos": True, "seed": seed, **fields}


def metric(page: str, name: str) -> float:
    values = [line for line in page.splitlines() if line.startswith(f"tritium_{name} ")]
    assert len(values) == 1, f"{name} in {len(values)} lines"
    return float(values[0].split()[-1])


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT_S)  # a connection of its own: any worker may take it


def post(url: str, asked: dict[str, object]) -> httpx.Response:
    return httpx.post(url, json=asked, timeout=TIMEOUT_S)


def until_metric(
    url: str, name: str, value: float, get: Callable[[str], httpx.Response] = get
) -> str:
    """The page of metrics that has it."""
    end_s = time.monotonic() + TIMEOUT_S
    while metric(page := get(url + "/metrics").text, name) != value:
        assert time.monotonic() < end_s, f"{name} did not become {value}"
        time.sleep(0.01)
    return page


def test_streams_of_two_workers_equal_plain_answers_and_metrics_add_up():
    def play(url: str) -> None:
        with httpx.Client(timeout=TIMEOUT_S) as http, ThreadPoolExecutor(16) as pool:
            plain = list(pool.map(lambda seed: post(url + TEXT, body(seed)), range(8)))
            streams = list(
                pool.map(lambda seed: post(url + TEXT, body(seed % 8, stream=True)), range(32))
            )
            for seed, answer in enumerate(streams):
                choice = plain[seed % 8].json()["choices"][0]
                read = events(answer.text)
                assert read.done
                assert read.joined(0) == (choice["text"], None, "length")
            for _ in range(4):
                page = get(url + "/metrics").text
                assert metric(page, 'requests_total{reason="length"}') == 40
                assert metric(page, 'tokens_total{kind="output"}') == 800
                assert metric(page, "ttft_seconds_count") == 40
            page = until_metric(url, "requests_open", 0, http.get)
            assert metric(page, "running") == metric(page, "waiting") == 0
            assert http.get(url + "/v1/engine").json()["totals"]["finished_length"] == 40

    assert served(play, workers=2) == {"length": 40}


def test_sigterm_lets_streams_end_and_answers_503_meanwhile():
    """L02; that the command then exits with 0 is in tests/plugins/mode/test_load.py."""
    fake = fake_of(SLOW_S)

    def play(url: str) -> None:
        asked = {"json": body(1, 2000, stream=True), "timeout": TIMEOUT_S}
        with httpx.stream("POST", url + TEXT, **asked) as open_stream:
            lines = open_stream.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            end_s = time.monotonic() + TIMEOUT_S
            while get(url + "/ready").status_code == 200:
                assert time.monotonic() < end_s, "the signal was not noticed"
            late = post(url + TEXT, body(2))
            assert late.status_code == 503
            assert "shutting down" in late.json()["error"]["message"]
            assert get(url + "/ready").status_code == 503
            assert get(url + "/health").status_code == 200
            fake.step_s = 0.0
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"

    assert served(play, fake=fake) == {"length": 1}


def test_clients_that_leave_free_the_engine():
    def play(url: str) -> None:
        streams = [httpx.Client(timeout=TIMEOUT_S) for _ in range(20)]
        for seed, http in enumerate(streams):
            asked = http.build_request("POST", url + TEXT, json=body(seed, 3000, stream=True))
            answer = http.send(asked, stream=True)
            assert answer.status_code == 200
        until_metric(url, "requests_open", 20)
        for http in streams:
            http.close()
        page = until_metric(url, "requests_open", 0)
        assert metric(page, "pool_request") == 0
        answer = post(url + TEXT, body(99, 3))
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 3

    assert served(play, fake=fake_of(SLOW_S)) == {"abort": 20, "length": 1}
