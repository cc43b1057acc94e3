"""plugins/sink/timeline.py against the Chrome trace event format."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from core.records import StepRecord
from plugins.shared.run_info import SinkQuery
from plugins.sink.timeline import ENGINE, REQUESTS, Timeline
from tests.plugins.sink.sink_run import RUN, feed, steps

NEEDED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}


def events(folder: Path) -> list[dict[str, Any]]:
    trace = json.loads((folder / "timeline.json").read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


def track(folder: Path, label: str) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds of the spans of a request's track."""
    found = events(folder)
    tid = next(e["tid"] for e in found if e["name"] == "thread_name" and e["args"]["name"] == label)
    spans = [e for e in found if e["ph"] == "X" and (e["pid"], e["tid"]) == (REQUESTS, tid)]
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in spans]


def test_every_event_has_the_fields_of_its_phase(tmp_path: Path) -> None:
    feed(Timeline(), tmp_path)
    for event in events(tmp_path):
        assert set(event) == NEEDED[event["ph"]]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def test_spans_of_one_track_never_overlap(tmp_path: Path) -> None:
    sink: Any = Timeline().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    for index in range(6):  # two launches in flight
        sink.step(StepRecord(step=index, start_s=float(index), end_s=index + 1.8))
    sink.close(RUN, {})
    ends: dict[Any, float] = defaultdict(float)
    spans = [event for event in events(tmp_path) if event["ph"] == "X"]
    for span in spans:
        key = (span["pid"], span["tid"])
        assert span["ts"] >= ends[key]
        ends[key] = span["ts"] + span["dur"]
    assert len(spans) == 6
    assert len(ends) == 2


def test_request_track_shows_waiting_prefill_decode_and_preemption(tmp_path: Path) -> None:
    feed(Timeline(), tmp_path)
    assert track(tmp_path, "a") == [
        ("waiting", 0.0, 0.0),
        ("prefill", 0.0, 1.0),
        ("decode", 1.0, 2.0),
        ("preempted", 2.0, 4.0),
        ("prefill", 4.0, 5.0),
        ("decode", 5.0, 6.0),
    ]
    assert track(tmp_path, "b") == [
        ("waiting", 0.5, 1.0),
        ("prefill", 1.0, 2.0),
        ("decode", 2.0, 4.0),
    ]


def test_steps_and_counters_are_on_the_engine(tmp_path: Path) -> None:
    feed(Timeline(), tmp_path)
    found = events(tmp_path)
    named = [e["name"] for e in found if e["ph"] == "X" and e["pid"] == ENGINE]
    assert named == [f"step {index}" for index in range(6)]
    counters = {e["name"] for e in found if e["ph"] == "C"}
    assert counters == {"KV pages", "sequences in the step", "requests waiting"}
    preemption = next(e for e in found if e["name"] == "preempted")
    assert preemption["args"]["by"] == "evict_shortest"
    assert preemption["args"]["lost_tokens"] == 9


def test_span_of_several_steps_names_the_first_and_the_last(tmp_path: Path) -> None:
    sink: Any = Timeline().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.step(StepRecord(step=4, start_s=0.0, end_s=1.0))
    sink.step(StepRecord(step=5, start_s=1.0, end_s=8.0, steps=7))
    sink.close(RUN, {})
    spans = [e["name"] for e in events(tmp_path) if e["ph"] == "X" and e["pid"] == ENGINE]
    assert spans == ["step 4", "steps 5 - 11"]


def test_failed_run_leaves_a_readable_trace(tmp_path: Path) -> None:
    sink: Any = Timeline().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.step(steps()[0])
    sink.fail(RuntimeError("boom"))
    assert any(event["name"] == "step 0" for event in events(tmp_path))


def test_lower_levels_write_no_timeline(tmp_path: Path) -> None:
    assert Timeline("requests").build_sink(query=SinkQuery(RUN, str(tmp_path))) is None
    assert list(tmp_path.iterdir()) == []
