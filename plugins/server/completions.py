"""What answers of /v1/completions hold."""

from collections.abc import Sequence
from typing import Any

from plugins.server.choice import Scored
from plugins.server.chunks import finite, quoted
from plugins.shared.tokens import TokenTable


class Completions:
    """chunks.Format."""

    kind = chunk_kind = "text_completion"
    opening = ""
    ending = '"text":""'

    def part(self, text: str) -> str:
        """See Format."""
        return f'"text":{quoted(text)}'

    def whole(self, text: str) -> dict[str, Any]:
        """See Format."""
        return {"text": text}

    def logprobs(self, table: TokenTable, scored: Sequence[Scored]) -> dict[str, Any]:
        """See Format."""
        return {
            "tokens": [entry.text.token for entry in scored],
            "token_logprobs": [
                None if entry.logprobs is None else finite(entry.logprobs.logprob)
                for entry in scored
            ],
            "top_logprobs": [_top(table, entry) for entry in scored],
            "text_offset": [entry.text.text_offset for entry in scored],
            "bytes": [entry.text.utf8 for entry in scored],
        }


def _top(table: TokenTable, entry: Scored) -> dict[str, float] | None:
    """The best candidates and the token itself. Two ids of one name share an entry: the more likely
    has it."""
    if entry.logprobs is None:
        return None
    top: dict[str, float] = {}
    ids = entry.logprobs.top_ids.tolist()
    for token_id, value in zip(ids, entry.logprobs.top_logprobs.tolist(), strict=True):
        top.setdefault(table.token_text(token_id), finite(value))
    top.setdefault(entry.text.token, finite(entry.logprobs.logprob))
    return top
