"""The torch executor on a toy model, by hand-made launches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.errors import ConfigError, InvariantError
from core.request import SamplingParams
from plugins.executor.torch_runner import TorchRunner
from tests.plugins.executor.launch_driver import GREEDY, Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query

MODEL = ToyModel()
PROMPTS = [np.random.default_rng(i).integers(0, 50, n).tolist() for i, n in enumerate((37, 5, 1))]
REFERENCE = [MODEL.greedy(prompt, 12) for prompt in PROMPTS]


def driver(page_size=16, dtype="auto", seed=0, **options):
    executor = TorchRunner(dtype=dtype).build_executor(executor_query(MODEL))
    return Driver(executor, page_size, seed=seed, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_tokens_equal_dense_model(page_size, chunk, seed):
    core = driver(page_size, seed=seed)
    for row, prompt in enumerate(PROMPTS):
        core.start(row, prompt)
        assert core.run(row, 12, chunk) == REFERENCE[row]


def test_mixed_batch_of_chunks_and_decodes_equals_dense_model():
    core = driver()
    core.start(4, PROMPTS[0])
    core.start(0, PROMPTS[1])
    core.start(7, PROMPTS[2])
    core.step((4, 20), (0, 5))
    core.step((0, 1), (4, 10), (7, 1))
    core.step((4, 7), (0, 1), (7, 1))
    for _ in range(11):
        core.step((7, 1), (4, 1), (0, 1))
    assert [core.outputs[row][:12] for row in (4, 0, 7)] == REFERENCE


def test_fed_back_tokens_equal_tokens_from_the_host():
    core = driver()
    core.start(1, PROMPTS[0])
    core.start(3, PROMPTS[1])
    core.launch((1, 37), (3, 5))
    feedback = []
    for _ in range(11):
        feedback.append(core.launch((1, 1), (3, 1)).feedback.all())
        core.collect()
    core.collect()
    assert all(feedback)
    assert [core.outputs[1], core.outputs[3]] == REFERENCE[:2]


def test_stale_pages_do_not_leak():
    core = driver(num_tokens=64)
    core.executor._state.pool.kv.fill_(torch.nan)
    core.start(0, PROMPTS[0])
    assert core.run(0, 6) == REFERENCE[0][:6]
    core.release(0)
    core.start(0, PROMPTS[1])  # the same row and pages again
    assert core.run(0, 6, chunk=2) == REFERENCE[1][:6]
    assert (core.executor._state.pool.table[0, 1:] == 0).all()


def test_resumed_sequence_continues_as_if_never_preempted():
    core = driver()
    core.start(0, PROMPTS[0])
    before = list(core.run(0, 5))
    core.release(0)
    core.start(2, PROMPTS[0], outputs=before)
    assert core.run(2, 12, chunk=8) == REFERENCE[0]


def test_shared_pages_serve_another_row():
    core = driver()
    core.start(0, PROMPTS[0])
    core.run(0, 1)
    core.start(1, PROMPTS[0])
    core.computed[1] = 32
    core.pages[1] = core.pages[0][:2]
    updates = [(1, index, page) for index, page in enumerate(core.pages[1])]
    core.alter = lambda launch: replace(
        launch, table_updates=np.array([*updates, *launch.table_updates.tolist()], np.int32)
    )
    core.step((1, 5))
    core.alter = None
    assert core.run(1, 12) == REFERENCE[0]


def test_padding_of_the_head_is_never_sampled():
    core = driver()
    params = SamplingParams(temperature=2.0, logprobs=64)
    core.start(0, PROMPTS[1], params)
    core.start(1, PROMPTS[1], GREEDY)
    core.step((0, 5), (1, 5))
    for _ in range(5):
        core.step((0, 1), (1, 1))
    assert max(core.outputs[0] + core.outputs[1]) < 50
    assert all(result.logprobs[0].top_ids.max() < 50 for result in core.results)


@pytest.mark.parametrize("chunk", [None, 3])
def test_prompt_logprobs_score_each_prompt_token_once(chunk):
    core = driver()
    core.start(5, PROMPTS[0], SamplingParams(temperature=0, prompt_logprobs=2))
    core.start(2, PROMPTS[1])  # a neighbour that does not ask
    core.step((2, 5))
    left, entries = 37, []
    while left:
        count = min(left, chunk or left)
        left -= count
        entries += core.step((2, 1), (5, count)).prompt_logprobs.get(1, [])
    core.step((5, 1))
    assert core.results[-1].prompt_logprobs == {}
    expected = MODEL.dense_logits(PROMPTS[0]).log_softmax(-1)[:-1]
    assert len(entries) == 36
    scored = [entry.logprob for entry in entries]
    own = expected.gather(1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
    np.testing.assert_allclose(scored, own, atol=1e-4)
    best = expected.topk(2)
    assert [entry.top_ids.tolist() for entry in entries] == best.indices.tolist()
    top = np.stack([entry.top_logprobs for entry in entries])
    np.testing.assert_allclose(top, best.values, atol=1e-4)


def test_lower_precision_pool_stores_and_answers():
    core = driver(dtype="bfloat16")
    core.start(0, PROMPTS[1])
    core.run(0, 4)
    assert core.executor._state.pool.kv.dtype == torch.bfloat16
    assert core.executor.describe()["kv_dtype"] == "bfloat16"
    assert core.executor.describe()["model_dtype"] == "float32"


def test_float8_pool_tells_the_backend_of_its_scales_and_clamps():
    asked = []
    query = executor_query(MODEL)
    attention = query.attention
    query = replace(query, attention=lambda facts: asked.append(facts) or attention(facts))
    runner = TorchRunner(dtype="float8_e4m3fn", k_scale=0.002, v_scale=0.5)
    core = Driver(runner.build_executor(query))
    assert (asked[0].dtype, asked[0].kv_dtype) == ("float32", "float8_e4m3fn")
    assert (asked[0].k_scale, asked[0].v_scale) == (0.002, 0.5)
    core.start(0, PROMPTS[0])
    core.run(0, 4)
    pool = core.executor._state.pool
    assert pool.kv.dtype == torch.float8_e4m3fn
    assert pool.kv[:, 0].float().abs().max() == 448.0  # K / 0.002 is beyond the range
    wide = driver()
    wide.start(0, PROMPTS[0])
    wide.step((0, 37))
    slots = [core.pages[0][i // 16] * 16 + i % 16 for i in range(37)]
    assert core.pages[0][:3] == wide.pages[0]
    exact = wide.executor._state.pool.kv[0, 1].flatten(0, 1)[slots]
    stored = pool.kv[0, 1].flatten(0, 1)[slots].float() * 0.5
    torch.testing.assert_close(stored, exact, rtol=2**-4, atol=2**-10)


def test_third_launch_in_flight_is_refused():
    core = driver()
    core.start(0, PROMPTS[1])
    core.launch((0, 5))
    core.launch((0, 1))
    with pytest.raises(InvariantError, match="at most 2 launches"):
        core.launch((0, 1))


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"executor\.dtype must be .*, got 'int8'"):
        TorchRunner(dtype="int8")
    with pytest.raises(ConfigError, match=r"executor\.k_scale must be > 0, got 0"):
        TorchRunner(dtype="float8_e4m3fn", k_scale=0)
    with pytest.raises(ConfigError, match=r"executor\.v_scale must be 1 unless .*, got 2"):
        TorchRunner(v_scale=2.0)
    with pytest.raises(ConfigError, match=r"executor\.num_threads must be >= 1 or null, got 0"):
        TorchRunner(num_threads=0)


def test_describe_names_device_and_kernels():
    facts = driver().executor.describe()
    assert facts["device"] == "cpu"
    assert facts["attention"]["decode"]["kernel"] == "kernels.torch_reference.paged_decode"
    assert facts["kv_pool_bytes"] == 2 * 2 * 65 * 16 * 2 * 8 * 4
