"""Front-end processes over HTTP, with an engine on scripted tokens behind them."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from plugins.mode.serve_loop import ServeLoop
from plugins.server.settings import Settings
from plugins.server.sse import start
from tests.plugins.server.live import TIMEOUT_S, events
from tests.plugins.server.rig import FACTS, real_engine

TEXT = "/v1/completions"


def served(play: Callable[[str], None], workers: int = 1) -> dict[str, int]:
    """How requests ended, by reason: an engine served from this thread while `play` (url) runs in
    another; it ends by SIGTERM."""
    hub, url, _ = start(Settings(port=0, workers=workers), FACTS)
    loop = ServeLoop(real_engine(step_s=0.002), hub, report_s=0.02)

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


def test_streams_of_two_workers_equal_plain_answers_and_metrics_add_up():
    def play(url: str) -> None:
        with httpx.Client(timeout=TIMEOUT_S) as http, ThreadPoolExecutor(16) as pool:
            # A call has a connection of its own: either worker may take it.
            plain = list(pool.map(lambda seed: httpx.post(url + TEXT, json=body(seed)), range(8)))
            streams = list(
                pool.map(
                    lambda seed: httpx.post(url + TEXT, json=body(seed % 8, stream=True)),
                    range(32),
                )
            )
            for seed, answer in enumerate(streams):
                choice = plain[seed % 8].json()["choices"][0]
                read = events(answer.text)
                assert read.done
                assert read.joined(0) == (choice["text"], None, "length")
            for _ in range(4):
                page = httpx.get(url + "/metrics").text
                assert metric(page, 'requests_total{reason="length"}') == 40
                assert metric(page, 'tokens_total{kind="output"}') == 800
                assert metric(page, "ttft_seconds_count") == 40
            deadline_s = time.monotonic() + 2
            while metric(http.get(url + "/metrics").text, "requests_open"):
                assert time.monotonic() < deadline_s
            page = http.get(url + "/metrics").text
            assert metric(page, "running") == metric(page, "waiting") == 0
            assert http.get(url + "/v1/engine").json()["totals"]["finished_length"] == 40

    assert served(play, workers=2) == {"length": 40}


def test_sigterm_lets_streams_end_and_answers_503_meanwhile():
    def play(url: str) -> None:
        with httpx.stream("POST", url + TEXT, json=body(1, 300, stream=True)) as open_stream:
            lines = open_stream.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            late = httpx.post(url + TEXT, json=body(2))
            assert late.status_code == 503
            assert "shutting down" in late.json()["error"]["message"]
            assert httpx.get(url + "/ready").status_code == 503
            assert httpx.get(url + "/health").status_code == 200
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"

    assert served(play) == {"length": 1}


def test_clients_that_leave_free_the_engine():
    def play(url: str) -> None:
        streams = [httpx.Client(timeout=TIMEOUT_S) for _ in range(20)]
        for seed, http in enumerate(streams):
            asked = http.build_request("POST", url + TEXT, json=body(seed, 3000, stream=True))
            answer = http.send(asked, stream=True)
            assert answer.status_code == 200
        time.sleep(0.2)
        for http in streams:
            http.close()
        left_s = time.monotonic()
        while metric(page := httpx.get(url + "/metrics").text, "requests_open"):
            assert time.monotonic() - left_s < 2
        assert metric(page, "pool_request") == 0
        answer = httpx.post(url + TEXT, json=body(99, 3))
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 3

    assert served(play) == {"abort": 20, "length": 1}
