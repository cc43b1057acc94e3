"""Strict mode: each book out of balance is found, and named."""

import numpy as np
import pytest

from core.errors import ConfigError, InvariantError
from core.invariants import check_invariants
from core.ledger import PageClass
from core.table import State
from plugins.allocator.contiguous import Contiguous
from tests.engine_harness import Arrival, finish, make_engine, sequence_of


def busy_engine():
    """A runs and has pages in the cache, B waits for the only slot."""
    engine = make_engine(seqs=1)
    engine.submit(Arrival(0, "A", 40, 20).request())
    engine.submit(Arrival(0, "B", 40, 20).request())
    for _ in range(3):
        engine.step()
    return engine


def slot(engine, name="A"):
    return sequence_of(engine, name).slot


def page(engine, index):
    return engine.state.memory.pages_of(sequence_of(engine, "A"))[index]


def put(column, name, value):
    """Writes a wrong number into a column of a request."""

    def break_it(engine):
        engine.state.table.columns[column][slot(engine, name)] = value

    return break_it


def attribute(part, name, change):
    """Changes a counter of the ledger or another part of memory."""

    def break_it(engine):
        holder = getattr(engine.state.memory, part)
        setattr(holder, name, getattr(holder, name) + change)

    return break_it


def reclass(index, kind):
    def break_it(engine):
        engine.state.memory.ledger.classes[page(engine, index)] = kind

    return break_it


def change_refs(engine):
    engine.state.memory.ledger.refs[page(engine, 0)] += 1


def repeat_running(engine):
    engine.state.running = np.append(engine.state.running, slot(engine))


def forget_waiting(engine):
    engine.state.waiting.discard(sequence_of(engine, "B").id)


def drop_handle(engine):
    sequence_of(engine, "A").prefix = None


def forget_live(engine):
    engine.state.live["B"].sequences.clear()


def take_free_page(engine):
    engine.state.memory.allocator.allocate(1)


BREAKS = {
    "free count": (attribute("ledger", "num_free", 1), "pages free in the ledger"),
    "tree count": (attribute("ledger", "num_tree", -1), "pages of the cache in the ledger"),
    "request references": (attribute("ledger", "request_refs", 1), "references to request pages"),
    "class of page 0": (lambda e: e.state.memory.ledger.classes.__setitem__(0, 1), "pages free"),
    "cached page": (reclass(0, PageClass.REQUEST), "pages of the cache in the ledger"),
    "allocator": (take_free_page, "free pages of allocator and ledger: 12 != 13"),
    "references": (change_refs, "references to page . and its holders: 2 != 1"),
    "pages held": (put("pages_held", "A", 2), "references to page . and its holders: 1 != 0"),
    "state of a running": (put("state", "A", State.WAITING), "runs and is listed"),
    "state of a waiting": (put("state", "B", State.DRAINING), "waits and is queued"),
    "listed twice": (repeat_running, "running list without repeats"),
    "not queued": (forget_waiting, "waits and is queued"),
    "known": (put("known", "A", 99), "known tokens: 99 !="),
    "computed": (put("computed", "A", 47), "computed tokens beyond 43: 4 != 0"),
    "handle": (drop_handle, "live handles on the cache: 1 != 0"),
    "cache total": (attribute("cache", "num_pages", 1), "pages of cache and ledger"),
    "cache evictable": (attribute("cache", "num_evictable", 1), "evictable"),
    "live requests": (forget_live, "sequences of live requests: 1 != 2"),
}


def test_sound_engine_passes():
    engine = busy_engine()
    check_invariants(engine.state, [])
    finish(engine)
    check_invariants(engine.state, [])


@pytest.mark.parametrize("name", BREAKS)
def test_broken_book_is_found_and_named(name):
    break_it, text = BREAKS[name]
    engine = busy_engine()
    break_it(engine)
    with pytest.raises(InvariantError, match=text):
        check_invariants(engine.state, [])


IDLE_BREAKS = {
    "row": (lambda e: e.state.memory.rows._free.pop(), "idle: rows in use: 1 != 0"),
    "handle": (
        lambda e: e.state.memory.cache.lock(
            e.state.memory.cache.match(np.empty(0, np.uint64), np.empty(0, np.int32), "nobody")
        ),
        "live handles on the cache: 1 != 0",
    ),
}


@pytest.mark.parametrize("name", IDLE_BREAKS)
def test_leak_of_an_idle_engine_is_found(name):
    break_it, text = IDLE_BREAKS[name]
    engine = busy_engine()
    finish(engine)
    break_it(engine)
    with pytest.raises(InvariantError, match=text):
        check_invariants(engine.state, [])


@pytest.mark.parametrize("strict", [True, False])
def test_every_step_checks_in_strict_mode_only(strict):
    engine = make_engine(strict=strict)
    engine.submit(Arrival(0, "A", 10, 9).request())
    engine.step()
    engine.state.memory.ledger.request_refs += 1
    if strict:
        with pytest.raises(InvariantError, match="references to request pages"):
            engine.step()
    else:
        engine.step()


def test_sharing_cache_is_refused_with_an_allocator_that_cannot_share():
    text = "cache must be none with allocator ContiguousAllocator, .* got RadixTree"
    with pytest.raises(ConfigError, match=text):
        make_engine(allocator=Contiguous(16))
