"""Qwen-Bailian's traces: chats of a cloud service with the prefix blocks that they share, from a
user's own copy.

Source: alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0), USENIX ATC 2025, arXiv:2506.02634;
too large to ship. A request lists the ids of its 16-token blocks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.config import require
from core.request import Request
from plugins.workload.block_trace import Blocks
from plugins.workload.common import read_jsonl
from plugins.workload.own_file import checked
from plugins.workload.trace import Cut, Trace, replay

BLOCK_TOKENS = 16
SHA256 = {
    "qwen_coder_blksz_16.jsonl": "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff",
    "qwen_thinking_blksz_16.jsonl": (
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906"
    ),
}


class QwenBailian:
    """path: your qwen_coder_blksz_16.jsonl or qwen_thinking_blksz_16.jsonl (also .gz), whose sha256
    is checked; checksum: another one that you trust. Open loop: a chat's turns come when they came.
    A request's session is its chat's first request, its client the kind of request (`type`). The
    other arguments: plugins/workload/trace.py::Cut."""

    def __init__(
        self,
        path: str,
        checksum: str | None = None,
        start: int = 0,
        num_requests: int | None = None,
        window_s: float | None = None,
        rate_scale: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
        too_long: str = "skip",
        max_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> None:
        self.name = "qwen_bailian"
        self.path = path
        self.checksum = checksum
        self.cut = Cut(
            start, num_requests, window_s, rate_scale, max_prompt, max_output, too_long, max_tokens
        )
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids qwen_bailian-ROW."""
        trace, blocks = read_bailian(checked(self.path, self.checksum, SHA256))
        contents = blocks.contents(vocab_size)
        requests, self.facts = replay(trace, self.cut, contents, self.temperature)
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts


def read_bailian(path: Path) -> tuple[Trace, Blocks]:
    """Columns and block ids; a request's session is the chat_id of its chat's first request."""
    rows = [row for _, row in read_jsonl(path, "workload.path")]
    require(bool(rows), "workload.path", "a file with at least one request", str(path))
    kinds = sorted({str(row["type"]) for row in rows})
    root: dict[int, int] = {}
    for row in rows:
        parent = row["parent_chat_id"]
        root[row["chat_id"]] = row["chat_id"] if parent < 0 else root.get(parent, parent)
    times = np.array([row["timestamp"] for row in rows], dtype=np.float64)
    whole = Trace(
        name="qwen_bailian",
        row=np.arange(len(rows)),
        arrival_s=times,
        prompt_tokens=np.array([row["input_length"] for row in rows], dtype=np.int64),
        output_tokens=np.array([max(1, row["output_length"]) for row in rows], dtype=np.int64),
        client=np.array([kinds.index(str(row["type"])) for row in rows]),
        clients=kinds,
        session=np.array([root[row["chat_id"]] for row in rows]),
    )
    in_order = whole.take(np.argsort(times, kind="stable"))
    return in_order, Blocks((row["hash_ids"] for row in rows), BLOCK_TOKENS)
