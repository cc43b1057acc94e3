"""engine.deterministic=true: tokens and log-probabilities have the same bits alone and together,
whatever the chunks, the prefix cache, and preemptions."""

import itertools

import numpy as np
import pytest
import torch

from core.build import build_engine
from core.config import EngineConfig
from core.errors import ConfigError
from core.hooks import Hooks
from core.queries import ModelQuery
from core.request import Request, SamplingParams
from kernels import torch_invariant
from kernels.extend import extend
from kernels.fused import FusedOps, FusedPaging
from kernels.fused_sampling import FusedSampling
from kernels.invariant import InvariantDecode, InvariantExtend
from kernels.jit import INTERPRETED
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from kernels.torch_reference import paged_decode, paged_extend
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.attention.paged import PagedAttention
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.model.ops import TorchOps
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.kernels.ordered_dot import ordered_dot  # noqa: F401
from tests.test_equality import Shared
from tests.tiny_models import random_prompts, save_tiny

CUDA = torch.cuda.is_available()
SCHEDULES = {  # slice of a chunk, cache, preempt by force every so many steps (0 = never)
    "whole chunks": (1024, NoCache, 0),
    "small chunks": (7, NoCache, 0),
    "cache": (16, Radix, 0),
    "cache, preempted": (5, Radix, 3),
    "preempted": (33, NoCache, 2),
}


def torch_parts():
    return PagedAttention(torch_invariant.decode, torch_invariant.extend), TorchRunner()


def triton_parts(split_tokens=64):
    kernels = InvariantDecode(split_tokens), InvariantExtend(split_tokens)
    return PagedAttention(*kernels), TorchRunner(paging=FusedPaging(), sampling=FusedSampling())


def load(folder, ops, device="cpu", dtype="float32"):
    plugin = HuggingFaceModel(path=str(folder), dtype=dtype, ops=ops)
    return plugin.build_model(ModelQuery(device, 0, False))


def make(model, parts, slice_tokens=1024, cache=NoCache, seqs=16, pool_tokens=8192, device="cpu"):
    plugins = [Fcfs(), PromptFits(growth_share=0), Chunked(slice_tokens), LastAdmitted()]
    plugins += [Paged(4), cache(), Lru(), AdmitAll(), MaxTokensShare(), Fixed()]
    plugins += [Shared(model), *parts]
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=1024,
        pool_tokens=pool_tokens,
        strict=True,
        deterministic=True,
    )
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    return build_engine(hooks, config, 0, RealClock(), device)


