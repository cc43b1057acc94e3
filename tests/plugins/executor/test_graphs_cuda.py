"""CUDA graphs of one-token launches: the tokens of launches without graphs, replayed while
sequences grow, end and make room for others."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from core.queries import ModelQuery
from kernels.extend_dense import extend
from kernels.flat_indices import FlatIndices
from kernels.fused import FusedOps, FusedPaging
from kernels.fused_sampling import FusedSampling
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from plugins.executor import capture, device_state
from plugins.model.loader import HuggingFaceModel
from tests.plugins.executor.graph_run import make, rerun, serve
from tests.plugins.executor.launch_driver import Driver
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu

DECODES = {
    "split_kv": SplitKV,
    "invariant": lambda: SplitKV("invariant"),
    "flat_indices": FlatIndices,
    "shared_prefix": lambda: SharedPrefix(min_prefix_tokens=16, min_saved_bytes=0),
}


@cache
def tiny(dtype):
    """A random Llama on the device, with fused layers."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="tiny-llama-")
    save_tiny("llama", folder, seed=1, max_position_embeddings=2048)
    loader = HuggingFaceModel(path=folder, dtype=dtype, ops=FusedOps())
    return loader.build_model(ModelQuery("cuda", 0, False))


def executor(dtype="float32", decode="split_kv", **options):
    parts = {"extend": extend, "paging": FusedPaging(), "sampling": FusedSampling}
    return make(tiny(dtype), decode=DECODES[decode](), **parts, **options)


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_those_without_graphs(decode, overlap):
    """N14: batches of 1, 3, 5, 7, 9 in graphs of 1, 4, 8, 12, junk where nothing may be read."""
    graphs = serve(executor(decode=decode, capture=None), overlap=overlap)
    eager = serve(executor(decode=decode, graphs="off"))
    assert graphs.served == eager.served
    assert {1, 4, 8, 12} <= {result.graph_tokens for result in graphs.results}


@pytest.mark.parametrize("page_size", [1, 16])
def test_half_precision_tokens_equal_those_of_the_same_padded_launches(page_size):
    graphs = serve(executor("bfloat16", capture=None), page_size, overlap=True)
    again = serve(executor("bfloat16", capture=rerun), page_size)
    assert graphs.served == again.served


@pytest.mark.parametrize("decode", DECODES)
def test_sequences_that_grow_past_a_split_and_rows_used_again(decode):
    """N18: captured with one token a row; 1024 crossed; then another request in the row."""
    outputs = []
    for options in ({"capture": None}, {"graphs": "off"}):
        core = Driver(executor(decode=decode, **options), 16, num_rows=4, num_tokens=8192)
        random = np.random.default_rng(5)
        for row, length in enumerate((1000, 480, 3)):
            core.start(row, random.integers(0, 128, length).tolist())
            core.step((row, length))
        for _ in range(50):
            core.step((0, 1), (1, 1), (2, 1))
        first = core.outputs[0]
        core.release(0)
        core.start(0, random.integers(0, 128, 20).tolist())
        core.step((0, 20))
        for _ in range(20):
            core.step((2, 1), (0, 1))
        outputs.append([first, *core.outputs.values()])
    assert outputs[0] == outputs[1]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_replays_neither_wait_nor_allocate():
    core = Driver(executor("bfloat16", capture=None), 16, num_rows=4)
    core.start(0, list(range(30)))
    core.start(1, list(range(7)))
    core.step((0, 30), (1, 7))
    core.step((0, 1), (1, 1))
    before = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        core.launch((0, 1), (1, 1))
        core.launch((1, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [core.collect().graph_tokens, core.collect().graph_tokens] == [2, 1]
    for _ in range(40):
        core.step((0, 1), (1, 1))
    assert torch.cuda.memory_reserved() == before


MIXED_ROWS = 12


def mixed_core(dtype, graphs, page_size=16, **options):
    """Four rows decode while chunks come: a short prompt, two, and one in slices."""
    served = executor(dtype, capture=None, graphs=graphs, **options)
    core = Driver(served, page_size, MIXED_ROWS, 8192)
    random = np.random.default_rng(3)
    for row, length in enumerate((700, 90, 5, 1)):
        core.start(row, random.integers(0, 128, length).tolist())
        core.launch((row, length))
        core.collect()
    ones = [(row, 1) for row in range(4)]
    for row, slices in ((4, [30]), (5, [200]), (6, [64, 64, 64]), (7, [400, 300])):
        core.start(row, random.integers(0, 128, sum(slices)).tolist())
        for count in slices:
            core.launch(*ones, (row, count))
            core.launch(*ones)
            core.collect()
            core.collect()
        ones.append((row, 1))
    for row in (8, 9):
        core.start(row, random.integers(0, 128, 33).tolist())
    core.step(*ones, (8, 33), (9, 33))
    core.step(*ones, (8, 1), (9, 1))
    return core


@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_launches_as_one_graph_give_the_same_tokens(page_size):
    whole = mixed_core("float32", "auto", page_size)
    assert mixed_core("float32", "off", page_size).outputs == whole.outputs
    assert whole.executor._state.mixed_graphs[False].sizes, "some are worth it"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_mixed_launches_neither_wait_nor_allocate():
    core = mixed_core("bfloat16", "auto")
    ones = [(row, 1) for row in range(10)]
    core.release(9)
    core.start(9, list(range(40)))
    taken = []
    graphs = core.executor._state.mixed_graphs[False]
    run = graphs.run
    graphs.run = lambda *args: taken.append(1) or run(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        core.launch(*ones[:9], (9, 40))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    core.collect()
    assert taken


def test_mixed_launches_whose_rows_share_a_prefix(monkeypatch):
    """One graph with the kernel that reads it once, against launches without graphs."""
    monkeypatch.setattr(capture, "SHARED_ROWS", 2)
    monkeypatch.setattr(device_state, "SHARED_ROWS", 2)
    outputs, taken = [], []
    for graphs in ("auto", "off"):
        kernel = DECODES["shared_prefix"]()
        core = Driver(
            executor(capture=None, graphs=graphs, shared=kernel), 16, MIXED_ROWS, num_tokens=8192
        )
        state, random = core.executor._state, np.random.default_rng(4)
        state.sharing.forced = True
        prompt = random.integers(0, 128, 64).tolist()
        core.start(0, prompt)
        core.step((0, 64))
        for row in (1, 2, 3):
            core.start(row, [*prompt, row])
            core.pages[row], core.computed[row] = core.pages[0][:4], 64
            core.alter = partial(shared_pages, core, row)
            core.step((row, 1))
        core.alter = None
        if graphs == "auto":
            run = state.mixed_graphs[True].run
            state.mixed_graphs[True].run = lambda *args, run=run: taken.append(1) or run(*args)
        for row in (4, 5):
            core.start(row, random.integers(0, 128, 90).tolist())
            core.step(*((one, 1) for one in range(row)), (row, 40))
            core.step(*((one, 1) for one in range(row)), (row, 50))
        outputs.append(core.outputs)
    assert outputs[0] == outputs[1]
    assert len(taken) == 4


def shared_pages(core, row, launch):
    """The launch with a row's first pages in the block table: those of row 0."""
    first = [(row, index, page) for index, page in enumerate(core.pages[0][:4])]
    updates = np.concatenate([np.array(first, np.int32), launch.table_updates])
    return replace(launch, table_updates=updates)
