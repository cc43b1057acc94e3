"""The metrics of a run, each defined once. Sinks, tables and plots only show what is computed here
and in plugins/shared/metrics.py.

A request is *completed* if it ended with stop or length; latencies and throughput are taken over
completed requests alone. Aborted, capacity and error requests are counted by reason and enter no
percentile: sum(finish_reasons) + unfinished == accepted, and tokens.output +
tokens.output_of_incomplete are all the tokens that were committed.

TTFT, ITL, TPOT, E2E, queue: plugins/shared/metrics.py
normalised      E2E / output tokens (Orca; PagedAttention, arXiv:2309.06180)
hit rate        prompt tokens taken from the cache at first admission / prompt tokens, of admitted
                requests; what a resumed request finds again never counts
recompute tax   tokens computed again after a preemption / all tokens computed
internal waste  reserved slots that hold no live or cached token / reserved slots, both integrated
                over time
external waste  free slots that a refused allocation could not use / pool slots, likewise
graph hit rate  launches that a captured graph ran / launches
padding share   tokens that only fill a graph up / tokens of the graphs run
SLO attainment  completed requests within every limit / requests (plugins/shared/measure.py)
Jain index      (sum x)^2 / (n sum x^2) over clients' service x = prompt + 2 * output tokens, the
                weights of VTC (arXiv:2401.00588); only with two clients or more

With a warm-up or drain cut (plugins/shared/measure.py) requests that arrived outside the window
enter nothing but `measured.left_out`, steps that began outside it nothing, and throughput is what
came within it, whoever it was for.

Percentiles interpolate linearly; of more than 4 million token gaps they are those of bins 0.05 %
wide (plugins/mode/samples.py). An empty set gives None; no number is ever NaN or infinite.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from core.records import RequestRecord
from core.request import FinishReason
from plugins.mode.request_totals import RequestTotals, totals_of
from plugins.mode.step_totals import StepTotals
from plugins.shared.measure import Slo, Window


def summarise(
    records: Iterable[RequestRecord],
    steps: StepTotals,
    window: Window | None = None,
    slo: Slo | None = None,
) -> dict[str, Any]:
    """As `summary_of`, of requests that are all at hand, ended or not."""
    return summary_of(totals_of(records, window, slo), steps)


def summary_of(requests: RequestTotals, steps: StepTotals) -> dict[str, Any]:
    """All metrics of a run as nested dicts of JSON-safe values (see the module's docstring).

    The requests' window must have cut `steps` too. Times are seconds of the run's clock, names
    ending in _us microseconds.
    """
    counts = requests.counts
    span_s = _span_s(requests, steps)
    duration_s = None if span_s is None else span_s[1] - span_s[0]
    return {
        "requests": _requests(requests),
        "measured": _measured(requests.cut, counts["accepted"], requests.seen),
        "duration_s": duration_s,
        "throughput": _throughput(requests, duration_s),
        "slo": None if requests.slo is None else _attainment(requests, requests.slo, duration_s),
        "latency": requests.latency(),
        "tokens": _tokens(counts, steps),
        "hit_rate": _ratio(counts["admitted_cached"], counts["admitted_prompt"]),
        "recompute_tax": _ratio(steps.counts["recomputed_tokens"], _computed(steps)),
        "preemptions": steps.counts["preemptions"],
        "requests_preempted": counts["preempted"],
        "evicted_pages": steps.counts["pages_evicted"],
        "kv": _kv(steps),
        "waste": _waste(steps),
        "batch": _batch(steps),
        "steps": _steps(steps),
        "graphs": _graphs(steps),
        "fairness": _fairness(requests.service),
    }


def jain_index(service: Sequence[float]) -> float | None:
    """Jain's fairness index, 1/n .. 1; None for fewer than two values or no service at all."""
    values = np.asarray(service, dtype=np.float64)
    if len(values) < 2:
        return None
    return _ratio(float(values.sum() ** 2), float(len(values) * np.square(values).sum()))


def _requests(requests: RequestTotals) -> dict[str, Any]:
    reasons = requests.reasons
    return {
        "accepted": requests.counts["accepted"],
        "completed": requests.counts["completed"],
        "unfinished": reasons[""],
        "finish_reasons": {reason.value: reasons[reason.value] for reason in FinishReason},
        "first_error": requests.first_error,
    }


def _measured(cut: Window | None, num_chosen: int, num_all: int) -> dict[str, Any]:
    """from_s, to_s: None = not cut there."""
    edges = () if cut is None else (cut.from_s, cut.to_s)
    start_s, end_s = (edge if math.isfinite(edge) else None for edge in edges or (math.inf,) * 2)
    return {"from_s": start_s, "to_s": end_s, "left_out": num_all - num_chosen}


def _span_s(requests: RequestTotals, steps: StepTotals) -> tuple[float, float] | None:
    """First arrival to the last step's or request's end, within the window."""
    ends = [end for end in (requests.last_end_s, steps.last_end_s) if end is not None]
    if requests.first_arrival_s is None or not ends:
        return None
    end_s = max(ends)
    return requests.first_arrival_s, end_s if requests.cut is None else min(
        end_s, requests.cut.to_s
    )


def _throughput(requests: RequestTotals, duration_s: float | None) -> dict[str, float | None]:
    """With a window: what came in its time, whoever it was for; a prompt counts with the first
    token."""
    names = ("prompt", "output", "completed")
    if requests.cut is not None:
        names = ("prompt_within", "output_within", "ended_within")
    prompt, output, ended = (requests.counts[name] for name in names)
    return {
        "output_tokens_per_s": _ratio(output, duration_s),
        "total_tokens_per_s": _ratio(prompt + output, duration_s),
        "requests_per_s": _ratio(ended, duration_s),
    }


def _attainment(
    requests: RequestTotals, slo: Slo, duration_s: float | None
) -> dict[str, float | None]:
    """Over all requests that count: one that failed misses its limits."""
    kept = requests.counts["kept"]
    return {
        "ttft_s": slo.ttft_s,
        "tpot_s": slo.tpot_s,
        "itl_s": slo.itl_s,
        "target": slo.attainment,
        "attainment": _ratio(kept, requests.counts["accepted"]),
        "requests_per_s": _ratio(kept, duration_s),
    }


def _tokens(counts: Counter[str], steps: StepTotals) -> dict[str, int]:
    return {
        "prompt": counts["prompt"],
        "output": counts["output"],
        "output_of_incomplete": counts["all_output"] - counts["output"],
        "cached": counts["cached"],
        "resumed_cached": counts["resumed_cached"],
        "computed": _computed(steps),
        "prefill": steps.counts["prefill_tokens"],
        "decode": steps.counts["decode_tokens"],
        "recomputed": steps.counts["recomputed_tokens"],
        "duplicate_prefill": steps.counts["duplicate_prefill_tokens"],
    }


def _kv(steps: StepTotals) -> dict[str, Any]:
    slots = steps.pool_pages * steps.page_size
    return {
        "page_size": steps.page_size,
        "pool_pages": steps.pool_pages,
        "live_mean": _ratio(steps.mean("live_tokens"), slots),
        "live_peak": _ratio(steps.peaks.get("live_tokens"), slots),
        "reserved_mean": _ratio(steps.mean("reserved_tokens"), slots),
        "reserved_peak": _ratio(steps.peaks.get("reserved_tokens"), slots),
    }


def _waste(steps: StepTotals) -> dict[str, float | None]:
    empty = steps.integrals.get("empty_tokens", 0.0)
    external = steps.integrals.get("external_tokens", 0.0)
    reserved = steps.integrals.get("reserved_tokens", 0.0)
    pool = steps.pool_pages * steps.page_size * steps.busy_s
    return {
        "internal": _ratio(empty, reserved),
        "external": _ratio(external, pool),
        "total": _ratio(empty + external, reserved + external),
    }


def _batch(steps: StepTotals) -> dict[str, Any]:
    names = ("batch", "running", "waiting")
    means = {f"{name}_mean": steps.mean(name) for name in names}
    return means | {f"{name}_peak": steps.peaks.get(name) for name in names}


def _steps(steps: StepTotals) -> dict[str, Any]:
    return {
        "count": steps.steps,
        "busy_s": steps.busy_s,
        "mean_s": _ratio(steps.busy_s, steps.steps),
        "tokens_mean": _ratio(_computed(steps), steps.steps),
        "host_us_mean": {
            part: _ratio(micros, steps.steps) for part, micros in sorted(steps.host_us.items())
        },
    }


def _graphs(steps: StepTotals) -> dict[str, Any]:
    counts = steps.counts
    return {
        "launches": counts["launches"],
        "hit_rate": _ratio(counts["graph_launches"], counts["launches"]),
        "padding_share": _ratio(counts["padding_tokens"], counts["graph_tokens"]),
    }


def _fairness(service: dict[str, float]) -> dict[str, Any]:
    return {"clients": len(service), "jain_index": jain_index(list(service.values()))}


def _computed(steps: StepTotals) -> int:
    return steps.counts["prefill_tokens"] + steps.counts["decode_tokens"]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
