"""Sinks of mode bench, in real and in simulated time: what they get, where, and their faults."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from core.hookspecs import hookimpl
from plugins.executor.fake import Fake
from plugins.mode.bench import Bench
from plugins.shared.clocks import RealClock, VirtualClock
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, Recorder, make_session

inline_or_threaded = pytest.mark.parametrize(
    ("clock", "device"), [(VirtualClock, "cuda"), (RealClock, "cpu"), (RealClock, "cuda:0")]
)


def requests() -> Synthetic:
    """More than 24 pages can hold."""
    sizes = {"kind": "uniform", "low": 20, "high": 60}
    return Synthetic(12, prompt=sizes, output=sizes)


def fake() -> Fake:
    """Takes no time of a real clock."""
    return Fake(vocab_size=VOCAB, max_model_len=512, step_s=0, token_s=0)


@inline_or_threaded
def test_steps_on_disk_have_every_part_of_host_time(
    tmp_path: Path, clock: Any, device: str
) -> None:
    session = make_session(tmp_path, requests(), clock(), executor=fake())
    session.device = device
    summary = Bench(lock="off").run(session)
    steps = list(map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines()))
    parts = {"plan", "pack", "launch", "collect", "commit", "observers"}
    assert all(set(step["host_us"]) == parts for step in steps if step["num_rows"])
    for part, mean_us in summary["steps"]["host_us_mean"].items():
        total_us = sum(step["host_us"].get(part, 0.0) for step in steps)
        assert total_us == pytest.approx(mean_us * len(steps))


class Threads:
    """A sink plugin that notes on which threads it is called."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.names: set[str] = set()
        self.ended: list[Any] = []

    @hookimpl
    def build_sink(self, query: Any) -> Any:
        return self

    def step(self, record: Any) -> None:
        self.names.add(threading.current_thread().name)
        if self.error is not None and record.step == 3:
            raise self.error

    def request(self, record: Any) -> None:
        self.names.add(threading.current_thread().name)

    def close(self, run: Any, summary: dict[str, Any]) -> None:
        self.ended.append(threading.current_thread())

    def fail(self, error: BaseException) -> None:
        self.ended.append(error)


@inline_or_threaded
def test_sinks_have_a_thread_beside_a_device_that_ends_with_the_run(
    tmp_path: Path, clock: Any, device: str
) -> None:
    session = make_session(tmp_path, requests(), clock(), executor=fake(), sink=(sink := Threads()))
    session.device = device
    Bench(lock="off").run(session)
    here = threading.current_thread()
    assert sink.names == {"sinks" if device == "cuda:0" else here.name}
    assert sink.ended == [here]
    assert "sinks" not in [thread.name for thread in threading.enumerate()]


@inline_or_threaded
def test_fault_of_a_sink_fails_the_run_and_names_it(
    tmp_path: Path, clock: Any, device: str
) -> None:
    sink, recorder = Threads(OSError("no space left")), Recorder()
    plugins = {"sink": sink, "recorder": recorder}
    session = make_session(tmp_path, requests(), clock(), executor=fake(), **plugins)
    session.device = device
    with pytest.raises(OSError, match="no space left") as raised:
        Bench(lock="off").run(session)
    assert raised.value.__notes__ == [f"raised in sink {__name__}.Threads"]
    assert sink.ended == [raised.value]
    assert recorder.failed is raised.value
    assert [record.step for record in recorder.steps] == list(range(len(recorder.steps)))
    assert len(recorder.steps) > 3
    assert not (tmp_path / "summary.json").exists()


class Interrupted(Fake):
    """As if the user pressed Ctrl-C while the fifth launch runs."""

    @hookimpl
    def build_executor(self, query: Any) -> Any:
        executor = super().build_executor(query=query)
        collect = executor.collect

        def interrupted() -> Any:
            if (result := collect()).launch_id == 4:
                raise KeyboardInterrupt
            return result

        executor.collect = interrupted
        return executor


@inline_or_threaded
def test_interrupt_leaves_the_steps_so_far_and_no_thread(
    tmp_path: Path, clock: Any, device: str
) -> None:
    executor = Interrupted(vocab_size=VOCAB, max_model_len=512, step_s=0, token_s=0)
    session = make_session(
        tmp_path, requests(), clock(), executor=executor, recorder=(recorder := Recorder())
    )
    session.device = device
    with pytest.raises(KeyboardInterrupt) as raised:
        Bench(lock="off").run(session)
    assert recorder.failed is raised.value
    steps = list(map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines()))
    assert [step["step"] for step in steps if step["num_rows"]] == [0, 1, 2, 3]
    assert "sinks" not in [thread.name for thread in threading.enumerate()]
