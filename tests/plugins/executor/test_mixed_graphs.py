"""Launches of any rows as one graph each."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.declare import Capabilities, declare
from kernels.torch_reference import paged_extend
from plugins.executor import device_state, mixed_graphs
from plugins.executor.device_state import DeviceState
from plugins.executor.mixed_graphs import CHUNKS, MixedGraphs, mixed_sizes
from plugins.executor.padding import Padding
from plugins.executor.warm_up import page_0_launch
from plugins.shared.launch_sizes import LaunchSizes
from tests.plugins.executor.graph_run import JUNK, device_decode, make, rerun, serve
from tests.plugins.model.dense import load
from tests.tiny_models import save_tiny

SIZES = [32, 64, 96, 128, 192]
CAPABILITIES = Capabilities(dtypes=("float32",), devices=("cpu",), graph_safe=True, takes_out=True)


@declare(CAPABILITIES)
def device_extend(q, k_cache, v_cache, page_table, context_lens, query_starts, scale, window, out):
    """The reference over rows that have tokens; those before the first row's are left alone."""
    begin, there = int(query_starts[0]), query_starts.diff() > 0
    starts = torch.cat([query_starts[:-1][there], query_starts[-1:]]) - begin
    rows = page_table[there], context_lens[there], starts.to(torch.int32)
    out[begin:] = paged_extend(q[begin:], k_cache, v_cache, *rows, scale, window)
    return out


device_extend.in_graph = device_extend


@pytest.fixture
def tiny(tmp_path):
    save_tiny("qwen3", tmp_path)
    return lambda: load(tmp_path)


def with_graphs(model, graphs="off", sizes=SIZES, capture=rerun):
    """An executor that pads, and captures mixed launches at prepare."""
    executor = make(model, graphs=graphs, decode=device_decode, extend=device_extend)
    prepare = executor.prepare

    @torch.inference_mode()
    def prepare_and_capture(layout):
        prepare(layout)
        state = executor._state
        state.padding = Padding(2048)
        rows = layout.num_rows, state.pool.pad_row
        mixed = state.mixed_graphs[False] = MixedGraphs(state.forward, sizes, *rows, capture)
        mixed.capture(progress=False)

    executor.prepare = prepare_and_capture
    return executor


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_those_without(tiny, graphs, overlap):
    executor = with_graphs(tiny(), graphs)
    launch = executor.launch
    taken = []

    @torch.inference_mode()
    def launch_over_junk(one):
        found = executor._state.mixed_graphs[False]
        taken.append((found.size_for(one) > 0, one.num_decode_rows < len(one.row_ids)))
        for given in (found._token_ids, found._others):
            given.fill_(JUNK)
        launch(one)

    executor.launch = launch_over_junk
    whole = serve(executor, overlap=overlap, rounds=1)
    plain = serve(make(tiny(), graphs="off", decode=device_decode), rounds=1)
    assert whole.served == plain.served
    assert taken.count((True, True)) >= 3, "launches with chunks"
    results = [result.graph_tokens for result in whole.results]
    assert [size in SIZES for size in results].count(True) >= 3
    replays = sum(
        one.graph.replays for one in executor._state.mixed_graphs[False]._captured.values()
    )
    alone = 0 if graphs == "on" else taken.count((True, False))
    assert replays == taken.count((True, True)) + alone


@pytest.fixture
def graphs(tiny):
    """Graphs of a model in an executor, and a launch's verdict."""
    executor = with_graphs(tiny())
    serve(executor, rounds=0)
    return executor._state.mixed_graphs[False]


def launch_of(*parts):
    return page_0_launch(parts)


def test_takes_what_has_room(graphs):
    assert graphs.sizes == SIZES
    assert graphs.size_for(launch_of((9, 1), (0, 5))) == 32
    assert graphs.size_for(launch_of((9, 1), (0, 31))) == 32
    assert graphs.size_for(launch_of((9, 1), (0, 32))) == 64
    assert graphs.size_for(launch_of((0, 192))) == 192
    assert not graphs.size_for(launch_of((0, 193)))
    ones, room = [(0, 1)] * 12, graphs._captured[32].ones
    assert room == 12
    assert graphs.size_for(launch_of(*ones)) == 32
    assert not graphs.size_for(launch_of(*ones, (0, 1)))
    assert graphs.size_for(launch_of(*[(0, 2)] * CHUNKS)) == 64
    assert not graphs.size_for(launch_of(*[(0, 2)] * (CHUNKS + 1)))


