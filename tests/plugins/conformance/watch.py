"""A policy under watch: what it is asked and answers, whether it keeps its hands off what it is
shown and off clocks and chance, and what its calls cost."""

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np

from core.engine import Engine
from core.hookspecs import PROJECT, hookimpl
from core.queries import (
    AdmissionDecision,
    BatchDecision,
    CacheAdmissionDecision,
    OrderDecision,
    PreemptionDecision,
)
from core.table import DERIVED, FACTS, RequestTable
from tests.plugins.conformance.forbidden import Forbidden

CLOCK_NS = perf_counter_ns  # taken in before it is forbidden


class PoisonError(Exception):
    """Raised by a query that was poisoned: the policy must let it pass."""


@dataclass(frozen=True)
class Answer:
    """What a decide_* hook was asked and said, in names that do not depend on table slots."""

    step: int
    hook: str
    said: Any


@dataclass(frozen=True)
class Breach:
    """A rule that a hook broke during its call."""

    rule: str
    hook: str
    text: str


class Watch:
    """Watches one plugin in one run. compares: hold queries against a copy after each call, which
    takes its time. poisons: the hook whose `poison_at`-th query raises when it is read."""

    def __init__(self, compares: bool = False, poisons: str = "", poison_at: int = 3) -> None:
        self.engine: Engine | None = None
        self.answers: list[Answer] = []
        self.breaches: list[Breach] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.times_ns: dict[str, list[int]] = defaultdict(list)
        self.compares = compares
        self.poisons, self.poison_at = poisons, poison_at
        self.poisoned_reads = 0
        self.swallowed = False
        self.forbidden = Forbidden(self._saw_forbidden)
        self._hook = ""
        self.raised: tuple[BaseException, str] | None = None  # by the policy, and at which hook

    def around(self, plugin: Any) -> Any:
        """A plugin with the same hooks that passes every call on."""

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(plugin, name)

        watched = Watched()
        for name in dir(plugin):
            if hasattr(getattr(plugin, name, None), f"{PROJECT}_impl"):
                setattr(watched, name, self._hook_around(name, getattr(plugin, name)))
        return watched

    def _hook_around(self, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(query: Any) -> Any:
            self.asked[hook] += 1
            answer = self._call(hook, method, query)
            if answer is None:
                return None
            self.answered[hook] += 1
            if hook.startswith("build_"):
                return _object_around(self, hook, answer)
            if hook.startswith("decide_"):
                self._note(hook, query, answer)
            return answer

        return hookimpl(call)

    def _call(self, hook: str, method: Callable[..., Any], query: Any) -> Any:
        if hook == self.poisons and self.asked[hook] == self.poison_at:
            return self._call_poisoned(method, query)
        before = _copied(query) if self.compares else None
        with self.inside(hook):
            begin = CLOCK_NS()
            answer = method(query=query)
            self.times_ns[hook].append(CLOCK_NS() - begin)
        if before is not None and (changed := _changed(query, before)):
            text = f"changed its query: {changed} is not what it was before the call"
            self.breaches.append(Breach("queries", hook, text))
        return answer

    def _call_poisoned(self, method: Callable[..., Any], query: Any) -> Any:
        self.poisoned_reads = 0
        answer = method(query=_poisoned(query, self))
        self.swallowed = self.poisoned_reads > 0
        return answer

    @contextmanager
    def inside(self, hook: str):
        """A call of the policy at a hook, or of an object it built there."""
        outer, self._hook = self._hook, hook
        try:
            with self.forbidden.hook():
                yield
        except Exception as error:
            if self.raised is None or self.raised[0] is not error:
                self.raised = error, hook
            raise
        finally:
            self._hook = outer

    def _saw_forbidden(self, text: str) -> None:
        self.breaches.append(Breach("clock and chance", self._hook, text))

    def _note(self, hook: str, query: Any, answer: Any) -> None:
        self.answers.append(Answer(getattr(query, "step", -1), hook, self._said(query, answer)))

    def _said(self, query: Any, answer: Any) -> Any:
        if isinstance(answer, OrderDecision):
            return (self._names(query.waiting.id), np.asarray(answer.keys).tolist(), answer.hold)
        if isinstance(answer, AdmissionDecision):
            return (self._names(query.candidate.id), answer.verdict)
        if isinstance(answer, BatchDecision):
            return (self._names(answer.ids), np.asarray(answer.num_tokens).tolist())
        if isinstance(answer, PreemptionDecision):
            return (query.cause, self._names(answer.victims))
        if isinstance(answer, CacheAdmissionDecision):
            limit = getattr(answer, "num_tokens", None)
            return (query.request.request_id, bool(answer.admit), limit)
        return repr(answer)

    def _names(self, ids: Any) -> list[Any]:
        assert self.engine is not None
        table = self.engine.state.table
        names = []
        for one in np.asarray(ids).ravel().tolist():
            found = table.get(int(one)) if one == one else None
            names.append((found.request.request_id, found.choice) if found else one)
        return names


def _object_around(watch: Watch, hook: str, built: Any) -> Any:
    """The object a build_* hook answered, every call of it watched."""

    class Watched:
        def __getattr__(self, name: str) -> Any:
            value = getattr(built, name)
            if not callable(value):
                return value

            def call(*arguments: Any, **options: Any) -> Any:
                with watch.inside(f"{hook}.{name}"):
                    begin = CLOCK_NS()
                    answer = value(*arguments, **options)
                    watch.times_ns[f"{hook}.{name}"].append(CLOCK_NS() - begin)
                return answer

            self.__dict__[name] = call
            return call

    Watched.__name__ = type(built).__name__
    return Watched()


def _copied(query: Any) -> dict[str, Any]:
    """What a query shows, copied: its fields, the tables behind its views, its records."""
    copies: dict[str, Any] = {}
    for name in _field_names(query):
        value = getattr(query, name)
        copies[name] = value
        if isinstance(value, RequestTable):
            copies[f"{name}.rows"] = value._slots.copy()
            columns = value._table.columns
            copies["table"] = {fact: column.copy() for fact, column in columns.items()}
        elif is_dataclass(value) and not isinstance(value, type):
            copies[f"{name}.fields"] = repr([getattr(value, one.name) for one in fields(value)])
    return copies


def _changed(query: Any, before: dict[str, Any]) -> str:
    """What differs from the copies, empty if nothing."""
    for name in _field_names(query):
        value = getattr(query, name)
        if value is not before[name]:
            return name
        if isinstance(value, RequestTable):
            if wrong := _changed_view(value, before[f"{name}.rows"], before["table"]):
                return f"{name}.{wrong}"
        elif f"{name}.fields" in before:
            now = repr([getattr(value, one.name) for one in fields(value)])
            if now != before[f"{name}.fields"]:
                return name
    return ""


def _changed_view(view: RequestTable, rows: Any, table: dict[str, Any]) -> str:
    if not np.array_equal(view._slots, rows):
        return "rows"
    for fact, column in table.items():
        if not np.array_equal(view._table.columns[fact], column):
            return fact
    fresh = RequestTable(view._table, rows)  # over columns that are what they were
    for fact, shown in vars(view).items():
        known = fact in FACTS or fact in DERIVED
        if known and not np.array_equal(shown, getattr(fresh, fact)):
            return fact
        if not known and not fact.startswith("_"):
            return fact
    return ""


def _field_names(query: Any) -> list[str]:
    return [one.name for one in fields(query)] if is_dataclass(query) else []


def _poisoned(query: Any, watch: Watch) -> Any:
    """The query with tables and requests that raise when a fact is read."""

    class PoisonedTable(RequestTable):
        def __getattr__(self, name: str) -> Any:
            watch.poisoned_reads += 1
            raise PoisonError(name)

    class PoisonedRequest:
        def __getattr__(self, name: str) -> Any:
            watch.poisoned_reads += 1
            raise PoisonError(name)

    changes: dict[str, Any] = {}
    for name in _field_names(query):
        value = getattr(query, name)
        if isinstance(value, RequestTable):
            changes[name] = PoisonedTable(value._table, value._slots)
        elif name == "request" and not callable(value):
            changes[name] = PoisonedRequest()
    return replace(query, **changes)
