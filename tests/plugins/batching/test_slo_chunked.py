"""slo_chunked: the longest slice that keeps a step within its target."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.batching.slo_chunked import SloChunked
from plugins.executor.fake import Fake
from plugins.executor.simulated import Simulated
from plugins.step_time.fitted import Fitted
from plugins.step_time.fixed import Fixed
from plugins.step_time.roofline import Roofline
from tests.core.policy_tables import batch_query, rows_of, table_of
from tests.engine_harness import VOCAB, Arrival, make_engine, run

MODEL = Fixed(step_s=0.01, row_s=0.0, token_s=0.001)


def choose(policy, remaining, token_limit=1000, model=MODEL, computed=0, **columns):
    """{row: tokens}; decodes have 100 tokens of context, prompts `computed`."""
    done = [99 if left == 1 else computed for left in remaining]
    known = [a + b for a, b in zip(done, remaining, strict=True)]
    view = table_of(known=known, computed=done, **columns)
    decision = policy.decide_batch(batch_query(view, token_limit, step_time=model))
    return dict(zip(rows_of(view, decision.ids), decision.num_tokens.tolist(), strict=True))


def test_slice_fills_the_step_up_to_the_target():
    # 10 ms + 1 ms a token: 40 tokens, of which two are decodes.
    policy = SloChunked(itl_slo_ms=50.0)
    assert choose(policy, [1, 500, 1]) == {0: 1, 2: 1, 1: 38}
    assert choose(policy, [1, 30, 300, 1]) == {0: 1, 3: 1, 1: 30, 2: 8}


def test_prompts_that_fit_run_whole():
    assert choose(SloChunked(itl_slo_ms=50.0), [1, 20, 5]) == {0: 1, 1: 20, 2: 5}


def test_rows_context_and_pairs_all_count():
    # 3 rows, 2 + n tokens, context 200 + n + 40, pairs 200 + 40 n + n (n + 1) / 2.
    model = Fixed(step_s=1.0, row_s=2.0, token_s=0.5, kv_token_s=0.25, pair_s=0.125)

    def seconds(n):
        pairs = 200 + 40 * n + n * (n + 1) / 2
        return 1 + 2 * 3 + 0.5 * (2 + n) + 0.25 * (200 + n + 40) + 0.125 * pairs

    for n in (20, 33, 34, 150):
        policy = SloChunked(itl_slo_ms=1000 * seconds(n))
        assert choose(policy, [1, 1, 200], model=model, computed=40)[2] == n
        policy = SloChunked(itl_slo_ms=1000 * seconds(n) - 1)
        assert choose(policy, [1, 1, 200], model=model, computed=40)[2] == n - 1


def test_prompts_move_on_by_a_minimum_whatever_it_costs():
    policy = SloChunked(itl_slo_ms=0.001, min_tokens=7)
    assert choose(policy, [1, 500]) == {0: 1, 1: 7}
    assert choose(policy, [1, 3, 2, 500]) == {0: 1, 1: 3, 2: 2, 3: 2}
    assert choose(policy, [1, 3]) == {0: 1, 1: 3}


def test_prompts_alone_fill_the_budget():
    policy = SloChunked(itl_slo_ms=0.001, token_budget=80)
    assert choose(policy, [50, 500]) == {0: 50, 1: 30}
    assert choose(policy, [50, 500], token_limit=60) == {0: 50, 1: 10}


def test_more_streams_than_budget_take_turns_beside_a_prompt():
    got = choose(SloChunked(min_tokens=2), [1, 1, 1, 500], 4, last_step=[8, 9, 7, 3])
    assert got == {2: 1, 0: 1, 3: 2}
    got = choose(SloChunked(min_tokens=16), [1, 1, 1, 500], 4, last_step=[8, 9, 7, 3])
    assert got == {2: 1, 0: 1, 3: 2}, "at most half the budget is kept for prompts"


def test_budget_of_one_token_goes_to_either_by_turns():
    policy = SloChunked()
    assert choose(policy, [1, 500], token_limit=1, last_step=[8, 7]) == {1: 1}
    assert choose(policy, [1, 500], token_limit=1, last_step=[8, 9]) == {0: 1}
    assert choose(policy, [500], token_limit=1) == {0: 1}


def test_random_tables_break_no_rule_and_no_longer_slice_would_do():
    rng = np.random.default_rng(0)
    for _ in range(200):
        remaining = rng.choice([1, 1, 1, 5, 60, 400], rng.integers(1, 16)).tolist()
        limit = int(rng.integers(1, 200))
        policy = SloChunked(itl_slo_ms=float(rng.uniform(5, 120)), min_tokens=4)
        got = choose(policy, remaining, limit)
        assert got
        assert all(1 <= tokens <= remaining[row] for row, tokens in got.items())
        total = sum(got.values())
        assert total <= limit
        prompts = sum(left for left in remaining if left > 1)
        decodes = sum(remaining[row] == 1 for row in got)
        whole = total - decodes == prompts
        full = total == limit
        if decodes and prompts and not whole and not full:
            seconds = policy.itl_slo_ms / 1e3
            assert total - decodes == 4 or MODEL.seconds(1, total, 0, 0) <= seconds
            assert MODEL.seconds(1, total + 1, 0, 0) > seconds


@pytest.mark.parametrize("model", [Fixed(0.01, 0.0, 0.0001), Fitted()], ids=["fixed", "fitted"])
def test_gaps_stay_within_the_target_in_an_engine(model):
    """Eight streams of short prompts, long ones coming between: with the fitted model from the
    twentieth step on."""
    executor = Fake(vocab_size=1000, step_s=0.01, token_s=0.0001)
    batching = SloChunked(itl_slo_ms=15.0)
    engine = make_engine(
        pages=400, budget=512, batching=batching, step_time=model, executor=executor
    )
    arrivals = [Arrival(5 * i, f"r{i}", 8 if i % 2 else 400, 60) for i in range(12)]
    out = run(engine, arrivals)
    mixed = [
        e.record for e in out.events[20:] if e.record.prefill_tokens and e.record.decode_tokens
    ]
    lasted = [record.end_s - record.start_s for record in mixed]
    assert len(mixed) > 20
    assert max(lasted) <= 0.0151
    assert np.median(lasted) >= 0.0147, "the target is used"


def test_fitted_model_keeps_a_device_that_is_no_straight_line_near_the_target():
    """Llama-8B on an H200 by its roofline: small steps wait for memory, large ones for products."""
    engine = make_engine(
        pages=4000,
        seqs=64,
        budget=8192,
        max_model_len=4096,
        strict=False,
        batching=SloChunked(itl_slo_ms=30.0),
        step_time=Fitted(),
        executor=Simulated(Roofline(), vocab_size=VOCAB),
    )
    records = []
    for i in range(48):
        engine.submit(Arrival(0, f"r{i}", 60 if i % 4 else 2000, 60).request(engine.clock.now()))
        records += [event.record for _ in range(8) if (event := engine.step()) is not None]
    lasted = [r.end_s - r.start_s for r in records[100:] if r.prefill_tokens and r.decode_tokens]
    assert max(lasted) < 0.0315
    assert max(lasted) > 0.028, "the target is used"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"itl_slo_ms": 0.0}, r"batching\.itl_slo_ms must be > 0, got 0.0"),
        ({"min_tokens": 0}, r"batching\.min_tokens must be >= 1, got 0"),
        ({"token_budget": 0}, r"batching\.token_budget must be >= 1, got 0"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        SloChunked(**arguments)
