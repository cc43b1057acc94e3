"""The trace of the VTC paper: 27 clients of very different appetites share one server.

Source: Ying1123/VTC-artifact (Apache-2.0), Virtual Token Counter, OSDI 2024, arXiv:2401.00588:
lengths and clients of a Chatbot Arena log. It holds no content: prompts are random and share
nothing. What the authors measured stands beside it in the file.
"""

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.request import Request
from plugins.workload.common import TRACES, open_text
from plugins.workload.contents import unshared
from plugins.workload.trace import Cut, Trace, replay


class VtcFairness:
    """1,500 requests over 600 s, mean prompt 136 and output 256 tokens, clients client-0 ..
    client-26. The arguments: plugins/workload/trace.py::Cut."""

    def __init__(
        self,
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
        self.name = "vtc_fairness"
        self.cut = Cut(
            start, num_requests, window_s, rate_scale, max_prompt, max_output, too_long, max_tokens
        )
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids vtc_fairness-ROW."""
        contents = unshared(vocab_size, seed)
        requests, self.facts = replay(read_vtc(), self.cut, contents, self.temperature)
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts


def read_vtc() -> Trace:
    """The whole trace."""
    path = TRACES / "fairness" / "vtc_arena_27clients_measured.csv"
    with open_text(path) as lines:
        rows = list(csv.DictReader(lines))
    client = np.array([int(row["client"]) for row in rows])
    return Trace(
        name="vtc_fairness",
        row=np.arange(len(rows)),
        arrival_s=np.array([float(row["arrival_s"]) for row in rows]),
        prompt_tokens=np.array([int(row["prompt_len"]) for row in rows]),
        output_tokens=np.array([int(row["output_len"]) for row in rows]),
        client=client,
        clients=[f"client-{number}" for number in range(int(client.max()) + 1)],
    )
