"""Mode serve with a server that plays a script: what it is told, and what is left behind."""

import csv
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.queries import AdmissionDecision, Verdict
from core.request import Request, SamplingParams
from plugins.executor.fake import Fake
from plugins.mode.device_lock import device_lock, physical_name
from plugins.mode.serve import Serve
from plugins.shared.clocks import RealClock
from tests.plugins.mode.mode_session import VOCAB, Recorder, make_session


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests use the device at the same time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def ask(name: str, max_tokens: int = 4, **fields: Any) -> Request:
    prompt = np.arange(1, 9, dtype=np.int32)
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), **fields)


class Scripted:
    """The plugin and its server. plays: step of the run -> what comes in before it; it drains when
    all of it is in. holds_s: it goes on for so long after that."""

    def __init__(self, plays: dict[int, list[Request | str]], holds_s: float = 0.0) -> None:
        self.plays = plays
        self.holds_s = holds_s
        self.draining = False
        self.facts: dict[str, Any] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.reports: list[dict[str, Any]] = []
        self.waits: list[float] = []
        self.closed = 0
        self.polls = 0
        self.kept: list[int] = []  # records the engine held, at each end

    @hookimpl
    def build_server(self, query: Any) -> Any:
        self.facts = query.facts
        assert Path(query.folder).is_dir()
        return self

    def poll(self, timeout_s: float) -> Sequence[Request | str]:
        self.waits.append(timeout_s)
        self.polls += 1
        due = [number for number in self.plays if number <= self.polls]
        items = [item for number in sorted(due) for item in self.plays.pop(number)]
        if not self.plays and not self.draining:
            self.holds_s -= timeout_s
            self.draining = self.holds_s <= 0
        if not items:
            time.sleep(min(timeout_s, 0.02))
        return items

    def refuse(self, request_id: str, error: str) -> None:
        self.refused.append((request_id, error))

    def publish(self, event: Any, records: Any) -> None:
        tokens = event.token_ids.tolist()
        for (name, choice), token in zip(event.rows, tokens, strict=True):
            assert records[name].request_id == name
            self.tokens.setdefault((name, choice), []).append(token)
        self.ended += [(record.request_id, record.finish_reason) for record in event.finished]
        if event.finished:
            self.kept.append(len(records))

    def report(self, state: dict[str, Any]) -> None:
        self.reports.append(json.loads(json.dumps(state)))

    def close(self) -> None:
        self.closed += 1


def serve(folder: Path, server: Scripted, mode: Serve | None = None, **plugins: object) -> Any:
    executor = Fake(vocab_size=VOCAB, max_model_len=512, step_s=0.0, token_s=0.0)
    session = make_session(folder, clock=RealClock(), executor=executor, server=server, **plugins)
    return (mode or Serve(report_s=0.01)).run(session)


def test_requests_get_their_tokens_and_the_summary_counts_them(tmp_path: Path):
    server = Scripted({1: [ask("a"), ask("b", 6)], 5: [ask("c", 30)], 12: ["c", "nobody"]})
    summary = serve(tmp_path, server)
    script = Fake(vocab_size=VOCAB).stream
    assert server.tokens["a", 0] == script(0, ask("a"), 0, 4)
    assert server.tokens["b", 0] == script(0, ask("b"), 0, 6)
    assert sorted(server.ended) == [("a", "length"), ("b", "length"), ("c", "abort")]
    assert (server.refused, server.closed) == ([], 1)
    assert summary["mode"] == "serve"
    assert summary["requests"]["finish_reasons"]["length"] == 2
    assert summary["requests"]["finish_reasons"]["abort"] == 1
    assert summary["measured_requests"] == 3
    assert json.loads((tmp_path / "summary.json").read_text())["requests"]["accepted"] == 3
    with open(tmp_path / "requests.csv", newline="") as lines:
        assert [row["request_id"] for row in csv.DictReader(lines)] == ["a", "b", "c"]


def test_server_is_told_what_is_served(tmp_path: Path):
    server = Scripted({1: [ask("a")]})
    serve(tmp_path, server)
    assert server.facts == {
        "model": "fake",
        "tokenizer": None,
        "vocab_size": VOCAB,
        "max_model_len": 512,
        "pool_tokens": 24 * 16,
        "policy": "default",
        "hooks": server.facts["hooks"],
    }
    assert server.facts["hooks"]["build_server"] == "server"


def test_ended_records_are_dropped(tmp_path: Path):
    plays = {1 + 6 * number: [ask(f"r{number}")] for number in range(30)}
    server = Scripted(dict(plays))
    serve(tmp_path, server)
    assert len(server.ended) == 30
    assert max(server.kept) <= 2


def test_idle_engine_waits_for_a_report_period_and_a_working_one_not_at_all(tmp_path: Path):
    server = Scripted({1: [], 20: [ask("a", 8)]}, holds_s=0.05)
    serve(tmp_path, server, Serve(report_s=0.01))
    assert server.waits[:19] == [0.01] * 19
    assert server.waits[20:27] == [0.0] * 7
    assert len(server.reports) >= 15
    last = server.reports[-1]
    assert last["ready"]
    assert last["totals"]["sampled_tokens"] == 8
    assert last["totals"]["finished_length"] == 1
    assert (last["requests"], last["idle_s"], last["slots"]) == (0, 0.0, 8)


