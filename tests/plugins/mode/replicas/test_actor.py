"""A replica's process without Ray: what the calls do that Ray makes."""

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.hooks import Hooks
from core.hookspecs import hookimpl
from plugins.executor.fake import Fake
from plugins.mode.replicas.actor import Replica
from plugins.mode.replicas.messages import Ask, News, Orders
from plugins.mode.replicas.plan import plan_of
from plugins.shared.clocks import RealClock
from tests.patience import SOON_S
from tests.plugins.mode.mode_session import make_session
from tests.plugins.mode.replicas.step_fleet import Poison, ask


class Observer:
    """A plugin that hears of a run."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    @hookimpl
    def on_run_start(self, query: Any) -> None:
        self.heard.append(("start", query.seed))

    @hookimpl
    def on_run_end(self, query: Any) -> None:
        self.heard.append(("end", query["replica"]))


def plan(folder: Path, **plugins: object) -> Any:
    fake = Fake(vocab_size=1000, max_model_len=512, step_s=0.001)
    session = make_session(folder, clock=RealClock(), executor=fake, **plugins)
    registered = session.hooks.registered
    defaults = {name: one.plugin for name, one in registered.items() if one.default}
    session.hooks_again = lambda: Hooks(defaults, plugins)
    return plan_of(session, warmup=True, report_s=0.01, lock="off")


class Told(threading.Thread):
    """All news of a replica, as they come."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(daemon=True)
        self.replica = replica
        self.news: list[News] = []
        self.start()

    def run(self) -> None:
        for batch in self.replica.news():
            self.news += pickle.loads(batch)

    def until(self, holds: Any) -> None:
        until_s = time.monotonic() + SOON_S
        while not holds():
            assert time.monotonic() < until_s, "it did not come to hold"
            time.sleep(0.002)


def orders(*items: Any) -> bytes:
    return pickle.dumps(Orders(time.perf_counter(), list(items)))


def test_a_replica_serves_what_it_is_sent_and_ends(tmp_path: Path) -> None:
    observer = Observer()
    replica = Replica(plan(tmp_path, observer=observer), "7")
    born, told = replica.ready(), Told(replica)
    assert born.executor["executor"] == "fake"
    assert replica.facts()["vocab_size"] == 1000
    replica.take("of another incarnation", 0, orders(Ask(50, 1, ask("other"))))
    replica.take(born.birth, 1, orders(Ask(6, 2, ask("b", tokens=5))))
    replica.take(born.birth, 0, orders(Ask(3, 1, ask("a", tokens=9))))
    told.until(lambda: sum(len(news.ended) for news in told.news) == 2)
    keys = [key for news in told.news for key in news.keys]
    assert (keys.count(3), keys.count(6), len(keys)) == (9, 5, 14)
    told.until(lambda: told.news[-1].snapshot and told.news[-1].snapshot.received == 2)
    assert told.news[-1].snapshot.replica == "7"
    replica.stop()
    told.join(SOON_S)
    assert not told.is_alive(), "the news ended"
    assert observer.heard == [("start", 0), ("end", "7")]


def test_an_engine_that_breaks_says_why_and_takes_the_process_along(tmp_path: Path) -> None:
    left: list[int] = []
    gone = threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        gone.set()

    replica = Replica(plan(tmp_path, poison=Poison(prompt_tokens=13)), "0", leave)
    born, told = replica.ready(), Told(replica)
    replica.take(born.birth, 0, orders(Ask(0, 1, ask("a", prompt_tokens=13))))
    told.join(SOON_S)
    assert told.news[-1].fault == "RuntimeError: poison; raised by plugin poison at decide_batch"
    assert gone.wait(SOON_S)
    assert left[0] == 1


def test_an_engine_that_cannot_be_built_says_so_to_each_who_asks(tmp_path: Path) -> None:
    broken = plan(tmp_path)
    broken.engine.pool_tokens = 100
    replica = Replica(broken, "0")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"engine\.pool_tokens must be a multiple"):
            replica.ready()
