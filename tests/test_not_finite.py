"""Models whose logits are not finite: such requests fail, others get their tokens (N17)."""

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from core.queries import ModelQuery
from core.request import Request, SamplingParams
from kernels.fused_sampling import FusedSampling
from kernels.torch_reference import paged_decode, paged_extend
from plugins.attention.paged import PagedAttention
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from tests.engine_harness import check_idle, make_engine
from tests.kernels.sampling_case import DEVICE, SMALL
from tests.test_equality import Shared
from tests.tiny_models import random_prompts, save_tiny

# Of Triton's interpreter, which computes with numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]
BAD_TOKEN = 100  # whose embedding is infinite in one model
DTYPES = {"one norm": "float16", "one token": "float32"}  # by kind of model
TOKENS = 3
SAMPLING = {"torch": None, "kernels": FusedSampling(SMALL)}
PATHS = pytest.mark.parametrize(
    ("sampling", "overlap"), [("torch", False), ("torch", True), ("kernels", True)]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: load(kind, tmp_path_factory.mktemp("tiny")) for kind in DTYPES}


def load(kind, folder):
    """A tiny Llama. In float16 with a norm that is 10,000 times too large, so that every token
    overflows; or in float32, whose rounding changes no token, with one infinite embedding."""
    save_tiny("llama", folder, seed=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if kind == "one token":
        tensors["model.embed_tokens.weight"][BAD_TOKEN] = float("inf")
    else:
        tensors["model.layers.1.post_attention_layernorm.weight"] *= 1e4
    save_file(tensors, file, metadata={"format": "pt"})
    plugin = HuggingFaceModel(path=str(folder), dtype=DTYPES[kind])
    return plugin.build_model(ModelQuery(DEVICE.type, 0, False))


def serve(model, requests, sampling, overlap):
    plugins = {"attention": PagedAttention(paged_decode, paged_extend), "model": Shared(model)}
    executor = TorchRunner(sampling=SAMPLING[sampling])
    engine = make_engine(pages=24, executor=executor, overlap=overlap, plugins=plugins, seqs=6)
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    check_idle(engine)
    return engine


def asks(name, prompt, **params):
    params = {"max_tokens": TOKENS, "ignore_eos": True} | params
    return Request(name, np.array(prompt, np.int32), SamplingParams(**params))


def tokens(engine, name):
    return [list(choice.token_ids) for choice in engine.records[name].choices]


@PATHS
@pytest.mark.parametrize("kind", DTYPES)
def test_requests_that_meet_the_overflow_fail_and_others_do_not(models, kind, sampling, overlap):
    model = models[kind]
    prompts = random_prompts([20, 33, 40, 18, 7], seed=3, vocab_size=BAD_TOKEN)
    bias = {BAD_TOKEN: -100.0}  # sound requests never draw it
    sound = [
        asks("greedy", prompts[0], temperature=0.0, logit_bias=bias),
        asks("draws", prompts[1], n=2, top_p=0.9, logprobs=2, logit_bias=bias),
    ]
    failing = [
        asks("n", [*prompts[2], BAD_TOKEN], n=2, logprobs=3, frequency_penalty=0.5),
        asks("greedy too", [BAD_TOKEN, *prompts[3]], temperature=0.0),
        asks("scored", [*prompts[4], BAD_TOKEN, 9], max_tokens=0, prompt_logprobs=1),
    ]
    engine = serve(model, [*failing, *sound], sampling, overlap)
    for request in failing:
        record = engine.records[request.request_id]
        assert record.finish_reason == "error"
        assert record.error.startswith(f"request {request.request_id!r} at position ")
        assert "logits must be finite" in record.error
        assert f"model {DTYPES[kind]}, KV {DTYPES[kind]}" in record.error
        assert record.output_tokens == 0
    if kind == "one token":
        assert engine.state.finish_counts == {"error": 3, "length": 2}
        alone = serve(model, sound, sampling, overlap)
        for request in sound:
            assert tokens(engine, request.request_id) == tokens(alone, request.request_id)
            assert all(len(choice) == TOKENS for choice in tokens(engine, request.request_id))
        assert engine.state.memory.ledger.num_tree == alone.state.memory.ledger.num_tree
    else:
        assert engine.state.finish_counts == {"error": 5}
        assert engine.state.memory.ledger.num_tree == 0


@PATHS
def test_a_request_fails_at_the_token_that_overflows(models, sampling, overlap):
    prompt = random_prompts([20], seed=3, vocab_size=BAD_TOKEN)[0]
    drawn = asks("A", prompt, temperature=0.0, logit_bias={BAD_TOKEN: 1e6})
    engine = serve(models["one token"], [drawn], sampling, overlap)
    assert engine.records["A"].finish_reason == "error"
    assert tokens(engine, "A") == [[BAD_TOKEN]]
    assert "at position 21" in engine.records["A"].error
