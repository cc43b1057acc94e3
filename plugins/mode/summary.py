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
padding share   rows that only fill a graph up / rows of the graphs run
SLO attainment  completed requests within every limit / requests (plugins/shared/measure.py)
Jain index      (sum x)^2 / (n sum x^2) over clients' service x = prompt + 2 * output tokens, the
                weights of VTC (arXiv:2401.00588); only with two clients or more

With a warm-up or drain cut (plugins/shared/measure.py) requests that arrived outside the window
enter nothing but `measured.left_out`, steps that began outside it nothing, and throughput is what
came within it, whoever it was for.

Percentiles interpolate linearly. An empty set gives None; no number is ever NaN or infinite.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from core.records import RequestRecord
from core.request import FinishReason
from plugins.mode.step_totals import StepTotals
from plugins.shared.measure import Slo, Window, tokens_within
from plugins.shared.metrics import (
    COMPLETED,
    completed,
    e2e_s,
    queue_s,
    token_gaps_s,
    tpot_s,
    ttft_s,
)

PERCENTILES = (50, 90, 99)
OUTPUT_WEIGHT = 2.0  # of an output token against a prompt token, in a client's service


def summarise(
    records: Iterable[RequestRecord],
    steps: StepTotals,
    window: Window | None = None,
    slo: Slo | None = None,
) -> dict[str, Any]:
    """All metrics of a run as nested dicts of JSON-safe values (see the module's docstring).

    records: every request submitted, ended or not. window: what counts of them, None = all; it must
    have cut `steps` too. slo: None or without limits = no attainment. Times are seconds of the
    run's clock, names ending in _us microseconds.
    """
    all_records = list(records)
    cut = window if window is not None and window.cuts else None
    chosen = all_records if cut is None else [r for r in all_records if cut.holds(r.arrival_s)]
    done = completed(chosen)
    seen = [r for r in chosen if r.admitted_s is not None]
    span_s = _span_s(chosen, steps, cut)
    duration_s = None if span_s is None else span_s[1] - span_s[0]
    return {
        "requests": _requests(chosen),
        "measured": _measured(cut, len(chosen), len(all_records)),
        "duration_s": duration_s,
        "throughput": _throughput(done, duration_s)
        if cut is None or span_s is None
        else _throughput_within(completed(all_records), *span_s),
        "slo": None if slo is None or not slo.given else _attainment(chosen, slo, duration_s),
        "latency": _latency(done),
        "tokens": _tokens(chosen, done, steps),
        "hit_rate": _ratio(sum(r.cached_tokens for r in seen), sum(r.prompt_tokens for r in seen)),
        "recompute_tax": _ratio(steps.counts["recomputed_tokens"], _computed(steps)),
        "preemptions": steps.counts["preemptions"],
        "requests_preempted": sum(r.preemptions > 0 for r in chosen),
        "evicted_pages": steps.counts["pages_evicted"],
        "kv": _kv(steps),
        "waste": _waste(steps),
        "batch": _batch(steps),
        "steps": _steps(steps),
        "graphs": _graphs(steps),
        "fairness": _fairness(chosen),
    }


def distribution(samples: Iterable[float | None]) -> dict[str, float | int | None]:
    """count, mean, p50, p90, p99 and max of what is not None; all but count None if nothing is."""
    values = np.array([value for value in samples if value is not None], dtype=np.float64)
    names = [f"p{q}" for q in PERCENTILES]
    if not len(values):
        return {"count": 0, "mean": None, **dict.fromkeys(names), "max": None}
    ranks = np.percentile(values, PERCENTILES)
    return {
        "count": len(values),
        "mean": float(values.mean()),
        **{name: float(rank) for name, rank in zip(names, ranks, strict=True)},
        "max": float(values.max()),
    }


def jain_index(service: Sequence[float]) -> float | None:
    """Jain's fairness index, 1/n .. 1; None for fewer than two values or no service at all."""
    values = np.asarray(service, dtype=np.float64)
    if len(values) < 2:
        return None
    return _ratio(float(values.sum() ** 2), float(len(values) * np.square(values).sum()))


def _requests(records: list[RequestRecord]) -> dict[str, Any]:
    reasons = Counter(r.finish_reason for r in records if r.finish_reason)
    return {
        "accepted": len(records),
        "completed": sum(reasons[name] for name in COMPLETED),
        "unfinished": len(records) - reasons.total(),
        "finish_reasons": {reason.value: reasons[reason.value] for reason in FinishReason},
        "first_error": next((r.error for r in records if r.error), None),
    }


