"""Plugins that note what they are asked."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from core.hookspecs import hookimpl
from core.table import FACTS, RequestTable
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


def _freeze(query: object) -> None:
    """Gather all columns now: a table is a window on numbers that go on changing."""
    for field in fields(query) if is_dataclass(query) else ():
        value = getattr(query, field.name)
        if isinstance(value, RequestTable):
            for name in FACTS:
                getattr(value, name)
