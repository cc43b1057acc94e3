"""The Azure LLM inference traces of 2023: arrivals and lengths of two services.

Source: Azure/AzurePublicDataset (CC-BY-4.0), published with Splitwise (ISCA 2024,
arXiv:2311.18677). They hold no content: prompts are random and share nothing.
"""

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.config import require
from core.request import Request
from plugins.workload.common import TRACES, open_text
from plugins.workload.contents import unshared
from plugins.workload.trace import Cut, Trace, replay

DATASETS = ("code", "conv")


class Azure:
    """dataset: code (8,819 requests over 57 minutes, mean prompt 2,048 and output 28 tokens) or
    conv (19,366 over 58, 1,155 and 211). The other arguments: plugins/workload/trace.py::Cut."""

    def __init__(
        self,
        dataset: str = "code",
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
        rule = f"one of {', '.join(DATASETS)}"
        require(dataset in DATASETS, "workload.dataset", rule, dataset)
        self.name = f"azure_{dataset}"
        self.dataset = dataset
        self.cut = Cut(
            start, num_requests, window_s, rate_scale, max_prompt, max_output, too_long, max_tokens
        )
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids NAME-ROW."""
        trace, contents = read_azure(self.dataset), unshared(vocab_size, seed)
        requests, self.facts = replay(trace, self.cut, contents, self.temperature)
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts


def read_azure(dataset: str) -> Trace:
    """The whole trace, arrivals in seconds after its first request."""
    path = TRACES / "azure2023" / f"AzureLLMInferenceTrace_{dataset}.csv"
    with open_text(path) as lines:
        rows = list(csv.reader(lines))[1:]
    times, prompts, outputs = zip(*rows, strict=True)
    stamps = np.array(times, dtype="datetime64[ns]")
    return Trace(
        name=f"azure_{dataset}",
        row=np.arange(len(rows)),
        arrival_s=(stamps - stamps[0]) / np.timedelta64(1, "s"),
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )
