"""Assemble an engine from its plugins."""

from dataclasses import replace
from functools import cache, partial

from core import queries
from core.block_table import BlockTable
from core.clock import Clock
from core.config import AUTO, EngineConfig, require
from core.engine import Engine
from core.hooks import Hooks
from core.launch import PoolLayout
from core.memory import KVMemory
from core.protocols import Allocator, Executor, Sink
from core.state import EngineState
from core.table import SequenceTable
from core.waiting import WaitingQueue

PROBE_TOKENS = 1 << 20  # a multiple of every page size: for an allocator asked for its page size
MOST_PAGES = (1 << 31) - 1  # page ids are int32


def build_engine(
    hooks: Hooks,
    config: EngineConfig,
    seed: int,
    clock: Clock,
    device: str = "cpu",
    progress: bool = False,
    sinks: list[Sink] | None = None,
    record_rows: bool = True,
    contains_faults: bool = False,
) -> Engine:
    """Ask every `build_*` hook in turn. Raises ConfigError for parts that do not fit together.

    record_rows: list each step's rows in its record (costs host time with many running).
    contains_faults: an exception of a hook that concerns one request fails that request alone."""
    model = cache(partial(hooks.build, "build_model", queries.ModelQuery(device, seed, progress)))
    attention = partial(hooks.build, "build_attention")
    query = queries.ExecutorQuery(config, seed, clock, model, attention, progress)
    executor: Executor = hooks.build("build_executor", query)
    longest = executor.max_model_len
    max_model_len = longest if config.max_model_len is None else config.max_model_len
    within = max_model_len <= longest
    require(within, "engine.max_model_len", f"<= the model's {longest}", max_model_len)
    tokens = PROBE_TOKENS if config.pool_tokens == AUTO else int(config.pool_tokens)
    pool = queries.AllocatorQuery(tokens, max_model_len)
    allocator: Allocator = hooks.build("build_allocator", pool)
    page_size = allocator.page_size
    evictor = hooks.build("build_evictor", queries.EvictorQuery(page_size))
    prefix_cache = hooks.build("build_prefix_cache", queries.PrefixCacheQuery(page_size, evictor))
    # Rows of the launch in flight stay taken while others start: twice the running is enough.
    num_rows = 2 * config.max_num_seqs
    max_pages = -(-max_model_len // page_size)
    sizes = page_size, num_rows, max_pages, config.max_num_batched_tokens
    if config.pool_tokens == AUTO:  # a cache has a use for more pages than the running can fill
        most = MOST_PAGES if prefix_cache.stores else config.max_num_seqs * max_pages + 1
        tokens = executor.measure_pool(PoolLayout(most, *sizes))
        allocator = hooks.build("build_allocator", replace(pool, pool_tokens=tokens))
    table = SequenceTable(max_model_len)
    memory = KVMemory(allocator, prefix_cache, table, BlockTable(num_rows, max_pages))
    executor.prepare(PoolLayout(allocator.num_pages + 1, *sizes))
    predictor = hooks.build("build_length_predictor", queries.LengthPredictorQuery(seed))
    step_time = hooks.build("build_step_time_model", queries.StepTimeQuery(model))
    parts = config, seed, hooks, clock, table, WaitingQueue(table), memory, predictor, step_time
    facts = executor.vocab_size, max_model_len, executor.end_token_ids, contains_faults
    state = EngineState(*parts, *facts)
    return Engine(state, executor, sinks or [], record_rows)
