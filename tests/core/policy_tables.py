"""Small hand-made tables for policies, without an engine."""

from collections.abc import Callable
from typing import Any

import numpy as np

from core.queries import AdmissionQuery, BatchQuery, Cause, PreemptionQuery
from core.records import ChoiceRecord
from core.request import Request
from core.table import RequestTable, SequenceTable
from plugins.admission.defer_twins import DeferTwins
from plugins.admission.mc_sf import McSf
from plugins.admission.new_token_ratio import NewTokenRatio
from plugins.admission.past_future import PastFuture
from plugins.admission.prompt_fits import PromptFits
from plugins.admission.reserve_max import ReserveMax
from plugins.batching.chunked import Chunked
from plugins.batching.interleaved import Interleaved
from plugins.batching.prefill_first import PrefillFirst
from plugins.batching.slo_chunked import SloChunked
from plugins.batching.static import Static
from plugins.order.priority import Priority
from plugins.order.sjf import Sjf
from plugins.preemption.cheapest_recompute import CheapestRecompute
from plugins.preemption.evict_longest import EvictLongest
from plugins.preemption.evict_shortest import EvictShortest
from plugins.preemption.fewest_preempted import FewestPreempted
from plugins.preemption.last_admitted import LastAdmitted
from plugins.preemption.least_remaining import LeastRemaining
from plugins.preemption.most_pages import MostPages
from plugins.preemption.most_remaining import MostRemaining
from plugins.preemption.priority import PreemptLowestPriority
from plugins.preemption.random_victim import RandomVictim
from plugins.step_time.fixed import Fixed

# Every shipped policy of three hooks, by name: makers, since some keep a state of their own.
ADMISSIONS: dict[str, Callable[[], dict[str, object]]] = {
    "prompt_fits": lambda: {"mine": PromptFits()},
    "reserve_max": lambda: {"mine": ReserveMax()},
    "defer_twins": lambda: {"mine": DeferTwins()},
    "new_token_ratio": lambda: {"mine": NewTokenRatio()},
    "past_future": lambda: {"mine": PastFuture()},
    "mc_sf": lambda: {"mine": McSf(), "order_mine": Sjf()},
}
BATCHINGS: dict[str, Callable[[], object]] = {
    "chunked": lambda: Chunked(slice_tokens=32),
    "prefill_first": PrefillFirst,
    "static": Static,
    "interleaved": lambda: Interleaved(slice_tokens=32),
    "slo_chunked": lambda: SloChunked(itl_slo_ms=13.0),
}
VICTIMS: dict[str, Callable[[], dict[str, object]]] = {
    "last_admitted": lambda: {"mine": LastAdmitted()},
    "evict_shortest": lambda: {"mine": EvictShortest()},
    "evict_longest": lambda: {"mine": EvictLongest()},
    "most_pages": lambda: {"mine": MostPages()},
    "cheapest_recompute": lambda: {"mine": CheapestRecompute()},
    "fewest_preempted": lambda: {"mine": FewestPreempted()},
    "least_remaining": lambda: {"mine": LeastRemaining()},
    "most_remaining": lambda: {"mine": MostRemaining()},
    "random": lambda: {"mine": RandomVictim()},
    "priority": lambda: {"mine": PreemptLowestPriority(), "order_mine": Priority()},
}


def table_of(num_rows: int = 0, **columns: list[Any]) -> RequestTable:
    """A view of as many requests as the columns are long (or `num_rows`). What is not given: 10
    prompt tokens, nothing computed, 16 output tokens at most, admitted in the order of rows."""
    num = len(next(iter(columns.values()))) if columns else num_rows
    table = SequenceTable(max_model_len=10_000)
    request = [Request(f"r{i}", np.ones(10, np.int32)) for i in range(num)]
    slots = np.array([table.add(one, 0, ChoiceRecord(), 8.0).slot for one in request], np.int64)
    table.admitted_order[slots] = np.arange(num)
    for name, values in columns.items():
        table.columns[name][slots] = values
    if "prompt" in columns and "known" not in columns:
        table.known[slots] = columns["prompt"]
    return table.view(slots)


def rows_of(view: RequestTable, ids: Any) -> list[int]:
    """Which rows of the view the ids name."""
    return [view.id.tolist().index(one) for one in np.asarray(ids).tolist()]


def batch_query(view: RequestTable, token_limit: int, waiting: int = 0, **facts: Any) -> BatchQuery:
    values = {"now_s": 0.0, "step": 0, "replanning": False, "step_time": Fixed()} | facts
    return BatchQuery(view, waiting, token_limit, **values)


def preemption_query(
    view: RequestTable,
    cause: Cause = Cause.PAGES,
    beneficiary: RequestTable | None = None,
    seed: int = 0,
    step_time: object = None,
) -> PreemptionQuery:
    rng, model = np.random.default_rng(seed), step_time or Fixed()
    return PreemptionQuery(cause, view, 1, beneficiary, rng, now_s=0.0, step=0, step_time=model)


def admission_query(
    running: RequestTable,
    allocatable: Callable[[int], bool] = lambda num_pages: True,
    candidate: RequestTable | None = None,
    step: int = 0,
    **facts: int,
) -> AdmissionQuery:
    """A question about one candidate; all page counts are 0 but for those given."""
    names = ("cached_tokens", "pages_needed", "pages_at_most", "pages_free", "pages_evictable")
    names += ("pages_promised", "pages_reserved_at_once")
    values = dict.fromkeys(names, 0) | {"pool_pages": 100, "page_size": 16} | facts
    return AdmissionQuery(
        candidate=table_of(1) if candidate is None else candidate,
        allocatable=allocatable,
        request=lambda one: Request(f"r{one}", np.ones(10, np.int32)),
        running=running,
        waiting=1,
        now_s=0.0,
        step=step,
        step_time=Fixed(),
        **values,
    )