def _measured(cut: Window | None, num_chosen: int, num_all: int) -> dict[str, Any]:
    """from_s, to_s: None = not cut there."""
    edges = () if cut is None else (cut.from_s, cut.to_s)
    start_s, end_s = (edge if math.isfinite(edge) else None for edge in edges or (math.inf,) * 2)
    return {"from_s": start_s, "to_s": end_s, "left_out": num_all - num_chosen}


def _span_s(
    records: list[RequestRecord], steps: StepTotals, cut: Window | None
) -> tuple[float, float] | None:
    """First arrival to the last step's or request's end, within the window."""
    ends = [r.finished_s for r in records if r.finished_s is not None]
    if steps.last_end_s is not None:
        ends.append(steps.last_end_s)
    if not records or not ends:
        return None
    start_s, end_s = min(r.arrival_s for r in records), max(ends)
    return start_s, end_s if cut is None else min(end_s, cut.to_s)


def _throughput(done: list[RequestRecord], duration_s: float | None) -> dict[str, float | None]:
    output = sum(r.output_tokens for r in done)
    prompt = sum(r.prompt_tokens for r in done)
    return {
        "output_tokens_per_s": _ratio(output, duration_s),
        "total_tokens_per_s": _ratio(prompt + output, duration_s),
        "requests_per_s": _ratio(len(done), duration_s),
    }


def _throughput_within(
    done: list[RequestRecord], from_s: float, to_s: float
) -> dict[str, float | None]:
    """What came in that time, whoever it was for: a prompt counts with the first token."""
    output = sum(tokens_within(r, from_s, to_s) for r in done)
    firsts = [(r.first_token_s, r.prompt_tokens) for r in done]
    prompt = sum(tokens for at, tokens in firsts if at is not None and from_s <= at <= to_s)
    ended = sum(from_s <= r.finished_s <= to_s for r in done if r.finished_s is not None)
    return {
        "output_tokens_per_s": _ratio(output, to_s - from_s),
        "total_tokens_per_s": _ratio(prompt + output, to_s - from_s),
        "requests_per_s": _ratio(ended, to_s - from_s),
    }


def _attainment(
    records: list[RequestRecord], slo: Slo, duration_s: float | None
) -> dict[str, float | None]:
    """Over all requests that count: one that failed misses its limits."""
    kept = sum(map(slo.kept, records))
    return {
        "ttft_s": slo.ttft_s,
        "tpot_s": slo.tpot_s,
        "itl_s": slo.itl_s,
        "target": slo.attainment,
        "attainment": _ratio(kept, len(records)),
        "requests_per_s": _ratio(kept, duration_s),
    }


def _latency(done: list[RequestRecord]) -> dict[str, Any]:
    outputs = [(e2e_s(r), r.output_tokens) for r in done]
    return {
        "ttft_s": distribution(ttft_s(r) for r in done),
        "itl_s": distribution(token_gaps_s(done).tolist()),
        "tpot_s": distribution(tpot_s(r) for r in done),
        "e2e_s": distribution(e2e_s(r) for r in done),
        "normalised_s": distribution(_ratio(seconds, tokens) for seconds, tokens in outputs),
        "queue_s": distribution(queue_s(r) for r in done),
    }


def _tokens(
    records: list[RequestRecord], done: list[RequestRecord], steps: StepTotals
) -> dict[str, int]:
    output = sum(r.output_tokens for r in done)
    return {
        "prompt": sum(r.prompt_tokens for r in done),
        "output": output,
        "output_of_incomplete": sum(r.output_tokens for r in records) - output,
        "cached": sum(r.cached_tokens for r in records),
        "resumed_cached": sum(r.resumed_cached_tokens for r in records),
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
        "padding_share": _ratio(counts["padding_rows"], counts["graph_rows"]),
    }


def _fairness(records: list[RequestRecord]) -> dict[str, Any]:
    service: dict[str, float] = {}
    for r in records:
        service.setdefault(r.client, 0.0)
        if r.admitted_s is not None or r.first_token_s is not None:  # a client sees tokens alone
            service[r.client] += r.prompt_tokens + OUTPUT_WEIGHT * r.output_tokens
    return {"clients": len(service), "jain_index": jain_index(list(service.values()))}


def _computed(steps: StepTotals) -> int:
    return steps.counts["prefill_tokens"] + steps.counts["decode_tokens"]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
