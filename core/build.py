"""Assemble an engine from its plugins."""

from functools import cache

from core.clock import Clock
from core.config import EngineConfig, require
from core.engine import Engine
from core.hooks import Hooks
from core.launch import PoolLayout
from core.memory import KVMemory
from core.protocols import Allocator, Executor, Sink
from core.queries import (
    AllocatorQuery,
    EvictorQuery,
    ExecutorQuery,
    LengthPredictorQuery,
    ModelQuery,
    PrefixCacheQuery,
)
from core.state import EngineState
from core.table import SequenceTable


def build_engine(
    hooks: Hooks,
    config: EngineConfig,
    seed: int,
    clock: Clock,
    device: str = "cpu",
    progress: bool = False,
    sinks: list[Sink] | None = None,
    record_rows: bool = True,
) -> Engine:
    """Ask every `build_*` hook in turn. Raises ConfigError for parts that do not fit together.

    record_rows: list each step's rows in its record (costs host time with many running).
    """
    executor: Executor = hooks.build(
        "build_executor",
        ExecutorQuery(
            engine=config,
            seed=seed,
            clock=clock,
            model=cache(lambda: hooks.build("build_model", ModelQuery(device, seed, progress))),
            attention=lambda query: hooks.build("build_attention", query),
            progress=progress,
        ),
    )
    max_model_len = _model_len(config, executor)
    allocator: Allocator = hooks.build(
        "build_allocator", AllocatorQuery(config.pool_tokens, max_model_len)
    )
    page_size = allocator.page_size
    evictor = hooks.build("build_evictor", EvictorQuery(page_size))
    prefix_cache = hooks.build("build_prefix_cache", PrefixCacheQuery(page_size, evictor))
    # Rows of the launch in flight stay taken while others start: twice the running is enough.
    num_rows = 2 * config.max_num_seqs
    table = SequenceTable(max_model_len)
    memory = KVMemory(allocator, prefix_cache, table, num_rows, max_model_len)
    num_pages, budget = allocator.num_pages + 1, config.max_num_batched_tokens
    executor.prepare(PoolLayout(num_pages, page_size, num_rows, memory.max_pages, budget))
    state = EngineState(
        config=config,
        seed=seed,
        hooks=hooks,
        clock=clock,
        table=table,
        memory=memory,
        predictor=hooks.build("build_length_predictor", LengthPredictorQuery(seed)),
        vocab_size=executor.vocab_size,
        max_model_len=max_model_len,
        model_end_tokens=executor.end_token_ids,
    )
    return Engine(state, executor, sinks or [], record_rows)


def _model_len(config: EngineConfig, executor: Executor) -> int:
    if config.max_model_len is None:
        return executor.max_model_len
    require(
        config.max_model_len <= executor.max_model_len,
        "engine.max_model_len",
        f"<= the model's {executor.max_model_len}",
        config.max_model_len,
    )
    return config.max_model_len
