"""Launches of one-token rows as graphs, without a device: captured functions are run again."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from core.build import build_engine
from core.config import EngineConfig
from core.errors import ConfigError
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from kernels.fused import FusedPaging
from kernels.fused_sampling import FusedSampling
from kernels.jit import INTERPRETED
from kernels.split_kv import SplitKV
from kernels.torch_reference import paged_decode
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.graphs import graph_sizes
from plugins.executor.torch_runner import TorchRunner
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.plugins.executor.graph_run import BATCHES, NUM_ROWS, make, rerun, serve
from tests.plugins.executor.launch_driver import GREEDY, Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="runs kernels on a CPU; test_graphs_cuda.py has a device's graphs"
)
MODEL = ToyModel()
PROMPTS = [np.random.default_rng(i).integers(0, 50, n).tolist() for i, n in enumerate((37, 5, 1))]


class WideModel(ToyModel):
    """With heads that the kernels take."""

    head_dim = 16


def sizes_run(core):
    return [result.graph_tokens for result in core.results]


def decoding(executor=None, params=GREEDY, num_rows=NUM_ROWS):
    """A driver with rows 0 and 1 prefilled, row 0 with `params`."""
    core = Driver(executor or make(MODEL), 4, num_rows)
    core.start(0, PROMPTS[1], params, ends=(7,))
    core.start(1, PROMPTS[1])
    core.step((0, 5), (1, 5))
    return core


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_those_without_graphs(page_size, overlap):
    graphs = serve(make(MODEL), page_size, overlap)
    eager = serve(make(MODEL, graphs="off"), page_size)
    assert graphs.served == eager.served
    sizes = sizes_run(graphs)
    assert {1, 4, 8, 12} <= set(sizes)
    captured = graphs.executor._state.graphs[False]._captured
    assert sum(one.graph.replays for one in captured) == sum(size > 0 for size in sizes)
    assert set(sizes_run(eager)) == {0}


def test_tokens_of_kernels_equal_those_without_graphs():
    runs = []
    for graphs in ("on", "off"):
        kernels = {"decode": SplitKV(), "paging": FusedPaging(), "sampling": FusedSampling}
        executor = make(WideModel(), graphs=graphs, **kernels)
        core = Driver(executor, 4, num_rows=3, num_tokens=64)
        for row in range(3):
            core.start(row, PROMPTS[1][: 5 - row])
        core.step((0, 5), (1, 4), (2, 3))
        for rows in ((0, 1, 2), (2,), (0, 2)):
            core.step(*((row, 1) for row in rows))
        runs.append(core)
    assert runs[0].outputs == runs[1].outputs
    assert sizes_run(runs[0]) == [0, 3, 1, 2]


def test_a_launch_takes_the_least_graph_that_holds_it():
    core = serve(make(MODEL), rounds=1, poisoned=False)
    decodes = sizes_run(core)[1 : 1 + 4 * len(BATCHES)]
    assert decodes == np.repeat([1, 4, 8, 8, 12], 4).tolist()


def test_padding_writes_page_0_alone():
    core = decoding()
    core.start(2, PROMPTS[0])
    core.step((2, 37))
    pool = core.executor._state.pool
    pool.kv[:, :, 0] = 0.0
    before = pool.kv.clone(), pool.table.clone(), pool.last_tokens.clone()
    launch = core.launch((0, 1), (1, 1), (2, 1))
    result = core.collect()
    assert result.graph_tokens == 4
    written = (pool.kv != before[0]).flatten(4).any(-1).nonzero().tolist()
    pages = {(page, slot) for _, _, page, slot in written}
    slots = [(core.pages[row][at // 4], at % 4) for row, at in ((0, 5), (1, 5), (2, 37))]
    assert pages == {(0, 0), *slots}
    changed = (pool.table != before[1]).nonzero().tolist()
    assert sorted(changed) == sorted(launch.table_updates[:, :2].tolist())
    changed = (pool.last_tokens != before[2]).nonzero().flatten().tolist()
    assert set(changed) <= {0, 1, 2, pool.pad_row}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(logprobs=0),
    ],
)
def test_rows_that_ask_for_more_than_a_draw_run_without_a_graph(params):
    core = decoding(params=params)
    core.step((1, 1), (0, 1))
    assert core.results[-1].graph_tokens == 0
    core.step((1, 1))
    assert core.results[-1].graph_tokens == 1


def test_rows_run_in_graphs_once_their_minimum_is_out():
    params = SamplingParams(temperature=0, min_tokens=3)
    core = decoding(params=params)
    for _ in range(4):
        core.step((0, 1))
    assert sizes_run(core)[1:] == [0, 0, 1, 1]
    eager = decoding(make(MODEL, graphs="off"), params)
    for _ in range(4):
        eager.step((0, 1))
    assert core.outputs == eager.outputs


def test_prompt_tokens_one_by_one_are_scored_without_a_graph():
    core = Driver(make(MODEL), 4)
    core.start(0, PROMPTS[1], SamplingParams(temperature=0, prompt_logprobs=1))
    for _ in range(7):
        core.step((0, 1))
    assert sizes_run(core) == [0, 0, 0, 0, 1, 1, 1]
    assert [len(result.prompt_logprobs) for result in core.results] == [1, 1, 1, 1, 0, 0, 0]
    assert core.outputs[0] == MODEL.greedy(PROMPTS[1], 3)


def test_prompt_tokens_one_by_one_yield_no_token_until_the_last():
    core = decoding()
    core.start(2, PROMPTS[0])
    core.executor._state.pool.last_tokens[2] = 33
    for _ in range(36):
        core.step((2, 1), (0, 1))
    assert core.outputs[2] == []
    assert core.executor._state.pool.last_tokens[2] == 33
    core.step((2, 1), (0, 1))
    assert set(sizes_run(core)[1:]) == {2}
    assert core.outputs[2] == MODEL.greedy(PROMPTS[0], 1)
    assert core.outputs[0] == MODEL.greedy(PROMPTS[1], 38)


@pytest.mark.parametrize("paging", [None, FusedPaging()])
def test_a_row_that_starts_with_one_token_is_reset_first(paging):
    core = decoding(make(MODEL, paging=paging))
    core.release(0)
    core.executor._state.pool.table[3] = 9
    core.start(3, PROMPTS[0])  # all but its last token in pages of another
    core.start(0, PROMPTS[0])
    core.step((0, 37))
    core.computed[3], core.pages[3] = 36, core.pages[0][:9]
    pages = [(3, index, page) for index, page in enumerate(core.pages[3])]
    core.alter = lambda launch: replace(
        launch, table_updates=np.array([*pages, *launch.table_updates.tolist()], np.int32)
    )
    core.step((3, 1), (1, 1))
    core.alter = None
    assert core.results[-1].graph_tokens == 2
    assert (core.executor._state.pool.table[3, 10:] == 0).all()
    for _ in range(4):
        core.step((3, 1), (1, 1))
    assert core.outputs[3] == MODEL.greedy(PROMPTS[0], 5)
    assert core.outputs[1] == MODEL.greedy(PROMPTS[1], 6)


def test_more_updates_than_rows_are_applied():
    core = decoding()
    moved = [(0, 20 + index, 7) for index in range(5)]
    core.alter = lambda launch: replace(launch, table_updates=np.array(moved, np.int32))
    core.step((0, 1))
    assert core.results[-1].graph_tokens == 1
    assert (core.executor._state.pool.table[0, 20:25] == 7).all()


def test_rows_without_a_token_fail_alone():
    class Failing(ToyModel):
        def forward(self, token_ids, positions, attend, logits_rows):
            logits = super().forward(token_ids, positions, attend, logits_rows)
            return logits.masked_fill((positions[logits_rows] == 6)[:, None], torch.nan)

    core = decoding(make(Failing()))
    core.start(2, PROMPTS[2])
    core.step((2, 1), (0, 1), (1, 1))
    assert core.results[-1].errors == {}
    core.step((2, 1), (0, 1))
    assert core.results[-1].graph_tokens == 2
    assert list(core.results[-1].errors) == [1]


def test_launches_beyond_the_largest_size_run_without_a_graph():
    executor = make(MODEL)
    executor._max_rows = 2
    core = decoding(executor)
    core.start(2, PROMPTS[2])
    core.step((0, 1), (1, 1), (2, 1))
    core.step((0, 1), (1, 1))
    assert sizes_run(core)[1:] == [0, 2]


def test_sizes_grow_by_an_eighth_at_most_beyond_64():
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    sizes = graph_sizes(1000)
    assert sizes[-1] == 1000
    wide = [size for size in sizes if size >= 64]
    assert all(b - a <= a / 8 for a, b in pairwise(wide))
    assert len(sizes) < 50


def test_manifest_says_why_there_are_no_graphs():
    def graphs(executor):
        return Driver(executor).executor.describe()["graphs"]

    assert graphs(make(MODEL)) == {"sizes": [1, 2, 4, 8], "why_not": ""}
    assert graphs(make(MODEL, graphs="off")) == {"sizes": [], "why_not": "off"}
    reason = "device is cpu"
    assert graphs(make(MODEL, capture=None, graphs="auto")) == {"sizes": [], "why_not": reason}
    reason = graphs(make(MODEL, decode=paged_decode, graphs="auto"))["why_not"]
    assert reason.endswith("torch_reference.paged_decode does not declare graph_safe")
    plain = TorchRunner().build_executor(executor_query(MODEL))
    plain._capture = rerun
    assert graphs(plain) == {"sizes": [], "why_not": "ops.sampling is torch's"}


def test_graphs_that_are_demanded_and_cannot_be_are_refused():
    runner = TorchRunner(graphs="on")
    with pytest.raises(ConfigError, match="graphs must be auto or off where device is cpu, got"):
        Driver(runner.build_executor(executor_query(MODEL)))
    with pytest.raises(ConfigError, match=r"executor\.graphs must be one of .*, got 'yes'"):
        TorchRunner(graphs="yes")


def test_a_failed_capture_names_the_way_out():
    def broken(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError) as failure:
        Driver(make(MODEL, capture=broken))
    assert failure.value.__notes__ == ["while capturing 8 rows; executor.graphs=off does without"]


class GraphRunner:
    """The plugin of an executor made for tests."""

    @hookimpl
    def build_executor(self, query):
        return make(MODEL)


def test_step_records_tell_the_graph_that_ran():
    plugins = [Fcfs(), PromptFits(growth_share=0), Chunked(), LastAdmitted(), Paged(4), Radix()]
    plugins += [Lru(), AdmitAll(), MaxTokensShare(), Fixed(), GraphRunner()]
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    config = EngineConfig(max_num_seqs=4, pool_tokens=256, overlap=True, strict=True)
    engine = build_engine(hooks, config, 0, RealClock())
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(Request(str(index), np.array(prompt, np.int32), params))
    records = []
    while engine.has_work:
        event = engine.step()
        if event is not None and event.record.num_rows:
            records.append(event.record)
    decodes = [record for record in records if not record.prefill_tokens]
    assert {record.graph_tokens for record in decodes} == {4}
    assert {record.graph_tokens for record in records if record.prefill_tokens} == {0}
    tokens = [list(engine.records[str(i)].choices[0].token_ids) for i in range(3)]
    assert tokens == [MODEL.greedy(prompt, 6) for prompt in PROMPTS]