def test_leaves_long_contexts_and_much_work_to_other_kernels(graphs):
    model = graphs._forward.model
    assert graphs.size_for(launch_of((8188, 4)))
    assert not graphs.size_for(launch_of((8189, 4)))
    assert graphs.size_for(launch_of((100_000, 1), (0, 4))), "one-token rows are as before"
    graphs._work = 4 * 1000
    assert graphs.size_for(launch_of((996, 4)))
    assert not graphs.size_for(launch_of((997, 4)))
    assert MixedGraphs(graphs._forward, [32], 4, 0, rerun)._work == (
        mixed_graphs.WORK / (4 * model.num_q_heads * model.head_dim)
    )


@pytest.mark.parametrize(
    "parts",
    [
        [(9, 1), (0, 5)], [(0, 33)], [(0, 192)], [(0, 193)], [(8188, 4)], [(8189, 4)],
        [(100_000, 1), (0, 4)], [(0, 2)] * CHUNKS, [(0, 2)] * (CHUNKS + 1), [(6000, 30)],
    ],
)  # fmt: skip
def test_models_of_time_know_which_launches_are_graphs(graphs, parts):
    graphs._work = 180_000
    launch = launch_of(*parts)
    sizes = LaunchSizes(mixed=graphs.sizes, chunks=[256], mixed_pairs=180_000)
    _, tokens, kind = sizes.of(launch)
    assert (tokens if kind == "graphed" else 0) == graphs.size_for(launch)


def test_sizes_are_those_to_which_others_pad():
    small = SimpleNamespace(layer_parameters=15_728_640)  # Qwen3-0.6B
    found = mixed_sizes(Padding(8192).sizes, small)
    assert found[:6] == [32, 64, 96, 128, 192, 256]
    assert found[-3:] == [1792, 1920, 2048]
    assert {576, 1024, 1152} <= set(found)
    assert len(found) == 26
    assert mixed_sizes(Padding(700).sizes, small)[-1] == 700
    assert mixed_sizes(Padding(9000).sizes, small)[-1] == 2048
    large = SimpleNamespace(layer_parameters=218_103_808)  # Llama-3.1-8B
    assert mixed_sizes(Padding(8192).sizes, large) == [32, 64, 96, 128, 192, 256]


def test_lay_out_pads_rows_and_keeps_the_rest(graphs):
    arrays = {
        "token_ids": np.arange(32), "positions": np.arange(32) + 100,
        "token_rows": np.arange(32) + 200, "row_ids": np.array([3, 1, 2]),
        "context_lens": np.array([7, 8, 9]), "query_starts": np.array([0, 1, 2, 6]),
        "updates": np.zeros((0, 3)),
    }  # fmt: skip
    laid = graphs.lay_out(arrays, 2)
    assert set(laid) == {"token_ids", "updates", "others"}
    pad, room = graphs._pad_row, 12
    positions, token_rows, rest = np.split(laid["others"], [32, 64])
    rows, lens, starts = np.split(rest, [room + CHUNKS, 2 * (room + CHUNKS)])
    assert positions.tolist() == arrays["positions"].tolist()
    assert token_rows.tolist() == arrays["token_rows"].tolist()
    assert rows.tolist() == [3, 1] + [pad] * 10 + [2] + [pad] * (CHUNKS - 1)
    assert lens.tolist() == [7, 8] + [1] * 10 + [9] + [0] * (CHUNKS - 1)
    assert starts[room:].tolist() == [2] + [6] * CHUNKS


def test_a_size_that_fails_says_so(tiny):
    def broken(run):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError) as failure:
        serve(with_graphs(tiny(), capture=broken), rounds=0)
    said = "while capturing 192 tokens; executor.graphs=off does without"
    assert failure.value.__notes__[0] == said


def test_rows_that_share_a_prefix_have_graphs_of_their_own(graphs, monkeypatch):
    monkeypatch.setattr(device_state, "SHARED_ROWS", 3)
    forward, launch = graphs._forward, launch_of((9, 1), (9, 1), (9, 1), (0, 5))
    state = DeviceState(forward.pool, None, None, forward, mixed_graphs={False: graphs})
    assert state.mixed_for(launch, shares_prefix=False) == (graphs, 32)
    assert state.mixed_for(launch, shares_prefix=True) == (None, 0)
    assert state.mixed_for(launch_of((9, 1), (0, 5)), shares_prefix=True) == (graphs, 32), "few"
    assert state.mixed_for(launch_of((0, 200)), shares_prefix=False) == (None, 0)
    sharing = MixedGraphs(forward, SIZES, 12, graphs._pad_row, rerun, shares_prefix=True)
    seen = []
    plan = forward.backend.plan
    monkeypatch.setattr(forward.backend, "plan", lambda batch: seen.append(batch) or plan(batch))
    with torch.inference_mode():
        sharing.capture(progress=False)
    assert {(batch.shares_prefix, batch.in_graph) for batch in seen} == {(True, True)}
    state.mixed_graphs[True] = sharing
    assert state.mixed_for(launch, shares_prefix=True) == (sharing, 32)
