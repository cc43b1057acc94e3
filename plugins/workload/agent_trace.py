"""Recorded agent sessions: calls of a model one after the other, and sub-agents beside them.

Source: callanjfox/kv-cache-tester (Apache-2.0), sessions of a coding agent; the format is described
in data/traces/README.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.workload.common import TRACES, read_jsonl

BLOCK_TOKENS = 64
FILE = TRACES / "agentic_coding" / "claude_code_sessions.rle.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Call:
    """One request. delay_s: from the end of what it waits for. blocks: runs of ids that belong to
    the session, (first, count) each; only whole blocks of 64 tokens have one. number: which of the
    calls that were read."""

    number: int
    delay_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[tuple[int, int], ...]

    def ids(self) -> NDArray[np.int64]:
        """The block ids, int64."""
        runs = [np.arange(first, first + length) for first, length in self.blocks]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Turn:
    """A call of the agent itself, and the sub-agents that start when it has ended, each a chain of
    calls. The next turn waits for the last of them, else for the call."""

    call: Call
    agents: tuple[tuple[Call, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSession:
    """Turns in order. tool_blocks, system_blocks: whole blocks of the tool definitions at the
    beginning, and of those with the system prompt; their ids are 1, 2, ..."""

    name: str
    tool_tokens: int
    system_tokens: int
    turns: tuple[Turn, ...]

    @property
    def tool_blocks(self) -> int:
        """Whole blocks of the tool definitions."""
        return self.tool_tokens // BLOCK_TOKENS

    @property
    def system_blocks(self) -> int:
        """Whole blocks of tool definitions and system prompt together."""
        return (self.tool_tokens + self.system_tokens) // BLOCK_TOKENS

    def calls(self) -> list[Call]:
        """All calls, sub-agents' included."""
        own = [turn.call for turn in self.turns]
        return own + [call for turn in self.turns for agent in turn.agents for call in agent]


def read_sessions(start: int, num: int | None) -> list[AgentSession]:
    """Sessions of the file, from number `start`, at most `num`."""
    stop, numbers = None if num is None else start + num, count()
    entries = islice(read_jsonl(FILE, "workload data"), start, stop)
    return [_session(entry, numbers) for _, entry in entries]


def _session(entry: dict[str, Any], numbers: Iterator[int]) -> AgentSession:
    items: list[dict[str, Any]] = entry["requests"]
    own = [index for index, item in enumerate(items) if item["type"] != "subagent"]
    turns: list[Turn] = []
    wait_s = 0.0
    for here, after in zip(own, [*own[1:], len(items)], strict=True):
        item, agents = items[here], items[here + 1 : after]
        following = items[after] if after < len(items) else None
        call = _call(item, wait_s, numbers)
        ended_s = _end(item, following)
        turns.append(Turn(call, tuple(_agent(agent, ended_s, numbers) for agent in agents)))
        if following is not None:
            last_s = max((agent["t"] for agent in agents), default=ended_s)
            think_s = following.get("think_time", following["t"] - ended_s)
            wait_s = max(0.0, following["t"] - last_s if agents else think_s)
    return AgentSession(entry["id"], entry["tool_tokens"], entry["system_tokens"], tuple(turns))


def _end(item: dict[str, Any], following: dict[str, Any] | None) -> float:
    """When a call of the agent ended, seconds after the session began. Where the trace has not
    measured its duration, from the think time before the next one, if that is known."""
    begun_s: float = item["t"]
    if "api_time" in item:
        return begun_s + float(item["api_time"])
    if following is None or "think_time" not in following:
        return begun_s
    return max(begun_s, float(following["t"] - following["think_time"]))


def _agent(
    entry: dict[str, Any], parent_ended_s: float, numbers: Iterator[int]
) -> tuple[Call, ...]:
    """A sub-agent's calls; the first waits for the parent's call as long as it did in the trace,
    which records when a sub-agent ended and how long it took."""
    calls: Sequence[dict[str, Any]] = entry["requests"]
    measured = sum(call["api_time"] + call["think_time"] for call in calls)
    took_s = measured if entry["duration_ms"] is None else entry["duration_ms"] / 1e3
    first_s = max(0.0, entry["t"] - took_s - parent_ended_s)
    delays = [first_s, *(float(call["think_time"]) for call in calls[1:])]
    return tuple(_call(call, delay, numbers) for call, delay in zip(calls, delays, strict=True))


def _call(item: dict[str, Any], delay_s: float, numbers: Iterator[int]) -> Call:
    """An answer of 0 tokens (27 of the file) counts as one of 1: a request ends with a token."""
    blocks = tuple((first, length) for first, length in item["hash_runs"])
    return Call(next(numbers), float(delay_s), item["in"], max(1, item["out"]), blocks)
