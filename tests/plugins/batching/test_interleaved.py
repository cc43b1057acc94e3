"""interleaved: a slice of prompts, then decode steps, by turns."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.batching.interleaved import Interleaved
from tests.core.policy_tables import batch_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run


def choose(policy, step, remaining, token_limit=1000, replanning=False, **columns):
    """{row: tokens}; one token left is a decode."""
    view = table_of(
        known=[15 if left == 1 else left for left in remaining],
        computed=[14 if left == 1 else 0 for left in remaining],
        **columns,
    )
    query = batch_query(view, token_limit, step=step, replanning=replanning)
    decision = policy.decide_batch(query)
    return dict(zip(rows_of(view, decision.ids), decision.num_tokens.tolist(), strict=True))


def test_slices_and_decodes_take_turns():
    policy = Interleaved(slice_tokens=64)
    kinds = [sum(choose(policy, step, [1, 1, 500]).values()) for step in range(6)]
    assert kinds == [2, 64, 2, 64, 2, 64]


def test_slice_goes_to_prompts_in_order_of_admission():
    policy = Interleaved(slice_tokens=64)
    choose(policy, 0, [1, 50, 40, 90])
    assert choose(policy, 1, [1, 50, 40, 90]) == {1: 50, 2: 14}


def test_decode_steps_between_two_slices():
    policy = Interleaved(slice_tokens=64, decode_steps=3)
    kinds = [sum(choose(policy, step, [1, 500]).values()) for step in range(9)]
    assert kinds == [1, 1, 1, 64, 1, 1, 1, 64, 1]


def test_one_kind_alone_runs_in_every_step():
    policy = Interleaved(slice_tokens=64)
    assert [choose(policy, step, [500]) for step in range(3)] == [{0: 64}] * 3
    assert [choose(policy, step, [1, 1]) for step in range(3, 6)] == [{0: 1, 1: 1}] * 3
    assert choose(policy, 6, [1, 500]) == {1: 64}, "decodes have had their turn"


def test_step_that_is_planned_again_keeps_its_turn():
    policy = Interleaved(slice_tokens=64)
    choose(policy, 0, [1, 500])
    assert choose(policy, 1, [1, 500]) == {1: 64}
    assert choose(policy, 1, [1, 500], replanning=True) == {1: 64}
    assert choose(policy, 1, [1], replanning=True) == {0: 1}
    assert choose(policy, 2, [1, 500]) == {1: 64}, "what ran at last in step 1 was a decode"


def test_more_decodes_than_the_limit_take_turns():
    got = choose(Interleaved(), 0, [1, 1, 1], token_limit=2, last_step=[5, 7, 3])
    assert got == {2: 1, 0: 1}


def test_bounded_wait_in_an_engine_while_prompts_keep_coming():
    """A stream waits for one slice at most, and prompts for one decode step."""
    arrivals = [Arrival(2 * i, f"r{i}", 60, 40) for i in range(8)]
    out = run(make_engine(pages=200, budget=64, batching=Interleaved(slice_tokens=16)), arrivals)
    gaps = np.concatenate([np.diff(out.token_steps(f"r{i}")) for i in range(8)])
    assert set(gaps.tolist()) == {1, 2}
    assert not [e for e in out.events if e.record.prefill_tokens and e.record.decode_tokens]
    # 8 prompts of 60 tokens are 4 slices each (a decode step between two), and the last ends last.
    assert out.first_token_step("r7") <= 2 * 8 * 4


@pytest.mark.parametrize("field", ["slice_tokens", "decode_steps"])
def test_bad_settings_are_refused(field):
    with pytest.raises(ConfigError, match=rf"batching\.{field} must be >= 1, got 0"):
        Interleaved(**{field: 0})
