"""What both completion endpoints need to write JSON: chunk events, usage, finite numbers.

A chunk is put together from ready-made parts, since it is made for every token: a pydantic model
for each takes about ten times as long. All is ASCII: some clients split lines at U+2028 or U+0085.
"""

import json
from typing import Any, Protocol

from plugins.server.call import Counts
from plugins.server.choice import Delta
from plugins.server.replies import FLOOR

quoted = json.encoder.encode_basestring_ascii


class Format(Protocol):
    """How an endpoint answers. Events are whole server-sent events, or none: b""."""

    def opening(self, num_choices: int) -> bytes:
        """Events before any token."""

    def chunk(self, delta: Delta) -> bytes:
        """The events of a delta: its text, then its finish, as OpenAI has them."""

    def usage(self, counts: Counts) -> bytes:
        """The event that counts tokens."""

    def body(self, answers: list[Delta], counts: Counts) -> dict[str, Any]:
        """The answer to a plain call. answers: all that came, joined, one a choice, in order."""


class Chunks:
    """Writes chunk events. kind: the chunks' `object`. usage: chunks have a `usage`, null."""

    def __init__(self, call_id: str, kind: str, created: int, model: str, usage: bool) -> None:
        self._head = (
            f'data: {{"id":{quoted(call_id)},"object":{quoted(kind)},"created":{created},'
            f'"model":{quoted(model)},'
        )
        self._tail = '}],"usage":null}\n\n' if usage else "}]}\n\n"

    def event(self, index: int, content: str, logprobs: str, finish_reason: str) -> str:
        """content: the choice's own key and value, JSON; so are logprobs and finish_reason."""
        return (
            f'{self._head}"choices":[{{"index":{index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason}{self._tail}'
        )

    def usage(self, counts: Counts) -> bytes:
        """The event without choices."""
        return f'{self._head}"choices":[],"usage":{compact(usage(counts))}}}\n\n'.encode()


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
