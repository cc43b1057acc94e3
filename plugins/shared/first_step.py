"""The first step at which two runs decided differently, with both reasons (from steps.jsonl)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

Step = dict[str, Any]
SHOWN_ROWS = 6  # of a step whose rows differ


@dataclass(frozen=True, slots=True)
class Side:
    """What one run did in that step and the other did not; time in seconds. ended: it had no such
    step any more. Lines: `kind request by plugin: reason`."""

    policy: str
    time_s: float | None
    decisions: tuple[str, ...]
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """step: counted from the first of both runs, starting at 1. before: equal steps."""

    step: int
    sides: tuple[Side, Side]


def first_difference(
    base: Iterable[Step], own: Iterable[Step], policies: tuple[str, str]
) -> Divergence | int:
    """The first step whose decisions differ; the number of steps if none does.

    base, own: lines of steps.jsonl as values. policies: what to call the two. Decisions are who was
    admitted, refused, skipped, preempted or finished, and which rows ran with how many tokens, in
    any order within the step."""
    pairs = zip_longest(expanded(base), expanded(own))
    step = 0
    for step, (first, second) in enumerate(pairs, start=1):
        if first is None or second is None or _decisions(first) != _decisions(second):
            sides = (_side(policies[0], first, second), _side(policies[1], second, first))
            return Divergence(step, sides)
    return step


def expanded(steps: Iterable[Step]) -> Iterator[Step]:
    """One item a step: a record that stands for k steps of the same decodes comes k times, its
    choices in the first, the ends of requests in the last."""
    for record in steps:
        num = record.get("steps", 1)
        if num == 1:
            yield record
            continue
        ends = [choice for choice in record["choices"] if choice["kind"] == "finished"]
        others = [choice for choice in record["choices"] if choice["kind"] != "finished"]
        for index in range(num):
            choices = others * (index == 0) + ends * (index == num - 1)
            yield {**record, "choices": choices}


def describe(found: Divergence | int) -> list[str]:
    """Lines of Markdown."""
    if isinstance(found, int):
        return [f"No decision differs in {found:,} steps.", ""]
    lines = [f"Decisions differ from step {found.step:,} on."]
    for side in found.sides:
        time = "" if side.time_s is None else f" (at {side.time_s:.3f} s)"
        lines.append(f"- **{side.policy}**{time}:")
        if side.ended:
            lines.append("  - has ended")
        lines += [f"  - {decision}" for decision in side.decisions]
        if not side.decisions and not side.ended:
            lines.append("  - nothing that the other did not decide too")
    return lines


def _decisions(record: Step) -> tuple[list[Any], list[Any]]:
    choices = sorted((c["kind"], c["request_id"], c["choice"]) for c in record["choices"])
    rows = record["rows"] or [[record["num_rows"], record["prefill_tokens"], 0]]
    return choices, sorted(rows)


def _side(policy: str, record: Step | None, other: Step | None) -> Side:
    if record is None:
        return Side(policy, None, (), ended=True)
    others, other_rows = _decisions(other) if other is not None else ([], [])
    _, own_rows = _decisions(record)
    lines = [
        _line(choice)
        for choice in record["choices"]
        if (choice["kind"], choice["request_id"], choice["choice"]) not in others
    ]
    extra = [row for row in own_rows if row not in other_rows]
    if extra and record["rows"]:
        shown = [f"{name} {tokens} tokens" for name, _, tokens in extra[:SHOWN_ROWS]]
        more = f" and {len(extra) - SHOWN_ROWS} more" if len(extra) > SHOWN_ROWS else ""
        rows = f"ran {', '.join(shown)}{more}"
        lines.append(f"{rows} by {record['batch_plugin']}: {record['batch_reason']}")
    return Side(policy, float(record["start_s"]), tuple(lines))


def _line(choice: dict[str, Any]) -> str:
    stream = f" choice {choice['choice']}" if choice["choice"] else ""
    reason = f"{choice['kind']} {choice['request_id']}{stream} by {choice['plugin']}"
    return f"{reason}: {choice['reason']}" if choice["reason"] else reason
