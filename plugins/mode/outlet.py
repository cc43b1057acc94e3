"""Where records leave the engine: to the sinks of a run, on a thread of their own."""

from collections.abc import Sequence
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from core.protocols import Sink
from core.records import RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo

MAX_QUEUED_STEPS = 1024  # with 256 rows in each record some 30 MB
PATIENCE_S = 60.0  # for sinks that are behind when a run broke

Records = list[StepRecord | RequestRecord]


class Outlet:
    """The engine's one sink: passes records on to sinks that open when the measured part begins.

    threaded: on a thread named "sinks", else where the engine calls. Either way a sink sees every
    record, in the engine's order and one call at a time, and a step's record once it is final, with
    the time of its observers: when the next step's comes, or at the end. `close` and `fail` follow
    the last record, on the caller's thread.

    A sink that acts on the engine or the device has a class attribute `immediate = True`: it is
    called at once and on the engine's thread, with a record that lacks its observers' time.

    What a sink raises is raised by the next `step`, or by `close`, once, with a note that names the
    sink; at once, if it is immediate. That sink gets no more records; the others get all of them.

    The thread shares Python's lock with the engine: it gets on while the engine waits or calls what
    releases the lock, and else costs as much time as inline. At most MAX_QUEUED_STEPS wait for it:
    from there on the sinks set the engine's pace."""

    def __init__(self, threaded: bool) -> None:
        self._threaded = threaded
        self._sinks: Sequence[Sink] = ()
        self._immediate = self._receivers = Receivers(())
        self._worker: Worker | None = None
        self._held: Records = []  # a step that is not final yet, and the requests it ended

    def open(self, sinks: Sequence[Sink]) -> None:
        """Pass records on from now, to these, until `close` or `fail`."""
        self._sinks, self._held = sinks, []
        self._immediate = Receivers([sink for sink in sinks if _is_immediate(sink)])
        others = [sink for sink in sinks if not _is_immediate(sink)]
        self._receivers = Receivers(others)
        self._worker = Worker(self._receivers) if self._threaded and others else None

    def step(self, record: StepRecord) -> None:
        """Hand over the step before this one; this one to immediate sinks."""
        if self._worker is not None:
            self._worker.wait_for_room()  # an interrupt here loses nothing
        held, self._held = self._held, [record]
        if self._worker is not None:
            self._worker.put(held)
        else:
            self._receivers.take(held)
        self._immediate.take([record])
        self._receivers.check()
        self._immediate.check()

    def request(self, record: RequestRecord) -> None:
        """An ended request, which follows its last step."""
        self._held.append(record)
        self._immediate.take([record])
        self._immediate.check()

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """The run ended well: wait for the last record, then close the sinks. What a sink raised
        meanwhile fails the run after all."""
        try:
            self._finish(None)
            self._receivers.check()
        except BaseException as error:
            self.fail(error)
            raise
        for number, sink in enumerate(self._sinks, 1):
            try:
                sink.close(run, summary)
            except BaseException as error:
                _tell(self._sinks[number:], error)
                self.open(())
                raise
        self.open(())

    def fail(self, error: BaseException) -> None:
        """The run broke: hand over what there is, then tell the sinks that have a method
        `fail(error)`. Raises nothing: what goes wrong here becomes a note of `error`. Sinks that
        are still busy after PATIENCE_S are not told."""
        sinks = self._sinks
        if not self._finish(PATIENCE_S):
            sinks = self._immediate.sinks
            error.add_note(f"sinks were left after {PATIENCE_S:g} s, busy with earlier records")
        if self._receivers.error is not None:
            error.add_note(f"sinks failed too: {_described(self._receivers.error)}")
        _tell(sinks, error)
        self.open(())

    def _finish(self, timeout_s: float | None) -> bool:
        """Hand over what is held and end the thread; whether all records are through."""
        held, self._held = self._held, []
        if self._worker is None:
            self._receivers.take(held)
            return True
        return self._worker.finish(held, timeout_s)


class Receivers:
    """Sinks that take records in turn. error: what one of them raised, until `check` raises it."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)
        self.error: BaseException | None = None

    def take(self, records: Records) -> None:
        """Pass records on. Raises nothing: a sink that raises gets no more."""
        for record in records:
            for sink in tuple(self.sinks):
                try:
                    if isinstance(record, StepRecord):
                        sink.step(record)
                    else:
                        sink.request(record)
                except BaseException as error:
                    self._failed(sink, error)

    def check(self) -> None:
        """Raise what a sink raised, once."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _failed(self, sink: Sink, error: BaseException) -> None:
        error.add_note(f"raised in sink {_name(sink)}")
        if isinstance(error, Exception):  # an interrupt is no fault of the sink's
            self.sinks.remove(sink)
        if self.error is None:
            self.error = error


class Worker:
    """A thread on which receivers take records."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers
        self._queue: SimpleQueue[Records | None] = SimpleQueue()
        self._room = Semaphore(MAX_QUEUED_STEPS)
        self._thread = Thread(target=self._work, name="sinks", daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Until `put` may be called once."""
        self._room.acquire()

    def put(self, records: Records) -> None:
        """Queue a step's records."""
        self._queue.put(records)

    def finish(self, records: Records, timeout_s: float | None) -> bool:
        """Queue the last records, full or not, and wait until all are taken: whether they were."""
        self._queue.put(records)
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (records := self._queue.get()) is not None:
            self._receivers.take(records)
            self._room.release()


def _tell(sinks: Sequence[Sink], error: BaseException) -> None:
    """Tell those that have a method `fail(error)`; what they raise becomes a note of `error`."""
    for sink in sinks:
        if hasattr(sink, "fail"):
            try:
                sink.fail(error)
            except Exception as another:
                error.add_note(f"sink {_name(sink)} failed too: {_described(another)}")


def _is_immediate(sink: Sink) -> bool:
    return bool(getattr(sink, "immediate", False))


def _name(sink: Sink) -> str:
    return f"{type(sink).__module__}.{type(sink).__qualname__}"


def _described(error: BaseException) -> str:
    return ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
