"""The first step at which two runs decided differently, with both reasons (from steps.jsonl)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

Step = dict[str, Any]
Rows = dict[tuple[str, int], int | None]  # tokens, None = some
SHOWN_ROWS = 6  # of a step whose rows differ
REPEATED = ("refused", "skipped")  # told again in every step, of steps that went in one once


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
        if first is None or second is None or not _alike(first, second):
            sides = (_side(policies[0], first, second), _side(policies[1], second, first))
            return Divergence(step, sides)
    return step


def expanded(steps: Iterable[Step]) -> Iterator[Step]:
    """One item a step: a record that stands for k steps comes k times, its refusals in each, other
    choices in the first, the ends of requests in the last, and its rows with the tokens of one
    step; None: a slice of a prompt, of which the record tells the sum of several."""
    for record in steps:
        num = record.get("steps", 1)
        if num == 1:
            yield record
            continue
        slices = record.get("slices") or num  # as many as the longest rows have, if any
        for index in range(num):
            choices = [
                choice
                for choice in record["choices"]
                if choice["kind"] in REPEATED
                or index == (num - 1 if choice["kind"] == "finished" else 0)
            ]
            rows = [[*key, _tokens(sums, num, slices, index)] for *key, sums in record["rows"]]
            sliced = record["prefill_tokens"] if index < slices else 0
            prefill = sliced if slices == 1 or not sliced else None
            yield record | {"choices": choices, "rows": rows, "prefill_tokens": prefill}


def _tokens(sums: int, num: int, slices: int, index: int) -> int | None:
    """Of a row in one of `num` steps, before and after its slices end."""
    if sums <= num or index >= slices:
        return 1
    return sums - (num - 1) if slices == 1 else None


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


def _decisions(record: Step) -> tuple[list[Any], Rows]:
    choices = sorted((c["kind"], c["request_id"], c["choice"]) for c in record["choices"])
    rows = record["rows"] or [["rows", record["num_rows"], record["prefill_tokens"]]]
    return choices, {(name, choice): tokens for name, choice, tokens in rows}


def _alike(first: Step, second: Step) -> bool:
    (choices, rows), (others, other_rows) = _decisions(first), _decisions(second)
    if choices != others or rows.keys() != other_rows.keys():
        return False
    return all(_same(tokens, other_rows[key]) for key, tokens in rows.items())


def _same(tokens: int | None, others: int | None) -> bool:
    return tokens == others or tokens is None or others is None


def _side(policy: str, record: Step | None, other: Step | None) -> Side:
    if record is None:
        return Side(policy, None, (), ended=True)
    others, other_rows = _decisions(other) if other is not None else ([], {})
    _, own_rows = _decisions(record)
    lines = [
        _line(choice)
        for choice in record["choices"]
        if (choice["kind"], choice["request_id"], choice["choice"]) not in others
    ]
    extra = [
        (name, tokens)
        for (name, choice), tokens in own_rows.items()
        if (name, choice) not in other_rows or not _same(tokens, other_rows[name, choice])
    ]
    if extra and record["rows"]:
        shown = [
            f"{name} {'a slice' if tokens is None else f'{tokens} tokens'}"
            for name, tokens in extra[:SHOWN_ROWS]
        ]
        more = f" and {len(extra) - SHOWN_ROWS} more" if len(extra) > SHOWN_ROWS else ""
        rows = f"ran {', '.join(shown)}{more}"
        lines.append(f"{rows} by {record['batch_plugin']}: {record['batch_reason']}")
    return Side(policy, float(record["start_s"]), tuple(lines))


def _line(choice: dict[str, Any]) -> str:
    stream = f" choice {choice['choice']}" if choice["choice"] else ""
    reason = f"{choice['kind']} {choice['request_id']}{stream} by {choice['plugin']}"
    return f"{reason}: {choice['reason']}" if choice["reason"] else reason
