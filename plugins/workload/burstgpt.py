"""BurstGPT: bursty traffic of a university's ChatGPT and GPT-4 service, from a user's own copy.

Source: HPMLL/BurstGPT (CC-BY-4.0), arXiv:2401.17644; too large to ship. It holds no content:
prompts are random and share nothing.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.config import require
from core.request import Request
from plugins.workload.common import open_text
from plugins.workload.contents import unshared
from plugins.workload.own_file import checked
from plugins.workload.trace import Cut, Trace, replay

SHA256 = {
    "BurstGPT_1.csv": "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
    "BurstGPT_without_fails_1.csv": (
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4"
    ),
}
COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class BurstGpt:
    """path: your BurstGPT_1.csv or BurstGPT_without_fails_1.csv (also .gz), whose sha256 is
    checked; checksum: another one that you trust. Rows without a request or response token (failed
    calls) are left out and counted. service: only that of column Model (ChatGPT, GPT-4), None =
    both; it is the client. The other arguments: plugins/workload/trace.py::Cut."""

    def __init__(
        self,
        path: str,
        checksum: str | None = None,
        service: str | None = None,
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
        self.name = "burstgpt"
        self.path = path
        self.checksum = checksum
        self.service = service
        self.cut = Cut(
            start, num_requests, window_s, rate_scale, max_prompt, max_output, too_long, max_tokens
        )
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids burstgpt-ROW."""
        trace, failed = read_burstgpt(checked(self.path, self.checksum, SHA256), self.service)
        contents = unshared(vocab_size, seed)
        requests, facts = replay(trace, self.cut, contents, self.temperature)
        self.facts = facts | {"failed_calls_of_the_trace": failed}
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts


def read_burstgpt(path: Path, service: str | None) -> tuple[Trace, int]:
    """The calls of a service that succeeded, and how many did not."""
    with open_text(path) as lines:
        rows = list(csv.DictReader(lines))
    require(bool(rows), "workload.path", "a file with at least one request", str(path))
    missing = [name for name in COLUMNS if name not in rows[0]]
    require(not missing, "workload.path", f"a CSV with the columns {', '.join(COLUMNS)}", missing)
    services = np.array([row["Model"] for row in rows])
    prompts = np.array([row["Request tokens"] for row in rows], dtype=np.int64)
    outputs = np.array([row["Response tokens"] for row in rows], dtype=np.int64)
    names = sorted(set(services.tolist()))
    known = service is None or service in names
    require(known, "workload.service", f"one of {', '.join(names)} or null", service)
    ours = np.full(len(rows), True) if service is None else services == service
    answered = (prompts >= 1) & (outputs >= 1)
    whole = Trace(
        name="burstgpt",
        row=np.arange(len(rows)),
        arrival_s=np.array([row["Timestamp"] for row in rows], dtype=np.float64),
        prompt_tokens=prompts,
        output_tokens=outputs,
        client=np.searchsorted(names, services),
        clients=names,
    )
    kept = whole.take(ours & answered)
    in_order = kept.take(np.argsort(kept.arrival_s, kind="stable"))
    return in_order, int((ours & ~answered).sum())
