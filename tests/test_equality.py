"""Greedy tokens equal those of transformers.generate in float32, whatever the engine does.

Every combination of batching, page size, prefix cache and memory pressure for a tiny random Llama,
every pair of them for the other families. test_equality_smollm2.py does the latter with the
embedded model on real prompts.
"""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.build import build_engine
from core.config import EngineConfig
from core.engine import Engine
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.queries import ModelQuery
from core.request import Request, SamplingParams
from kernels.torch_reference import paged_decode, paged_extend
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.attention.paged import PagedAttention
from plugins.batching.chunked import Chunked
from plugins.batching.prefill_first import PrefillFirst
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.torch_runner import TorchRunner
from plugins.model.loader import HuggingFaceModel
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from tests.pairwise import pairwise
from tests.tiny_models import FAMILIES, random_prompts, reference_generate, save_tiny

BATCHING = {"chunked": lambda: Chunked(slice_tokens=16), "prefill_first": PrefillFirst}
CACHES = {"radix": Radix, "none": NoCache}
PRESSURES = ("free", "forced", "scarce")
AXES = (BATCHING, (1, 16), CACHES, PRESSURES)
MATRIX, PAIRS = list(itertools.product(*AXES)), pairwise(*AXES)
FORCED_TIMES = 12  # preemptions without need
TINY_TOKENS = 20
SCARCE_POOL = 112  # tokens; the longest tiny request needs 100 of them


class Shared:
    """Hands an already loaded model to the engine."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @hookimpl
    def build_model(self, query: ModelQuery) -> Any:
        return self.model


def make(
    model, batching, page_size, cache_name, pool_tokens, overlap=False, seqs=8, budget=48
) -> Engine:
    plugins = [Fcfs(), PromptFits(growth_share=0), BATCHING[batching](), LastAdmitted()]
    plugins += [Paged(page_size), CACHES[cache_name](), Lru(), AdmitAll(), MaxTokensShare()]
    plugins += [Fixed(), TorchRunner(), PagedAttention(paged_decode, paged_extend), Shared(model)]
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=256,
        pool_tokens=pool_tokens,
        overlap=overlap,
        strict=True,
    )
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    return build_engine(hooks, config, 0, RealClock())


def generate(
    engine,
    prompts,
    max_tokens,
    pressure,
    ignore_eos=False,
    forced_every=5,
    forced_times=FORCED_TIMES,
) -> list[list[int]]:
    """Tokens of all prompts served together. Streams and records must agree. forced_every: steps
    between preemptions without need; forced_times: how many."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), np.array(prompt, np.int32), params))
    streams: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for step in itertools.count():
        if not engine.has_work:
            break
        state = engine.state
        assert step < 2000, "no end in sight"
        due = step % forced_every == 0 and step < forced_every * forced_times
        if pressure == "forced" and due and len(state.running):
            victim = int(state.running[step // forced_every % len(state.running)])
            state.preempt(state.table.at(victim))
        event = engine.step()
        if event is not None:
            for (name, _), token in zip(event.rows, event.token_ids.tolist(), strict=True):
                streams[name].append(token)
    plain = {name: list(record.choices[0].token_ids) for name, record in engine.records.items()}
    assert streams == plain
    return [plain[str(index)] for index in range(len(prompts))]


@cache
def tiny(family: str) -> tuple[Any, list[list[int]], dict[bool, list[list[int]]]]:
    """(model, prompts, reference tokens by ignore_eos) of a random model, made once."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    save_tiny(family, folder, seed=1)
    prompts = random_prompts([1, 15, 16, 17, 33, 48, 60], seed=2)
    prompts += [prompts[4][:20] + prompts[5], prompts[6] + [9], prompts[3]]
    expected = {
        ignore: reference_generate(folder, prompts, TINY_TOKENS, ignore_eos=ignore)
        for ignore in (False, True)
    }
    model = HuggingFaceModel(path=str(folder)).build_model(ModelQuery("cpu", 0, False))
    return model, prompts, expected


def preemptions(engine: Engine) -> int:
    return sum(record.preemptions for record in engine.records.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_in_any_combination_equal_transformers(family):
    model, prompts, expected = tiny(family)
    for batching, page_size, cache_name, pressure in MATRIX if family == "llama" else PAIRS:
        scarce = pressure == "scarce"  # and no early end, so that memory does run out
        engine = make(model, batching, page_size, cache_name, SCARCE_POOL if scarce else 2048)
        got = generate(engine, prompts, TINY_TOKENS, pressure, ignore_eos=scarce)
        assert got == expected[scarce], (batching, page_size, cache_name, pressure)
        if pressure != "free":
            assert preemptions(engine) >= 3, (batching, page_size, cache_name, pressure)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tiny_models_overlapping_launches_equal_transformers(family):
    model, prompts, expected = tiny(family)
    for pressure in PRESSURES:
        scarce = pressure == "scarce"
        pool = SCARCE_POOL if scarce else 2048
        engine = make(model, "chunked", 16, "radix", pool, overlap=True)
        got = generate(engine, prompts, TINY_TOKENS, pressure, ignore_eos=scarce)
        assert got == expected[scarce], pressure


def test_tiny_model_seeded_sampling_independent_of_schedule():
    model, prompts, _ = tiny("llama")
    results = []
    for batching, page_size, cache_name, pressure in PAIRS:
        pool = SCARCE_POOL if pressure == "scarce" else 2048
        engine = make(model, batching, page_size, cache_name, pool)
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=16,
                temperature=1.3,
                top_k=(0, 5, 40)[index % 3],
                top_p=(1.0, 0.9)[index % 2],
                repetition_penalty=(1.0, 1.2)[index % 2],
                presence_penalty=0.3,
                seed=(None, 11)[index % 2],
                n=1 + index % 2,
                ignore_eos=True,
            )
            engine.submit(Request(str(index), np.array(prompt, np.int32), params))
        while engine.has_work:
            engine.step()
        results.append(
            {
                name: [list(choice.token_ids) for choice in record.choices]
                for name, record in engine.records.items()
            }
        )
    assert all(result == results[0] for result in results)
    first, second = results[0]["1"]
    assert first != second, "choices of one request must differ"
