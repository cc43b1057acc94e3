"""static: batches that nobody joins."""

import pytest

from core.errors import ConfigError
from core.queries import Verdict
from plugins.admission.prompt_fits import PromptFits
from plugins.admission.reserve_max import ReserveMax
from plugins.batching.chunked import Chunked
from plugins.batching.static import Static
from tests.core.policy_tables import admission_query, batch_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run


def choose(policy, view, token_limit=100):
    decision = policy.decide_batch(batch_query(view, token_limit))
    return dict(zip(rows_of(view, decision.ids), decision.num_tokens.tolist(), strict=True))


def decoding(num_rows, **columns):
    return table_of(known=[15] * num_rows, computed=[14] * num_rows, **columns)


def test_prompts_run_whole_in_order_before_anyone_decodes():
    policy = Static()
    view = table_of(prompt=[30, 10, 40], known=[30, 12, 40], computed=[0, 11, 0])
    assert choose(policy, view) == {0: 30, 2: 40}
    assert choose(policy, view, token_limit=50) == {0: 30, 2: 20}
    assert choose(policy, decoding(3)) == {0: 1, 1: 1, 2: 1}


def test_who_runs_and_is_not_of_the_batch_waits_until_nobody_of_it_runs():
    policy, view = Static(), decoding(4)
    three = view._table.view(view._slots[:3])
    assert choose(policy, three) == {0: 1, 1: 1, 2: 1}
    assert choose(policy, view) == {0: 1, 1: 1, 2: 1}
    last_two = view._table.view(view._slots[2:])
    assert choose(policy, last_two) == {0: 1}
    assert choose(policy, view._table.view(view._slots[3:])) == {0: 1}


def test_preempted_member_does_not_come_back_into_its_batch():
    policy = Static()
    choose(policy, decoding(3, admitted_order=[1, 2, 3]))
    assert choose(policy, decoding(3, admitted_order=[1, 3, 4])) == {0: 1, 1: 1}


def test_batch_size_bounds_the_batch():
    assert choose(Static(batch_size=2), decoding(5)) == {0: 1, 1: 1}
    full = admission_query(table_of(2))
    assert Static(batch_size=2).decide_admission(full).verdict is Verdict.WAIT
    assert Static(batch_size=3).decide_admission(full) is None


def test_admission_waits_while_a_batch_is_under_way_and_else_has_no_opinion():
    policy, view = Static(), decoding(2)
    assert policy.decide_admission(admission_query(view)) is None, "the batch is being formed"
    choose(policy, view)
    refused = policy.decide_admission(admission_query(view))
    assert refused.verdict is Verdict.WAIT
    assert refused.reason == "a batch is under way, 2 of it not done"
    assert policy.decide_admission(admission_query(table_of(0))) is None


def test_more_members_than_budget_take_turns():
    policy = Static()
    assert choose(policy, decoding(3, last_step=[8, 9, 7]), token_limit=2) == {2: 1, 0: 1}


def test_batches_follow_one_another_in_an_engine():
    lengths = [4, 30, 9, 12, 5, 7]
    arrivals = [Arrival(0, f"r{i}", 8, length) for i, length in enumerate(lengths)]
    out = run(make_engine(pages=64, seqs=3, batching=Static()), arrivals)
    steps = [out.token_steps(f"r{i}") for i in range(6)]
    assert {first[0] for first in steps[:3]} == {0}
    assert {first[0] for first in steps[3:]} == {30}, "the longest of the first three has ended"
    assert len(out.events) == 30 + 12
    assert {choice.plugin for choice in out.choices("refused")} == {"batching", "core"}


def test_memory_is_left_to_the_admission_policy():
    """Of eight that come together three fit by reservation."""
    arrivals = [Arrival(0, f"r{i}", 16, 17) for i in range(8)]
    engine = make_engine(pages=6, batching=Static(), admission=ReserveMax())
    out = run(engine, arrivals)
    assert out.preemptions() == 0
    assert {out.first_token_step(f"r{i}") for i in range(3)} == {0}
    assert out.first_token_step("r3") == 17


def test_admission_policy_that_is_asked_first_changes_no_batch():
    """Its newcomers hold places among the running, unserved."""
    lengths = [4, 30, 9, 12, 5, 7]
    arrivals = [Arrival(0, f"r{i}", 8, length) for i, length in enumerate(lengths)]
    plugins = {"asked_first": PromptFits()}
    out = run(make_engine(pages=64, seqs=3, batching=Static(), plugins=plugins), arrivals)
    assert out.first_token_step("r3") == 30
    assert max(event.record.running for event in out.events[5:29]) == 3


def test_few_long_outputs_hold_up_batches_that_continuous_batching_does_not_wait_for():
    lengths = [5] * 7 + [60]
    arrivals = [Arrival(0, f"r{i}", 4, lengths[i % 8]) for i in range(32)]

    def steps(batching):
        return len(run(make_engine(pages=200, batching=batching), arrivals).events)

    assert steps(Static()) == 4 * 60
    assert steps(Chunked()) < 2 * 60


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, r"batching\.batch_size must be >= 1, got 0"),
        ({"token_budget": 0}, r"batching\.token_budget must be >= 1, got 0"),
    ],
)
def test_bad_settings_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        Static(**arguments)