def test_bad_request_is_refused_and_the_rest_goes_on(tmp_path: Path):
    wrong = Request("wrong", np.array([VOCAB], np.int32))
    server = Scripted({1: [wrong, ask("a"), ask("a")]})
    serve(tmp_path, server)
    assert [name for name, _ in server.refused] == ["wrong", "a"]
    assert f"token ids in [0, {VOCAB})" in server.refused[0][1]
    assert server.ended == [("a", "length")]


class Breaks:
    """A policy or observer that raises from the third time on."""

    def __init__(self) -> None:
        self.asked = 0

    def count(self) -> None:
        self.asked += 1
        if self.asked >= 3:
            raise ZeroDivisionError("told to fail")


class BreaksBatch(Breaks):
    @hookimpl
    def decide_batch(self, query: Any) -> None:
        self.count()


class BreaksObserver(Breaks):
    @hookimpl
    def on_step(self, query: Any) -> None:
        self.count()


class BreaksSink(Breaks):
    @hookimpl
    def build_sink(self, query: Any) -> Any:
        return self

    def step(self, record: Any) -> None:
        self.count()

    def request(self, record: Any) -> None:
        """Nothing."""

    def close(self, run: Any, summary: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("plugin", "named"),
    [
        (BreaksBatch, "raised by plugin breaks at decide_batch"),
        (BreaksObserver, "raised by plugin breaks at on_step"),
        (BreaksSink, "raised in sink"),
    ],
)
def test_fault_ends_requests_at_once_and_the_run_at_the_end(
    tmp_path: Path, plugin: type[Breaks], named: str
):
    recorder = Recorder()
    server = Scripted({1: [ask("a", 50), ask("b", 50)], 30: [ask("c")], 31: ["a"]})
    with pytest.raises(ZeroDivisionError, match="told to fail"):
        serve(tmp_path, server, breaks=plugin(), recorder=recorder)
    assert [name for name, _ in server.refused] == ["a", "b", "c"]
    for _, error in server.refused:
        assert "ZeroDivisionError: told to fail" in error
        assert named in error
    assert server.reports[-1]["ready"] is False
    assert named in server.reports[-1]["reason"]
    assert len(server.waits) >= 31, "it stays up to say so"
    assert server.closed >= 1
    assert isinstance(recorder.failed, ZeroDivisionError)
    assert not (tmp_path / "summary.json").exists()


def test_stalled_engine_is_asked_again_at_growing_intervals_or_when_something_comes(
    tmp_path: Path,
):
    asked: list[float] = []

    class Refuses:
        @hookimpl
        def decide_admission(self, query: Any) -> Any:
            asked.append(time.monotonic())
            return AdmissionDecision(Verdict.WAIT if len(asked) <= 4 else Verdict.ADMIT, "later")

    server = Scripted({1: [ask("a")]})
    serve(tmp_path, server, Serve(report_s=0.05), refuses=Refuses())
    assert server.ended == [("a", "length")]
    gaps = np.diff(asked[:5])
    assert (gaps >= np.array([0.009, 0.018, 0.036, 0.072])).all()
    assert any(report["idle_s"] > 0 for report in server.reports)


def test_device_is_locked_as_long_as_it_serves(tmp_path: Path):
    path = tmp_path / f"tritium-bench-{physical_name('cpu')}.lock"
    holders: list[str] = []

    class Looks(Scripted):
        def poll(self, timeout_s: float) -> Any:
            holders.append(path.read_text())
            return super().poll(timeout_s)

    with device_lock("cpu", wait=False), pytest.raises(ConfigError, match="cpu is in use by"):
        serve(tmp_path, Looks({1: [ask("a")]}))
    assert holders == []
    serve(tmp_path, Looks({1: [ask("a")]}))
    assert set(holders) == {f"{os.getpid()}\n"}
    assert path.read_text() == ""
    with device_lock("cpu", wait=False):
        serve(tmp_path, Scripted({1: [ask("a")]}), Serve(lock="off"))
    with pytest.raises(ConfigError, match=r"mode\.lock must be one of fail, wait, off"):
        Serve(lock="no")


def test_server_that_fails_fails_the_run(tmp_path: Path):
    class Failing(Scripted):
        def poll(self, timeout_s: float) -> Any:
            raise ConfigError("no front end")

    recorder, server = Recorder(), Failing({})
    with pytest.raises(ConfigError, match="no front end"):
        serve(tmp_path, server, recorder=recorder)
    assert server.closed == 1
    assert recorder.failed is not None


def test_virtual_clock_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="clock=real"):
        Serve().run(make_session(tmp_path))
    with pytest.raises(ConfigError, match=r"mode\.report_s must be > 0"):
        Serve(report_s=0)


def test_run_ends_are_told_to_plugins(tmp_path: Path):
    told: list[str] = []

    class Told:
        @hookimpl
        def on_run_start(self, query: Any) -> None:
            told.append(query.name)

        @hookimpl
        def on_run_end(self, query: Any) -> None:
            told.append(query["mode"])

    serve(tmp_path, Scripted({1: [ask("a")]}), told=Told())
    assert told == ["test", "serve"]
    assert not [one for one in threading.enumerate() if one.name == "sinks"]
