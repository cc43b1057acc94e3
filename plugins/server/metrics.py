"""Prometheus metrics of the front ends.

Engine gauges and totals come from the engine's latest report, which every worker has, so any
worker's page shows the same. HTTP counters and histograms are a worker's own; with several workers
they are kept in files of one folder (prometheus-client's multiprocess mode, which the environment
variable PROMETHEUS_MULTIPROC_DIR chooses when that package is imported) and each page shows their
sum, also over workers that have ended.

Each accepted request counts once in `tritium_requests_total`, by how it ended; those refused with a
4xx or 5xx status count in `tritium_http_responses_total` alone.
"""

import os
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/engine",
    "/v1/engine/steps",
    "/metrics",
    "/health",
    "/ready",
)

Numbers = Mapping[str, tuple[str, float]]  # name -> help, value


class Metrics:
    """What this worker's HTTP side counted, and the engine's numbers at the time of the scrape.

    gauges and totals: called at each scrape; name -> (help, value) of the engine's gauges and
    ever-growing totals.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        gauges: Callable[[], Numbers] = dict,
        totals: Callable[[], Numbers] = dict,
    ) -> None:
        own = CollectorRegistry()
        self._pages = [own]
        if os.environ.get(FOLDER_VARIABLE):
            shared = CollectorRegistry()
            MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
            self._pages = [shared]
        engine = CollectorRegistry()
        engine.register(_EngineNumbers(gauges, totals))
        self._pages.append(engine)
        self._responses = Counter(
            "tritium_http_responses",
            "Responses by path and status",
            ("path", "status"),
            registry=own,
        )
        self._requests = Counter(
            "tritium_requests", "Accepted requests by how they ended", ("reason",), registry=own
        )
        tokens = Counter("tritium_tokens", "Tokens of accepted requests", ("kind",), registry=own)
        self._prompt = tokens.labels("prompt")
        self._cached = tokens.labels("prompt_cached")
        self._output = tokens.labels("output")
        chunks = Counter(
            "tritium_stream_chunks",
            "Stream writes; shared: several engine steps went out together, as the client lagged",
            ("kind",),
            registry=own,
        )
        self._single = chunks.labels("single")
        self._shared = chunks.labels("shared")
        self._ttft = self._histogram("ttft_seconds", "Call to first token", SECONDS, own)
        self._tpot = self._histogram(
            "tpot_seconds", "Mean time between tokens, by choice", TOKEN_SECONDS, own
        )
        self._e2e = self._histogram("e2e_seconds", "Call to last token", SECONDS, own)

    @staticmethod
    def _histogram(
        name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry
    ) -> Histogram:
        return Histogram(f"tritium_{name}", text, buckets=buckets, registry=registry)

    def response(self, path: str, status: int) -> None:
        """One HTTP response went out. Paths that no endpoint has share one label."""
        if path.startswith("/v1/models/"):
            path = "/v1/models"
        self._responses.labels(path if path in ENDPOINTS else "other", str(status)).inc()

    def chunks(self, single: int, shared: int) -> None:
        """Writes of a stream that has ended."""
        self._single.inc(single)
        self._shared.inc(shared)

    def ended(
        self, reason: str, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """An accepted request is over. reason: stop, length, abort (the client left), timeout,
        capacity or error."""
        self._requests.labels(reason).inc()
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)
        self._output.inc(output_tokens)

    def latencies(self, ttft_s: float, e2e_s: float, gaps: int) -> None:
        """Times of a request that produced tokens. gaps: tokens - 1 of its longest choice."""
        self._ttft.observe(ttft_s)
        self._e2e.observe(e2e_s)
        if gaps:
            self._tpot.observe((e2e_s - ttft_s) / gaps)

    def page(self) -> bytes:
        """The text of /metrics."""
        return b"".join(generate_latest(registry) for registry in self._pages)


class _EngineNumbers:
    def __init__(self, gauges: Callable[[], Numbers], totals: Callable[[], Numbers]) -> None:
        self._gauges = gauges
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        for name, (text, value) in self._gauges().items():
            yield GaugeMetricFamily(f"tritium_{name}", text, value=value)
        for name, (text, value) in self._totals().items():
            yield CounterMetricFamily(f"tritium_{name}", text, value=value)
