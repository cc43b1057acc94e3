"""The metrics that tables and figures show, by name; each is defined in plugins/mode/summary.py."""

from dataclasses import dataclass

from core.errors import ConfigError
from experiments.paper.folders import Run, select


@dataclass(frozen=True, slots=True)
class Metric:
    """path: in summary.json. scale: shown value = scale * stored one, in `unit`. better: which way
    is good, "higher" or "lower"; "" = neither.

    How it follows from requests, for a bootstrap: column and quantile (None = mean) of a sample a
    request; gaps: of a sample a token gap; part / whole: a ratio of sums; a part alone: a sum."""

    name: str
    label: str
    path: str
    unit: str = ""
    scale: float = 1.0
    better: str = ""
    column: str = ""
    quantile: float | None = None
    gaps: bool = False
    part: str = ""
    whole: str = ""

    @property
    def title(self) -> str:
        """Label with unit, for a column or an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def value(self, run: Run) -> float | None:
        """In the unit shown; None if the run has no such number."""
        found = select(run.summary, self.path)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return None
        return self.scale * float(found)


def metric(name: str) -> Metric:
    """A metric by its name, or any number of summary.json by its dotted path."""
    if name in METRICS:
        return METRICS[name]
    if "." in name:
        return Metric(name, name, name)
    raise ConfigError(
        f"metric must be one of {', '.join(METRICS)}, or a dotted path of summary.json, got {name}"
    )


def _latencies(short: str, label: str, unit: str, scale: float) -> list[Metric]:
    gaps, key = short == "itl", f"{short}_s"
    return [
        Metric(
            f"{short}_{name}",
            f"{label} {name}",
            f"latency.{key}.{name}",
            unit,
            scale,
            "lower",
            "" if gaps or short == "normalised" else key,
            quantile,
            gaps,
        )
        for name, quantile in (("mean", None), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    ]


_ALL = [
    Metric(
        "output_tokens_per_s", "output tokens/s", "throughput.output_tokens_per_s", better="higher"
    ),
    Metric(
        "total_tokens_per_s", "total tokens/s", "throughput.total_tokens_per_s", better="higher"
    ),
    Metric("requests_per_s", "requests/s", "throughput.requests_per_s", better="higher"),
    Metric("attainment", "SLO attainment", "slo.attainment", "%", 100, "higher"),
    Metric("slo_requests_per_s", "requests/s within SLO", "slo.requests_per_s", better="higher"),
    *_latencies("ttft", "TTFT", "s", 1),
    *_latencies("itl", "ITL", "ms", 1000),
    *_latencies("tpot", "TPOT", "ms", 1000),
    *_latencies("e2e", "E2E", "s", 1),
    *_latencies("queue", "queueing", "s", 1),
    *_latencies("normalised", "normalised latency", "ms/token", 1000),
    Metric(
        "hit_rate",
        "prefix hit rate",
        "hit_rate",
        "%",
        100,
        "higher",
        part="cached_tokens",
        whole="prompt_tokens",
    ),
    Metric(
        "recompute_tax",
        "recompute tax",
        "recompute_tax",
        "%",
        100,
        "lower",
        part="recomputed_tokens",
        whole="computed_tokens",
    ),
    Metric("preemptions", "preemptions", "preemptions", better="lower", part="preemptions"),
    Metric("evicted_pages", "evicted pages", "evicted_pages", better="lower"),
    Metric("waste", "wasted slots", "waste.total", "%", 100, "lower"),
    Metric("kv_live", "KV live, mean", "kv.live_mean", "%", 100),
    Metric("batch", "batch, mean", "batch.batch_mean"),
    Metric("jain_index", "Jain index of service", "fairness.jain_index", better="higher"),
]
METRICS = {one.name: one for one in _ALL}
SHOWN = (
    "output_tokens_per_s",
    "requests_per_s",
    "attainment",
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
    "tpot_p50",
    "tpot_p99",
    "e2e_p50",
    "e2e_p99",
    "hit_rate",
    "recompute_tax",
    "preemptions",
    "jain_index",
)
