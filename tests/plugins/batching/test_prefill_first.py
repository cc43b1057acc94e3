"""prefill_first: no decode while an admitted request waits for prefill."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.batching.prefill_first import PrefillFirst
from tests.core.policy_tables import batch_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run


def choose(policy, token_limit, remaining, computed=None):
    """{row: tokens}; a request with one token left decodes, unless it is a one-token prompt."""
    computed = [10 if left == 1 else 0 for left in remaining] if computed is None else computed
    known = [a + b for a, b in zip(remaining, computed, strict=True)]
    view = table_of(known=known, computed=computed, prompt=[10] * len(known))
    decision = policy.decide_batch(batch_query(view, token_limit))
    got = dict(zip(rows_of(view, decision.ids), decision.num_tokens.tolist(), strict=True))
    return got, decision.reason


def test_prompts_run_alone_in_order_of_admission():
    got, reason = choose(PrefillFirst(), 64, [1, 30, 1, 30, 30])
    assert got == {1: 30, 3: 30, 4: 4}
    assert reason == "prefill 3"


def test_decodes_run_when_no_prompt_is_left():
    got, reason = choose(PrefillFirst(), 64, [1, 1, 1])
    assert got == {0: 1, 1: 1, 2: 1}
    assert reason == "decode 3"


def test_resumed_request_counts_as_prefill():
    got, _ = choose(PrefillFirst(), 64, [1, 25], computed=[12, 0])
    assert got == {1: 25}


def test_one_token_left_of_a_prompt_is_prefill():
    got, _ = choose(PrefillFirst(), 64, [1, 1], computed=[12, 9])
    assert got == {1: 1}


def test_budget_cuts_a_long_prompt_and_is_the_smaller_of_two():
    assert choose(PrefillFirst(), 20, [50])[0] == {0: 20}
    assert choose(PrefillFirst(token_budget=8), 20, [50])[0] == {0: 8}
    assert choose(PrefillFirst(token_budget=80), 20, [5, 50, 50])[0] == {0: 5, 1: 15}
    assert choose(PrefillFirst(token_budget=2), 20, [1, 1, 1])[0] == {0: 1, 1: 1}


def test_budget_below_1_is_refused():
    with pytest.raises(ConfigError, match=r"batching\.token_budget must be >= 1, got 0"):
        PrefillFirst(token_budget=0)


def test_random_tables_break_no_rule():
    rng = np.random.default_rng(2)
    for _ in range(300):
        remaining = rng.choice([1, 1, 2, 5, 40], rng.integers(1, 20)).tolist()
        limit = int(rng.integers(1, 100))
        got, _ = choose(PrefillFirst(), limit, remaining)
        prompts = [row for row, left in enumerate(remaining) if left > 1]
        assert set(got) <= set(prompts or range(len(remaining)))
        assert sum(got.values()) == min(limit, sum(remaining[r] for r in prompts or got or [0]))


def test_no_step_mixes_prompts_and_decodes():
    engine = make_engine(pages=64, batching=PrefillFirst())
    out = run(engine, [Arrival(3 * i, f"r{i}", 40, 12) for i in range(6)])
    mixed = [e for e in out.events if e.record.prefill_tokens and e.record.decode_tokens]
    assert not mixed


def test_head_that_cannot_be_admitted_does_not_hold_up_decodes():
    """A full pool with a waiting prompt must not stop the running from ending."""
    engine = make_engine(pages=8, batching=PrefillFirst())
    out = run(engine, [Arrival(0, "A", 60, 40), Arrival(1, "B", 100, 4)])
    assert out.first_token_step("B") > out.last_token_step("A")
    assert int(np.diff(out.token_steps("A")).max()) == 1
