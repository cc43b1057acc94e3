"""Launches with chunks whose layers run as graphs between their attentions."""

import pytest
import torch

from core.errors import LaunchError
from plugins.executor import chunk_graphs
from plugins.executor.chunk_graphs import ChunkGraphs
from plugins.executor.padding import Padding
from tests.plugins.executor.graph_run import DRAWS, device_decode, make, poison, rerun, serve
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.model.dense import load
from tests.tiny_models import save_tiny

LARGEST = 2048


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A decoder of every kind of layer: norms of q and k, biases of none."""
    monkeypatch.setattr(chunk_graphs, "SMALLEST", 8)
    save_tiny("qwen3", tmp_path)
    return lambda: load(tmp_path)


def with_graphs(model, graphs="off"):
    """An executor that pads, and captures at prepare."""
    executor = make(model, graphs=graphs, decode=device_decode)
    prepare = executor.prepare

    @torch.inference_mode()
    def prepare_and_capture(layout):
        prepare(layout)
        state = executor._state
        state.padding = Padding(LARGEST)
        state.chunk_graphs = ChunkGraphs(model, state.pool, state.padding.sizes[:12], rerun)
        state.chunk_graphs.capture(progress=False)

    executor.prepare = prepare_and_capture
    return executor


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_those_without(tiny, graphs, overlap):
    executor = with_graphs(tiny(), graphs)
    layered = serve(executor, overlap=overlap, rounds=1)
    plain = serve(make(tiny(), graphs="off", decode=device_decode), rounds=1)
    assert layered.served == plain.served
    captured = executor._state.chunk_graphs._captured
    assert sorted(captured) == executor._state.chunk_graphs.sizes
    replays = {size: {g.replays for g, _ in one.entries} for size, one in captured.items()}
    assert all(len(counts) == 1 for counts in replays.values()), "every layer's graph alike"
    assert sum(max(counts) for counts in replays.values()) > (3 if graphs == "off" else 0)


def run_beside(executor, fails):
    """Three rows decode; a prompt joins them, whose first launch runs out of memory between two
    layers if it `fails`. All rows' outputs."""
    core = Driver(executor, 4, num_rows=12)
    core.alter = lambda launch: poison(core) or launch
    for row in range(3):
        core.start(row, range(1 + row, 20 + row), DRAWS[row], seed=row)
    core.step(*((row, 19) for row in range(3)))
    core.launch(*((row, 1) for row in range(3)))
    core.start(5, range(3, 20))
    if fails:
        attend = executor.model.attend

        def broken(attention, index, q, k, v):
            if index == 1:
                raise torch.OutOfMemoryError("no memory")
            return attend(attention, index, q, k, v)

        executor.model.attend = broken
        with pytest.raises(LaunchError, match="no memory"):
            core.launch((5, 17))
        executor.model.attend = attend
        core.sampling.pop()
        core.release(5)
        core.start(5, range(3, 20))
    core.launch(*((row, 1) for row in range(3)), (5, 17))
    core.collect()
    core.collect()
    for _ in range(3):
        core.step(*((row, 1) for row in (0, 1, 2, 5)))
    return core.outputs


def test_a_launch_that_fails_between_two_layers_concerns_no_other(tiny):
    plain = make(tiny(), graphs="off", decode=device_decode)
    assert run_beside(with_graphs(tiny()), True) == run_beside(plain, False)


def test_sizes_are_fine_where_launches_are_small():
    sizes = Padding(8192).sizes

    class Shape:
        num_q_heads, head_dim, dtype, device = 1, 1, torch.float32, torch.device("cpu")

    found = ChunkGraphs(Shape(), None, sizes, rerun).sizes
    assert found[0] == 16
    assert found[-1] == 8192
    assert {64, 72, 640, 1024, 1152, 2048, 2560, 7680} <= set(found) <= set(sizes)
    assert 2176 not in found
    assert ChunkGraphs(Shape(), None, Padding(1000).sizes, rerun).sizes[-1] == 1000


@pytest.mark.parametrize(
    ("layer_parameters", "last"),
    [(15_728_640, 8064), (50_000_000, 3000), (218_103_808, 0)],
    ids=["0.6b", "between", "8b"],
)
def test_small_models_pad_to_the_next_graph(layer_parameters, last):
    """Launches of 2,049 to 2,560 tokens, of which the host would launch every kernel, are padded to
    2,560, unless the device takes longer for a layer of so many than the host."""

    class Shape:
        num_q_heads, head_dim, dtype, device = 1, 1, torch.float32, torch.device("cpu")

    Shape.layer_parameters = layer_parameters
    sizes = Padding(8192).sizes
    graphs = ChunkGraphs(Shape(), None, sizes, rerun)
    kept = graphs.padding_sizes(sizes)
    dropped = sorted(set(sizes) - set(kept))
    assert dropped == [size for size in sizes if 2048 < size <= last and size % 512]
    assert set(graphs.sizes) <= set(kept)


def test_a_size_that_fails_says_so(tiny):
    def broken(run):
        raise RuntimeError("no memory")

    executor = make(tiny(), graphs="off", decode=device_decode)
    graphs = ChunkGraphs(executor.model, None, [16], broken)
    with pytest.raises(RuntimeError) as failure:
        graphs.capture(progress=False)
    said = "while capturing 16 tokens; executor.graphs=off does without"
    assert failure.value.__notes__ == [said]
