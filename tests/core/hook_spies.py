"""Plugins that note what they are asked."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from core.config import EngineConfig
from core.hookspecs import hookimpl
from core.table import FACTS, RequestTable
from plugins.mode.bench import Bench
from plugins.shared.clocks import VirtualClock
from plugins.shared.run_info import RunInfo
from plugins.shared.session import Records, Session
from tests.engine_harness import Arrival, Outcome, make_engine, run


def spy(hook: str, answer: Callable[[Any], Any] = lambda query: None, **attributes: Any) -> Any:
    """A plugin for one hook: keeps every query in `asked` and answers with `answer(query)`.
    attributes: of its class."""

    def method(self, query):
        self.asked.append(query)
        _freeze(query)
        return answer(query)

    method.__name__ = hook
    plugin = type(f"Spy_{hook}", (), {hook: hookimpl(method), **attributes})()
    plugin.asked = []
    return plugin


def spied(plugin: object, arrivals: list[Arrival], **kwargs: Any) -> Outcome:
    """A scenario with the spy as a configured plugin of that name."""
    return run(make_engine(plugins={"spy": plugin}, **kwargs), arrivals)


def play_bench(tmp_path, plugins, arrivals):
    """Mode bench over a small workload on the scripted executor; returns run and summary."""
    engine = make_engine(plugins=plugins)

    class Given:
        name = "given"

        def requests(self, tokenizer, vocab_size, seed):
            return [arrival.request() for arrival in arrivals]

    session = Session(
        hooks=engine.hooks,
        engine=EngineConfig(pool_tokens=256, max_num_batched_tokens=64, strict=True),
        clock=VirtualClock(),
        run=RunInfo("test", 0, "default", engine.hooks.in_charge(), {}, {}),
        folder=tmp_path,
        device="cpu",
        records=Records.full,
        progress=False,
        workload=Given(),
    )
    return session.run, Bench().run(session)


class LoggingSink:
    """Notes what it receives, in `log`."""

    def __init__(self, log):
        self.log = log

    def step(self, record):
        self.log.append(("step", record.step))

    def request(self, record):
        self.log.append(("request", record.request_id))

    def close(self, run, summary):
        self.log.append(("close", summary["requests"]["accepted"]))


def _freeze(query: object) -> None:
    """Gather all columns now: a table is a window on numbers that go on changing."""
    for field in fields(query) if is_dataclass(query) else ():
        value = getattr(query, field.name)
        if isinstance(value, RequestTable):
            for name in FACTS:
                getattr(value, name)
