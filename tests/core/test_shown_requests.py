"""True lengths are for oracles: no event of a live request tells them."""

from dataclasses import fields, is_dataclass

import numpy as np

from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from tests.engine_harness import finish, make_engine


def parts(value):
    """Everything that can be reached from an event."""
    yield value
    if is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    else:
        inner = list(value) if isinstance(value, (list, tuple)) else []
    for one in inner:
        yield from parts(one)


class Watcher:
    """Keeps what events show."""

    def __init__(self):
        self.requests = []
        self.events = 0

    def look(self, query):
        self.events += 1
        self.requests += [one for one in parts(query) if isinstance(one, Request)]

    on_step = hookimpl(lambda self, query: self.look(query))
    on_request_arrived = hookimpl(lambda self, query: self.look(query))
    on_request_finished = hookimpl(lambda self, query: self.look(query))


def test_events_show_no_forced_length():
    watcher = Watcher()
    engine = make_engine(plugins={"watcher": watcher})
    prompt = np.arange(1, 40, dtype=np.int32)
    for name, forced in (("a", 5), ("b", 20)):
        params = SamplingParams(max_tokens=50, n=2)
        engine.submit(Request(name, prompt, params, forced_output=forced))
    finish(engine)
    lengths = [len(c.token_ids) for r in engine.records.values() for c in r.choices]
    assert lengths == [5, 5, 20, 20]
    assert watcher.events > 20
    assert [one.request_id for one in watcher.requests] == ["a", "b", "a", "b"]
    assert {one.forced_output for one in watcher.requests} == {None}
