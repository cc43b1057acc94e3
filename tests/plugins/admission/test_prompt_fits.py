"""prompt_fits: the arithmetic of its gate, and what it does in an engine."""

import pytest

from core.errors import ConfigError
from core.queries import Verdict
from plugins.admission.prompt_fits import PromptFits
from plugins.cache.none import NoCache
from tests.core.policy_tables import admission_query, table_of
from tests.engine_harness import Arrival, make_engine, run


def verdict(policy, running, **facts):
    return policy.decide_admission(admission_query(running, **facts)).verdict


def test_need_plus_growth_must_be_within_what_nobody_counts_on():
    # Two running, 8 and 24 tokens expected: a quarter of 32 tokens is 8, one page of 16.
    running = table_of(predicted_output=[8.0, 24.0], max_output=[16, 64])
    supply = {"pages_free": 5, "pages_evictable": 3, "pages_promised": 2}
    assert verdict(PromptFits(), running, pages_needed=5, **supply) is Verdict.ADMIT
    assert verdict(PromptFits(), running, pages_needed=6, **supply) is Verdict.WAIT


@pytest.mark.parametrize(("share", "most"), [(0.0, 10), (0.25, 9), (0.5, 9), (0.51, 8), (1.0, 8)])
def test_growth_is_a_share_of_the_prediction_rounded_up_to_pages(share, most):
    running = table_of(predicted_output=[8.0, 24.0], max_output=[16, 64])
    policy = PromptFits(growth_share=share)
    assert verdict(policy, running, pages_needed=most, pages_free=10) is Verdict.ADMIT
    assert verdict(policy, running, pages_needed=most + 1, pages_free=10) is Verdict.WAIT


def test_tokens_already_out_shrink_the_expected_growth():
    running = table_of(known=[10 + 60], predicted_output=[64.0], max_output=[64])
    assert verdict(PromptFits(1.0), running, pages_needed=9, pages_free=10) is Verdict.ADMIT
    running = table_of(predicted_output=[64.0], max_output=[64])
    assert verdict(PromptFits(1.0), running, pages_needed=7, pages_free=10) is Verdict.WAIT


def test_request_alone_is_admitted_whatever_the_numbers_say():
    alone = table_of(0)
    assert verdict(PromptFits(), alone, pages_needed=50, pages_free=1) is Verdict.ADMIT


@pytest.mark.parametrize("possible", [True, False])
def test_reservation_at_once_asks_the_allocator_alone(possible):
    asked = []
    query = admission_query(
        table_of(1),
        allocatable=lambda num_pages: asked.append(num_pages) or possible,
        pages_reserved_at_once=7,
        pages_free=3,
    )
    decision = PromptFits().decide_admission(query)
    assert decision.verdict is (Verdict.ADMIT if possible else Verdict.WAIT)
    assert asked == [7]
    assert "reserves 7 pages at once" in decision.reason


def test_reason_holds_the_numbers():
    running = table_of(predicted_output=[64.0], max_output=[64])
    query = admission_query(running, pages_needed=3, pages_free=2)
    assert PromptFits().decide_admission(query).reason == (
        "needs 3 + 1 for growth, 2 of 100 pages left"
    )


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_growth_share_out_of_range_is_refused(share):
    with pytest.raises(ConfigError, match=rf"growth_share must be in \[0, 1\], got {share}"):
        PromptFits(growth_share=share)


def test_whole_prompts_are_gated_not_their_first_chunks():
    """Gating on chunks would start all eight and let them preempt one another."""
    engine = make_engine(pages=12, budget=16, cache=NoCache(), admission=PromptFits(0.0))
    out = run(engine, [Arrival(0, f"L{i}", 80, 1) for i in range(8)])
    assert out.preemptions() == 0
    assert max(event.record.running for event in out.events) == 2


def test_higher_growth_share_preempts_less():
    def preemptions(share):
        engine = make_engine(pages=14, admission=PromptFits(share))
        return run(engine, [Arrival(i, f"r{i}", 30, 60) for i in range(7)]).preemptions()

    assert preemptions(1.0) < preemptions(0.0)