def params(index, max_tokens):
    """Greedy and drawn by turns, with the log-probabilities of both; some penalised, which changes
    the type in which a batch's logits are kept, and some drawn after top-p, which sums them."""
    temperature = (0.0, 1.2)[index % 2]
    more = ({}, {"top_p": 0.8}, {"repetition_penalty": 1.1}, {"top_p": 0.9})[index % 4]
    common = {"max_tokens": max_tokens, "seed": index, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(temperature=temperature, **common, **more)


def answers(engine, prompts, max_tokens, forced=0):
    """(ids, log-probabilities) of prompts by index, served together."""
    for index, prompt in prompts.items():
        ids = np.array(prompt, np.int32)
        engine.submit(Request(str(index), ids, params(index, max_tokens)))
    for step in itertools.count():
        if not engine.has_work:
            break
        assert step < 2000, "no end in sight"
        state = engine.state
        if forced and step % forced == forced - 1 and step < 20 * forced and len(state.running):
            victim = int(state.running[step // forced % len(state.running)])
            state.preempt(state.table.at(victim))
        engine.step()
    found = {}
    for index in prompts:
        choice = engine.records[str(index)].choices[0]
        scores = [(entry.logprob, *entry.top_logprobs.tolist()) for entry in choice.logprobs]
        found[index] = list(choice.token_ids), scores
    return found


def check(model, parts, prompts, max_tokens, schedules=SCHEDULES, device="cpu"):
    alone = {}
    for index, prompt in prompts.items():
        alone |= answers(make(model, parts(), device=device), {index: prompt}, max_tokens)
    for name in schedules:
        slice_tokens, cache, forced = SCHEDULES[name]
        engine = make(model, parts(), slice_tokens, cache, device=device)
        found = answers(engine, prompts, max_tokens, forced)
        assert found == alone, name
        preemptions = sum(record.preemptions for record in engine.records.values())
        assert preemptions >= 3 or not forced, name


def shared_prompts(lengths, seed=3):
    """Prompts of which the last begins with all of the one before it."""
    prompts = random_prompts(lengths, seed=seed)
    prompts.append(prompts[-1] + prompts[0])
    return dict(enumerate(prompts))


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_torch_answers_alike_in_any_schedule(tmp_path, family):
    save_tiny(family, tmp_path, seed=1)
    model = load(tmp_path, TorchOps(invariant=True))
    check(model, torch_parts, shared_prompts([1, 15, 33, 60]), 12)


@pytest.mark.skipif(CUDA, reason="in the interpreter")
def test_kernels_answer_alike_in_any_schedule(tmp_path):
    save_tiny("qwen3", tmp_path, seed=1, num_hidden_layers=1)
    model = load(tmp_path, FusedOps(invariant=True))
    check(model, triton_parts, shared_prompts([3, 40]), 2, ["cache, preempted"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_card_answers_alike_in_any_schedule(tmp_path, family, dtype):
    sizes = {"hidden_size": 256, "intermediate_size": 640, "max_position_embeddings": 1024}
    save_tiny(family, tmp_path, seed=1, **sizes)
    model = load(tmp_path, FusedOps(invariant=True), "cuda", dtype)
    prompts = shared_prompts([1, 15, 33, 60, 170, 300])

    def parts():
        return triton_parts(128)

    check(model, parts, prompts, 24, device="cuda")


def refused(tmp_path, ops, parts, message, family="llama", **settings):
    save_tiny(family, tmp_path)
    plugin = HuggingFaceModel(path=str(tmp_path), ops=ops, **settings)
    model = plugin.build_model(ModelQuery("cpu", 0, False))
    with pytest.raises(ConfigError, match=f"engine.deterministic must be false {message}"):
        make(model, parts)


@pytest.mark.skipif(not INTERPRETED, reason="names kernels for a CPU")
@pytest.mark.parametrize(
    "kernels",
    [
        (paged_decode, paged_extend),
        (SplitKV("invariant"), extend),
        (SharedPrefix(), extend),
        (InvariantDecode(64), InvariantExtend(128)),
        (InvariantDecode(64), torch_invariant.extend),
        (InvariantDecode(64), InvariantExtend(64), None, SharedPrefix()),
    ],
    ids=["torch", "split_kv", "shared_prefix", "other splits", "mixed", "shared"],
)
def test_kernels_that_do_not_agree_are_refused(tmp_path, kernels):
    parts = PagedAttention(*kernels), TorchRunner()
    refused(tmp_path, TorchOps(invariant=True), parts, "unless attention.decode and")


def test_models_and_sampling_that_depend_on_the_batch_are_refused(tmp_path):
    refused(tmp_path, TorchOps(), torch_parts(), "for a model whose layer operations")


def test_transformers_models_are_refused(tmp_path):
    settings = {"implementation": "transformers"}
    ops = TorchOps(invariant=True)
    refused(tmp_path, ops, torch_parts(), "for a model whose layer operations", **settings)


def test_command_refuses_a_kernel_that_follows_the_batch(command):
    arguments = "+experiment=smoke", "device=cpu", "engine.deterministic=true"
    outcome = command(*arguments, "+kernel=torch_reference")
    assert outcome.code == 1
    assert "engine.deterministic must be false unless attention.decode and" in outcome.err


def test_torch_operations_are_refused_on_a_gpu():
    with pytest.raises(ValueError, match=r"ops must be fused for engine\.deterministic on a GPU"):
        TorchOps(invariant=True).check(torch.device("cuda"), torch.bfloat16, 64)
