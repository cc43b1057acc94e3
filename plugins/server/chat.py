"""Answers of /v1/chat/completions, plain and streamed."""

from collections.abc import Sequence
from typing import Any

from plugins.server.call import Counts
from plugins.server.choice import Delta, Scored
from plugins.server.chunks import Chunks, compact, finite, quoted, usage
from plugins.server.tokens import TokenTable

ROLE = '"delta":{"role":"assistant","content":""}'


class Chat:
    """chunks.Format."""

    def __init__(
        self, call_id: str, created: int, model: str, table: TokenTable, counted: bool
    ) -> None:
        self._facts = {"id": call_id, "object": "chat.completion", "created": created}
        self._facts["model"] = model
        self._table = table
        self._chunks = Chunks(call_id, "chat.completion.chunk", created, model, counted)

    def opening(self, num_choices: int) -> bytes:
        """The role, for each choice."""
        events = [self._chunks.event(index, ROLE, "null", "null") for index in range(num_choices)]
        return "".join(events).encode()

    def chunk(self, delta: Delta) -> bytes:
        """See Format."""
        events = ""
        if delta.text or delta.scored:
            scored = compact(self._logprobs(delta.scored)) if delta.scored else "null"
            content = f'"delta":{{"content":{quoted(delta.text)}}}'
            events = self._chunks.event(delta.index, content, scored, "null")
        if delta.finish_reason:
            reason = quoted(delta.finish_reason)
            events += self._chunks.event(delta.index, '"delta":{}', "null", reason)
        return events.encode()

    def usage(self, counts: Counts) -> bytes:
        """See Format."""
        return self._chunks.usage(counts)

    def body(self, answers: list[Delta], counts: Counts) -> dict[str, Any]:
        """See Format."""
        choices = [
            {
                "index": answer.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.scored) if answer.scored else None,
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return {**self._facts, "choices": choices, "usage": usage(counts)}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in scored]}

    def _entry(self, entry: Scored) -> dict[str, Any]:
        logprobs = entry.logprobs
        assert logprobs is not None, "a chat does not echo its prompt"
        top = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
        return {
            "token": entry.text.token,
            "logprob": finite(logprobs.logprob),
            "bytes": entry.text.utf8,
            "top_logprobs": [
                {
                    "token": self._table.token_text(token_id),
                    "logprob": finite(value),
                    "bytes": list(self._table.token_bytes(token_id, skip_special_tokens=False)),
                }
                for token_id, value in top
            ],
        }
