"""The embedded model on 16 real prompts equals transformers.generate, whatever the engine does."""

from functools import cache
from typing import Any

import pytest
import torch

from core.queries import ModelQuery
from plugins.model.smollm2 import SmolLM2
from plugins.model.smollm2_files import model_folder
from plugins.workload.prompts import Prompts
from tests.test_equality import PAIRS, generate, make, preemptions

TOKENS = 5


@cache
def smollm2(max_tokens: int = TOKENS) -> tuple[Any, list[list[int]], list[list[int]]]:
    """(model, 16 shortest GSM8K questions as ids, reference tokens)."""
    import transformers

    model = SmolLM2().build_model(ModelQuery("cpu", 0, False))
    workload = Prompts(dataset="gsm8k", num_requests=200, max_tokens=max_tokens, chat=False)
    asked = workload.requests(model.tokenizer, model.vocab_size, 0)
    prompts = sorted((request.prompt.tolist() for request in asked), key=len)[:16]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder(False), dtype=torch.float32
    ).eval()
    reference.generation_config.eos_token_id = None  # a few tokens: tiny models test the ends
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
        )
        expected.append(out[0, len(prompt) :].tolist())
    return model, prompts, expected


@pytest.mark.parametrize(("batching", "page_size", "cache_name", "pressure"), PAIRS)
def test_smollm2_real_prompts_equal_transformers(batching, page_size, cache_name, pressure):
    model, prompts, expected = smollm2()
    pool = 256 if pressure == "scarce" else 4096
    engine = make(model, batching, page_size, cache_name, pool, seqs=16, budget=256)
    got = generate(
        engine, prompts, TOKENS, pressure, ignore_eos=True, forced_every=2, forced_times=4
    )
    assert got == expected
    if pressure != "free":
        assert preemptions(engine) >= 2
