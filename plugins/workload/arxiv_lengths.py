"""Lengths of arXiv summarisation: long prompts, short answers.

Source: microsoft/vidur (MIT), MLSys 2024, arXiv:2405.05465; Llama-2 tokens. It holds neither
arrivals nor content: arrivals are drawn, prompts are random and share nothing.
"""

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.request import Request
from plugins.workload.common import TRACES, arrivals, open_text
from plugins.workload.contents import unshared
from plugins.workload.trace import Cut, Trace, replay

NUM_ROWS = 28_257


class ArxivLengths:
    """`num_requests` of 28,257 rows from number `start`, mean prompt 2,588 and output 291 tokens.

    rate: arrivals a second, None = all at once; arrival_cv: coefficient of variation of the gaps,
    1 = Poisson, else Gamma. The other arguments: plugins/workload/trace.py::Cut.
    """

    def __init__(
        self,
        start: int = 0,
        num_requests: int | None = 1000,
        rate: float | None = 1.0,
        arrival_cv: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
        too_long: str = "skip",
        max_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> None:
        require(start < NUM_ROWS, "workload.start", f"< {NUM_ROWS}, the rows there are", start)
        self.name = "arxiv_lengths"
        self.rate = rate
        self.arrival_cv = arrival_cv
        self.cut = Cut(start, num_requests, None, 1.0, max_prompt, max_output, too_long, max_tokens)
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids arxiv_lengths-ROW."""
        prompts, outputs = read_arxiv()
        num = len(prompts)
        trace = Trace(self.name, np.arange(num), np.zeros(num), prompts, outputs)
        contents = unshared(vocab_size, seed)

        def times(num_taken: int) -> NDArray[np.float64]:
            return arrivals(num_taken, self.rate, seed, self.arrival_cv)

        requests, self.facts = replay(trace, self.cut, contents, self.temperature, times)
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts


def read_arxiv() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and output lengths of every row, int64."""
    path = TRACES / "lengths" / "arxiv_summarization_llama2_lengths.csv.gz"
    with open_text(path) as lines:
        rows = list(csv.reader(lines))[1:]
    prompts, outputs, *_ = zip(*rows, strict=True)
    return np.array(prompts, dtype=np.int64), np.array(outputs, dtype=np.int64)
