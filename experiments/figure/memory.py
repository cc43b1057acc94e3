"""Hit rate against the size of the cache, beside what no cache can beat."""

from collections.abc import Sequence

import numpy as np

from conf.instantiate import build
from core.errors import TritiumError
from experiments.figure.options import Options, along, mean
from experiments.figure.plots import Line, LinePlot, Panel
from experiments.paper.folders import Run, select
from experiments.paper.metrics import METRICS
from plugins.shared.cache_bounds import PrefixTrace, prefix_trace, prompt_uses, trace_bounds

SIZES = ("engine.pool_tokens",)
INFINITE, BELADY = "infinite cache", "Belady's MIN"
VOCABULARY = 32_000  # of random contents, where the executor does not say; hits do not depend on it


def hit_rate(runs: Sequence[Run], options: Options) -> LinePlot:
    """Prefix hit rate against KV pool size, a line a policy, with the bounds of
    plugins/shared/cache_bounds.py for the same requests (prompts; mean over seeds).

    Where the requests cannot be made again (their text needs a tokenizer), a note says so."""
    key, series = along(runs, options, SIZES)
    metric = METRICS["hit_rate"]
    lines = []
    for label, places in series.items():
        points = [(x, mean(metric, seeds)) for x, seeds in places.items()]
        known = [(x, one) for x, one in points if one is not None]
        xs, found = zip(*known, strict=True)
        means = [one.mean for one in found]
        low, high = [one.low for one in found], [one.high for one in found]
        lines.append(Line("hit_rate", label, xs, means, low, high))
    sizes = sorted({x for places in series.values() for x in places})
    notes: tuple[str, ...] = ()
    try:
        lines += _bounds(runs, sizes)
    except TritiumError as error:  # text needs a tokenizer, a trace its file
        notes = (f"bounds left out: {error}",)
    panel = Panel("KV pool (tokens)" if key in SIZES else key, metric.title, log_x=True)
    return LinePlot({"hit_rate": panel}, lines, bounds=(BELADY, INFINITE), notes=notes)


def _bounds(runs: Sequence[Run], sizes: Sequence[float]) -> list[Line]:
    by_seed: dict[int, Run] = {}
    for run in runs:
        by_seed.setdefault(run.seed, run)
    traces = [_trace(run) for run in by_seed.values()]
    rates: dict[str, list[float]] = {BELADY: [], INFINITE: []}
    for size in sizes:
        found = [trace_bounds(trace, max(int(size) // page, 1)) for trace, page in traces]
        rates[BELADY].append(_percent([one.rate(one.belady_min) for one in found]))
        rates[INFINITE].append(_percent([one.rate(one.infinite) for one in found]))
    return [Line("hit_rate", name, sizes, found, style="plain") for name, found in rates.items()]


def _trace(run: Run) -> tuple[PrefixTrace, int]:
    """The run's requests as a cache sees them, and its page size."""
    workload = build("workload", run.config["workload"])
    vocab_size = select(run.config, "executor.vocab_size") or VOCABULARY
    page_size = int(select(run.summary, "kv.page_size"))
    requests = workload.requests(None, vocab_size, run.seed)
    return prefix_trace(prompt_uses(requests, page_size)), page_size


def _percent(rates: Sequence[float]) -> float:
    return 100 * float(np.mean(rates))
