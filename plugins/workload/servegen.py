"""Mixes of clients generated from ServeGen's models: few heavy ones, many light, each with bursts
and lengths of its own.

Source: alibaba/ServeGen (Apache-2.0), arXiv:2505.09999: models fitted to a cloud provider's
traffic, not its requests. They hold no content: prompts are random and share nothing.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.request import Request
from plugins.workload.common import stream
from plugins.workload.contents import unshared
from plugins.workload.servegen_clients import DAY_S, Client, Lengths, Window, read_clients
from plugins.workload.trace import Cut, Trace, replay

DATASETS = {"deepseek-r1": "deepseek-r1_1day", "m-large": "m-large_day1"}
logger = logging.getLogger(__name__)


class ServeGen:
    """Requests of a part of a day, each client's under its label client-N.

    dataset: deepseek-r1 (73 clients, 16 requests/s over the day, long answers) or m-large (162, 279
    requests/s; the 15 without published lengths, 46 % of the load, are left out and counted).
    start_s, window_s: which part of the day. In each ten minutes a client sends as many requests as
    published, with gaps of the published family (Gamma or Weibull) and shape, and lengths of its
    six hours, prompt and output drawn apart (ServeGen's own generator takes both at one quantile).
    num_clients: only so many, those with most requests in the part; None = all. The other
    arguments: plugins/workload/trace.py::Cut.
    """

    def __init__(
        self,
        dataset: str = "deepseek-r1",
        start_s: float = 43_200.0,
        window_s: float = 600.0,
        num_clients: int | None = None,
        num_requests: int | None = None,
        rate_scale: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
        too_long: str = "skip",
        max_tokens: int | None = None,
        temperature: float = 0.0,
    ) -> None:
        rule = f"one of {', '.join(DATASETS)}"
        require(dataset in DATASETS, "workload.dataset", rule, dataset)
        require(0 <= start_s < DAY_S, "workload.start_s", f"in [0, {DAY_S:.0f})", start_s)
        require(window_s > 0, "workload.window_s", "> 0", window_s)
        some = num_clients is None or num_clients >= 1
        require(some, "workload.num_clients", ">= 1 or null", num_clients)
        self.name = f"servegen_{dataset}"
        self.dataset = dataset
        self.start_s = start_s
        self.end_s = min(DAY_S, start_s + window_s)
        self.num_clients = num_clients
        self.cut = Cut(
            0, num_requests, None, rate_scale, max_prompt, max_output, too_long, max_tokens
        )
        self.temperature = temperature
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival; ids NAME-0, NAME-1, ..."""
        clients = read_clients(DATASETS[self.dataset], self.start_s, self.end_s)
        known = [client for client in clients if client.texts]
        without = [client for client in clients if not client.texts]
        trace = self._generate(known, seed)
        contents = unshared(vocab_size, seed)
        requests, facts = replay(trace, self.cut, contents, self.temperature)
        asked = [sum(window.num for window in client.windows) for client in without]
        self.facts = facts | {
            "clients": len(trace.clients),
            "clients_without_lengths": len(without),
            "requests_of_clients_without_lengths": sum(asked),
        }
        if without:
            text = "workload %s: %d clients without published lengths are left out, %d requests"
            logger.warning(text, self.name, len(without), sum(asked))
        return requests

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts

    def _generate(self, clients: list[Client], seed: int) -> Trace:
        """Requests of the part of the day in order of arrival, of the clients that have most."""
        drawn = [self._client(client, seed) for client in clients]
        order = sorted(range(len(clients)), key=lambda index: -len(drawn[index][0]))
        taken = [index for index in order[: self.num_clients] if len(drawn[index][0])]
        rule = "a part of the day with requests"
        require(bool(taken), "workload.start_s and window_s", rule, (self.start_s, self.end_s))
        times, prompts, outputs = (
            np.concatenate([drawn[index][column] for index in taken]) for column in range(3)
        )
        owner = np.repeat(np.arange(len(taken)), [len(drawn[index][0]) for index in taken])
        by_time = np.argsort(times, kind="stable")
        return Trace(
            name=self.name,
            row=np.arange(len(times)),
            arrival_s=times[by_time],
            prompt_tokens=prompts[by_time].astype(np.int64),
            output_tokens=outputs[by_time].astype(np.int64),
            client=owner[by_time],
            clients=[f"client-{clients[index].number}" for index in taken],
        )

    def _client(self, client: Client, seed: int) -> tuple[NDArray[np.float64], ...]:
        """Arrivals in the part of the day, prompt and output lengths."""
        lengths = client.lengths()
        columns = [
            self._window(client.number, window, lengths[window.period_s], seed)
            for window in client.windows
        ]
        times, prompts, outputs = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        inside = (times >= self.start_s) & (times < self.end_s)
        return times[inside], prompts[inside], outputs[inside]

    def _window(
        self, client: int, window: Window, lengths: tuple[Lengths, Lengths], seed: int
    ) -> tuple[NDArray[Any], ...]:
        """A window draws on its own: it is the same in whatever part of the day it is taken."""
        which = (client, int(window.start_s))
        return (
            window.arrivals(stream(seed, "arrival", *which)),
            lengths[0].draw(window.num, stream(seed, "prompt_length", *which)),
            lengths[1].draw(window.num, stream(seed, "output_length", *which)),
        )
