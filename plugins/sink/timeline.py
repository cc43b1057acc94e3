"""timeline.json: the run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Chrome trace event format: complete events (ph X), counters (C) and metadata (M); times in
microseconds. Process 1 holds the engine: one span a step, and counters. Process 2 holds one track
for each token stream with spans waiting, prefill, decode and preempted.
"""

from pathlib import Path
from typing import Any

from core.hookspecs import hookimpl
from core.records import Choice, ChoiceRecord, RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo, SinkQuery
from plugins.shared.session import Records
from plugins.sink.rows import to_json

ENGINE, REQUESTS = 1, 2
STATES = ("admitted", "resumed", "preempted")

Turn = tuple[float, Choice]  # a change of state and its time in seconds


class Timeline:
    """Writes timeline.json if records=full."""

    def __init__(self, records: str | Records = "full") -> None:
        self.records = Records(records)

    @hookimpl
    def build_sink(self, query: SinkQuery) -> "TimelineSink | None":
        """Open the file in the run's folder."""
        if self.records is not Records.full:
            return None
        return TimelineSink(Path(query.folder) / "timeline.json")


class TimelineSink:
    """Writes events as they happen; keeps only the turns of requests that have not ended."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close and fail
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._first = True
        self._turns: dict[tuple[str, int], list[Turn]] = {}
        self._num_tracks = 0
        self._track_ends_s: list[float] = []
        self._name("process_name", ENGINE, 0, "engine")
        self._name("process_name", REQUESTS, 0, "requests")

    def step(self, record: StepRecord) -> None:
        """One span and one value of each counter; remembers who changed state."""
        args = {
            "prefill_tokens": record.prefill_tokens,
            "decode_tokens": record.decode_tokens,
            "recomputed_tokens": record.recomputed_tokens,
            "rows": record.num_rows,
            "batch": f"{record.batch_plugin}: {record.batch_reason}",
            "decisions": [
                f"{c.kind} {c.request_id} by {c.plugin}: {c.reason}" for c in record.choices
            ],
        }
        track = self._step_track(record)
        name = f"step {record.step}"
        if record.steps > 1:
            name = f"steps {record.step} - {record.step + record.steps - 1}"
        self._span(ENGINE, track, name, record.start_s, record.end_s, args)
        pages = {
            "requests": record.pages_request,
            "cached, in use": record.pages_tree - record.pages_evictable,
            "cached, evictable": record.pages_evictable,
        }
        self._counter("KV pages", record.start_s, pages)
        self._counter("sequences in the step", record.start_s, {"batch": record.num_rows})
        self._counter("requests waiting", record.start_s, {"waiting": record.waiting})
        for choice in record.choices:
            if choice.kind in STATES:
                key = (choice.request_id, choice.choice)
                self._turns.setdefault(key, []).append((record.start_s, choice))

    def request(self, record: RequestRecord) -> None:
        """The track of each token stream of a request that ended."""
        for number, stream in enumerate(record.choices):
            turns = self._turns.pop((record.request_id, number), [])
            if record.finished_s is not None:
                self._track(record, number, stream, turns, record.finished_s)

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Complete the JSON."""
        self._finish()

    def fail(self, error: BaseException) -> None:
        """The run broke: what there is stays readable."""
        self._finish()

    def _track(
        self,
        record: RequestRecord,
        number: int,
        stream: ChoiceRecord,
        turns: list[Turn],
        end_s: float,
    ) -> None:
        self._num_tracks += 1
        track = self._num_tracks
        label = record.request_id if number == 0 else f"{record.request_id} choice {number}"
        self._name("thread_name", REQUESTS, track, label)
        if not turns:
            reason = {"finish_reason": record.finish_reason, "error": record.error}
            self._span(REQUESTS, track, "waiting", record.arrival_s, end_s, reason)
            return
        self._span(REQUESTS, track, "waiting", record.arrival_s, turns[0][0], {})
        edges = [turn_s for turn_s, _ in turns[1:]] + [end_s]
        for (start_s, choice), until_s in zip(turns, edges, strict=True):
            args = {"by": choice.plugin, "reason": choice.reason, **choice.detail}
            if choice.kind == "preempted":
                self._span(REQUESTS, track, "preempted", start_s, until_s, args)
            else:
                self._running(track, stream, start_s, until_s, args)

    def _running(
        self, track: int, stream: ChoiceRecord, start_s: float, until_s: float, args: dict[str, Any]
    ) -> None:
        """Prefill (or recomputing) up to the first token after `start_s`, then decode."""
        times = [time_s for time_s in stream.times_s if start_s < time_s <= until_s]
        first_s = times[0] if times else until_s
        self._span(REQUESTS, track, "prefill", start_s, first_s, args)
        if len(times) > 1 or first_s < until_s:
            self._span(REQUESTS, track, "decode", first_s, until_s, {"tokens": len(times)})

    def _step_track(self, record: StepRecord) -> int:
        """The first engine track that is free: steps overlap when two launches are in flight."""
        for index, end_s in enumerate(self._track_ends_s):
            if end_s <= record.start_s:
                self._track_ends_s[index] = record.end_s
                return index + 1
        self._track_ends_s.append(record.end_s)
        track = len(self._track_ends_s)
        self._name("thread_name", ENGINE, track, "steps" if track == 1 else f"steps ({track})")
        return track

    def _span(
        self, pid: int, tid: int, name: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> None:
        begin_us = _micros(start_s)
        self._event(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "cat": "step" if pid == ENGINE else "request",
                "ts": begin_us,
                "dur": max(round(_micros(end_s) - begin_us, 3), 0.0),
                "args": args,
            }
        )

    def _counter(self, name: str, time_s: float, values: dict[str, int]) -> None:
        event = {"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": _micros(time_s)}
        self._event({**event, "args": values})

    def _name(self, kind: str, pid: int, tid: int, label: str) -> None:
        self._event({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": label}})

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write("" if self._first else ",\n")
        self._file.write(to_json(event))
        self._first = False

    def _finish(self) -> None:
        self._file.write("\n]}\n")
        self._file.close()


def _micros(time_s: float) -> float:
    return round(time_s * 1e6, 3)
