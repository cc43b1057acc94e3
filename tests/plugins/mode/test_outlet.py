"""plugins/mode/outlet.py: what sinks get, where they run, and what becomes of their faults."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.records import RequestRecord, StepRecord
from plugins.mode import outlet as module
from plugins.mode.outlet import Outlet
from plugins.shared.run_info import RunInfo
from plugins.sink.kernel_report import Roofline
from plugins.sink.kernels import KernelsSink, Schedule
from tests.patience import SOON_S

RUN = RunInfo("test", 0, "default", {}, {}, {})


either = pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in sinks_threads():
        thread.join(SOON_S)
    assert sinks_threads() == []


def sinks_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sinks"]


class Log:
    """A sink that notes its calls, their threads, and the parts of each step's host time."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads: set[str] = set()
        self.parts: list[set[str]] = []

    def step(self, record: StepRecord) -> None:
        self._note(record.step)
        self.parts.append(set(record.host_us))

    def request(self, record: RequestRecord) -> None:
        self._note(record.request_id)

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        self.calls.append(summary)

    def fail(self, error: BaseException) -> None:
        self.calls.append(error)

    def _note(self, what: Any) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)


class Immediate(Log):
    """As a sink that acts on the device."""

    immediate = True


class Faulty(Log):
    """Raises at one step."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__()
        self.error = error
        self.at = at

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if record.step == self.at:
            raise self.error


class Stuck(Log):
    """Takes nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def step(self, record: StepRecord) -> None:
        self.begun.set()
        assert self.go.wait(SOON_S)
        super().step(record)


def play(outlet: Outlet, steps: int, first: int = 0, made: list[int] | None = None) -> None:
    """As the engine does: observers' time is written once the sinks were called. made: grows by
    the numbers of steps."""
    for number in range(first, first + steps):
        record = StepRecord(number, 0.0)
        if made is not None:
            made.append(number)
        outlet.step(record)
        if number % 3 == 1:
            for name in "ab":
                outlet.request(RequestRecord(f"{name}{number}", "", 0.0, 1))
        record.host_us["observers"] = 1.0


def opened(threaded: bool, *sinks: Any) -> Outlet:
    outlet = Outlet(threaded)
    outlet.open(sinks)
    return outlet


@either
def test_sinks_get_final_records_in_the_engines_order(threaded: bool) -> None:
    sinks, summary = (Log(), Log()), {"the": "summary"}
    outlet = opened(threaded, *sinks)
    play(outlet, 6)
    outlet.close(RUN, summary)
    for sink in sinks:
        assert sink.calls == [0, 1, "a1", "b1", 2, 3, 4, "a4", "b4", 5, summary]
        assert sink.parts == [{"observers"}] * 6
        assert sink.threads == {"sinks" if threaded else threading.current_thread().name}


@either
def test_immediate_sink_is_called_at_once_on_the_steps_thread(threaded: bool) -> None:
    immediate, other = Immediate(), Log()
    outlet = opened(threaded, immediate, other)
    for number in range(3):
        play(outlet, 1, number)
        assert immediate.calls[-1] == ("b1" if number == 1 else number)
    outlet.close(RUN, {})
    assert immediate.calls == other.calls == [0, 1, "a1", "b1", 2, {}]
    assert immediate.threads == {threading.current_thread().name}


def test_kernels_sink_opens_its_windows_on_the_steps_thread(tmp_path: Path) -> None:
    starts = []

    class Profiler:
        def start(self) -> None:
            starts.append((threading.current_thread().name, number))

        def wait(self) -> None:
            pass

        def stop(self) -> list[Any]:
            return []

    sink = KernelsSink(tmp_path, Schedule(2, 2, 1, 9), Profiler(), Roofline(None, None))
    outlet = opened(True, sink)
    for number in range(3):
        outlet.step(StepRecord(number, 0.0, num_rows=1, rows=[("a", 0, 1)]))
    outlet.fail(RuntimeError("enough"))
    assert starts == [(threading.current_thread().name, 1)]


def test_without_deferred_sinks_there_is_no_thread() -> None:
    outlet = opened(True, Immediate())
    assert sinks_threads() == []
    outlet.close(RUN, {})


@either
def test_outlet_opens_again_for_other_sinks(threaded: bool) -> None:
    outlet = Outlet(threaded)
    play(outlet, 2)  # nobody listens yet
    for _ in range(2):
        sink = Log()
        outlet.open([sink])
        play(outlet, 2)
        outlet.close(RUN, {})
        play(outlet, 2, 7)  # nor any more
        assert sink.calls == [0, 1, "a1", "b1", {}]


@either
def test_fault_of_a_sink_is_raised_once_at_a_later_step(threaded: bool) -> None:
    error, other, made = ZeroDivisionError("no disk"), Log(), []
    faulty = Faulty(error, at=1)
    outlet = opened(threaded, faulty, other)
    with pytest.raises(ZeroDivisionError, match="no disk") as raised:
        play(outlet, 1_000_000, made=made)
    play(outlet, 1, len(made), made=made)
    outlet.fail(raised.value)
    assert raised.value is error
    assert error.__notes__ == [f"raised in sink {__name__}.Faulty"]
    assert faulty.calls == [0, 1, error]
    seen = [call for call in other.calls if isinstance(call, int)]
    assert seen == made == list(range(len(made)))
    assert other.calls[-1] is error


