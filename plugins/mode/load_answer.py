"""What mode load hears: the chunks of a streamed answer, and the record they amount to.

A chunk says how much text it brought, seldom how many tokens. They are counted so, the first that
applies:

- logprobs: each chunk lists its tokens, and the lists agree with the answer's usage if it has one.
- usage: the total is exact, its place an estimate. Each chunk with text brought one token; what is
  left goes, one each, to the chunks without text (an end token has none; nor has half a character),
  then to where a token has the most characters.
- chunks: one each.

Tokens of one chunk have one time, that of its arrival: the gaps between them are 0. Token ids are
not known and stand as -1; a token's step is the number of its chunk in the answer."""

import heapq
from array import array
from dataclasses import dataclass, field
from typing import Any

from core.records import ChoiceRecord, RequestRecord
from core.request import FinishReason, Request

UNKNOWN_ID = -1
REASONS = {
    "stop": FinishReason.stop,
    "length": FinishReason.length,
    "tool_calls": FinishReason.stop,
    "function_call": FinishReason.stop,
    "abort": FinishReason.abort,
}
TEXTS = ("content", "reasoning_content", "reasoning")  # of a chat's delta


@dataclass(slots=True, eq=False)
class Answer:
    """One request on its way, in columns: an object for each chunk would keep the garbage collector
    busy while time is measured.

    num_choices: asked for. sent_s, ended_s: when the driver began to send and when it was through.
    prompt_tokens, output_tokens, cached_tokens: its usage, None = not told. times_s, choices,
    chars, listed: of each chunk, arrival, choice, characters of text, tokens that it lists. kind:
    of the fault that ended it, "" = none; error: its message."""

    sent_s: float
    num_choices: int
    ended_s: float = 0.0
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    choices: "array[int]" = field(default_factory=lambda: array("i"))
    chars: "array[int]" = field(default_factory=lambda: array("i"))
    listed: "array[int]" = field(default_factory=lambda: array("i"))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    finished_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    kind: str = ""
    error: str = ""

    def fail(self, kind: str, error: str) -> None:
        """End it; the first fault stands."""
        if not self.kind:
            self.kind, self.error = kind, error

    def take(self, event: Any, now_s: float) -> None:
        """The JSON of one event. Raises AttributeError, KeyError, TypeError or ValueError for one
        that does not look like OpenAI's."""
        if error := event.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            self.fail("error_event", str(message))
        if usage := event.get("usage"):
            self._count(usage)
        for choice in event.get("choices") or ():
            self._chunk(choice, now_s)

    def _count(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        self.prompt_tokens = int(usage["prompt_tokens"])
        self.output_tokens = int(usage["completion_tokens"])
        self.cached_tokens = None if cached is None else int(cached)

    def _chunk(self, choice: dict[str, Any], now_s: float) -> None:
        index, delta = int(choice.get("index", 0)), choice.get("delta")
        if not 0 <= index < self.num_choices:
            raise ValueError(f"there is no choice {index}")
        text = choice.get("text") or ""
        if delta:
            text = "".join(delta[name] for name in TEXTS if delta.get(name))
        logprobs = choice.get("logprobs") or {}
        listed = len(logprobs.get("content") or logprobs.get("tokens") or ())
        reason = choice.get("finish_reason")
        if reason:
            self.finish_reasons[index] = str(reason)
            self.finished_s = now_s
        opens = delta is not None and "role" in delta and not text
        ends = bool(reason) and reason != "stop" and not text  # the end alone, which is no token
        if listed or not (opens or ends):
            self._place(now_s, index, len(text), listed)

    def _place(self, now_s: float, index: int, chars: int, listed: int) -> None:
        self.times_s.append(now_s)
        self.choices.append(index)
        self.chars.append(chars)
        self.listed.append(listed)

    def counts(self) -> tuple[list[int], str]:
        """Tokens of each chunk, and how they were counted (see the module's docstring)."""
        total = self.output_tokens
        listed = sum(self.listed)
        if listed and total in (None, listed):
            return self.listed.tolist(), "logprobs"
        if total is None:
            return [int(chars > 0) for chars in self.chars], "chunks"
        if total and not self.times_s:  # none had text: they came with the end
            self._place(self.ended_s if self.finished_s is None else self.finished_s, 0, 0, 0)
        return placed(self.chars.tolist(), total), "usage"


def placed(chars: list[int], total: int) -> list[int]:
    """`total` tokens on chunks with so many characters each, at least one chunk."""
    counts = [int(size > 0) for size in chars]
    left = total - sum(counts)
    if left < 0:  # text in more pieces than tokens: evenly
        texts = [index for index, size in enumerate(chars) if size]
        for rank, index in enumerate(texts):
            counts[index] = (rank + 1) * total // len(texts) - rank * total // len(texts)
        return counts
    for index in reversed(range(len(chars))):  # an end token comes last
        if left and not chars[index]:
            counts[index] = 1
            left -= 1
    held = enumerate(zip(chars, counts, strict=True))
    heap = [(-size / count, index) for index, (size, count) in held if count]
    heapq.heapify(heap)
    for _ in range(left):
        _, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (-chars[index] / counts[index], index))
    return counts


def record_of(request: Request, answer: Answer) -> tuple[RequestRecord, list[int], str]:
    """The request's record, its chunks' tokens and how they were counted."""
    most = request.output_limit * request.params.n
    if (answer.output_tokens or 0) > most:
        answer.fail("usage", f"usage tells of {answer.output_tokens} tokens, of at most {most}")
        answer.output_tokens = None
    counts, counted_by = answer.counts()
    choices = [ChoiceRecord() for _ in range(request.params.n)]
    for number, count in enumerate(counts):
        index = answer.choices[number]
        choices[index].token_ids.extend([UNKNOWN_ID] * count)
        choices[index].times_s.extend([answer.times_s[number]] * count)
        choices[index].steps.extend([number] * count)
    reason = _ending(answer)
    for index, choice in enumerate(choices):
        given = REASONS.get(answer.finish_reasons.get(index, ""), reason)
        choice.finish_reason = given.value
    record = RequestRecord(
        request.request_id,
        request.client,
        request.arrival_s,
        len(request.prompt) if answer.prompt_tokens is None else answer.prompt_tokens,
        finished_s=answer.ended_s if answer.kind else answer.finished_s,
        cached_tokens=answer.cached_tokens or 0,
        finish_reason=reason.value,
        error=answer.error,
        choices=choices,
    )
    return record, counts, counted_by


def _ending(answer: Answer) -> FinishReason:
    """Why the request ended, with a fault of the answer noted."""
    reasons = answer.finish_reasons
    if len(reasons) < answer.num_choices:
        answer.fail("cut_short", "the answer ended before its end")
    for reason in reasons.values():
        if reason not in REASONS:
            answer.fail("finish_reason", f"the server ended it with finish_reason {reason!r}")
    if answer.kind:
        return FinishReason.abort if answer.kind == "timeout" else FinishReason.error
    aborted = "abort" in reasons.values()
    return FinishReason.abort if aborted else REASONS[list(reasons.values())[-1]]
