"""A decoder over several ranks gives the tokens of one device. Ranks are threads here, that talk
through gloo; test_tensor_parallel_processes.py has processes."""

from itertools import islice

import numpy as np
import pytest
import torch

from core.build import build_engine
from core.config import EngineConfig
from core.errors import ConfigError
from core.queries import ModelQuery
from core.request import Request, SamplingParams
from kernels import torch_invariant
from plugins.attention.paged import PagedAttention
from plugins.executor import chunk_graphs
from plugins.executor.chunk_graphs import ChunkGraphs
from plugins.executor.padding import Padding
from plugins.executor.parallel_executor import per_rank
from plugins.executor.torch_executor import TorchExecutor
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.model.ops import TorchOps
from plugins.model.smollm2 import SmolLM2
from plugins.shared.clocks import RealClock
from plugins.shared.model_protocols import check_shards
from tests.plugins.executor.graph_run import TorchDraw, device_decode, rerun, serve
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.rank_threads import Threads, executor_query, hooks, load, settings
from tests.plugins.executor.toy_model import ToyModel
from tests.tiny_models import random_prompts, save_tiny

CASES = {
    "llama": ("llama", 2, {}),
    "biases everywhere": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "six heads, tied": ("smollm", 2, {}),
    "windows": ("mistral", 2, {}),
    "biases of qkv, tied": ("qwen2", 2, {}),
    "norms of q and k": ("qwen3", 2, {}),
    "two KV heads for four": ("qwen3", 4, {}),
    "one KV head for two": ("llama", 2, {"num_key_value_heads": 1}),
    "a head that does not divide": ("llama", 4, {"vocab_size": 90}),
}
TOKENS = 14
REQUESTS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, seed=5),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, logit_bias={9: 1.5}),
)


def requests(vocab_size):
    """Greedy and drawn; later prompts begin as earlier ones."""
    prompts = random_prompts([1, 15, 33, 48], seed=2, vocab_size=vocab_size)
    prompts += [prompts[2][:20] + prompts[1], prompts[3] + [9], prompts[3]]
    for index, prompt in enumerate(prompts):
        params = REQUESTS[index % len(REQUESTS)]
        facts = {name: getattr(params, name) for name in params.__dataclass_fields__}
        facts |= {"max_tokens": TOKENS, "ignore_eos": True}
        yield Request(str(index), np.array(prompt, np.int32), SamplingParams(**facts))


