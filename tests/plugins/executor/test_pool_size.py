"""engine.pool_tokens=auto: what is measured, what is left for the pool, and what a user reads."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.build import build_engine
from core.config import EngineConfig
from core.errors import ConfigError
from core.hooks import Hooks
from core.launch import PoolLayout
from core.request import Request, SamplingParams
from kernels.jit import INTERPRETED
from kernels.torch_reference import paged_decode, paged_extend
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.attention.paged import PagedAttention
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor import pool_size
from plugins.executor.graphs import graph_sizes
from plugins.executor.pool_size import (
    GRAPH_BYTES,
    Budget,
    cpu_budget,
    cuda_budget,
    fit_pool,
    free_memory,
    gib,
    graph_launch,
    largest_launches,
)
from plugins.executor.torch_runner import TorchRunner
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.engine_harness import finish
from tests.plugins.executor.graph_run import make
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query
from tests.test_equality import Shared

GIB = 1 << 30
LAYOUT = PoolLayout(1 << 20, 16, num_rows=8, max_pages=4, max_num_batched_tokens=32)
SLOT_BYTES = 2 * 2 * 2 * 8 * 4  # of ToyModel: K and V, layers, heads, head_dim, fp32


def test_what_is_left_is_the_share_without_all_that_is_used():
    budget = Budget(0.5, 100 * GIB, 3 * GIB, 16 * GIB, 4 * GIB, 2 * GIB)
    assert budget.pool_bytes == 25 * GIB
    assert replace(budget, most_bytes=4 * GIB).pool_bytes == 4 * GIB
    assert str(budget) == (
        "0.5 x 100.00 GiB - 3.00 GiB other programs - 16.00 GiB weights - 4.00 GiB launches"
        " - 2.00 GiB graphs"
    )
    size = fit_pool(budget, LAYOUT, page_bytes=GIB + 1)
    assert (size.num_pages, size.num_tokens) == (24, 23 * 16), "whole pages, page 0 not counted"
    assert size.describe() == {
        "pool_tokens": 368,
        "page_bytes": GIB + 1,
        "share": 0.5,
        "total_bytes": 100 * GIB,
        "others_bytes": 3 * GIB,
        "weights_bytes": 16 * GIB,
        "work_bytes": 4 * GIB,
        "graphs_bytes": 2 * GIB,
        "most_bytes": None,
    }
    assert fit_pool(budget, LAYOUT, page_bytes=8).num_pages == LAYOUT.num_pages


@pytest.mark.parametrize("total", [6 * 100 - 1, 100])
def test_a_pool_without_room_for_one_request_is_refused(total):
    fit_pool(Budget(1.0, 5 * 100 + 10, 10), LAYOUT, page_bytes=100)
    with pytest.raises(ConfigError) as failure:
        fit_pool(Budget(1.0, total, 100), LAYOUT, page_bytes=100)
    assert str(failure.value) == (
        f"engine.pool_tokens=auto must hold one request of 64 tokens (500 bytes), got {total - 100}"
        f" bytes = 1 x {total} bytes - 100 bytes other programs: raise engine.memory_share, or"
        " lower engine.max_model_len, engine.max_num_batched_tokens or engine.max_num_seqs"
    )


def test_bytes_as_text():
    texts = [gib(size) for size in (7000, 64 << 20, 5 << 29, -GIB)]
    assert texts == ["7,000 bytes", "0.06 GiB", "2.50 GiB", "-1.00 GiB"]


class Device:
    """torch.cuda of a device with 100 units of memory, of which others use 5."""

    def __init__(self):
        self.held, self.peak, self.cached = 20, 0, 7

    def empty_cache(self):
        self.cached = 0

    def memory_reserved(self, device):
        return self.held + self.cached

    def reset_peak_memory_stats(self, device):
        self.peak = self.held + self.cached

    def max_memory_reserved(self, device):
        return self.peak

    def mem_get_info(self, device):
        return 100 - 5 - self.held - self.cached, 100

    def run(self, launches):
        """The first run keeps 3 units for good; a graph's launch takes 4, the largest 30."""
        self.held = 23
        self.cached = 4 if len(launches) == 1 else 30
        self.peak = max(self.peak, self.held + self.cached)


