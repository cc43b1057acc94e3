"""plugins/mode/bench.py on the scripted executor: replay, warm-up, sinks, faults."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError, RequestError
from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from plugins.executor.fake import Fake
from plugins.mode.bench import Bench
from plugins.shared.clocks import RealClock
from plugins.shared.measure import Measure, Slo
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, Given, Recorder, make_session


def pressing(rate: float | None = None) -> Synthetic:
    """More than 24 pages can hold."""
    return Synthetic(
        12,
        prompt={"kind": "uniform", "low": 20, "high": 60},
        output={"kind": "uniform", "low": 10, "high": 60},
        rate=rate,
    )


def test_bench_serves_all_and_its_numbers_agree_with_its_files(tmp_path: Path) -> None:
    recorder = Recorder()
    summary = Bench().run(make_session(tmp_path, pressing(), recorder=recorder))
    assert summary["requests"]["completed"] == summary["requests"]["accepted"] == 12
    assert summary["preemptions"] > 0
    kinds = [choice.kind for record in recorder.steps for choice in record.choices]
    assert summary["preemptions"] == kinds.count("preempted")
    assert summary["tokens"]["output"] == sum(record.sampled_tokens for record in recorder.steps)
    computed = sum(record.prefill_tokens + record.decode_tokens for record in recorder.steps)
    assert summary["tokens"]["computed"] == computed
    assert computed == sum(record.computed_tokens for record in recorder.requests)
    assert summary["tokens"]["recomputed"] == sum(r.recomputed_tokens for r in recorder.requests)
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    with np.load(tmp_path / "tokens.npz") as tokens:
        assert len(tokens["token_id"]) == summary["tokens"]["output"]
    assert recorder.closed is summary


def test_summary_says_who_decided_and_how_often(tmp_path: Path) -> None:
    summary = Bench().run(make_session(tmp_path, pressing()))
    assert summary["hooks"]["decide_preemption"] == "preemption"
    asked = {entry["plugin"]: entry["asked"] for entry in summary["plugins"]}
    assert asked["preemption"] > 0
    assert asked["batching"] >= summary["steps"]["count"]


def test_requests_enter_at_their_arrival_and_idle_time_is_skipped(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompt = np.arange(5, dtype=np.int32)
    given = [
        Request(str(i), prompt, params, arrival_s=at) for i, at in enumerate((0.0, 0.003, 60.0))
    ]
    recorder = Recorder()
    summary = Bench().run(make_session(tmp_path, Given(given), recorder=recorder))
    _, second, third = sorted(recorder.requests, key=lambda r: r.request_id)
    assert second.admitted_s >= 0.003
    assert third.admitted_s == 60.0
    assert summary["duration_s"] == pytest.approx(60.0, abs=0.1)
    assert summary["steps"]["busy_s"] < 0.1


class Dialogue(Given):
    """Two questions at once; each answer brings one more `think_s` later, `turns` in all."""

    name = "dialogue"
    closed_loop = True
    turns, think_s = 3, 0.5

    def __init__(self) -> None:
        super().__init__([self.ask("a", 0, 0.0), self.ask("b", 0, 0.1)])
        self.total_requests = 2 * self.turns
        self.ended: list[str] = []

    def ask(self, who: str, turn: int, at: float) -> Request:
        params = SamplingParams(max_tokens=3 + turn, ignore_eos=True)
        return Request(f"{who}-{turn}", np.arange(8 + turn, dtype=np.int32), params, arrival_s=at)

    def describe(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def follow_up(self, record: Any) -> list[Request]:
        self.ended.append(record.request_id)
        who, turn = record.request_id.split("-")
        after = int(turn) + 1
        return [self.ask(who, after, record.finished_s + self.think_s)] if after < 3 else []


@pytest.mark.parametrize("overlap", [True, False])
def test_closed_loop_goes_on_when_an_answer_has_come(tmp_path: Path, overlap: bool) -> None:
    workload, recorder = Dialogue(), Recorder()
    session = make_session(tmp_path, workload, recorder=recorder)
    session.engine = dataclasses.replace(session.engine, overlap=overlap)
    summary = Bench().run(session)
    records = {record.request_id: record for record in recorder.requests}
    assert summary["requests"]["completed"] == len(records) == 6
    assert sorted(workload.ended) == sorted(records)  # each end is told once
    assert session.run.manifest["workload"] == {"name": "dialogue", "turns": 3}
    for who in "ab":
        for turn in (1, 2):
            before, record = records[f"{who}-{turn - 1}"], records[f"{who}-{turn}"]
            assert record.arrival_s == before.finished_s + 0.5
            assert record.admitted_s >= record.arrival_s


def test_closed_loop_goes_on_after_a_request_that_cannot_fit(tmp_path: Path) -> None:
    workload, recorder = Dialogue(), Recorder()
    workload.given[0] = Request("a-0", np.zeros(16 * 24 + 1, np.int32))
    summary = Bench().run(make_session(tmp_path, workload, recorder=recorder))
    assert summary["requests"]["finish_reasons"]["capacity"] == 1
    assert summary["requests"]["completed"] == 5


def test_workload_with_a_closed_loop_switched_off_is_never_asked(tmp_path: Path) -> None:
    workload = Dialogue()
    workload.closed_loop = False
    summary = Bench().run(make_session(tmp_path, workload))
    assert (summary["requests"]["completed"], workload.ended) == (2, [])


def test_same_seed_gives_the_same_records(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        Bench().run(make_session(folder, pressing(rate=30.0)))
        lines = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
        texts.append([{k: v for k, v in line.items() if k != "host_us"} for line in lines])
    assert texts[0] == texts[1]
    assert (tmp_path / "a/requests.csv").read_text() == (tmp_path / "b/requests.csv").read_text()


class Launches(Fake):
    """Counts launches by id."""

    ids: list[int]

    @hookimpl
    def build_executor(self, query: Any) -> Any:
        executor = super().build_executor(query=query)
        self.ids = []
        launch = executor.launch

        def counted(one: Any) -> None:
            self.ids.append(one.launch_id)
            launch(one)

        executor.launch = counted
        return executor


@pytest.mark.parametrize("warmup", [True, False])
def test_warm_up_runs_on_the_device_and_is_in_no_record(tmp_path: Path, warmup: bool) -> None:
    executor, recorder = (
        Launches(vocab_size=VOCAB, max_model_len=512, step_s=0, token_s=0),
        Recorder(),
    )
    clock = RealClock()
    session = make_session(tmp_path, pressing(), clock, executor=executor, recorder=recorder)
    summary = Bench(warmup=warmup, lock="off").run(session)
    assert executor.ids[: 2 * warmup] == [-2, -1][: 2 * warmup]
    assert executor.ids[2 * warmup] == 0
    assert recorder.steps[0].step == 0
    assert {record.request_id for record in recorder.requests} == {
        f"synthetic-{i}" for i in range(12)
    }
    assert summary["requests"]["accepted"] == 12


class Compiles(Fake):
    """As an executor whose kernels are compiled one a launch."""

    @hookimpl
    def build_executor(self, query: Any) -> Any:
        executor = super().build_executor(query=query)
        compiled: list[Any] = []
        executor.watch = SimpleNamespace(compiled=compiled)
        launch = executor.launch

        def compiles(one: Any) -> None:
            compiled.append(SimpleNamespace(kernel=f"kernel {one.launch_id}", seconds=0.5))
            launch(one)

        executor.launch = compiles
        return executor


def test_summary_names_kernels_compiled_while_requests_waited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Compiles(vocab_size=VOCAB, max_model_len=512, step_s=0, token_s=0)
    given = Given([Request("one", np.arange(5, dtype=np.int32), SamplingParams(max_tokens=1))])
    session = make_session(tmp_path, given, RealClock(), executor=executor)
    summary = Bench(lock="off").run(session)
    assert summary["compiled"] == {"count": 1, "seconds": 0.5, "kernels": ["kernel 0"]}
    assert "1 kernels were compiled while requests waited (0.5 s): kernel 0" in caplog.text


def test_summary_says_nothing_of_kernels_where_nobody_watched(tmp_path: Path) -> None:
    assert Bench().run(make_session(tmp_path, pressing()))["compiled"] is None


def test_warm_up_changes_no_decision(tmp_path: Path) -> None:
    seen = []
    for warmup in (True, False):
        recorder = Recorder()
        executor = Fake(vocab_size=VOCAB, max_model_len=512, step_s=0, token_s=0)
        session = make_session(
            tmp_path, pressing(), RealClock(), executor=executor, recorder=recorder
        )
        Bench(warmup=warmup, lock="off").run(session)
        seen.append([(r.step, r.rows, [c.reason for c in r.choices]) for r in recorder.steps])
    assert seen[0] == seen[1]


class Broken:
    """A policy that fails in the middle of a run."""

    @hookimpl
    def decide_preemption(self, query: Any) -> Any:
        raise ZeroDivisionError("broken policy")


def test_fault_reaches_the_sinks_and_leaves_no_summary(tmp_path: Path) -> None:
    recorder = Recorder()
    session = make_session(tmp_path, pressing(), recorder=recorder, broken=Broken())
    with pytest.raises(ZeroDivisionError, match="broken policy") as caught:
        Bench().run(session)
    assert "raised by plugin broken at decide_preemption" in caught.value.__notes__
    assert recorder.failed is caught.value
    assert recorder.closed is None
    assert not (tmp_path / "summary.json").exists()


def test_malformed_request_stops_the_bench(tmp_path: Path) -> None:
    bad = Request("bad", np.array([VOCAB], np.int32))
    with pytest.raises(RequestError, match=f"prompt of request 'bad' .* got {VOCAB}"):
        Bench().run(make_session(tmp_path, Given([bad])))


def test_request_that_cannot_fit_is_counted_apart(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    huge = Request("huge", np.zeros(16 * 24 + 1, np.int32), params)
    small = Request("small", np.zeros(8, np.int32), params)
    summary = Bench().run(make_session(tmp_path, Given([huge, small])))
    assert summary["requests"]["finish_reasons"]["capacity"] == 1
    assert summary["requests"]["completed"] == 1
    assert summary["latency"]["e2e_s"]["count"] == 1


def test_records_below_full_leave_rows_out_and_keep_the_batch_size(tmp_path: Path) -> None:
    session = make_session(tmp_path, pressing(), recorder=(recorder := Recorder()))
    session.records = type(session.records).summary
    summary = Bench().run(session)
    assert all(not record.rows for record in recorder.steps)
    assert summary["batch"]["batch_mean"] > 1


def test_progress_stays_silent_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = make_session(tmp_path, pressing())
    session.progress = True
    Bench().run(session)
    assert capsys.readouterr().err == ""


def test_progress_shows_what_is_done_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("plugins.mode.progress.EVERY_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    session = make_session(tmp_path, pressing())
    session.progress = True
    Bench().run(session)
    shown = capsys.readouterr().err
    assert "12/12" in shown
    assert "preemption" in shown


def test_unknown_lock_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mode.lock must be one of fail, wait, off, got 'no'"):
        Bench(lock="no")


def test_warm_up_and_drain_leave_requests_and_steps_out(tmp_path: Path) -> None:
    requests = [
        Request(f"r{second}", np.arange(8, dtype=np.int32), arrival_s=float(second))
        for second in range(10)
    ]
    session = make_session(tmp_path, Given(requests))
    session.measure, session.slo = Measure(0.2, 0.3), Slo(ttft_s=60.0)
    summary = Bench().run(session)
    assert summary["measured"] == {"from_s": 2.0, "to_s": 6.0, "left_out": 5}
    assert summary["requests"]["completed"] == 5
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    inside = [one for one in steps if 2.0 <= one["start_s"] <= 6.0]
    counted = [sum(one["steps"] for one in chosen) for chosen in (inside, steps)]
    assert 0 < summary["steps"]["count"] == counted[0] < counted[1]
    assert summary["slo"]["attainment"] == 1.0
