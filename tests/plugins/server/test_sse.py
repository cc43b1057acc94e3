"""Front-end processes: started, fed, drained, killed, and left behind by the engine's."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.errors import ConfigError
from plugins.executor.fake import Fake
from plugins.mode.serve_loop import ServeLoop
from plugins.server.hub import ServerError
from plugins.server.settings import Settings
from plugins.server.sse import Sse, listen, start
from tests.patience import SOON_S
from tests.plugins.server import stub_front
from tests.plugins.server.rig import FACTS, SLOW_S, fake_of, real_engine

ROOT = Path(__file__).resolve().parents[3]


class Caller:
    """A connection to a stub front end."""

    def __init__(self, url: str, name: str, max_tokens: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SOON_S)
        self.lines = self.socket.makefile("rw")
        self.lines.write(f"{name} {max_tokens}\n")
        self.lines.flush()
        self.front = int(self.lines.readline().split()[1])

    def line(self) -> str:
        return self.lines.readline().strip()

    def rest(self) -> list[str]:
        return [line.strip() for line in self.lines]

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@contextlib.contextmanager
def running(
    play: Callable[[str, list[int]], None], fake: Fake | None = None, **settings: object
) -> Iterator[ServeLoop]:
    """An engine's loop in this thread, as in mode serve, until `play` (url, process ids) ends in
    another and SIGTERM comes. Yields it when it has ended."""
    given = {"port": 0, "drain_s": 2 * SOON_S, "stuck_s": SOON_S, **settings}
    hub, url, fronts = start(Settings(**given), FACTS, stub_front.work)
    loop = ServeLoop(real_engine(executor=fake or fake_of(0.002)), hub, report_s=0.02)
    failure: list[BaseException] = []

    def play_then_stop() -> None:
        try:
            play(url, fronts)
        except BaseException as error:
            failure.append(error)
        if not hub.draining:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=play_then_stop)
    thread.start()
    try:
        loop.run()
    finally:
        hub.close()
        thread.join(SOON_S)
        if failure:
            raise failure[0]
    yield loop


def drains(url: str) -> None:
    """Returns once new requests are turned away."""
    end_s = time.monotonic() + SOON_S
    while True:
        caller = Caller(url, f"late{time.monotonic_ns()}", 1)
        answer = caller.rest()
        caller.close()
        if answer == ["end unavailable the server is shutting down"]:
            return
        assert time.monotonic() < end_s, answer


def ended(pid: int) -> bool:
    try:  # it may go at any moment, between opening the file and reading it too
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def until_ended(*pids: int) -> None:
    end_s = time.monotonic() + SOON_S
    while not all(map(ended, pids)):
        assert time.monotonic() < end_s, "a front end goes on"
        time.sleep(0.02)


def test_front_ends_serve_share_the_port_and_end_with_the_server():
    seen: list[int] = []
    pids: list[int] = []

    def play(url: str, fronts: list[int]) -> None:
        pids.extend(fronts)
        for number in range(30):
            caller = Caller(url, f"r{number}", 5)
            seen.append(caller.front)
            *tokens, last = caller.rest()
            assert sum(len(line.split()) for line in tokens) == 5
            assert last == "end length"
            caller.close()

    before = signal.getsignal(signal.SIGTERM)
    with running(play, workers=2) as loop:
        assert loop.finished == {"length": 30}
    assert len(pids) == 2
    assert set(seen) <= set(pids)
    assert all(map(ended, pids))
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_lets_streams_end_and_turns_new_ones_away():
    def play(url: str, fronts: list[int]) -> None:
        caller = Caller(url, "a", 2000)
        caller.line()
        os.kill(os.getpid(), signal.SIGTERM)
        drains(url)
        fake.step_s = 0.0
        assert caller.rest()[-1] == "end length"
        caller.close()

    fake = fake_of(SLOW_S)
    with running(play, fake) as loop:
        assert loop.finished["length"] >= 1
        assert loop.finished["abort"] == 0


def test_signals_to_front_ends_change_nothing():
    def play(url: str, fronts: list[int]) -> None:
        caller = Caller(url, "a", 100)
        for pid in fronts:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert caller.rest()[-1] == "end length"
        caller.close()

    with running(play) as loop:
        assert loop.finished == {"length": 1}


def test_killed_front_end_has_its_requests_aborted_and_the_others_go_on():
    def play(url: str, fronts: list[int]) -> None:
        callers: dict[int, Caller] = {}
        number = 0
        while len(callers) < 2:
            number += 1
            caller = Caller(url, f"r{number}", 2000)
            kept = callers.setdefault(caller.front, caller)
            if kept is not caller:
                caller.close()  # the stub does not mind: the request goes on
        victim, other = callers
        assert callers[victim].line()
        os.kill(victim, signal.SIGKILL)
        until_ended(victim)
        fake.step_s = 0.0
        assert callers[other].rest()[-1] == "end length"
        for caller in callers.values():
            caller.close()

    fake = fake_of(SLOW_S)
    with running(play, fake, workers=2) as loop:  # drains for longer than requests take
        assert loop.finished["abort"] >= 1
        assert loop.finished["length"] >= 1


def test_killed_front_end_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("plugins.server.restarts.FIRST_S", 0.01)
    seen: list[int] = []

    def play(url: str, fronts: list[int]) -> None:
        os.kill(fronts[0], signal.SIGKILL)
        until_ended(fronts[0])
        for number in range(2):
            caller = Caller(url, f"r{number}", 5)  # connects at once, and waits to be accepted
            seen.append(caller.front)
            assert caller.rest()[-1] == "end length"
            caller.close()
        assert seen[0] not in fronts

    with running(play) as loop:
        assert loop.finished == {"length": 2}
    assert "died (exit code -9), with 0 requests; another one in 0.0 s" in caplog.text
    assert all(map(ended, seen))


def test_server_whose_front_ends_all_die_gives_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plugins.server.restarts.FIRST_S", 0.01)
    monkeypatch.setattr("plugins.server.restarts.TRIES", 2)
    hub, _, _ = start(Settings(port=0), FACTS, stub_front.leaves)
    end_s = time.monotonic() + SOON_S

    def serve() -> None:
        while time.monotonic() < end_s:
            hub.poll(0.05)

    try:
        with pytest.raises(ServerError, match="no front end is left"):
            serve()
    finally:
        hub.close()


def test_second_signal_ends_at_once():
    def play(url: str, fronts: list[int]) -> None:
        caller = Caller(url, "a", 4000)
        caller.line()
        os.kill(os.getpid(), signal.SIGTERM)
        drains(url)  # two signals at once may count as one
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(ConnectionError):  # it was killed
            caller.rest()
        caller.close()

    with pytest.raises(SystemExit) as stop, running(play, fake_of(SLOW_S)):
        pass
    assert stop.value.code == 1


def test_front_end_that_hangs_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plugins.server.workers.GRACE_S", 0.3)
    hub, _, (front,) = start(Settings(port=0), FACTS, stub_front.hangs)
    hub.report({})
    hub.close()
    hub.close()
    assert ended(front)


def test_front_end_that_takes_in_nothing_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("plugins.server.hub.MAX_BACKLOG", 50)
    hub, _, (front,) = start(Settings(port=0), FACTS, stub_front.hangs)
    end_s = time.monotonic() + SOON_S
    try:
        while not ended(front):
            assert time.monotonic() < end_s, "it was not killed"
            hub.report({})
            hub.poll(0.01)
    finally:
        hub.close()


def test_front_end_that_ends_at_once_stops_the_start():
    with pytest.raises(ConfigError, match="a front end ended at once"):
        start(Settings(port=0), FACTS, stub_front.fails)


def test_taken_port_and_unknown_host_are_named():
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    try:
        with pytest.raises(ConfigError, match=rf"server.port must be free .*, got {port}"):
            listen("127.0.0.1", port)
    finally:
        taken.close()
    with pytest.raises(ConfigError, match=r"server\.host must be .*, got 'no\.such\.invalid'"):
        listen("no.such.invalid", 0)


def test_front_ends_end_when_the_engine_process_is_killed(tmp_path: Path):
    script = """
        import sys
        from plugins.server.settings import Settings
        from plugins.server.sse import start
        from tests.plugins.server import stub_front
        from tests.plugins.server.rig import FACTS

        if __name__ == "__main__":
            hub, url, fronts = start(Settings(port=0, workers=2), FACTS, stub_front.work)
            print(*fronts, flush=True)
            while True:
                hub.poll(1.0)
    """
    file = tmp_path / "engine.py"
    file.write_text(textwrap.dedent(script))
    process = subprocess.Popen(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    fronts = [int(pid) for pid in process.stdout.readline().split()]
    assert len(fronts) == 2
    process.kill()
    process.wait(SOON_S)
    process.stdout.close()
    until_ended(*fronts)


def test_plugin_checks_its_settings():
    with pytest.raises(ConfigError, match=r"server\.workers must be in \[1, 64\], got 0"):
        Sse(workers=0)
    with pytest.raises(ConfigError, match=r"server\.stuck_s must be > 0, got 0"):
        Sse(stuck_s=0)
    with pytest.raises(ConfigError, match=r"server\.model_name"):
        Sse(model_name="")
