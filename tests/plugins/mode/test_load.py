"""Mode load against live servers: ours over a fake client, odd ones, and run.py's own."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.mode.load import Load
from plugins.mode.outlet import Outlet
from plugins.model.smollm2_files import model_folder
from plugins.server.client import Busy
from plugins.shared.clocks import RealClock, VirtualClock
from plugins.shared.session import Session
from plugins.sink.figures import Figures
from plugins.sink.timeline import Timeline
from tests.patience import SOON_S
from tests.plugins.mode.mode_session import Given, Recorder, make_session
from tests.plugins.mode.odd_server import answering, refuse, stream
from tests.plugins.server.asking import facts, with_facts
from tests.plugins.server.live import Live, serving

ROOT = Path(__file__).resolve().parents[3]
FINISH = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


def ask(name: str, max_tokens: int = 4, arrival_s: float = 0.0, **fields: Any) -> Request:
    own = {key: fields.pop(key) for key in list(fields) if key in Request.__slots__}
    prompt = own.pop("prompt", np.arange(1, 9, dtype=np.int32))
    params = SamplingParams(max_tokens=max_tokens, **fields)
    return Request(name, prompt, params, arrival_s=arrival_s, **own)


def session_of(folder: Path, requests: Sequence[Request], **plugins: object) -> Session:
    return make_session(folder, Given(requests), clock=RealClock(), **plugins)


def load(folder: Path, url: str, requests: Sequence[Request], **options: Any) -> Any:
    """The summary and the records by id."""
    recorder = Recorder()
    options = {"vocab_size": 300, **options}
    summary = Load(url, **options).run(session_of(folder, requests, recorder=recorder))
    assert recorder.steps == []
    return summary, {record.request_id: record for record in recorder.requests}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(with_facts(tokenizer=None)) as server:
        yield server


def test_every_token_is_recorded_with_its_time(live: Live, tmp_path: Path):
    requests = [ask("a", 5), ask("b", 9, 0.05, n=2, temperature=1.0), ask("c", 3, 0.1, logprobs=2)]
    with live.scripted(step_s=0.01, delay_s=0.05):
        summary, records = load(tmp_path, live.url, requests)
    assert summary["latency"]["queue_s"]["count"] == 0
    assert {name: record.output_tokens for name, record in records.items()} == {
        "a": 5,
        "b": 18,
        "c": 3,
    }
    assert summary["requests"]["finish_reasons"]["length"] == 3
    assert summary["tokens"]["output"] == 26
    assert summary["load"]["counted_by"] == {"usage": 2, "logprobs": 1}
    assert summary["server"] == {"url": f"{live.url}/v1", "model": "MODEL"}
    assert summary["hit_rate"] == pytest.approx(3 / 24)
    assert summary["latency"]["ttft_s"]["count"] == 3
    for record in records.values():
        assert record.first_token_s - record.arrival_s >= 0.05
        assert record.prompt_tokens == 8
        for choice in record.choices:
            assert np.diff(choice.times_s).min() >= 0
    with open(tmp_path / "requests.csv", newline="") as lines:
        assert sorted(row["request_id"] for row in csv.DictReader(lines)) == ["a", "b", "c"]
    assert len(np.load(tmp_path / "tokens.npz")["time_s"]) == 26
    assert json.loads((tmp_path / "summary.json").read_text())["mode"] == "load"


def test_requests_arrive_on_time_whatever_the_server_does(live: Live, tmp_path: Path):
    """The server answers none before all are there."""
    requests = [ask(f"r{number}", 2, 0.02 * number) for number in range(20)]
    with live.scripted(held_at=0, opens_at=20, peak=0):
        summary, records = load(tmp_path, live.url, requests)
    assert summary["requests"]["completed"] == 20
    assert summary["load"]["late_s"]["count"] == 20
    assert min(record.first_token_s for record in records.values()) >= requests[-1].arrival_s
    assert [records[one.request_id].arrival_s for one in requests] == pytest.approx(
        [one.arrival_s for one in requests]
    )


def test_connections_that_are_short_count_as_time(live: Live, tmp_path: Path):
    with live.scripted(delay_s=0.2, peak=0) as client:
        _, records = load(tmp_path, live.url, [ask("a"), ask("b")], max_connections=1)
        assert client.peak == 1
    first = sorted(record.first_token_s for record in records.values())
    assert first[0] >= 0.2
    assert first[1] >= 0.4


def test_fairness_is_that_of_the_tokens_that_clients_got(live: Live, tmp_path: Path):
    requests = [ask("a", 6, client="one"), ask("b", 1, client="two"), ask("c", 3, client="two")]
    summary, _ = load(tmp_path, live.url, requests)
    one, two = 8 + 2 * 6, 8 + 2 * 1 + 8 + 2 * 3  # prompts of 8; an output token counts twice
    expected = (one + two) ** 2 / (2 * (one**2 + two**2))
    assert summary["fairness"] == {"clients": 2, "jain_index": pytest.approx(expected)}


def test_fields_are_those_of_the_workload(live: Live, tmp_path: Path):
    request = ask(
        "a",
        7,
        0.5,
        forced_output=3,
        priority=2,
        namespace="salt",
        client="me",
        session="s",
        deadline_s=2.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=11,
        stop_token_ids=(3, 4),
        logit_bias={7: 1.5},
        presence_penalty=0.5,
        cache=False,
    )
    live.client.submitted.clear()
    summary, records = load(tmp_path, live.url, [request])
    (got,) = live.client.submitted
    assert list(got.prompt) == list(request.prompt)
    assert got.params.max_tokens == records["a"].output_tokens == 3
    assert got.params.ignore_eos
    for name in ("top_k", "top_p", "min_p", "seed", "stop_token_ids", "logit_bias", "temperature"):
        assert getattr(got.params, name) == getattr(request.params, name)
    for name in ("priority", "namespace", "client", "session"):
        assert getattr(got, name) == getattr(request, name)
    assert got.deadline_s == 2.0
    assert summary["load"]["dropped_fields"] == {"cache": 1}


def test_without_extensions_nothing_but_openais_fields(tmp_path: Path, caplog: Any):
    bodies: list[dict[str, Any]] = []

    def answer(handler: Any, body: dict[str, Any]) -> None:
        bodies.append(body)
        stream(handler, {"choices": [{"index": 0, "text": "x"}]}, FINISH, "data: [DONE]\n\n")

    requests = [ask("a", 4, forced_output=2, priority=1, client="me"), ask("b", 4, top_k=3)]
    with answering(answer) as url:
        summary, _ = load(tmp_path, url, requests, extensions=False, vocab_size=9)
    dropped = {"ignore_eos": 1, "priority": 1, "top_k": 1}
    assert summary["load"]["dropped_fields"] == dropped
    assert str(dropped) in caplog.text
    fields = {"model", "stream", "stream_options", "prompt", "max_tokens", "temperature"}
    assert [set(body) - {"headers", "user"} for body in bodies] == [fields, fields]
    assert sorted(body["max_tokens"] for body in bodies) == [2, 4]


@pytest.mark.parametrize("prompts", ["text", "chat"])
def test_text_and_chats_go_through_the_tokenizer(tmp_path: Path, prompts: str):
    said = "Why is the sky blue?"
    ids = np.array(facts().tokenizer(said)["input_ids"], np.int32)
    options = {"prompts": prompts, "tokenizer": str(model_folder(False)), "vocab_size": None}
    with serving(facts()) as server:
        summary, records = load(tmp_path, server.url, [ask("a", prompt=ids)], **options)
        (got,) = server.client.submitted
    text = facts().tokenizer.decode(got.prompt)
    assert text == said if prompts == "text" else f"user\n{said}" in text
    assert records["a"].prompt_tokens == len(got.prompt)
    assert summary["tokens"]["output"] == 4


def test_faults_of_a_server_end_their_requests_alone(tmp_path: Path):
    begun = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    answers = {
        "good": lambda handler: stream(handler, begun, FINISH, ": comment\n\n", "data: [DONE]\n\n"),
        "busy": lambda handler: refuse(handler, 429, "the queue is full"),
        "broken": lambda handler: refuse(handler, 500, "oh"),
        "left": lambda handler: stream(handler, begun),
        "gone": lambda handler: handler.connection.shutdown(socket.SHUT_RDWR),
        "error": lambda handler: stream(handler, begun, {"error": {"message": "stopped"}}),
        "bad": lambda handler: stream(handler, begun, "data: {nonsense\n\n"),
        "plain": lambda handler: (
            handler.send_response(200),
            handler.end_headers(),
            handler.wfile.write(b"hello"),
        ),
    }
    names = list(answers)
    requests = [ask(name, max_tokens=index + 1) for index, name in enumerate(names)]

    def answer(handler: Any, body: dict[str, Any]) -> None:
        answers[names[body["max_tokens"] - 1]](handler)

    with answering(answer) as url:
        summary, records = load(tmp_path, url, requests)
    reasons = {name: record.finish_reason for name, record in records.items()}
    assert reasons.pop("good") == "length"
    assert {name for name in reasons if reasons[name] != "error"} == set()
    assert summary["load"]["errors"] == {
        "http_429": 1,
        "http_500": 1,
        "cut_short": 1,
        "disconnected": 1,
        "error_event": 1,
        "bad_event": 1,
        "no_stream": 1,
    }
    assert records["busy"].error == "429: the queue is full"
    assert records["error"].error == "stopped"
    assert all(records[name].error for name in reasons)
    assert records["left"].output_tokens == 1
    assert summary["tokens"]["output_of_incomplete"] == 3
    assert summary["requests"]["completed"] == 1
    assert summary["requests"]["accepted"] == len(names)


def test_server_that_stays_silent_is_left_after_the_timeout(tmp_path: Path):
    answered, recorder = threading.Event(), Recorder()
    with answering(lambda *_: answered.wait(SOON_S)) as url:
        session = session_of(tmp_path, [ask("a")], recorder=recorder)
        with pytest.raises(ConfigError, match=r"mode\.timeout_s = 0\.2"):
            Load(url, vocab_size=9, timeout_s=0.2).run(session)
        answered.set()
    (record,) = recorder.requests
    assert record.finish_reason == "abort"
    assert "mode.timeout_s = 0.2" in record.error


def test_run_in_which_nothing_completes_fails_and_keeps_its_records(live: Live, tmp_path: Path):
    recorder = Recorder()
    session = session_of(tmp_path, [ask("a"), ask("b")], recorder=recorder)
    with (
        live.scripted(refuse=Busy(3, 2)),
        pytest.raises(ConfigError, match=r"none of 2 requests completed; the first: 429"),
    ):
        Load(live.url, vocab_size=9).run(session)
    assert isinstance(recorder.failed, ConfigError)
    assert [record.finish_reason for record in recorder.requests] == ["error", "error"]
    assert not (tmp_path / "summary.json").exists()
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 3


def test_interrupt_keeps_what_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    recorder, noted = Recorder(), threading.Event()

    class Noted(Outlet):
        def request(self, record: Any) -> None:
            super().request(record)
            noted.set()

    monkeypatch.setattr("plugins.mode.load.Outlet", Noted)
    chunk = {"choices": [{"index": 0, "text": "x"}]}

    def answer(handler: Any, body: dict[str, Any]) -> None:
        if body["max_tokens"] == 1:
            return stream(handler, chunk, FINISH)
        stream(handler, chunk)
        noted.wait(SOON_S)
        os.kill(os.getpid(), signal.SIGINT)
        end_s = time.monotonic() + SOON_S
        while recorder.failed is None and time.monotonic() < end_s:
            time.sleep(0.01)
        return None

    requests = [ask("done", 1), ask("going", 2, 0.05), ask("never", 3, 2 * SOON_S)]
    try:
        with answering(answer) as url, pytest.raises(KeyboardInterrupt):
            Load(url, vocab_size=9).run(session_of(tmp_path, requests, recorder=recorder))
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(recorder.failed, BaseException)
    assert [record.request_id for record in recorder.requests] == ["done"]
    assert not (tmp_path / "summary.json").exists()


def test_sinks_do_without_steps(live: Live, tmp_path: Path):
    plugins = {"figures": Figures(), "timeline": Timeline()}
    Load(live.url, vocab_size=9).run(session_of(tmp_path, [ask("a")], **plugins))
    assert (tmp_path / "figures" / "latency.png").stat().st_size > 1000
    assert not (tmp_path / "figures" / "memory.png").exists()
    json.loads((tmp_path / "timeline.json").read_text())
    assert (tmp_path / "steps.jsonl").read_text() == ""


def test_key_is_sent_and_written_nowhere(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_KEY", "secret-1234")
    seen: list[str] = []

    def answer(handler: Any, body: dict[str, Any]) -> None:
        seen.append(body["headers"]["Authorization"])
        stream(handler, {"choices": [{"index": 0, "text": "x"}]}, FINISH)

    with answering(answer) as url:
        load(tmp_path, url, [ask("a")], api_key_env="SOME_KEY")
    assert seen == ["Bearer secret-1234"]
    assert "secret" not in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "mode.url must be an address"),
        ({"prompts": "tokens"}, "mode.prompts must be one of ids, text, chat"),
        ({"prompts": "text"}, "mode.tokenizer must be given for mode.prompts=text"),
        ({"timeout_s": 0}, "mode.timeout_s must be > 0"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "mode.api_key_env must be the name of"),
        ({"vocab_size": None}, "mode.vocab_size must be given"),
        ({"url": "http://127.0.0.1:9", "model": "m"}, "completed; the first: ClientConnector"),
        ({"url": "http://127.0.0.1:9"}, "mode.url must be that of a server that answers"),
        ({"tokenizer": "/nowhere"}, "mode.tokenizer must be a folder or a name"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], message: str):
    with answering(lambda handler, _: refuse(handler, 400, "no")) as url:
        given = {"url": url, "vocab_size": 9, **options}
        with pytest.raises(ConfigError, match=message):
            Load(**given).run(session_of(tmp_path, [ask("a")]))


def test_simulated_time_is_refused(tmp_path: Path):
    session = make_session(tmp_path, Given([ask("a")]), clock=VirtualClock())
    with pytest.raises(ConfigError, match="needs clock=real"):
        Load("http://127.0.0.1:9").run(session)


def test_closed_loop_is_refused(tmp_path: Path):
    workload = Given([ask("a")])
    workload.closed_loop, workload.total_requests = True, 1
    workload.follow_up = lambda record: []
    with pytest.raises(ConfigError, match="workload given is a closed loop: its requests wait"):
        Load("http://127.0.0.1:9").run(make_session(tmp_path, workload, clock=RealClock()))


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}


def test_load_agrees_with_what_the_server_recorded(tmp_path: Path):
    """run.py on both ends; the driver imports neither torch nor transformers."""
    serve = ["mode=serve", "executor=fake", "engine.pool_tokens=65536", "server.port=0"]
    serve += ["executor.step_s=0.004", "executor.token_s=0", "records=full", "progress=false"]
    serve += ["mode.lock=off"]
    folders = {name: tmp_path / name for name in ("serve", "load")}
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *serve, f"hydra.run.dir={folders['serve']}"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        place = folders["serve"] / "server.json"
        until_s = time.monotonic() + SOON_S
        while not (place.exists() and place.read_text().endswith("\n")):
            assert server.poll() is None, server.communicate()
            assert time.monotonic() < until_s, "the server did not start"
            time.sleep(0.05)
        absent = ["torch", "triton", "transformers", "wandb"]
        script = (
            "import sys; import run; code = run.command_line(run.job);"
            f"print('CODE', code, [name for name in {absent} if name in sys.modules])"
        )
        url = json.loads(place.read_text())["url"]
        arguments = ["mode=load", f"mode.url={url}", "workload.num_requests=24", "workload.rate=30"]
        arguments += ["workload.output={kind: uniform, low: 1, high: 40}"]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments, f"hydra.run.dir={folders['load']}"],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=3 * SOON_S,
            check=False,
        )
        assert "CODE 0 []" in done.stdout, done.stdout + done.stderr
        assert "24 of 24 completed" in done.stdout
    finally:
        os.kill(server.pid, signal.SIGTERM)
        _, complaints = server.communicate(timeout=SOON_S)
    assert server.returncode == 0, complaints
    engine, client = (json.loads((f / "summary.json").read_text()) for f in folders.values())
    for name in ("prompt", "output", "output_of_incomplete", "cached"):
        assert client["tokens"][name] == engine["tokens"][name]
    assert client["requests"] == engine["requests"]
    ours, theirs = (rows(folders[name]) for name in ("load", "serve"))
    for key in ("prompt_tokens", "output_tokens", "finish_reason"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    late = np.array(
        [float(a["ttft_s"]) - float(b["ttft_s"]) for a, b in zip(ours, theirs, strict=True)]
    )
    assert late.min() > 0


def rows(folder: Path) -> list[dict[str, str]]:
    """By lengths, then arrival: two that are sent within a millisecond may overtake each other."""
    keys = ("prompt_tokens", "output_tokens", "arrival_s")
    with open(folder / "requests.csv", newline="") as lines:
        return sorted(csv.DictReader(lines), key=lambda row: [float(row[key]) for key in keys])
