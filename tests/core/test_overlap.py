"""Launching ahead changes nothing that a policy decides, and no token that a client sees."""

from itertools import cycle, zip_longest

import numpy as np
import pytest

from core.engine import Engine
from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.contiguous import Contiguous
from plugins.allocator.paged import Paged
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from tests.core.policy_tables import ADMISSIONS, BATCHINGS, VICTIMS
from tests.engine_harness import VOCAB, make_engine
from tests.pairwise import pairwise

MEMORY = [(Radix, 16), (NoCache, 1)]


def requests(ignore_eos: bool, choices: int) -> list[Request]:
    rng = np.random.default_rng(0)
    out = []
    for index in range(16):
        prompt = rng.integers(1, VOCAB, rng.integers(1, 80)).astype(np.int32)
        if index % 3 == 0:
            prompt[:40] = 7  # a shared prefix
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 60)),
            ignore_eos=ignore_eos,
            n=int(rng.integers(1, choices + 1)),
        )
        out.append(Request(f"r{index}", prompt, params, priority=int(rng.integers(0, 3))))
    return out


def play(engine: Engine, batch: list[Request]) -> list[tuple[object, ...]]:
    """Everything decided in a run, step by step."""
    for request in batch:
        engine.submit(request)
    decisions = []
    while engine.has_work:
        event = engine.step()
        if event is not None:
            record = event.record
            choices = [
                (c.request_id, c.choice, c.kind, c.plugin, c.reason, c.detail)
                for c in record.choices
                if c.kind != "finished"
            ]
            decisions.append((record.rows, choices, record.pages_free, record.pages_tree))
    return decisions


@pytest.mark.parametrize(
    ("victims", "batching", "memory"),
    [*zip(VICTIMS, cycle(BATCHINGS), cycle(MEMORY))]
    + [("evict_shortest", *row) for row in pairwise(BATCHINGS, MEMORY)],
)
def test_overlap_forced_lengths_same_decisions(victims, batching, memory):
    cache, page_size = memory
    runs = [
        play(
            make_engine(
                pages=256 // page_size,
                page_size=page_size,
                admission=PromptFits(growth_share=0),
                seqs=8,
                overlap=overlap,
                batching=BATCHINGS[batching](),
                cache=cache(),
                allocator=Paged(page_size),
                plugins=VICTIMS[victims](),
            ),
            requests(ignore_eos=True, choices=3),
        )
        for overlap in (False, True)
    ]
    assert any(kind == "preempted" for step in runs[0] for _, _, kind, *_ in step[1])
    for step, (plain, overlapped) in enumerate(zip_longest(*runs)):
        assert plain == overlapped, f"step {step}"


@pytest.mark.parametrize(
    ("admission", "batching", "contiguous"),
    [*zip(ADMISSIONS, cycle(BATCHINGS), cycle([True, True, False, False]))]
    + [(name, "chunked", False) for name in ADMISSIONS]
    + [("prompt_fits", batching, False) for batching in BATCHINGS],
)
def test_overlap_forced_lengths_same_decisions_of_admission(admission, batching, contiguous):
    """As above, where admission holds requests back."""
    memory = {"allocator": Contiguous(16), "cache": NoCache()} if contiguous else {}
    runs = [
        play(
            make_engine(
                pages=16,
                overlap=overlap,
                batching=BATCHINGS[batching](),
                plugins=ADMISSIONS[admission](),
                **memory,
            ),
            requests(ignore_eos=admission != "new_token_ratio", choices=2),
        )
        for overlap in (False, True)
    ]
    held_back = {kind for step in runs[0] for _, _, kind, *_ in step[1]}
    assert held_back & {"refused", "skipped"}
    for step, (plain, overlapped) in enumerate(zip_longest(*runs)):
        assert plain == overlapped, f"step {step}"


@pytest.mark.parametrize("victims", VICTIMS)
def test_overlap_end_tokens_same_tokens_per_request(victims):
    tokens = []
    for overlap in (False, True):
        engine = make_engine(
            pages=16,
            admission=PromptFits(growth_share=0),
            overlap=overlap,
            plugins=VICTIMS[victims](),
            executor=Fake(vocab_size=VOCAB, end_token_ids=tuple(range(24))),
        )
        play(engine, requests(ignore_eos=False, choices=1))
        tokens.append({k: list(r.choices[0].token_ids) for k, r in engine.records.items()})
        assert {"stop", "length"} <= {r.finish_reason for r in engine.records.values()}
    assert tokens[0] == tokens[1]
