"""Hit rates of the shipped tree and evictors on public traces: published figures, to four digits.

FIFO, LRU and MIN were found by three programs independently, one of them kvcache-simulator."""

import pytest

from experiments.cache_bounds.replay import OracleAdmission, mooncake, replay, uses_of
from plugins.cache.admit_all import AdmitAll
from plugins.cache.fifo import Fifo
from plugins.cache.lfu import Lfu
from plugins.cache.lru import Lru
from plugins.shared.cache_bounds import prefix_trace, trace_bounds

# (trace, blocks): FIFO, LFU, LRU, oracle admission + LRU, MIN, infinite
RATES = {
    ("conversation", 6000): (0.1393, 0.0981, 0.1393, 0.2678, 0.3551, 0.3664),
    ("synthetic", 1000): (0.0845, 0.0501, 0.0841, 0.1134, 0.2767, 0.6396),
    ("synthetic", 10000): (0.4224, 0.3622, 0.4239, 0.5269, 0.6180, 0.6396),
}


@pytest.fixture(scope="module")
def traces():
    requests = {name: mooncake(name) for name in ("conversation", "synthetic")}
    return {name: (read, prefix_trace(uses_of(read))) for name, read in requests.items()}


def test_traces_are_whole(traces):
    sizes = {name: (len(reqs), trace.pages_asked) for name, (reqs, trace) in traces.items()}
    assert sizes == {"conversation": (12031, 288500), "synthetic": (3993, 121877)}


@pytest.mark.parametrize(("name", "capacity"), RATES)
def test_shipped_tree_and_bounds_give_the_published_rates(traces, name, capacity):
    requests, trace = traces[name]
    oracle = OracleAdmission(trace.recurring())
    pairs = ((Fifo(), AdmitAll()), (Lfu(), AdmitAll()), (Lru(), AdmitAll()), (Lru(), oracle))
    hits = [replay(requests, capacity, evicts, admits) for evicts, admits in pairs]
    bounds = trace_bounds(trace, capacity)
    rates = [round(bounds.rate(h), 4) for h in (*hits, bounds.belady_min, bounds.infinite)]
    assert tuple(rates) == RATES[name, capacity]
    # The bounds' LRU is another program than the tree's: block by block, without nodes.
    assert hits[2:] == [bounds.lru, bounds.oracle_admission_lru]


@pytest.mark.parametrize(
    ("capacity", "rates"), [(1000, (0.0678, 0.1907)), (10000, (0.3260, 0.3664))]
)
def test_bounds_give_the_published_rates_of_conversation(traces, capacity, rates):
    bounds = trace_bounds(traces["conversation"][1], capacity)
    found = (bounds.oracle_admission_lru, bounds.belady_min)
    assert tuple(round(bounds.rate(hits), 4) for hits in found) == rates
