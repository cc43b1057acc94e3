"""A decoder on two GPUs through NCCL: the tokens of one, in CUDA graphs, launches overlapping."""

import os
import signal

import numpy as np
import pytest
import torch

from core.build import build_engine
from core.hooks import Hooks
from core.request import Request, SamplingParams
from plugins.executor.parallel_ranks import RankError
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.shared.clocks import RealClock
from tests.plugins.executor.rank_threads import hooks, settings
from tests.tiny_models import random_prompts, save_tiny

FOUND = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND < 2, reason=f"needs two CUDA devices, found {FOUND}"),
]
TOKENS = 24


def made(folder, size, dtype="float32", graphs="on", **changes):
    """An engine with the kernels of a GPU, over `size` devices."""
    from kernels.extend_dense import extend
    from kernels.fused import FusedOps, FusedPaging
    from kernels.fused_sampling import FusedSampling
    from kernels.split_kv import SplitKV
    from plugins.attention.paged import PagedAttention

    model = HuggingFaceModel(path=str(folder), dtype=dtype, ops=FusedOps(), tensor_parallel=size)
    parts = {"paging": FusedPaging(), "sampling": FusedSampling(), "graphs": graphs}
    plugins = {
        name: entry.plugin
        for name, entry in hooks(
            model, TorchRunner(tensor_parallel=size, **parts)
        ).registered.items()
    }
    plugins["PagedAttention"] = PagedAttention(SplitKV(), extend)
    return build_engine(Hooks(plugins, {}), settings(**changes), 0, RealClock(), "cuda")


def submit(engine, max_tokens=TOKENS):
    """Greedy and drawn, with shared beginnings."""
    prompts = random_prompts([1, 15, 33, 48], seed=2)
    prompts += [prompts[2][:20] + prompts[1], prompts[3] + [9], prompts[3]]
    for index, prompt in enumerate(prompts):
        draws = (
            {"temperature": 0.9, "top_k": 20, "top_p": 0.95} if index % 2 else {"temperature": 0}
        )
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **draws)
        engine.submit(Request(str(index), np.array(prompt, np.int32), params))


def served(engine, forced_every=4):
    submit(engine)
    steps, in_graphs = 0, 0
    while engine.has_work:
        running = engine.state.running
        if steps % forced_every == 0 and steps < 24 and len(running):
            engine.state.preempt(engine.state.table.at(int(running[steps % len(running)])))
        event = engine.step()
        in_graphs += bool(event is not None and event.record.graph_tokens)
        steps += 1
    tokens = {name: list(one.choices[0].token_ids) for name, one in engine.records.items()}
    facts = engine.executor.describe()
    engine.close()
    return tokens, in_graphs, facts


def run_out(engine):
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("pool_tokens", [2048, "auto"])
def test_two_devices_give_the_tokens_of_one(family, pool_tokens, tmp_path):
    save_tiny(family, tmp_path, seed=1)
    changes = {"pool_tokens": pool_tokens, "memory_share": 0.3}  # room beside other programs
    expected, _, _ = served(made(tmp_path, 1, **changes))
    found, in_graphs, facts = served(made(tmp_path, 2, **changes))
    assert found == expected
    assert in_graphs > 10
    assert facts["graphs"]["sizes"]
    assert facts["graphs"]["sizes_of_chunks"]
    assert facts["tensor_parallel"] == 2


def test_half_precision_is_served(tmp_path):
    save_tiny("qwen3", tmp_path, seed=1)
    found, in_graphs, _ = served(made(tmp_path, 2, "bfloat16"))
    assert in_graphs > 10
    assert all(len(tokens) == TOKENS for tokens in found.values())


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_killed_rank_ends_the_engine_with_a_word(graphs, tmp_path):
    save_tiny("qwen3", tmp_path, seed=1)
    engine = made(tmp_path, 2, graphs=graphs)
    submit(engine, 120)
    for _ in range(10):
        engine.step()
    process = engine.executor._ranks._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run_out(engine)
    engine.close()
    assert not process.is_alive()
