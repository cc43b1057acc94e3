"""Every shipped order by name, and questions to them over hand-made tables, without an engine."""

from collections.abc import Callable

import numpy as np

from core.queries import OrderQuery
from core.request import Request
from core.table import RequestTable
from plugins.order.dfs_weight import DfsWeight
from plugins.order.dlpm import Dlpm
from plugins.order.fcfs import Fcfs
from plugins.order.hrrn import Hrrn
from plugins.order.k_lpm import KLpm
from plugins.order.longest_prefix import LongestPrefix
from plugins.order.mlfq import Mlfq
from plugins.order.priority import Priority
from plugins.order.priority_ageing import PriorityAgeing
from plugins.order.sjf import Sjf
from plugins.order.slack import Slack
from plugins.order.srtf import Srtf
from plugins.order.trail import Trail
from plugins.order.vtc import Vtc
from plugins.predictor.oracle import Oracle

ORDERS: dict[str, Callable[[], dict[str, object]]] = {  # makers: some keep a state of their own
    "fcfs": lambda: {"mine": Fcfs()},
    "priority": lambda: {"mine": Priority()},
    "priority_ageing": lambda: {"mine": PriorityAgeing(0.1)},
    "sjf": lambda: {"mine": Sjf()},
    "sjf_oracle": lambda: {"mine": Sjf(), "oracle": Oracle()},
    "srtf": lambda: {"mine": Srtf()},
    "trail": lambda: {"mine": Trail()},
    "trail_oracle": lambda: {"mine": Trail(1.0), "oracle": Oracle()},
    "slack": lambda: {"mine": Slack(0.001, 0.01)},
    "longest_prefix": lambda: {"mine": LongestPrefix(twin_tokens=16, max_waiting=20)},
    "k_lpm": lambda: {"mine": KLpm(3)},
    "dfs_weight": lambda: {"mine": DfsWeight(min_tokens=16)},
    "hrrn": lambda: {"mine": Hrrn(window=8)},
    "vtc": lambda: {"mine": Vtc(client_weights={"c1": 2.0})},
    "dlpm": lambda: {"mine": Dlpm(quantum=30.0)},
    "mlfq": lambda: {"mine": Mlfq(quantum=2, prompt_tokens_per_iteration=16, promote_after=20)},
}


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