def served(engine, forced_every=3, count=7):
    """Choices of `count` requests by id, served together; now and then a running one is
    preempted."""
    for request in islice(requests(engine.executor.vocab_size), count):
        engine.submit(request)
    steps = 0
    while engine.has_work:
        running = engine.state.running
        if steps % forced_every == 0 and steps < 40 and len(running):
            victim = int(running[steps // forced_every % len(running)])
            engine.state.preempt(engine.state.table.at(victim))
        engine.step()
        steps += 1
        assert steps < 1000, "no end in sight"
    return {name: record.choices[0] for name, record in engine.records.items()}


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_one_device(case, tmp_path):
    family, size, overrides = CASES[case]
    save_tiny(family, tmp_path, seed=1, **overrides)
    one = build_engine(
        hooks(HuggingFaceModel(path=str(tmp_path)), TorchRunner()), settings(), 0, RealClock()
    )
    expected = served(one)
    threads = Threads()
    model = HuggingFaceModel(path=str(tmp_path), tensor_parallel=size)
    engine = build_engine(hooks(model, threads), settings(), 0, RealClock())
    found = served(engine)
    assert sum(record.preemptions for record in engine.records.values()) >= 5
    assert engine.state.memory.cache.num_pages > 0
    own = engine.executor._own._state.pool
    engine.close()
    threads.join()
    for executor in threads.executors.values():
        pool = executor._state.pool
        assert torch.equal(pool.table, own.table), "page ids are the same on all ranks"
        assert torch.equal(pool.last_tokens, own.last_tokens), "rank 0 samples for all"
    for name, choice in expected.items():
        assert list(found[name].token_ids) == list(choice.token_ids), name
    assert close(found["4"].logprobs, expected["4"].logprobs)
    prompts = [one.records["4"].prompt_logprobs for one in (engine, one)]
    assert close(*prompts)


def close(found, expected):
    """Whether log-probabilities agree, of as many entries, at least one."""
    pairs = zip(found, expected, strict=True)
    gaps = [abs(one.logprob - other.logprob) for one, other in pairs]
    return max(gaps) < 1e-4


def test_deterministic_log_probabilities_have_the_same_bits_under_any_schedule(tmp_path):
    """Three ranks: sums of two numbers are the same in any order."""
    save_tiny("smollm", tmp_path, seed=1, num_key_value_heads=3)
    found = []
    for slice_tokens, forced_every in ((48, 1000), (7, 3)):
        threads = Threads()
        ops = TorchOps(invariant=True)
        model = HuggingFaceModel(path=str(tmp_path), ops=ops, tensor_parallel=3)
        attention = PagedAttention(torch_invariant.decode, torch_invariant.extend)
        parts = hooks(model, threads, slice_tokens, attention)
        engine = build_engine(parts, settings(deterministic=True), 0, RealClock())
        served(engine, forced_every, 5)
        engine.close()
        threads.join()
        record = engine.records["4"]
        entries = [*record.choices[0].logprobs, *record.prompt_logprobs]
        tokens = {name: list(one.choices[0].token_ids) for name, one in engine.records.items()}
        found.append((tokens, [entry.logprob for entry in entries]))
    assert found[0] == found[1]


class WithGraphs(TorchRunner):
    """Graphs of one-token rows and between attentions, where a captured function runs again."""

    def over(self, model, query, group=None):
        kernels = None, TorchDraw()
        executor = TorchExecutor(
            model, model.dtype, query, (1.0, 1.0), *kernels, "on", rerun, group=group
        )
        prepare = executor.prepare

        @torch.inference_mode()
        def prepare_and_capture(layout):
            prepare(layout)
            state = executor._state
            state.padding = Padding(2048)
            sizes = state.padding.sizes[:12]
            state.chunk_graphs = ChunkGraphs(model, state.pool, sizes, rerun)
            state.chunk_graphs.capture(progress=False)

        executor.prepare = prepare_and_capture
        return executor


def test_graphs_and_overlapping_launches_change_no_token(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_graphs, "SMALLEST", 8)
    save_tiny("qwen3", tmp_path)
    plain = TorchRunner(sampling=TorchDraw()).over(load(tmp_path), query(load(tmp_path)))
    threads = Threads(WithGraphs())
    model = load(tmp_path, 2)
    executor = threads.over(model, query(model))
    found = serve(executor, overlap=True, poisoned=False, rounds=1)
    executor.close()
    threads.join()
    assert found.served == serve(plain, poisoned=False, rounds=1).served
    assert any(result.graph_tokens for result in found.results)


def query(model):
    return executor_query(model, device_decode)


def test_ranks_that_are_kept_serve_another_engine(tmp_path):
    save_tiny("llama", tmp_path)
    threads, model = Threads(), load(tmp_path, 2)
    executor = threads.over(model, executor_query(model))
    executor.keeps = True
    first = served_by_hand(executor)
    pool = executor._own._state.pool
    assert not executor.renew(executor_query(model, max_num_seqs=9))
    assert executor.renew(executor_query(model))
    assert served_by_hand(executor, seed=3) == first
    assert executor._own._state.pool is pool
    executor.keeps = False
    executor.close()
    threads.join()


def served_by_hand(executor, **options):
    """Tokens of a prompt; the executor's engine ends."""
    core = Driver(executor, **options)
    core.start(2, list(range(3, 40)))
    tokens = list(core.run(2, 8))
    executor.close()
    return tokens


def test_the_pool_is_that_of_the_rank_with_least_room(tmp_path, monkeypatch):
    save_tiny("llama", tmp_path)
    threads, model = Threads(), load(tmp_path, 2)
    executor = threads.over(model, executor_query(model))
    own = executor._own
    monkeypatch.setattr(type(own), "measure_pool", lambda self, layout: 32 - 8 * self.group.rank)
    assert executor.measure_pool(None) == 24
    executor.close()
    threads.join()


def test_ranks_of_a_cpu_share_its_memory():
    engine = EngineConfig(memory_share=0.6)
    asked = per_rank(executor_query(None, memory_share=0.6), torch.device("cpu"), 3)
    assert asked.engine.memory_share == pytest.approx(0.2)
    whole = executor_query(None, memory_share=0.6)
    assert per_rank(whole, torch.device("cuda"), 3).engine.memory_share == engine.memory_share


@pytest.mark.parametrize(
    ("overrides", "size", "rule"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "divisor of the model's 6 query"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "a multiple of the model's 4"),
        ({"intermediate_size": 90}, 4, "divisor of the model's intermediate size 90"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(overrides, size, rule):
    shape = {"model_type": "llama", "vocab_size": 32, "hidden_size": 48, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    loader = HuggingFaceModel(load="dummy", config=shape | overrides, tensor_parallel=size)
    with pytest.raises(ConfigError, match=f"executor.tensor_parallel must be .*{rule}.*got {size}"):
        loader.build_model(ModelQuery("cpu", 0, False))


def test_a_model_of_another_number_of_parts_is_refused(tmp_path):
    save_tiny("llama", tmp_path)
    text = r"model.tensor_parallel of .* must be executor.tensor_parallel \(1\), got 2"
    with pytest.raises(ConfigError, match=text):
        TorchRunner().build_executor(executor_query(load(tmp_path, 2)))
    with pytest.raises(ConfigError, match=r"must be executor.tensor_parallel \(4\), got 1"):
        check_shards(ToyModel(), 4)


def test_fewer_than_one_device_is_refused():
    with pytest.raises(ConfigError, match=r"executor\.tensor_parallel must be >= 1, got 0"):
        TorchRunner(tensor_parallel=0)
    with pytest.raises(ConfigError, match=r"executor\.tensor_parallel must be >= 1, got 0"):
        HuggingFaceModel(path="x", tensor_parallel=0)
    with pytest.raises(ConfigError, match=r"executor\.tensor_parallel must be >= 1, got 0"):
        SmolLM2(tensor_parallel=0)


def test_a_transformers_model_is_not_cut(tmp_path):
    save_tiny("llama", tmp_path)
    loader = HuggingFaceModel(str(tmp_path), implementation="transformers", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"executor\.tensor_parallel must be 1 for"):
        loader.build_model(ModelQuery("cpu", 0, False))
