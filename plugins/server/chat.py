"""What answers of /v1/chat/completions hold."""

from collections.abc import Sequence
from typing import Any

from plugins.server.choice import Scored
from plugins.server.chunks import finite, quoted
from plugins.shared.tokens import TokenTable


class Chat:
    """chunks.Format."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening = '"delta":{"role":"assistant","content":""}'
    ending = '"delta":{}'

    def part(self, text: str) -> str:
        """See Format."""
        return f'"delta":{{"content":{quoted(text)}}}'

    def whole(self, text: str) -> dict[str, Any]:
        """See Format."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, table: TokenTable, scored: Sequence[Scored]) -> dict[str, Any]:
        """See Format."""
        return {"content": [_entry(table, entry) for entry in scored]}


def _entry(table: TokenTable, entry: Scored) -> dict[str, Any]:
    logprobs = entry.logprobs
    assert logprobs is not None, "a chat does not echo its prompt"
    top = zip(logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
    return {
        "token": entry.text.token,
        "logprob": finite(logprobs.logprob),
        "bytes": entry.text.utf8,
        "top_logprobs": [
            {
                "token": table.token_text(token_id),
                "logprob": finite(value),
                "bytes": list(table.token_bytes(token_id, skip_special_tokens=False)),
            }
            for token_id, value in top
        ],
    }