@pytest.mark.parametrize(
    ("graph_rows", "sets", "layered"), [(0, 1, True), (4, 1, False), (4, 2, True)]
)
def test_a_device_is_measured_by_the_peak_of_its_largest_launches(
    graph_rows, sets, layered, monkeypatch
):
    device = Device()
    monkeypatch.setattr(pool_size, "torch", SimpleNamespace(cuda=device, device=torch.device))
    launches = largest_launches(LAYOUT, 4, 64)
    given = torch.device("cuda"), 0.9, device.run, launches, graph_rows
    budget = cuda_budget(*given, num_graphs=sets * 3, layered=layered)
    graphs = 4 + sets * 3 * GRAPH_BYTES + 33 * layered if graph_rows else 0  # 1, 2 and 4 rows
    assert budget == Budget(0.9, 100, 5, 20, 33, graphs)


@pytest.mark.parametrize(
    ("num_seqs", "budget", "max_pages"), [(4, 32, 4), (4, 30, 4), (4, 3, 4), (2, 32, 1), (1, 64, 1)]
)
def test_the_largest_launches_fill_a_step_and_run_over_one_page(num_seqs, budget, max_pages):
    layout = PoolLayout(1, 16, 2 * num_seqs, max_pages, budget)
    executor = TorchRunner().build_executor(executor_query(ToyModel()))
    executor.prepare(layout)
    chunks, one, decode = launches = largest_launches(layout, num_seqs, 500)
    longest = max_pages * 16
    rows = min(num_seqs, budget)
    assert chunks.num_tokens.sum() == min(budget, rows * longest)
    assert one.num_tokens.tolist() == [min(budget, longest)]
    for launch in (one, decode):
        ends = launch.first_positions + launch.num_tokens
        assert ends.tolist() == [longest] * len(ends)
    assert [len(one.row_ids) for one in launches] == [rows, 1, rows]
    for launch in [*launches, graph_launch(rows)]:
        assert launch.num_tokens.sum() <= budget
        assert (launch.num_tokens[: launch.num_decode_rows] == 1).all()
        executor.launch(launch)
        result = executor.collect()
        assert len(result.tokens) == len(launch.row_ids)
        assert not result.errors


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on a CPU")
@pytest.mark.parametrize(("graphs", "graph_rows"), [("on", 3), ("off", 0)])
def test_a_device_is_measured_over_one_page(graphs, graph_rows, monkeypatch):
    """The path of a CUDA device on a CPU: the backend is built once."""
    seen, built = [], []

    def measured(device, share, run, largest, rows, count, layered):
        sizes = len(graph_sizes(3))
        assert (count, layered) == (sizes, False), "a toy without shared kernels or layers"
        run([*largest, graph_launch(3)])
        seen.append((share, executor._state.pool.kv.shape[2], len(largest), rows))
        return Budget(share, 100 * 16 * SLOT_BYTES)

    model = ToyModel()
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "memory_share": 0.5}
    executor = make(model, graphs=graphs, engine=EngineConfig(pool_tokens="auto", **limits))
    build = executor._build_attention
    executor._build_attention = lambda query: built.append(query) or build(query)
    monkeypatch.setattr(pool_size, "cuda_budget", measured)
    budget = executor._measured(replace(LAYOUT, num_pages=1))
    assert seen == [(0.5, 1, 3, graph_rows)]
    size = fit_pool(budget, LAYOUT, 16 * SLOT_BYTES)
    assert size.num_pages == 50
    core = Driver(executor, num_tokens=size.num_tokens)
    core.start(0, [1, 2, 3])
    assert core.run(0, 5) == model.greedy([1, 2, 3], 5)
    assert len(built) == 1


def test_free_memory_is_some_of_the_machine():
    assert 0 < free_memory() < 1 << 50


