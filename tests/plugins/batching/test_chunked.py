"""chunked: decode first, then slices; the share of the budget that short prompts get."""

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.batching.chunked import Chunked
from tests.core.policy_tables import batch_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run


def choose(policy, token_limit, remaining):
    """{row: tokens} for requests with so many tokens left to compute; in the order of rows."""
    view = table_of(known=remaining)
    decision = policy.decide_batch(batch_query(view, token_limit))
    assert decision.reason
    return dict(zip(rows_of(view, decision.ids), decision.num_tokens.tolist(), strict=True))


def test_every_decoding_request_gets_its_token_before_any_prompt():
    got = choose(Chunked(slice_tokens=8), 10, [20, 1, 30, 1, 1])
    assert {row: got[row] for row in (1, 3, 4)} == {1: 1, 3: 1, 4: 1}
    assert sum(got.values()) == 10
    assert list(got)[:3] == [1, 3, 4], "decodes are served first when memory is short"


def test_decodes_alone_are_one_token_each():
    assert choose(Chunked(), 10, [1, 1, 1]) == {0: 1, 1: 1, 2: 1}


def test_more_decodes_than_budget_serves_the_first():
    assert choose(Chunked(), 2, [1, 1, 1, 50]) == {0: 1, 1: 1}


def test_prompts_that_fit_run_whole_and_long_ones_in_slices():
    assert choose(Chunked(slice_tokens=256), 2048, [100, 300, 256]) == {0: 100, 1: 256, 2: 256}


def test_budget_is_the_smaller_of_policy_and_engine():
    assert choose(Chunked(token_budget=8), 100, [50]) == {0: 8}
    assert choose(Chunked(token_budget=80), 20, [50]) == {0: 20}
    assert choose(Chunked(token_budget=None), 20, [50]) == {0: 20}


def test_half_the_prompt_budget_goes_to_prompts_shorter_than_the_oldest_shortest_first():
    got = choose(Chunked(slice_tokens=64), 64, [100, 90, 10, 12])
    assert got == {0: 32, 1: 10, 2: 10, 3: 12}
    assert choose(Chunked(slice_tokens=64), 64, [100, 200, 10]) == {0: 54, 2: 10}


def test_short_share_0_is_strict_order():
    strict = Chunked(slice_tokens=64, short_share=0.0)
    assert choose(strict, 64, [100, 90, 10]) == {0: 64}
    assert choose(strict, 80, [100, 90, 10]) == {0: 64, 1: 16}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_oldest_prompt_always_keeps_its_part(share):
    """It is slowed down by at most 1 / (1 - short_share), whatever comes behind it."""
    policy = Chunked(slice_tokens=1000, short_share=share)
    rng = np.random.default_rng(0)
    for _ in range(200):
        budget = int(rng.integers(1, 200))
        remaining = rng.integers(2, 300, rng.integers(1, 12)).tolist()
        got = choose(policy, budget, remaining)
        assert got[0] >= min(remaining[0], budget - int(budget * share))


@pytest.mark.parametrize("policy", [Chunked(slice_tokens=16), Chunked(16, 40, 0.9), Chunked(1)])
def test_random_tables_use_the_budget_and_break_no_rule(policy):
    rng = np.random.default_rng(1)
    for _ in range(300):
        remaining = rng.choice([1, 1, 1, 2, 5, 17, 400], rng.integers(1, 20)).tolist()
        limit = int(rng.integers(1, 120))
        got = choose(policy, limit, remaining)
        budget = min(limit, policy.token_budget or limit)
        assert all(1 <= n <= min(remaining[row], policy.slice_tokens) for row, n in got.items())
        wanted = sum(min(left, policy.slice_tokens) for left in remaining)
        assert sum(got.values()) == min(wanted, budget)


def test_slices_bound_the_tokens_of_one_prompt_in_a_step():
    engine = make_engine(budget=64, batching=Chunked(slice_tokens=10))
    out = run(engine, [Arrival(0, "A", 95, 2)])
    assert [event.record.rows[0][2] for event in out.events] == [10] * 9 + [5, 1]


@pytest.mark.parametrize(
    ("remaining", "token_limit", "holds"),
    [
        ([1, 40, 90], 100, True),
        ([1, 40, 9], 100, True),  # and what is left of a prompt
        ([1, 40, 90], 30, False),  # a budget too short for both
        ([1, 40, 9], 25, False),
        ([1, 1], 100, False),
    ],
)
def test_choice_holds_while_every_prompt_has_all_it_may(remaining, token_limit, holds):
    table = table_of(known=remaining)
    chosen = Chunked(slice_tokens=20).decide_batch(batch_query(table, token_limit))
    assert chosen.holds is holds


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"slice_tokens": 0}, "batching.slice_tokens must be >= 1, got 0"),
        ({"token_budget": 0}, "batching.token_budget must be >= 1, got 0"),
        ({"short_share": 1.0}, r"batching.short_share must be in \[0, 1\), got 1.0"),
        ({"short_share": -0.1}, r"batching.short_share must be in \[0, 1\), got -0.1"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        Chunked(**arguments)
