"""Mooncake's traces: arrivals, lengths and the prefix blocks that requests share.

Source: kvcache-ai/Mooncake (Apache-2.0), FAST 2025, arXiv:2407.00079. A request lists the ids of
its 512-token blocks; an id stands for the block and all before it. Each becomes tokens
(plugins/workload/contents.py), so that the prefix cache finds exactly what the trace shares.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.config import require
from core.request import Request
from plugins.workload.block_trace import Blocks
from plugins.workload.common import TRACES, read_jsonl
from plugins.workload.own_file import checked
from plugins.workload.trace import Cut, Trace, replay

BLOCK_TOKENS = 512
SHIPPED = ("conversation", "synthetic")
BLOB_IDS = {"toolagent": "b765599d1e08", "arxiv": "d68d1c6ce27b"}


class Mooncake:
    """dataset: conversation (12,031 requests over 59 minutes, mean prompt 12,035 and output 343
    tokens, 36.6 % of blocks seen before) or synthetic (3,993 over 17, 15,325 and 149, 64.0 %).

    toolagent and arxiv are too large to ship: path is your copy (.jsonl, also .gz), and its git
    blob id is checked. The other arguments: plugins/workload/trace.py::Cut.
    """

    def __init__(
        self,
        dataset: str = "conversation",
        path: str | None = None,
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
        known = (*SHIPPED, *BLOB_IDS)
        require(dataset in known, "workload.dataset", f"one of {', '.join(known)}", dataset)
        own = path is None or dataset in BLOB_IDS
        require(own, "workload.path", f"null for {dataset}, which is shipped", path)
        self.name = f"mooncake_{dataset}"
        self.dataset = dataset
        self.path = path
        self.cut = Cut(
            start, num_requests, window_s, rate_scale, max_prompt, max_output, too_long, max_tokens
        )
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids NAME-ROW. The seed changes nothing."""
        trace, blocks = read_mooncake(self._file(), self.name)
        contents = blocks.contents(vocab_size)
        requests, self.facts = replay(trace, self.cut, contents, self.temperature)
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts

    def _file(self) -> Path:
        if self.dataset in SHIPPED:
            return TRACES / "mooncake" / f"{self.dataset}_trace.jsonl.gz"
        return checked(self.path, None, {self.dataset: BLOB_IDS[self.dataset]})


def read_mooncake(path: Path, name: str) -> tuple[Trace, Blocks]:
    """Columns and block ids of a file, in its order (many arrivals share a millisecond)."""
    rows = [row for _, row in read_jsonl(path, "workload.path")]
    trace = Trace(
        name=name,
        row=np.arange(len(rows)),
        arrival_s=np.array([row["timestamp"] for row in rows]) / 1e3,
        prompt_tokens=np.array([row["input_length"] for row in rows], dtype=np.int64),
        output_tokens=np.array([row["output_length"] for row in rows], dtype=np.int64),
    )
    return trace, Blocks((row["hash_ids"] for row in rows), BLOCK_TOKENS)
