"""Launches that fail: for lack of memory or refused arguments their requests end and others get
their tokens; an error of CUDA stops the engine; at the start each is one message."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import ConfigError, EngineStoppedError
from core.hookspecs import hookimpl
from core.request import Request, SamplingParams
from kernels.torch_reference import paged_decode, paged_extend
from plugins.admission.prompt_fits import PromptFits
from plugins.attention.paged import PagedAttention
from plugins.executor import device_state
from plugins.executor.faults import out_of_memory
from plugins.executor.pool import KVPool
from plugins.executor.torch_runner import TorchRunner
from tests.engine_harness import check_idle, finish, make_engine
from tests.plugins.executor.graph_run import Rerun, make
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query
from tests.test_equality import Shared

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
SAID = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of"
    " which 3.00 GiB is free."
)
ADVICE = " If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=x"
ALONE = {
    "device": torch.OutOfMemoryError(SAID + ADVICE),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    "python": MemoryError("no memory"),
    "kernel": ValueError("q must be contiguous, got strides (1, 8)"),
}
LOST = {
    "CUDA": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "Triton": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
}
PROMPTS = {name: np.random.default_rng(i).integers(0, 50, 40) for i, name in enumerate("ABCD")}

SOUND = ToyModel()


class FailingModel(ToyModel):
    """Raises `error` at the forward passes in `at`, before or after it has stored K and V."""

    def __init__(self, error=None, at=(), late=False, device="cpu"):
        super().__init__(device=device)
        self.error, self.at, self.late = error, set(at), late
        self.calls = -100  # those of the start do not count

    def forward(self, *arguments):
        due = self.calls in self.at
        self.calls += 1
        if due and not self.late:
            self.fail()
        logits = super().forward(*arguments)
        if due:
            self.fail()
        return logits

    def fail(self):
        raise self.error


class Made:
    """The plugin of an executor made for tests."""

    def __init__(self, executor):
        self.executor = executor

    @hookimpl
    def build_executor(self, query):
        return self.executor


def engine_of(model, overlap, executor=None, seqs=2):
    plugins = {"attention": PagedAttention(paged_decode, paged_extend), "model": Shared(model)}
    engine = make_engine(
        pages=24,
        seqs=seqs,
        executor=executor or TorchRunner(),
        overlap=overlap,
        plugins=plugins,
        admission=PromptFits(growth_share=0.0),
    )
    model.calls = 0
    for name in PROMPTS:
        engine.submit(ask(name))
    return engine


def ask(name, prompt=None):
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    return Request(name, np.array(PROMPTS[name] if prompt is None else prompt, np.int32), params)


def tokens(engine, name):
    return list(engine.records[name].choices[0].token_ids)


def check_outcome(engine, model, reason):
    """Who failed has the reason, others their tokens, the engine goes on. Returns who failed."""
    check_idle(engine)
    failed = {name for name in PROMPTS if engine.records[name].finish_reason == "error"}
    for name in PROMPTS:
        record, wanted = engine.records[name], SOUND.greedy(PROMPTS[name].tolist(), 9)
        if name in failed:
            assert record.error.startswith(f"request {name!r} ended: a launch of "), record.error
            assert record.error.endswith(f" tokens failed: {reason}"), record.error
            assert tokens(engine, name) == wanted[: record.output_tokens]
        else:
            assert tokens(engine, name) == wanted
    model.at.clear()
    again = [ask(f"again {name}", PROMPTS[name]) for name in PROMPTS]
    for request in again:
        engine.submit(request)
    finish(engine)
    for request in again:
        assert tokens(engine, request.request_id) == SOUND.greedy(request.prompt.tolist(), 9)
    check_idle(engine)
    return failed


@OVERLAP
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        *(("device", at) for at in [(0,), (1,), (4,), (3, 4, 9)]),
        *((kind, (4,)) for kind in ALONE if kind != "device"),
    ],
)
def test_what_concerns_one_launch_ends_its_requests(kind, at, late, overlap):
    error = ALONE[kind]
    model = FailingModel(error, at, late)
    engine = engine_of(model, overlap)
    finish(engine)
    said = SAID if kind == "device" else str(error)
    failed = check_outcome(engine, model, f"{type(error).__name__}: {said}")
    assert 1 <= len(failed) < 4 or len(at) > 1


@OVERLAP
def test_a_graph_that_fails_ends_its_requests(overlap):
    class FailingGraph(Rerun):
        def replay(self):
            if model.at:
                model.at.clear()
                raise torch.OutOfMemoryError(SAID)
            super().replay()

    def capture(run):
        graph = FailingGraph(run)
        return graph, graph.results

    model = FailingModel()
    engine = engine_of(model, overlap, Made(make(model, capture=capture)))
    model.at = {-1}
    finish(engine)
    assert check_outcome(engine, model, f"OutOfMemoryError: {SAID}") == {"A", "B"}


@OVERLAP
@pytest.mark.parametrize("kind", LOST)
def test_an_error_of_cuda_stops_the_engine(kind, overlap):
    model = FailingModel(LOST[kind], [4])
    engine = engine_of(model, overlap)
    with pytest.raises(type(LOST[kind]), match="illegal memory access"):
        finish(engine)
    reason = f"the engine stopped: {type(LOST[kind]).__name__}: {LOST[kind]}"
    assert {record.error for record in engine.records.values()} == {reason}
    assert engine.state.finish_counts == {"error": 4}
    with pytest.raises(EngineStoppedError, match="illegal memory access"):
        engine.submit(ask("E", [1, 2]))
    check_idle(engine)


def test_a_failed_launch_keeps_no_tensors():
    """Its traceback would: the next launch needs the memory before Python collects garbage."""
    model, made = FailingModel(at=[1]), []

    def fail():
        tensor = torch.empty(5)
        made.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(f"{SAID} {len(tensor)}")

    model.fail = fail
    engine = engine_of(model, overlap=False)
    gc.disable()
    try:
        finish(engine)
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def test_memory_that_runs_out_under_the_pool_is_a_config_error(monkeypatch):
    def refuse(*arguments):
        raise torch.OutOfMemoryError(SAID + ADVICE)

    monkeypatch.setattr(device_state, "KVPool", refuse)
    rule = "the KV pool of 1,040 slots must fit the device's memory: lower engine.pool_tokens"
    with pytest.raises(ConfigError) as failure:
        Driver(TorchRunner().build_executor(executor_query(ToyModel())))
    assert str(failure.value) == f"{rule}, or let auto measure it; {SAID}"
    monkeypatch.setattr(device_state, "KVPool", KVPool)


@pytest.mark.parametrize("wrapped", [False, True])
def test_memory_that_runs_out_under_graphs_is_a_config_error(wrapped):
    """wrapped: ending a capture that failed fails too."""

    def capture(run):
        try:
            raise torch.OutOfMemoryError(SAID)
        finally:
            if wrapped:
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")

    rule = "CUDA graphs must fit the device's memory: lower engine.pool_tokens or"
    with pytest.raises(ConfigError) as failure:
        Driver(make(ToyModel(), capture=capture))
    rest = f"engine.memory_share, or set executor.graphs=off; {SAID}"
    assert str(failure.value) == f"{rule} {rest}"


def test_out_of_memory_is_found_behind_other_errors():
    error = ValueError("capture")
    assert out_of_memory(error) == ""
    error.__context__ = RuntimeError("stream")
    error.__context__.__cause__ = torch.OutOfMemoryError("full")
    assert out_of_memory(error) == "full"


@pytest.mark.gpu
@OVERLAP
def test_a_gpu_that_runs_out_of_memory_goes_on(overlap):
    """The fraction leaves 256 MiB, the fifth launch asks for 1 GiB."""
    model = FailingModel(at=[4], device="cuda")
    engine = engine_of(model, overlap)
    model.fail = lambda: torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    allowed = torch.cuda.memory_reserved() + (256 << 20)
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        finish(engine)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    failed = [r for r in engine.records.values() if r.finish_reason == "error"]
    assert 1 <= len(failed) <= 2
    for record in failed:
        assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB" in record.error
        assert "is free" in record.error
    assert engine.state.finish_counts["length"] == 4 - len(failed)
    for record in engine.records.values():
        wanted = SOUND.greedy(PROMPTS[record.request_id].tolist(), 9)
        assert tokens(engine, record.request_id) == wanted[: record.output_tokens]
    check_idle(engine)


SCRIPT = """
import torch
from tests.plugins.executor.test_faults import FailingModel, engine_of, finish

model = FailingModel(at=[4], device="cuda")
engine = engine_of(model, overlap={overlap})
model.fail = lambda: model.embedding[torch.full((1,), 10**9, device="cuda")]
try:
    finish(engine)
except RuntimeError as error:
    records = engine.records.values()
    print({{(one.finish_reason, one.error[:20], "CUDA error" in one.error) for one in records}})
    print(engine.state.finish_counts["length"], len(engine.records), engine.has_work)
"""


@pytest.mark.gpu
@OVERLAP
def test_a_gpu_that_is_lost_stops_the_engine(overlap):
    """In a process of its own: a kernel reads out of bounds, and CUDA's context is gone."""
    command = [sys.executable, "-c", SCRIPT.format(overlap=overlap)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=root
    )
    printed = done.stdout.strip().splitlines()[-2:]
    wanted = ["{('error', 'the engine stopped: ', True)}", "0 4 False"]
    assert printed == wanted, done.stderr[-2000:]
