"""How both completion endpoints write JSON: chunk events, whole answers, usage, finite numbers.

A chunk is put together from ready-made parts, since it is made for every token: a pydantic model
for each takes about ten times as long. All is ASCII: some clients split lines at U+2028 or U+0085.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from plugins.server.call import Counts
from plugins.server.choice import Delta, Scored
from plugins.server.replies import FLOOR
from plugins.shared.tokens import TokenTable

quoted = json.encoder.encode_basestring_ascii


class Format(Protocol):
    """What an endpoint's answers hold. kind, chunk_kind: their `object`, plain and streamed.
    opening, ending: JSON keys and values of a choice's chunk before any text ("" = there is none)
    and with its finish."""

    kind: str
    chunk_kind: str
    opening: str
    ending: str

    def part(self, text: str) -> str:
        """JSON key and value of a chunk with this text."""

    def whole(self, text: str) -> dict[str, Any]:
        """Those of a plain answer's choice."""

    def logprobs(self, table: TokenTable, scored: Sequence[Scored]) -> dict[str, Any]:
        """Log-probabilities of tokens, in OpenAI's form."""


class Writer:
    """The answer to one call, as server-sent events or whole. counted: chunks have a `usage`,
    null."""

    def __init__(
        self, form: Format, call_id: str, created: int, model: str, table: TokenTable, counted: bool
    ) -> None:
        self._form = form
        self._table = table
        self._facts = {"id": call_id, "object": form.kind, "created": created, "model": model}
        self._head = (
            f'data: {{"id":{quoted(call_id)},"object":{quoted(form.chunk_kind)},'
            f'"created":{created},"model":{quoted(model)},'
        )
        self._tail = '}],"usage":null}\n\n' if counted else "}]}\n\n"

    def opening(self, num_choices: int) -> bytes:
        """Events before any token, or none: b""."""
        opening = self._form.opening
        events = [self._event(index, opening) for index in range(num_choices) if opening]
        return "".join(events).encode()

    def chunk(self, delta: Delta) -> bytes:
        """The events of a delta: its text, then its finish, as OpenAI has them."""
        events = ""
        if delta.text or delta.scored:
            scored = compact(self._logprobs(delta.scored)) if delta.scored else "null"
            events = self._event(delta.index, self._form.part(delta.text), scored)
        if delta.finish_reason:
            reason = quoted(delta.finish_reason)
            events += self._event(delta.index, self._form.ending, finish_reason=reason)
        return events.encode()

    def usage(self, counts: Counts) -> bytes:
        """The event without choices, which counts tokens."""
        return f'{self._head}"choices":[],"usage":{compact(usage(counts))}}}\n\n'.encode()

    def body(self, answers: list[Delta], counts: Counts) -> dict[str, Any]:
        """The answer to a plain call. answers: all that came, joined, one a choice, in order."""
        choices = [
            {
                "index": answer.index,
                **self._form.whole(answer.text),
                "logprobs": self._logprobs(answer.scored) if answer.scored else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return {**self._facts, "choices": choices, "usage": usage(counts)}

    def _event(
        self, index: int, content: str, logprobs: str = "null", finish_reason: str = "null"
    ) -> str:
        return (
            f'{self._head}"choices":[{{"index":{index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}{self._tail}'
        )

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return self._form.logprobs(self._table, scored)


def usage(counts: Counts) -> dict[str, Any]:
    """replies.Usage as a dict."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.output,
        "total_tokens": counts.prompt + counts.output,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }


def compact(value: Any) -> str:
    """ASCII JSON without spaces. Raises ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(float(logprob), FLOOR)
