"""How far a simulated run is from what its requests and step times allow.

isolated      a request alone in the engine: its prompt in as few steps as max_num_batched_tokens
              allows, nothing cached, then a step a token; by the step-time model, host time and
              padding left out. Slowdown: the latency it had over that; below 1 where the cache
              served part of its prompt.
stability     the highest rate of such requests that any schedule could keep up with: a step takes
              at least as long as its prompt tokens alone and as its decode rows alone, prompt
              tokens are cheapest in full steps, decode rows in the largest batch that
              max_num_seqs and the pool allow. Prompt tokens that a cache without end would find
              cost nothing. load: the rate at which the requests came, as a share of it; above 1
              queues grow without end.
roofline      output tokens a second at that rate
hit rate      of a cache without end, and of Belady's MIN with as many pages as the pool has
              (plugins/shared/cache_bounds.py), prompts alone, in order of arrival

They bound a run in which step time is the model's; requests with several choices are left out of
slowdowns. A closed loop has no rate of its own and no order of arrival: neither is bounded then."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.engine import Engine
from core.errors import ConfigError
from core.records import RequestRecord, StepRecord
from core.request import Request
from plugins.mode.samples import distribution
from plugins.shared.cache_bounds import belady_min_hits, infinite_hits, prefix_trace, prompt_uses
from plugins.shared.metrics import COMPLETED, e2e_s, ttft_s
from plugins.shared.step_time import StepTimeModel

Float = NDArray[np.float64]


class Bounds:
    """A sink that keeps what bounds need of each request. requests: all of the run in order of
    arrival, None = they follow from what ended. Raises ConfigError for an executor without a
    step-time model."""

    def __init__(self, engine: Engine, requests: Sequence[Request] | None) -> None:
        model = getattr(engine.executor, "step_time", None)
        if model is None:
            raise ConfigError("mode.bounds must be false but for executor=simulated, got true")
        config, memory = engine.state.config, engine.state.memory
        self._model: StepTimeModel = model
        self._budget = config.max_num_batched_tokens
        self._max_rows = config.max_num_seqs
        self._pages, self._page_size = memory.ledger.num_pages, memory.page_size
        self._caches = memory.cache.stores
        self._requests = requests
        self._prompts, self._outputs = array("q"), array("q")
        self._ttft_s, self._e2e_s = array("d"), array("d")

    def step(self, record: StepRecord) -> None:
        """Nothing to do."""

    def request(self, record: RequestRecord) -> None:
        """Keep its lengths and latencies."""
        first_s, whole_s = ttft_s(record), e2e_s(record)
        alone = len(record.choices) == 1 and record.finish_reason in COMPLETED
        if alone and first_s is not None and whole_s is not None:
            self._prompts.append(record.prompt_tokens)
            self._outputs.append(record.output_tokens)
            self._ttft_s.append(first_s)
            self._e2e_s.append(whole_s)

    def close(self, run: Any, summary: dict[str, Any]) -> None:
        """Nothing to do."""

    def summary(self) -> dict[str, Any]:
        """All bounds; None where one does not apply."""
        if not self._prompts:
            return {}
        first, whole = self._isolated()
        return {
            "isolated_ttft_s": distribution(first),
            "isolated_e2e_s": distribution(whole),
            "ttft_slowdown": distribution(np.array(self._ttft_s) / first),
            "e2e_slowdown": distribution(np.array(self._e2e_s) / whole),
            **self._limits(),
        }

    def _isolated(self) -> tuple[Float, Float]:
        """Seconds to the first token and to the last of each request alone."""
        model, pairs = self._model, zip(self._prompts, self._outputs, strict=True)
        first, whole = [], []
        for prompt, output in pairs:
            ends = np.minimum(np.arange(self._budget, prompt + self._budget, self._budget), prompt)
            begins = np.concatenate([[0], ends[:-1]])
            counts = ends - begins
            attended = counts * begins + counts * (counts + 1) // 2
            prefill_s = float(np.sum(model.seconds(np.ones_like(counts), counts, ends, attended)))
            reads = prompt + np.arange(1, output)
            decode_s = float(np.sum(model.seconds(1, 1, reads, reads))) if output > 1 else 0.0
            first.append(prefill_s)
            whole.append(prefill_s + decode_s)
        return np.array(first), np.array(whole)

    def _limits(self) -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(
            ("infinite_hit_rate", "min_hit_rate", "offered_requests_per_s", "load")
        )
        hits = 0
        if self._requests is not None and self._caches:
            trace = prefix_trace(prompt_uses(self._requests, self._page_size))
            prompts = sum(len(request.prompt) for request in self._requests)
            hits = infinite_hits(trace) * self._page_size
            least = belady_min_hits(trace, self._pages) * self._page_size
            found |= {"infinite_hit_rate": hits / prompts, "min_hit_rate": least / prompts}
        limit = self._limit(hits)
        found["stability_limit_requests_per_s"] = limit
        found["roofline_output_tokens_per_s"] = limit * float(np.mean(self._outputs))
        if self._requests is not None and len(self._requests) > 1:
            span_s = self._requests[-1].arrival_s - self._requests[0].arrival_s
            if span_s > 0:
                rate = (len(self._requests) - 1) / span_s
                found |= {"offered_requests_per_s": rate, "load": rate / limit}
        return found

    def _limit(self, hits: int) -> float:
        """Requests a second, were each as long as their mean; `hits`: prompt tokens of all that
        need no computing."""
        prompts, outputs = np.array(self._prompts, float), np.array(self._outputs, float)
        num, budget = len(prompts), self._budget
        computed = max(float(prompts.sum()) - hits, float(num))
        # What a prompt's tokens attend to does not depend on its chunks; what hits save does.
        pairs = 0.0 if hits else float((prompts * (prompts + 1)).sum()) / 2 / float(prompts.sum())
        full_s = float(self._model.seconds(1, budget, budget, budget * pairs))
        prefill_s = computed / budget * full_s / num
        decodes = outputs - 1
        if not decodes.sum():
            return 1 / prefill_s
        reads = float((decodes * (prompts + outputs / 2)).sum()) / float(decodes.sum())
        rows = float(min(self._max_rows, budget))
        if not hits:  # rows that share pages can be more than the pool would hold apart
            rows = min(rows, max(self._pages * self._page_size / reads, 1.0))
        step_s = float(self._model.seconds(rows, rows, rows * reads, rows * reads))
        decode_s = float(decodes.mean()) * step_s / rows
        return 1 / max(prefill_s, decode_s)