def auto_engine(monkeypatch, free_bytes, cache=None, page_size=16, **limits):
    """On a CPU with so much memory free, of which the pool may take a half."""
    monkeypatch.setattr(pool_size, "free_memory", lambda: free_bytes)
    plugins = [Fcfs(), PromptFits(), Chunked(), LastAdmitted(), Paged(page_size), cache or Radix()]
    plugins += [Lru(), AdmitAll(), MaxTokensShare(), Fixed(), TorchRunner(), Shared(ToyModel())]
    plugins.append(PagedAttention(paged_decode, paged_extend))
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    config = EngineConfig(pool_tokens="auto", memory_share=0.5, strict=True, **limits)
    return build_engine(hooks, config, 0, RealClock())


def test_auto_on_a_cpu_is_a_share_of_the_free_memory(monkeypatch):
    engine = auto_engine(monkeypatch, 2 * 101 * 16 * SLOT_BYTES + 200)
    assert engine.state.memory.ledger.num_pages == 100
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.submit(Request("A", np.arange(40, dtype=np.int32), params))
    finish(engine)
    assert engine.records["A"].finish_reason == "length"
    auto = engine.executor.describe()["kv_pool_auto"]
    assert auto["pool_tokens"] == 1600
    assert auto["total_bytes"] == 2 * 101 * 16 * SLOT_BYTES + 200


def test_auto_on_a_cpu_has_a_bound():
    assert cpu_budget(1.0).most_bytes == 4 * GIB
    assert cpu_budget(0.5).pool_bytes <= 4 * GIB


@pytest.mark.parametrize("page_size", [1, 16])
def test_without_a_cache_the_pool_holds_what_can_run(page_size, monkeypatch):
    options = {"page_size": page_size, "max_model_len": 50, "max_num_seqs": 3}
    engine = auto_engine(monkeypatch, 1 << 24, NoCache(), **options)
    assert engine.state.memory.ledger.num_pages * page_size == 3 * (64 if page_size > 1 else 50)
    cached = auto_engine(monkeypatch, 1 << 24, **options)
    slots = (1 << 24) // 2 // SLOT_BYTES
    assert cached.state.memory.ledger.num_pages * page_size == slots - page_size, (
        "of use to a cache"
    )


def test_auto_without_memory_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"one request of 512 tokens .*, got 9,999 bytes"):
        auto_engine(monkeypatch, 9999 * 2)


def test_the_manifest_says_nothing_of_a_pool_that_was_given():
    executor = TorchRunner().build_executor(executor_query(ToyModel()))
    assert Driver(executor).executor.describe()["kv_pool_auto"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_gpu_keeps_the_rest_free(graphs):
    """About 3 GiB for everything: after the largest launches, and with all graphs captured, no more
    is used than the share."""
    from tests.plugins.executor.test_graphs_cuda import executor, tiny

    tiny("float32")
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 3 * GIB) / total
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 4096}
    engine = EngineConfig(pool_tokens="auto", memory_share=share, **limits)
    runner = executor(capture=None, graphs=graphs, engine=engine)
    layout = PoolLayout(1 << 30, 16, num_rows=64, max_pages=128, max_num_batched_tokens=4096)
    num_pages = runner.measure_pool(layout) // 16 + 1
    runner.prepare(replace(layout, num_pages=num_pages))
    auto = runner.describe()["kv_pool_auto"]
    assert GIB < num_pages * auto["page_bytes"] < 3 * GIB
    assert auto["work_bytes"] > 0
    assert (auto["graphs_bytes"] > 0) == (graphs == "on")
    torch.cuda.empty_cache()
    for launch in largest_launches(layout, 32, 2048):
        runner.launch(launch)
        runner.collect()
    free, _ = torch.cuda.mem_get_info()
    loaded_since = 64 << 20  # kernels of the warm-up, at most
    assert total - free <= share * total + loaded_since, f"{gib(total - free)} used, {auto}"
    runner.close()
