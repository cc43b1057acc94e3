"""What trace workloads share: the columns of a trace, and which part of it is replayed, how."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.request import Request, SamplingParams
from plugins.workload.common import Ids
from plugins.workload.lazy import LazyRequests

TOO_LONG = ("skip", "clip")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A trace as columns of equal length, in order of arrival.

    row: place in the source, which names the request NAME-ROW. arrival_s: float64. prompt_tokens,
    output_tokens: int64, each >= 1. client: indices into `clients`, None = no labels. session:
    numbers of the sessions, None = none.
    """

    name: str
    row: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    client: NDArray[np.int64] | None = None
    clients: Sequence[str] = ()
    session: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: NDArray[Any] | slice) -> "Trace":
        """The rows that an index, a mask or a slice names."""
        return replace(
            self,
            row=self.row[which],
            arrival_s=self.arrival_s[which],
            prompt_tokens=self.prompt_tokens[which],
            output_tokens=self.output_tokens[which],
            client=None if self.client is None else self.client[which],
            session=None if self.session is None else self.session[which],
        )


Contents = Callable[[Trace], Callable[[int], Ids]]
"""For a part of a trace, what gives the prompt of each of its requests, int32 [prompt_tokens]."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a trace is replayed, and how.

    start: so many requests at the beginning are left out. window_s: only those within so many
    seconds (of the trace) after the first one taken. num_requests: at most so many. rate_scale:
    times are divided by it, 2 = twice the rate; the first one taken arrives at 0. max_prompt,
    max_output: what the model can take, in tokens; a request beyond one of them is left out
    (too_long=skip) or cut to it (clip: the first tokens of the prompt, so many of the output), and
    how many were is logged and in the manifest. max_tokens: what a request states as its maximum,
    all that policies see of a forced length; None = the longest output of the part.
    """

    start: int = 0
    num_requests: int | None = None
    window_s: float | None = None
    rate_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    too_long: str = "skip"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        require(self.start >= 0, "workload.start", ">= 0", self.start)
        require(self.rate_scale > 0, "workload.rate_scale", "> 0", self.rate_scale)
        some = self.window_s is None or self.window_s > 0
        require(some, "workload.window_s", "> 0 or null", self.window_s)
        for field in ("num_requests", "max_prompt", "max_output", "max_tokens"):
            value = getattr(self, field)
            require(value is None or value >= 1, f"workload.{field}", ">= 1 or null", value)
        rule = f"one of {', '.join(TOO_LONG)}"
        require(self.too_long in TOO_LONG, "workload.too_long", rule, self.too_long)

    def part(self, trace: Trace) -> Trace:
        """The requests taken, times as in the trace. Raises ConfigError if there are none."""
        part = trace.take(slice(self.start, None))
        if self.window_s is not None and len(part):
            part = part.take(part.arrival_s < part.arrival_s[0] + self.window_s)
        part = part.take(slice(self.num_requests))
        rule = f"< {len(trace)}, the requests of {trace.name}"
        require(len(part) > 0, "workload.start", rule, self.start)
        return part

    def fit(self, trace: Trace) -> tuple[Trace, dict[str, int]]:
        """Requests as the model can take them, and how many were skipped or clipped."""
        over_prompt = trace.prompt_tokens > (self.max_prompt or np.inf)
        over_output = trace.output_tokens > (self.max_output or np.inf)
        over = over_prompt | over_output
        limits = f"max_prompt {self.max_prompt}, max_output {self.max_output}"
        if over.any():
            words = {"skip": "left out", "clip": "cut"}[self.too_long]
            text = "workload %s: %d of %d requests %s (%s)"
            logger.warning(text, trace.name, over.sum(), len(trace), words, limits)
        if self.too_long == "skip":
            rule = "enough for at least one request"
            require(not over.all(), "workload.max_prompt and max_output", rule, limits)
            return trace.take(~over), {"skipped": int(over.sum())}
        fitted = replace(
            trace,
            prompt_tokens=np.minimum(trace.prompt_tokens, self.max_prompt or np.inf).astype(int),
            output_tokens=np.minimum(trace.output_tokens, self.max_output or np.inf).astype(int),
        )
        clipped = {"clipped_prompts": over_prompt, "clipped_outputs": over_output}
        return fitted, {name: int(mask.sum()) for name, mask in clipped.items()}

    def stated(self, outputs: NDArray[Any]) -> int:
        """The maximum that every request states. Raises ConfigError if it is too low."""
        longest = int(outputs.max())
        limit = longest if self.max_tokens is None else self.max_tokens
        require(limit >= longest, "workload.max_tokens", f">= {longest}", limit)
        return limit


def replay(
    trace: Trace,
    cut: Cut,
    contents: Contents,
    temperature: float,
    times: Callable[[int], NDArray[np.float64]] | None = None,
) -> tuple[LazyRequests, dict[str, Any]]:
    """The requests of a cut, output lengths forced, and what to say of them in the manifest.

    times: draws the arrivals of so many requests, for a trace that has none.
    """
    part, counted = cut.fit(cut.part(trace))
    params = SamplingParams(max_tokens=cut.stated(part.output_tokens), temperature=temperature)
    recorded = part.arrival_s - part.arrival_s[0]
    arrivals = (recorded if times is None else times(len(part))) / cut.rate_scale
    prompt = contents(part)

    def build(number: int) -> Request:
        return Request(
            request_id=f"{part.name}-{part.row[number]}",
            prompt=prompt(number),
            params=params,
            arrival_s=float(arrivals[number]),
            client="" if part.client is None else part.clients[part.client[number]],
            session="" if part.session is None else f"session-{part.session[number]}",
            forced_output=int(part.output_tokens[number]),
        )

    return LazyRequests(len(part), build), described(part, params.max_tokens) | counted


def described(part: Trace, max_tokens: int) -> dict[str, Any]:
    """Figures of what is replayed, for the manifest."""
    return {
        "trace": part.name,
        "requests": len(part),
        "prompt_tokens": int(part.prompt_tokens.sum()),
        "output_tokens": int(part.output_tokens.sum()),
        "max_tokens": max_tokens,
    }
