"""The kernels in the executor's sampler: its tokens, log-probabilities and counts."""

import numpy as np
import torch

from core.request import SamplingParams
from kernels.fused_sampling import FusedSampling
from plugins.executor.torch_runner import TorchRunner
from tests.kernels.sampling_case import DEVICE, SMALL, Case, random_logits
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query

PARAMS = (
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(temperature=0.9, frequency_penalty=0.5, logprobs=0),
    SamplingParams(top_k=20, top_p=0.8, repetition_penalty=1.3, logit_bias={7: 3.0}),
    SamplingParams(min_p=0.1, min_tokens=99, max_tokens=100, stop_token_ids=(4,), logprobs=6),
)


def test_sampler_gives_the_torch_tokens_entries_and_counts():
    case = Case(random_logits(4, 300, seed=1), PARAMS, prompt=(1, 2, 2), outputs=(9, 9), ends=(5,))
    expected, expected_counts = case.sample()
    given, counts = case.sample(FusedSampling(SMALL), DEVICE)
    assert given.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(counts.cpu(), expected_counts)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    asked = [3, 0, 6]
    for one, other in zip(
        given.logprobs.to_host(asked), expected.logprobs.to_host(asked), strict=True
    ):
        assert one.logprob == np.float32(other.logprob) or abs(one.logprob - other.logprob) < 1e-5
        assert one.top_ids.tolist() == other.top_ids.tolist()
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-5)


def outputs(sampling):
    executor = TorchRunner(sampling=sampling).build_executor(
        executor_query(ToyModel(device=DEVICE.type))
    )
    core = Driver(executor)
    params = (*PARAMS, SamplingParams(top_p=0.7, prompt_logprobs=2))
    for row, one in enumerate(params):
        core.start(row, [3, 1, 4, 1, 5], one, seed=row, ends=(2,))
        core.step((row, 5))
    for _ in range(2):
        core.launch(*((row, 1) for row in range(len(params))))
        core.collect()
    return core.outputs


def test_executor_gives_the_torch_tokens():
    assert outputs(FusedSampling(SMALL)) == outputs(None)
