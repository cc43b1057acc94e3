"""The embedded model on a GPU: the CPU reference's tokens in float32, and answers in bfloat16."""

import pytest

from core.build import build_engine
from core.config import EngineConfig
from core.hooks import Hooks
from core.queries import ModelQuery
from kernels.extend_dense import extend
from kernels.fused import FusedOps, FusedPaging
from kernels.fused_sampling import FusedSampling
from kernels.shared_prefix import SharedPrefix
from kernels.split_kv import SplitKV
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.attention.paged import PagedAttention
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.torch_runner import TorchRunner
from plugins.model.smollm2 import SmolLM2
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.test_equality import Shared, generate, preemptions
from tests.test_equality_smollm2 import smollm2

pytestmark = pytest.mark.gpu

TOKENS = 8

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the opposite of hot?": "cold",
    "How many days are in a week?": "7",
}


def engine_of(dtype, pool_tokens=4096, overlap=True):
    """The kernels and graphs of a GPU, chunks of 64 tokens."""
    model = SmolLM2(dtype=dtype, ops=FusedOps()).build_model(ModelQuery("cuda", 0, False))
    plugins = [Fcfs(), PromptFits(growth_share=0), Chunked(), LastAdmitted(), Paged(16), Radix()]
    plugins += [Lru(), AdmitAll(), MaxTokensShare(), Fixed(), Shared(model)]
    plugins += [TorchRunner(paging=FusedPaging(), sampling=FusedSampling())]
    plugins += [PagedAttention(SplitKV(), extend, shared=SharedPrefix())]
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 256}
    config = EngineConfig(**limits, pool_tokens=pool_tokens, overlap=overlap, strict=True)
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    return build_engine(hooks, config, 0, RealClock(), "cuda"), model


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pressure", ["free", "forced", "scarce"])
def test_float32_tokens_equal_those_of_transformers_on_a_cpu(overlap, pressure):
    _, prompts, expected = smollm2(TOKENS)
    engine, _ = engine_of("float32", 400 if pressure == "scarce" else 4096, overlap)
    got = generate(engine, prompts, TOKENS, pressure, ignore_eos=True, forced_every=2)
    assert got == expected
    if pressure != "free":
        assert preemptions(engine) >= 2


def test_bfloat16_answers_questions():
    engine, model = engine_of("bfloat16")
    tokenizer = model.tokenizer
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    answers = [tokenizer.decode(ids) for ids in generate(engine, prompts, 40, "free")]
    for answer, wanted in zip(answers, QUESTIONS.values(), strict=True):
        assert wanted in answer