@either
def test_fault_at_the_last_step_is_raised_by_close_and_fails_all_sinks(threaded: bool) -> None:
    error, other = OSError("disk full"), Log()
    faulty = Faulty(error, at=2)
    outlet = opened(threaded, other, faulty)
    play(outlet, 3)
    with pytest.raises(OSError, match="disk full"):
        outlet.close(RUN, {})
    assert faulty.calls == [0, 1, "a1", "b1", 2, error]
    assert other.calls == [0, 1, "a1", "b1", 2, error]
    assert len(error.__notes__) == 1


@either
def test_exit_raised_by_a_sink_ends_no_thread(threaded: bool) -> None:
    sink = Faulty(SystemExit(3), at=0)
    outlet = opened(threaded, sink)
    play(outlet, 1)
    with pytest.raises(SystemExit):
        outlet.close(RUN, {})
    assert sink.calls[0] == 0


@either
def test_failed_run_leaves_sinks_all_its_records_and_its_own_error(threaded: bool) -> None:
    class Worse(Log):
        def fail(self, error: BaseException) -> None:
            raise OSError("cannot even fail")

    first, sinks = RuntimeError("the device is lost"), (Worse(), Faulty(OSError("full"), 2), Log())
    outlet = opened(threaded, *sinks)
    play(outlet, 3)
    outlet.fail(first)
    assert sinks[2].calls == [0, 1, "a1", "b1", 2, first]
    assert sinks[1].calls[-1] is first
    assert first.__notes__ == [
        f"sinks failed too: OSError: full, raised in sink {__name__}.Faulty",
        f"sink {__name__}.{Worse.__qualname__} failed too: OSError: cannot even fail",
    ]


def test_fail_waits_for_a_slow_sink() -> None:
    stuck, error = Stuck(), RuntimeError("broken")
    outlet = opened(True, stuck)
    play(outlet, 3)
    assert stuck.begun.wait(SOON_S)
    threading.Timer(0.05, stuck.go.set).start()
    outlet.fail(error)
    assert stuck.calls == [0, 1, "a1", "b1", 2, error]


def test_fail_leaves_a_sink_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    stuck, immediate, error = Stuck(), Immediate(), RuntimeError("broken")
    outlet = opened(True, stuck, immediate)
    play(outlet, 3)
    assert stuck.begun.wait(SOON_S)
    outlet.fail(error)
    assert stuck.calls == []
    assert immediate.calls[-1] is error
    assert error.__notes__ == ["sinks were left after 0.05 s, busy with earlier records"]
    stuck.go.set()


def test_full_queue_holds_the_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_STEPS", 4)
    stuck, made = Stuck(), []
    outlet = opened(True, stuck)
    engine = threading.Thread(target=play, args=(outlet, 20, 0, made))
    engine.start()
    until = time.monotonic() + SOON_S
    while len(made) < 6 and time.monotonic() < until:
        time.sleep(0.01)
    engine.join(0.2)
    assert engine.is_alive()
    assert len(made) == 6  # four handed over, one more to be, and the one that comes in
    stuck.go.set()
    engine.join(SOON_S)
    assert not engine.is_alive()
    outlet.close(RUN, {})
    assert [call for call in stuck.calls if isinstance(call, int)] == list(range(20))


def test_interrupt_while_the_queue_is_full_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_STEPS", 1)

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    sink, error = Log(), RuntimeError("stopped")
    outlet = opened(True, sink)
    play(outlet, 2)
    assert outlet._worker is not None
    monkeypatch.setattr(outlet._worker, "_room", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        outlet.step(StepRecord(2, 0.0))
    outlet.fail(error)
    assert sink.calls == [0, 1, "a1", "b1", error]


@either
def test_fault_of_an_immediate_sink_is_raised_at_once_and_named(threaded: bool) -> None:
    class Hasty(Faulty):
        immediate = True

    error, other = OSError("no device"), Log()
    hasty = Hasty(error, at=1)
    outlet = opened(threaded, hasty, other)
    play(outlet, 1)
    with pytest.raises(OSError, match="no device"):
        outlet.step(StepRecord(1, 0.0))
    assert error.__notes__ == [f"raised in sink {__name__}.{Hasty.__qualname__}"]
    outlet.fail(error)
    assert hasty.calls == other.calls == [0, 1, error]


@either
def test_sink_that_cannot_close_fails_those_behind_it(threaded: bool) -> None:
    class Unclosable(Log):
        def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
            raise OSError("no space")

    first, last = Log(), Log()
    outlet = opened(threaded, first, Unclosable(), last)
    play(outlet, 1)
    with pytest.raises(OSError, match="no space") as raised:
        outlet.close(RUN, {"the": "summary"})
    assert first.calls == [0, {"the": "summary"}]
    assert last.calls == [0, raised.value]
