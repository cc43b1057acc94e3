"""The same greedy prompt alone and under load (N13): deterministic attention gives the same ids.

Attention with fixed splits contributes nothing that depends on the batch: with matrix products
taken row by row every log-probability is the same bit for bit. A library's products may depend on
the number of rows; in float32 that moves the last bits and no id.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from core.queries import ModelQuery
from core.request import Request, SamplingParams
from kernels.split_kv import SplitKV
from kernels.torch_reference import paged_extend
from plugins.attention.paged import PagedAttention
from plugins.batching.chunked import Chunked
from plugins.cache.none import NoCache
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.model.ops import TorchOps
from tests.engine_harness import make_engine
from tests.kernels.sampling_case import DEVICE
from tests.test_equality import Shared
from tests.tiny_models import random_prompts, save_tiny

LENGTHS = (9, 70, 540)  # the last in two splits of 512
OTHERS = (3, 33, 8)
STEPS = 2
BUDGET = 4096  # every prompt in one chunk, whatever runs beside it


class RowByRow(TorchOps):
    """Matrix products whose rows cannot know of each other."""

    def linear(self, x, weight, bias):
        return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder, max_position_embeddings=1024, num_hidden_layers=1)
    return folder


def answers(model, splits, prompts, others=()):
    """Ids and log-probabilities of each prompt, served together with the others."""
    kernel = SplitKV(splits)
    assert kernel.capabilities.batch_invariant == (splits != "auto")
    plugins = {"attention": PagedAttention(kernel, paged_extend), "model": Shared(model)}
    roles = {"executor": TorchRunner(), "cache": NoCache(), "batching": Chunked(BUDGET)}
    engine = make_engine(pages=256, seqs=64, budget=BUDGET, plugins=plugins, **roles)
    greedy = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True, logprobs=0)
    drawn = SamplingParams(max_tokens=STEPS, temperature=1.0, ignore_eos=True)
    for index, prompt in enumerate(others):  # first, so that the prompts have other rows
        engine.submit(Request(f"other {index}", np.array(prompt, np.int32), drawn))
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), np.array(prompt, np.int32), greedy))
    while engine.has_work:
        engine.step()
    choices = [engine.records[str(index)].choices[0] for index in range(len(prompts))]
    ids = [list(choice.token_ids) for choice in choices]
    return ids, [[entry.logprob for entry in choice.logprobs] for choice in choices]


@pytest.mark.parametrize(("splits", "products"), [("invariant", "row by row"), (2, "library")])
def test_prompts_answer_alike_alone_and_under_load(folder, splits, products):
    ops = RowByRow() if products == "row by row" else TorchOps()
    loader = HuggingFaceModel(path=str(folder), ops=ops)
    model = loader.build_model(ModelQuery(DEVICE.type, 0, False))
    prompts = random_prompts(LENGTHS, seed=5)
    others = random_prompts(OTHERS, seed=6)
    alone = [answers(model, splits, [prompt]) for prompt in prompts]
    assert answers(model, splits, prompts[:1]) == alone[0]
    ids, logprobs = answers(model, splits, prompts, others)
    assert ids == [own[0][0] for own in alone]
    before = [own[1][0] for own in alone]
    if products == "row by row":
        assert logprobs == before
    np.testing.assert_allclose(logprobs, before, atol=1e-5)
