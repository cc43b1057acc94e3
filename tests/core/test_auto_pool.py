"""engine.pool_tokens=auto: what the executor is asked, and what the allocator gets."""

import pytest

from core import queries
from core.build import MOST_PAGES, PROBE_TOKENS, build_engine
from core.config import EngineConfig
from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.launch import PoolLayout
from plugins.allocator.contiguous import Contiguous
from plugins.allocator.paged import Paged, PagedAllocator
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake, FakeExecutor
from plugins.shared.clocks import VirtualClock
from tests.engine_harness import Arrival, finish, make_engine

LIMITS = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 100}


class Measured(Fake):
    """Says that `tokens` slots fit, and notes the layouts it was asked about and prepared for."""

    def __init__(self, tokens):
        super().__init__()
        self.num_tokens, self.asked, self.prepared = tokens, [], []

    @hookimpl
    def build_executor(self, query):
        return MeasuredExecutor(self, query.clock)


class MeasuredExecutor(FakeExecutor):
    def measure_pool(self, layout):
        self._plugin.asked.append(layout)
        return self._plugin.num_tokens

    def prepare(self, layout):
        self._plugin.prepared.append(layout)
        super().prepare(layout)


class SpiedPaged(Paged):
    """Notes its queries."""

    def __init__(self, page_size):
        super().__init__(page_size)
        self.asked = []

    @hookimpl
    def build_allocator(self, query) -> PagedAllocator:
        self.asked.append(query)
        return super().build_allocator(query)


def auto_engine(executor, allocator, cache):
    hooks = make_engine(executor=executor, allocator=allocator, cache=cache).hooks
    for plugin in (executor, allocator):
        for name in {"asked", "prepared"} & vars(plugin).keys():
            getattr(plugin, name).clear()
    config = EngineConfig(pool_tokens="auto", strict=True, **LIMITS)
    return build_engine(hooks, config, 0, VirtualClock())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cache", [Radix, NoCache])
def test_the_allocator_is_asked_its_page_size_and_gets_what_was_measured(cache, page_size):
    executor, allocator = Measured(112), SpiedPaged(page_size)
    engine = auto_engine(executor, allocator, cache())
    max_pages = -(-100 // page_size)
    most = MOST_PAGES if cache is Radix else 3 * max_pages + 1
    assert executor.asked == [PoolLayout(most, page_size, 6, max_pages, 64)]
    assert executor.prepared == [PoolLayout(112 // page_size + 1, page_size, 6, max_pages, 64)]
    assert allocator.asked == [
        queries.AllocatorQuery(PROBE_TOKENS, 100),
        queries.AllocatorQuery(112, 100),
    ]
    assert engine.state.memory.ledger.num_pages == 112 // page_size
    engine.submit(Arrival(0, "A", 40, 30).request())
    finish(engine)
    assert engine.records["A"].finish_reason == "length"


def test_the_contiguous_allocator_takes_a_measured_pool():
    engine = auto_engine(Measured(300), Contiguous(), NoCache())
    assert engine.state.memory.ledger.num_pages == 300


@pytest.mark.parametrize("page_size", [1, 16, 4096])
def test_the_probe_is_whole_pages(page_size):
    assert PROBE_TOKENS % page_size == 0


def test_an_executor_without_memory_refuses():
    text = "engine.pool_tokens must be a number for the fake executor, .*, got 'auto'"
    with pytest.raises(ConfigError, match=text):
        auto_engine(Fake(), Paged(16), Radix())
