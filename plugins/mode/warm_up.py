"""Warm-up: two launches straight to the executor, so that no policy, cache or record ever sees
them."""

import numpy as np

from core.engine import Engine
from core.launch import Launch, RowSetup
from core.request import SamplingParams

PROMPT_TOKENS = 32


def warm_up(engine: Engine) -> None:
    """Prefill and decode one throw-away sequence on row 0, before any request is submitted.

    Whatever is loaded, compiled or allocated lazily happens here. The row is set up anew by its
    first real user, and nothing reads the pages again before writing them.
    """
    memory = engine.state.memory
    room = min(memory.ledger.num_pages, memory.max_pages) * memory.page_size
    num = min(PROMPT_TOKENS, room - 1, engine.state.config.max_num_batched_tokens)
    if num < 1:
        return
    prompt = np.arange(num, dtype=np.int32) % engine.executor.vocab_size
    setup = RowSetup(0, SamplingParams(temperature=0.0), num, prompt, 0, 0, ())
    pages = np.arange(memory.pages_for(num + 1), dtype=np.int32)
    table = np.stack([np.zeros_like(pages), pages, pages + 1], axis=1)
    empty = np.empty((0, 3), np.int32)
    engine.executor.launch(_launch(-2, 0, prompt, table, (setup,)))
    token = engine.executor.collect().tokens.astype(np.int32)
    engine.executor.launch(_launch(-1, num, token, empty, ()))
    engine.executor.collect()


def _launch(
    launch_id: int,
    first: int,
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
    table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    setups: tuple[RowSetup, ...],
) -> Launch:
    num = len(tokens)
    return Launch(
        launch_id=launch_id,
        row_ids=np.zeros(1, np.int32),
        first_positions=np.full(1, first, np.int32),
        num_tokens=np.full(1, num, np.int32),
        token_ids=tokens,
        feedback=np.zeros(1, np.bool_),
        samples=np.ones(1, np.bool_),
        num_decode_rows=int(num == 1),
        table_updates=table,
        setups=setups,
    )
