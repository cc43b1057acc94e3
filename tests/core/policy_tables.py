"""Small hand-made tables for policies, without an engine."""

from collections.abc import Callable
from typing import Any

import numpy as np

from core.queries import AdmissionQuery, BatchQuery, Cause, PreemptionQuery
from core.records import ChoiceRecord
from core.request import Request
from core.table import RequestTable, SequenceTable


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


def batch_query(view: RequestTable, token_limit: int, waiting: int = 0) -> BatchQuery:
    return BatchQuery(view, waiting, token_limit, now_s=0.0, step=0, replanning=False)


def preemption_query(
    view: RequestTable,
    cause: Cause = Cause.PAGES,
    beneficiary: RequestTable | None = None,
    seed: int = 0,
) -> PreemptionQuery:
    rng = np.random.default_rng(seed)
    return PreemptionQuery(cause, view, 1, beneficiary, rng, now_s=0.0, step=0)


def admission_query(
    running: RequestTable,
    allocatable: Callable[[int], bool] = lambda num_pages: True,
    **facts: int,
) -> AdmissionQuery:
    """A question about one candidate; all page counts are 0 but for those given."""
    names = ("cached_tokens", "pages_needed", "pages_at_most", "pages_free", "pages_evictable")
    names += ("pages_promised", "pages_reserved_at_once")
    values = dict.fromkeys(names, 0) | {"pool_pages": 100, "page_size": 16} | facts
    return AdmissionQuery(
        candidate=table_of(1),
        allocatable=allocatable,
        request=lambda one: Request(f"r{one}", np.ones(10, np.int32)),
        running=running,
        waiting=1,
        now_s=0.0,
        step=0,
        **values,
    )
