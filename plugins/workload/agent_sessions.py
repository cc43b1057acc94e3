"""Agent sessions as a closed loop: each call waits for the one before it and a think time."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.config import require
from core.records import RequestRecord
from core.request import Request, SamplingParams
from plugins.workload.agent_prompts import AgentPrompts
from plugins.workload.agent_trace import AgentSession, Call, Turn, read_sessions
from plugins.workload.common import arrivals
from plugins.workload.trace import TOO_LONG

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Running:
    """A session on its way. turn: index of the one whose call or sub-agents run; agents_left: of
    its sub-agents, how many have not ended."""

    session: AgentSession
    turn: int = 0
    agents_left: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a request stands: agent None = the turn's own call, else its sub-agent's call number
    `step`."""

    running: Running
    agent: int | None = None
    step: int = 0


class AgentSessions:
    """710 recorded sessions of a coding agent, 48,658 calls and 676 of sub-agents, mean prompt
    123,450 and output 439 tokens (data/traces/README.md). Output lengths are forced.

    A call is submitted `think time` after the end of the one before it; sub-agents start after the
    call that starts them, side by side, and the next call waits for the last to end. A call that
    failed counts as ended. start, num_sessions: which sessions; rate: session starts a second, a
    Poisson process, None = all at 0; rate_scale: starts and think times are divided by it;
    max_turns: the first so many calls of a session, sub-agents not counted; max_think_s: longer
    think times (people go home) are cut to it. share_system: see AgentPrompts; without it each
    session is a namespace of its own. max_prompt, max_output: what the model can take; too_long:
    skip = a session or sub-agent ends before its first call beyond them, clip = such calls are
    cut. max_tokens: the maximum that requests state, all that policies see of a forced length;
    None = the longest output of the run. The session is the request's session and client.
    """

    closed_loop = True

    def __init__(
        self,
        start: int = 0,
        num_sessions: int | None = None,
        rate: float | None = None,
        rate_scale: float = 1.0,
        max_turns: int | None = None,
        max_think_s: float | None = None,
        share_system: bool = False,
        max_prompt: int | None = None,
        max_output: int | None = None,
        too_long: str = "skip",
        max_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> None:
        require(start >= 0, "workload.start", ">= 0", start)
        require(rate_scale > 0, "workload.rate_scale", "> 0", rate_scale)
        some = max_think_s is None or max_think_s >= 0
        require(some, "workload.max_think_s", ">= 0 or null", max_think_s)
        limits = {"num_sessions": num_sessions, "max_turns": max_turns, "max_tokens": max_tokens}
        for field, value in {**limits, "max_prompt": max_prompt, "max_output": max_output}.items():
            require(value is None or value >= 1, f"workload.{field}", ">= 1 or null", value)
        rule = f"one of {', '.join(TOO_LONG)}"
        require(too_long in TOO_LONG, "workload.too_long", rule, too_long)
        self.name = "agent_sessions"
        self.start = start
        self.num_sessions = num_sessions
        self.rate = rate
        self.rate_scale = rate_scale
        self.max_turns = max_turns
        self.max_think_s = max_think_s
        self.share_system = share_system
        self.max_prompt = max_prompt
        self.max_output = max_output
        self.too_long = too_long
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.total_requests = 0
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The first call of each session, in order of arrival. Ids SESSION-TURN, and
        SESSION-TURN.AGENT-CALL for a sub-agent's."""
        read = read_sessions(self.start, self.num_sessions)
        taken = [self._cut(session) for session in read]
        sessions = [session for session in taken if session.turns]
        rule = "such that at least one session has a call"
        require(bool(sessions), "workload.start and max_prompt", rule, self.start)
        self._places: dict[str, Place] = {}
        self._prompts = AgentPrompts(sessions, self.share_system, vocab_size)
        self._describe(read, sessions)
        times = arrivals(len(sessions), self.rate, seed) / self.rate_scale
        return [
            self._request(Place(Running(session)), float(at))
            for session, at in zip(sessions, times, strict=True)
        ]

    def follow_up(self, record: RequestRecord) -> Sequence[Request]:
        """What waited for this call alone: sub-agents, their next call, or the next turn."""
        place, ended_s = self._places.pop(record.request_id), record.finished_s
        assert ended_s is not None, "a request that has ended has an end"
        running = place.running
        turn = running.session.turns[running.turn]
        if place.agent is None:
            running.agents_left = len(turn.agents)
            starts = [Place(running, agent) for agent in range(len(turn.agents))]
            return [self._after(one, ended_s) for one in starts] or self._next(running, ended_s)
        if place.step + 1 < len(turn.agents[place.agent]):
            return [self._after(replace(place, step=place.step + 1), ended_s)]
        running.agents_left -= 1
        return [] if running.agents_left else self._next(running, ended_s)

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts

    def _next(self, running: Running, ended_s: float) -> list[Request]:
        running.turn += 1
        left = running.turn < len(running.session.turns)
        return [self._after(Place(running), ended_s)] if left else []

    def _after(self, place: Place, ended_s: float) -> Request:
        think_s = _call(place).delay_s / self.rate_scale
        return self._request(place, ended_s + think_s)

    def _request(self, place: Place, arrival_s: float) -> Request:
        call, session = _call(place), place.running.session.name
        agent = "" if place.agent is None else f".{place.agent}-{place.step}"
        name = f"{session}-{place.running.turn}{agent}"
        self._places[name] = place
        return Request(
            request_id=name,
            prompt=self._prompts.prompt(session, call),
            params=self._params,
            arrival_s=arrival_s,
            client=session,
            session=session,
            namespace="" if self.share_system else session,
            forced_output=call.output_tokens,
        )

    def _cut(self, session: AgentSession) -> AgentSession:
        """The session as the model can take it."""
        turns = []
        for turn in session.turns[: self.max_turns]:
            if not self._fits(turn.call):
                break
            agents = (self._chain(agent) for agent in turn.agents)
            turns.append(Turn(self._fitted(turn.call), tuple(agent for agent in agents if agent)))
        return replace(session, turns=tuple(turns))

    def _chain(self, calls: tuple[Call, ...]) -> tuple[Call, ...]:
        fitting = next((i for i, call in enumerate(calls) if not self._fits(call)), len(calls))
        return tuple(self._fitted(call) for call in calls[:fitting])

    def _fits(self, call: Call) -> bool:
        return self.too_long == "clip" or not self._beyond(call)

    def _beyond(self, call: Call) -> bool:
        long = call.prompt_tokens > (self.max_prompt or math.inf)
        return long or call.output_tokens > (self.max_output or math.inf)

    def _fitted(self, call: Call) -> Call:
        think_s = call.delay_s if self.max_think_s is None else self.max_think_s
        if call.delay_s <= think_s and not self._beyond(call):
            return call
        return replace(
            call,
            delay_s=min(call.delay_s, think_s),
            prompt_tokens=min(call.prompt_tokens, self.max_prompt or call.prompt_tokens),
            output_tokens=min(call.output_tokens, self.max_output or call.output_tokens),
        )

    def _describe(self, read: list[AgentSession], sessions: list[AgentSession]) -> None:
        """Count what is replayed and what became of the rest; the maximum that requests state."""
        calls = [call for session in sessions for call in session.calls()]
        asked = [
            call
            for session in read
            for call in replace(session, turns=session.turns[: self.max_turns]).calls()
        ]
        longest = max(call.output_tokens for call in calls)
        limit = longest if self.max_tokens is None else self.max_tokens
        require(limit >= longest, "workload.max_tokens", f">= {longest}", limit)
        self._params = SamplingParams(max_tokens=limit, temperature=self.temperature)
        self.total_requests = len(calls)
        self.facts = {
            "sessions": len(sessions),
            "requests": len(calls),
            "of_sub_agents": len(calls) - sum(len(session.turns) for session in sessions),
            "prompt_tokens": sum(call.prompt_tokens for call in calls),
            "output_tokens": sum(call.output_tokens for call in calls),
            "max_tokens": limit,
            "share_system": self.share_system,
            "skipped": len(asked) - len(calls),
            "clipped": sum(map(self._beyond, asked)) if self.too_long == "clip" else 0,
        }
        beyond = self.facts["skipped"] or self.facts["clipped"]
        if beyond:
            text = "workload agent_sessions: %d of %d calls %s (max_prompt %s, max_output %s)"
            word = {"skip": "left out", "clip": "cut"}[self.too_long]
            logger.warning(text, beyond, len(asked), word, self.max_prompt, self.max_output)


def _call(place: Place) -> Call:
    turn = place.running.session.turns[place.running.turn]
    return turn.call if place.agent is None else turn.agents[place.agent][place.step]
