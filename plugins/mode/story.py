"""The life of one request out of step records: who it waited for, why, and what preemption cost
it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_NAMES = 4
NUMBER = re.compile(r"\d[\d.,]*")
STARTED = ("admitted", "resumed")


@dataclass(slots=True)
class Event:
    """Something that held for steps `first` .. `last`, seconds `start_s` .. `end_s`.

    what: arrived, routed, waited, admitted, resumed, prefill, decode, preempted or finished. why: a
    sentence. key: events in a row with equal keys are one. names: the other requests it was about,
    in order.
    """

    what: str
    start_s: float
    end_s: float
    first: int | None = None
    last: int | None = None
    steps: int = 0
    why: str = ""
    latest: str = ""
    key: str = ""
    names: list[str] = field(default_factory=list)
    tokens: int = 0

    def times(self) -> str:
        """The time in seconds, or from - to."""
        start, end = f"{self.start_s:.3f}", f"{self.end_s:.3f}"
        return start if start == end or self.what in _INSTANTS else f"{start} - {end}"

    def span(self) -> str:
        """The step, or from - to."""
        if self.first is None:
            return ""
        return str(self.first) if self.first == self.last else f"{self.first} - {self.last}"

    def fields(self) -> dict[str, Any]:
        """JSON-safe values."""
        names = ("what", "start_s", "end_s", "first", "last", "steps", "why", "names", "tokens")
        return {name: getattr(self, name) for name in names}


_INSTANTS = ("arrived", "routed", "admitted", "resumed", "preempted", "finished")


def tell(request: str, row: dict[str, str] | None, steps: Iterable[dict[str, Any]]) -> list[Event]:
    """The events of `request` in order; empty if no step knows it and `row` is None.

    row: its line of requests.csv, None if it never ended. steps: the objects of steps.jsonl, in
    order.
    """
    first_token_s = float(row["first_token_s"]) if row and row["first_token_s"] else None
    teller = _Teller(request, float(row["arrival_s"]) if row else None, first_token_s)
    for step in steps:
        teller.step(step)
    events = teller.events
    for event in events:
        event.why = _sentence(event)
    if row is not None:
        begun = Event("arrived", float(row["arrival_s"]), float(row["arrival_s"]))
        begun.why = counted(row["prompt_tokens"], "prompt token") + (
            f", client {row['client']}" if row["client"] else ""
        )
        events.insert(0, begun)
        if row["finished_s"]:
            events.append(_end(row))
    return events


def told_routes(request: str, routes: Iterable[dict[str, Any]]) -> list[Event]:
    """Where `request` was sent, out of the objects of routes.jsonl; again where a replica died."""
    events = []
    for route in routes:
        if route["request_id"] == request:
            scores = ", ".join(f"{name} {score:.4g}" for name, score in route["scores"].items())
            why = f"to replica {route['replica']} by {route['plugin']}: {route['reason']}"
            event = Event("routed", route["time_s"], route["time_s"])
            event.why = f"{why} ({scores})" if scores else why
            events.append(event)
    return events


def counted(number: int | str, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {noun}{'' if int(number) == 1 else 's'}"


class _Teller:
    """Follows choice 0 and its waiting, and the preemptions of every choice."""

    def __init__(self, request: str, arrival_s: float | None, first_token_s: float | None) -> None:
        self.events: list[Event] = []
        self._request = request
        self._arrival_s = arrival_s
        self._first_token_s = first_token_s
        self._waiting = arrival_s is not None
        self._ended = False

    def step(self, step: dict[str, Any]) -> None:
        if self._ended:
            return
        own = [c for c in step["choices"] if c["request_id"] == self._request]
        for choice in own:
            if choice["kind"] in STARTED:
                self._turn(step, choice, waiting=False)
        if self._waiting and self._arrival_s is not None and step["start_s"] >= self._arrival_s:
            self._wait(step, own)
        preempted = [choice for choice in own if choice["kind"] == "preempted"]
        if not preempted:
            self._ran(step)
        for choice in preempted:
            self._turn(step, choice, waiting=True)
        self._ended = any(choice["kind"] == "finished" for choice in own)

    def _turn(self, step: dict[str, Any], choice: dict[str, Any], waiting: bool) -> None:
        """It started, or was preempted."""
        if self._arrival_s is None:
            self._arrival_s = step["start_s"]
        detail = choice["detail"]
        parts = [f"{choice['plugin']}: {choice['reason']}"]
        if choice["choice"]:
            parts.insert(0, f"choice {choice['choice']}")
        if choice["kind"] == "preempted":
            parts.append(
                f"for {detail.get('beneficiary') or detail.get('cause', 'pages')};"
                f" lost {counted(detail.get('lost_tokens', 0), 'computed token')},"
                f" freed {counted(detail.get('pages_freed', 0), 'page')} at once"
            )
        else:
            parts.append(
                f"{counted(detail.get('cached_tokens', 0), 'token')} found in the prefix cache"
            )
        self._add(step, choice["kind"], ", ".join(parts), key="")
        self._waiting = waiting

    def _wait(self, step: dict[str, Any], own: list[dict[str, Any]]) -> None:
        held = [c for c in own if c["kind"] in ("refused", "skipped", "unadmitted")]
        others = [c for c in step["choices"] if c["request_id"] != self._request]
        ahead = [c for c in others if c["kind"] == "refused"]
        if held:
            last = held[-1]
            why = f"{last['kind']} by {last['plugin']}: {last['reason']}"
            self._add(step, "waited", why, NUMBER.sub("#", why))
        elif ahead:
            why = f"refused by {ahead[-1]['plugin']}: {ahead[-1]['reason']}"
            event = self._add(step, "waited", why, f"behind {NUMBER.sub('#', why)}")
            if ahead[-1]["request_id"] not in event.names:
                event.names.append(ahead[-1]["request_id"])
        elif any(c["kind"] in ("preempted", "unadmitted") for c in others):
            self._add(
                step, "waited", "the step preempted or took back others: nobody else starts", ""
            )
        else:
            self._add(step, "waited", "its turn did not come in this step", "turn")

    def _ran(self, step: dict[str, Any]) -> None:
        tokens = [num for name, _, num in step["rows"] if name == self._request]
        if not tokens:
            return
        num, slices = step.get("steps", 1), step.get("slices", 0)
        if max(tokens) <= num:
            self._add(step, "decode", "", "decode").tokens += sum(tokens)
            return
        decodes = num - slices if slices else 0  # of steps that went in one, after the prompt
        turn_s = self._first_token_s
        known = turn_s is not None and step["start_s"] < turn_s < step["end_s"]
        ends = {"end_s": turn_s} if decodes and known else {}
        event = self._add(step | {"steps": num - decodes} | ends, "prefill", "", "prefill")
        event.tokens += sum(tokens) - decodes * len(tokens)
        if decodes:
            later = {"step": step["step"] + slices, "steps": decodes}
            later |= {"start_s": turn_s} if known else {}
            self._add(step | later, "decode", "", "decode").tokens += decodes * len(tokens)

    def _add(self, step: dict[str, Any], what: str, why: str, key: str) -> Event:
        """A new event, or the last one prolonged."""
        last = self.events[-1] if self.events else None
        instant = what in _INSTANTS
        end_s = step["start_s"] if instant else step["end_s"]
        if last is None or instant or last.what != what or last.key != key:
            number = step["step"]
            last = Event(what, step["start_s"], end_s, number, number, why=why, key=key)
            self.events.append(last)
        num = 1 if instant else step.get("steps", 1)
        last.last, last.end_s, last.latest = step["step"] + num - 1, end_s, why
        last.steps += num
        return last


def _sentence(event: Event) -> str:
    if event.what in ("prefill", "decode"):
        return f"{counted(event.tokens, 'token')} in {counted(event.steps, 'step')}"
    why = event.why
    if event.latest not in ("", why):  # its numbers changed meanwhile; who gave it did not
        why += f"; at last: {event.latest.split(': ', 1)[-1]}"
    if event.names:
        shown = ", ".join(event.names[:MAX_NAMES])
        more = len(event.names) - MAX_NAMES
        rest = f" and {more} more" if more > 0 else ""
        why = f"behind {shown}{rest}, {'in turn ' * (len(event.names) > 1)}{why}"
    return why


def _end(row: dict[str, str]) -> Event:
    finished_s = float(row["finished_s"])
    end = Event("finished", finished_s, finished_s)
    lost = int(row["recomputed_tokens"])
    cost = f", {counted(lost, 'token')} computed again after preemption" if lost else ""
    end.why = f"{row['finish_reason']} after {counted(row['output_tokens'], 'output token')}{cost}"
    if row["error"]:
        end.why += f": {row['error']}"
    return end
