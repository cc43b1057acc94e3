"""Questions to orders over hand-made tables, without an engine."""

import numpy as np

from core.queries import OrderQuery
from core.request import Request
from core.table import RequestTable


def order_query(
    view: RequestTable,
    now_s: float = 0.0,
    step: int = 0,
    cached: list[int] | None = None,
    requests: list[Request] | None = None,
) -> OrderQuery:
    """A question about all rows. cached: tokens that the cache holds of each, 0 if not given;
    requests: what the client of each row asked, ten equal tokens if not given."""
    ids = view.id.tolist()
    held = dict(zip(ids, cached or [0] * len(ids), strict=True))
    asked = requests or [Request(f"r{i}", np.ones(10, np.int32)) for i in range(len(ids))]
    by_id = dict(zip(ids, asked, strict=True))
    return OrderQuery(
        waiting=view,
        now_s=now_s,
        step=step,
        cached_tokens=lambda some: np.array([held[one] for one in some.tolist()], np.int32),
        request=by_id.__getitem__,
    )
