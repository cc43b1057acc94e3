"""Strict mode: recount everything after a step and compare it with the books the engine keeps."""

import numpy as np
from numpy.typing import NDArray

from core.errors import InvariantError
from core.ledger import PageClass
from core.state import EngineState
from core.table import State


def check_invariants(state: EngineState, in_flight: list[NDArray[np.int64]]) -> None:
    """Raise InvariantError for the first book that does not balance.

    Linear in pages and sequences: for tests, off in measured runs."""
    _check_classes(state)
    _check_references(state)
    _check_sequences(state)
    for part in (state.memory.cache, state.memory.allocator):
        part.check()
    _check_idle(state, in_flight)


def _check_classes(state: EngineState) -> None:
    ledger, memory = state.memory.ledger, state.memory
    counts = np.bincount(ledger.classes, minlength=4)
    _equal("pages free in the ledger", ledger.num_free, int(counts[PageClass.FREE]))
    _equal("pages of the cache in the ledger", ledger.num_tree, int(counts[PageClass.TREE]))
    _equal("reserved pages", 1, int(counts[PageClass.RESERVED]))
    _equal("classes sum to the pool", ledger.num_pages + 1, int(counts.sum()))
    _equal("free pages of allocator and ledger", memory.allocator.num_free, ledger.num_free)
    _equal("pages of cache and ledger", memory.cache.num_pages, ledger.num_tree)


def _check_references(state: EngineState) -> None:
    ledger, memory = state.memory.ledger, state.memory
    tables = [memory.pages_of(sequence) for sequence in filter(None, state.table.sequences)]
    held = np.concatenate(tables) if tables else np.empty(0, np.int32)
    counted = np.bincount(held, minlength=ledger.num_pages + 1)
    for page in np.flatnonzero(counted != ledger.refs)[:1].tolist():
        _equal(f"references to page {page} and its holders", ledger.refs[page], counted[page])
    owned = ledger.classes == PageClass.REQUEST
    _equal("pages owned by requests without a holder", int((ledger.refs[owned] < 1).sum()), 0)
    _equal("references to request pages", ledger.request_refs, int(ledger.refs[owned].sum()))
    used = int(((ledger.classes == PageClass.TREE) & (ledger.refs > 0)).sum())
    most = ledger.num_tree - used
    _equal("evictable pages in use", max(memory.cache.num_evictable - most, 0), 0)


def _check_sequences(state: EngineState) -> None:
    table, memory = state.table, state.memory
    running = set(state.running.tolist())
    _equal("running list without repeats", len(running), len(state.running))
    handles = 0
    for sequence in filter(None, table.sequences):
        slot = sequence.slot
        handles += sequence.prefix is not None
        now = int(table.state[slot])
        _equal(f"sequence {sequence.id} runs and is listed", now == State.RUNNING, slot in running)
        queued = sequence.id in state.waiting
        _equal(f"sequence {sequence.id} waits and is queued", now == State.WAITING, queued)
        _equal(f"sequence {sequence.id} has a row", now == State.RUNNING, sequence.row is not None)
        known = int(table.known[slot])
        _equal(f"sequence {sequence.id} known tokens", known, len(table.tokens(sequence)))
        if now == State.RUNNING:
            room = int(table.pages_held[slot]) * memory.page_size
            most = min(room, known + int(table.in_flight[slot]))
            beyond = max(int(table.computed[slot]) - most, 0)
            _equal(f"sequence {sequence.id} computed tokens beyond {most}", beyond, 0)
    _equal("live handles on the cache", memory.cache.num_handles, handles)
    listed = sum(len(live.sequences) for live in state.live.values())
    _equal("sequences of live requests", listed, len(table))


def _check_idle(state: EngineState, in_flight: list[NDArray[np.int64]]) -> None:
    if state.live or in_flight:
        return
    memory, ledger = state.memory, state.memory.ledger
    _equal("idle: free + cached pages", ledger.num_free + ledger.num_tree, ledger.num_pages)
    _equal("idle: evictable pages", memory.cache.num_evictable, memory.cache.num_pages)
    _equal("idle: rows in use", memory.rows.in_use, 0)
    _equal("idle: waiting", len(state.waiting), 0)


def _equal(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise InvariantError(f"{what}: {found} != {expected}")
