"""Prefixes shared by the rows of a launch: found on the host, served by a kernel of their own."""

from dataclasses import replace

import numpy as np
import pytest

from core.launch import Launch, RowSetup
from core.request import SamplingParams
from kernels.declare import Capabilities, declare
from plugins.executor import sharing
from plugins.executor.device_state import SHARED_ROWS
from plugins.executor.sharing import SharedPages
from tests.plugins.executor.graph_run import DRAWS, device_decode, make
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel

PAGE, DEPTH = 4, 8
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def _short_prefixes(monkeypatch):
    monkeypatch.setattr(sharing, "DEPTHS", (DEPTH, 4 * DEPTH))


def launch_of(rows, contexts, updates=(), setups=()):
    """One-token rows whose last token is their contexts'."""
    count = len(rows)
    return Launch(
        launch_id=0,
        row_ids=np.array(rows, np.int32),
        first_positions=np.array(contexts, np.int32) - 1,
        num_tokens=np.ones(count, np.int32),
        token_ids=np.zeros(count, np.int32),
        feedback=np.zeros(count, np.bool_),
        samples=np.ones(count, np.bool_),
        num_decode_rows=count,
        table_updates=np.array(updates, np.int32).reshape(-1, 3),
        setups=tuple(RowSetup(row, GREEDY, 1, np.zeros(1, np.int32), 0, 0, ()) for row in setups),
    )


def noted(tables):
    """SharedPages of rows with these pages."""
    pages = SharedPages(8, PAGE)
    updates = [(row, i, page) for row, table in enumerate(tables) for i, page in enumerate(table)]
    pages.note(launch_of([0], [1], updates))
    return pages


def test_rows_with_the_same_page_at_a_depth_share_what_comes_before():
    pages = noted([[5, 6, 7], [5, 6, 8], [5, 9, 10]])
    assert pages.worth_sharing(launch_of([0, 1], [12, 12]))
    assert not pages.worth_sharing(launch_of([0, 2], [12, 12])), "one page is shorter than a depth"
    assert not pages.worth_sharing(launch_of([0], [12]))
    assert pages.worth_sharing(launch_of([2, 1, 0], [12, 12, 12]))


def test_little_of_a_long_context_is_not_worth_it():
    shared = list(range(1, 9))
    pages = noted([[*shared, 20], [*shared, 21], [1, 2, 30], [1, 2, 31]])
    assert not pages.worth_sharing(launch_of([2, 3], [200, 200])), "8 tokens of 400"
    assert pages.worth_sharing(launch_of([0, 1], [200, 200])), "32 tokens of 400"


def test_a_new_request_in_a_row_forgets_its_pages():
    pages = noted([[5, 6], [5, 6]])
    assert pages.worth_sharing(launch_of([0, 1], [9, 9]))
    pages.note(launch_of([0], [1], [(0, 0, 7)], setups=[0]))
    assert not pages.worth_sharing(launch_of([0, 1], [9, 9]))
    pages.note(launch_of([0], [5], [(0, 1, 6)]))
    assert pages.worth_sharing(launch_of([0, 1], [9, 9]))


def test_chunks_beside_them_do_not_count():
    pages = noted([[5, 6], [5, 6]])
    launch = launch_of([0, 1], [9, 9])
    object.__setattr__(launch, "num_decode_rows", 1)
    assert not pages.worth_sharing(launch)


@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 64])
def test_the_page_at_a_depth_ends_there(page_size):
    pages = SharedPages(2, page_size)
    depth = next((depth for depth in sharing.DEPTHS if depth >= page_size), None)
    updates = [(row, i, 1 + i) for row in (0, 1) for i in range(4 * DEPTH)]
    last = None if depth is None else depth // page_size - 1
    before = [one for one in updates if last is None or one[1] < last]
    pages.note(launch_of([0], [1], before))
    assert not pages.worth_sharing(launch_of([0, 1], [40, 40]))
    pages.note(launch_of([0], [1], updates))
    assert pages.worth_sharing(launch_of([0, 1], [40, 40])) == (depth is not None)


class Spy:
    """device_decode, counted."""

    def __init__(self):
        self.rows = []
        declare(Capabilities(dtypes=("float32",), devices=("cpu", "cuda"), graph_safe=True))(self)

    def __call__(self, q, *rest):
        self.rows.append(len(q))
        return device_decode(q, *rest)


def run(graphs, shared):
    """Rows that begin with the first row's pages, and others, decoded in turns; the driver."""
    executor = make(ToyModel(), graphs=graphs, shared=shared)
    core = Driver(executor, PAGE, 2 * SHARED_ROWS, 4096)
    prompt, rows = list(range(1, 14)), range(SHARED_ROWS + 4)

    def hit(launch):
        row = int(launch.row_ids[0])
        cached = [(row, i, page) for i, page in enumerate(core.pages[0][:2])]
        return replace(launch, table_updates=np.array([*cached, *launch.table_updates], np.int32))

    for row in rows:
        core.start(row, prompt if row < SHARED_ROWS else prompt[::-1], DRAWS[row % 2], seed=row)
        core.alter = hit if 0 < row < SHARED_ROWS else None
        if core.alter is not None:
            core.pages[row], core.computed[row] = core.pages[0][:2], 2 * PAGE
        core.step((row, len(prompt) - core.computed[row]))
    core.alter = None
    for some in (range(SHARED_ROWS), (0, 16, 17, 18), range(3), rows):
        core.step(*((row, 1) for row in some))
    return core


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_steps_that_share_run_the_kernel_for_it(graphs):
    spy = Spy()
    core, plain = run(graphs, spy), run(graphs, None)
    assert core.outputs == plain.outputs
    layers = core.executor.model.num_layers
    if graphs == "on":  # padded to a size; three rows have no graphs of their own for it
        assert spy.rows[-2 * layers :] == [16] * layers + [24] * layers
    else:
        assert spy.rows == [16] * layers + [3] * layers + [20] * layers
    facts = core.executor.describe()["graphs"]
    if graphs == "on":
        assert facts["sizes_shared"] == [16, 24, 32]
        assert facts["sizes"][:3] == [1, 2, 4]


def test_a_backend_without_such_a_kernel_notes_nothing():
    executor = make(ToyModel())
    Driver(executor, PAGE)
    assert executor._state.sharing is None
