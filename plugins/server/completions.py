"""Answers of /v1/completions, plain and streamed."""

from collections.abc import Sequence
from typing import Any

from plugins.server.call import Counts
from plugins.server.choice import Delta, Scored
from plugins.server.chunks import Chunks, compact, finite, quoted, usage
from plugins.server.tokens import TokenTable


class Completions:
    """chunks.Format. logprobs: whether they were asked for."""

    def __init__(
        self, call_id: str, created: int, model: str, table: TokenTable, counted: bool
    ) -> None:
        self._facts = {"id": call_id, "object": "text_completion", "created": created}
        self._facts["model"] = model
        self._table = table
        self._chunks = Chunks(call_id, "text_completion", created, model, counted)

    def opening(self, num_choices: int) -> bytes:
        """None."""
        return b""

    def chunk(self, delta: Delta) -> bytes:
        """See Format."""
        events = ""
        if delta.text or delta.scored:
            scored = compact(self._logprobs(delta.scored)) if delta.scored else "null"
            text = f'"text":{quoted(delta.text)}'
            events = self._chunks.event(delta.index, text, scored, "null")
        if delta.finish_reason:
            reason = quoted(delta.finish_reason)
            events += self._chunks.event(delta.index, '"text":""', "null", reason)
        return events.encode()

    def usage(self, counts: Counts) -> bytes:
        """See Format."""
        return self._chunks.usage(counts)

    def body(self, answers: list[Delta], counts: Counts) -> dict[str, Any]:
        """See Format."""
        choices = [
            {
                "index": answer.index,
                "text": answer.text,
                "logprobs": self._logprobs(answer.scored) if answer.scored else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return {**self._facts, "choices": choices, "usage": usage(counts)}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return {
            "tokens": [entry.text.token for entry in scored],
            "token_logprobs": [
                None if entry.logprobs is None else finite(entry.logprobs.logprob)
                for entry in scored
            ],
            "top_logprobs": [self._top(entry) for entry in scored],
            "text_offset": [entry.text.text_offset for entry in scored],
            "bytes": [entry.text.utf8 for entry in scored],
        }

    def _top(self, entry: Scored) -> dict[str, float] | None:
        """The best candidates and the token itself. Two ids of one name share an entry: the more
        likely has it."""
        if entry.logprobs is None:
            return None
        top: dict[str, float] = {}
        ids = entry.logprobs.top_ids.tolist()
        for token_id, value in zip(ids, entry.logprobs.top_logprobs.tolist(), strict=True):
            top.setdefault(self._table.token_text(token_id), finite(value))
        top.setdefault(entry.text.token, finite(entry.logprobs.logprob))
        return top
