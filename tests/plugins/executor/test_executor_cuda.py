"""The torch executor on a CUDA device: the CPU's tokens, without waiting in launch."""

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from plugins.executor.philox import gumbel_rows, philox
from plugins.executor.torch_runner import TorchRunner
from tests.plugins.executor.launch_driver import GREEDY, Driver
from tests.plugins.executor.toy_model import ToyModel, executor_query

pytestmark = pytest.mark.gpu

PROMPTS = [np.random.default_rng(i).integers(0, 50, n).tolist() for i, n in enumerate((37, 5, 90))]
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, logprobs=3),
    SamplingParams(top_k=7, repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=4),
    SamplingParams(top_p=0.7, presence_penalty=0.4),
    SamplingParams(min_p=0.1, top_p=0.9, top_k=20, frequency_penalty=0.3, prompt_logprobs=2),
]


def outputs(device, page_size, overlap):
    executor = TorchRunner().build_executor(executor_query(ToyModel(device=device)))
    core = Driver(executor, page_size)
    rows = range(len(PARAMS))
    for row in rows:
        core.start(row, PROMPTS[row % 3], PARAMS[row], seed=row, ends=(7,))
    for row in rows:
        core.step((row, len(core.known[row]) - 3))
        core.step((row, 3))
    for _ in range(20):
        core.launch(*((row, 1) for row in rows))
        if not overlap or len(core.sampling) == 2:
            core.collect()
    while core.sampling:
        core.collect()
    return core


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_cuda_tokens_equal_cpu_tokens(page_size, overlap):
    cpu, cuda = outputs("cpu", 16, False), outputs("cuda", page_size, overlap)
    assert cuda.outputs == cpu.outputs
    scored = [
        [entry.logprob for result in core.results for entry in result.logprobs.values()]
        for core in (cpu, cuda)
    ]
    assert len(scored[0]) == 21
    np.testing.assert_allclose(*scored, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_launch_does_not_wait():
    executor = TorchRunner().build_executor(executor_query(ToyModel(device="cuda")))
    core = Driver(executor)
    core.start(0, PROMPTS[0], SamplingParams(top_k=5, repetition_penalty=1.1, logprobs=2))
    core.start(1, PROMPTS[1], SamplingParams(top_p=0.9))
    core.step((0, 37), (1, 5))
    core.start(2, PROMPTS[2], SamplingParams(frequency_penalty=0.5, prompt_logprobs=1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        core.launch((0, 1), (1, 1), (2, 90))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    core.collect()


def test_random_words_are_the_same_on_every_device():
    counter = tuple(torch.randint(0, 2**32, (1000,)) for _ in range(4))
    key = tuple(torch.randint(0, 2**32, (1000,)) for _ in range(2))
    words = philox(counter, key)
    on_cuda = philox(tuple(c.cuda() for c in counter), tuple(k.cuda() for k in key))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(words, on_cuda, strict=True))
    columns = torch.tensor([5, -9]), torch.tensor([0, 3]), torch.tensor([0, 1])
    noise = gumbel_rows(*columns, 1003)
    other = gumbel_rows(*(column.cuda() for column in columns), 1003)
    torch.testing.assert_close(noise, other.cpu(), atol=1e-5, rtol=1e-5)
