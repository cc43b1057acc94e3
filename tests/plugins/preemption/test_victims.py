"""Victim policies on small tables, and what they do in an engine under pressure."""

import numpy as np
import pytest

from core.queries import Cause
from plugins.admission.prompt_fits import PromptFits
from plugins.order.priority import Priority
from plugins.predictor.oracle import Oracle
from plugins.preemption.cheapest_recompute import CheapestRecompute
from plugins.preemption.evict_longest import EvictLongest
from plugins.preemption.evict_shortest import EvictShortest
from plugins.preemption.fewest_preempted import FewestPreempted
from plugins.preemption.last_admitted import LastAdmitted
from plugins.preemption.least_remaining import LeastRemaining
from plugins.preemption.most_pages import MostPages
from plugins.preemption.most_remaining import MostRemaining
from plugins.preemption.priority import PreemptLowestPriority
from plugins.preemption.random_victim import RandomVictim
from plugins.step_time.fixed import Fixed
from tests.core.policy_tables import VICTIMS, preemption_query, rows_of, table_of
from tests.engine_harness import Arrival, make_engine, run

CALM = [name for name in VICTIMS if name != "priority"]


def rank(policy, view, **query):
    decision = policy.decide_preemption(preemption_query(view, **query))
    assert decision.reason
    return rows_of(view, decision.victims)


def test_last_admitted_ranks_by_admission_latest_first():
    assert rank(LastAdmitted(), table_of(admitted_order=[5, 9, 2, 7])) == [1, 3, 0, 2]


def test_evict_shortest_takes_the_fewest_generated_first():
    view = table_of(prompt=[10, 10, 10], known=[18, 12, 15])
    assert rank(EvictShortest(), view) == [1, 2, 0]


def test_evict_shortest_breaks_ties_by_the_longest_prompt():
    view = table_of(prompt=[10, 90, 40, 5], known=[13, 93, 43, 9])
    assert rank(EvictShortest(), view) == [1, 2, 0, 3]


def test_evict_shortest_breaks_what_is_left_by_the_latest_admission():
    view = table_of(prompt=[10, 10, 10], known=[13, 13, 13], admitted_order=[4, 8, 6])
    assert rank(EvictShortest(), view) == [1, 2, 0]


def test_evict_shortest_counts_tokens_in_flight_so_that_overlap_changes_nothing():
    view = table_of(prompt=[10, 10], known=[13, 12], in_flight=[0, 2])
    assert rank(EvictShortest(), view) == [0, 1]


def test_evict_shortest_looks_at_output_not_at_length():
    view = table_of(prompt=[500, 10], known=[520, 12])
    assert rank(EvictShortest(), view) == [1, 0]


def test_evict_longest_is_the_other_way_round():
    view = table_of(prompt=[10, 10, 10, 80], known=[18, 12, 15, 88])
    assert rank(EvictLongest(), view) == [3, 0, 2, 1]
    in_flight = table_of(prompt=[10, 10], known=[13, 12], in_flight=[0, 2], admitted_order=[2, 1])
    assert rank(EvictLongest(), in_flight) == [1, 0]
    assert rank(EvictLongest(), table_of(admitted_order=[4, 8, 6])) == [1, 2, 0]


def test_most_pages_ranks_by_pages_held_then_by_admission():
    view = table_of(pages_held=[3, 7, 7, 1], pages_shared=[0, 7, 0, 0])
    assert rank(MostPages(), view) == [2, 1, 0, 3]


def test_fewest_preempted_spreads_the_cost():
    view = table_of(preemptions=[2, 0, 1, 0], admitted_order=[1, 2, 3, 4])
    assert rank(FewestPreempted(), view) == [3, 1, 2, 0]


def test_remaining_output_is_the_prediction_less_what_is_out():
    facts = {"predicted_output": [30.0, 12.0, 40.0], "max_output": [50] * 3}
    view = table_of(prompt=[10] * 3, known=[35, 11, 30], in_flight=[1, 0, 0], **facts)  # 4, 11, 20
    assert rank(LeastRemaining(), view) == [0, 1, 2]
    assert rank(MostRemaining(), view) == [2, 1, 0]


@pytest.mark.parametrize("policy", [LeastRemaining(), MostRemaining()])
def test_equal_predictions_leave_it_to_admission(policy):
    assert rank(policy, table_of(admitted_order=[4, 8, 6])) == [1, 2, 0]


def test_cheapest_recompute_weighs_seconds_against_pages():
    # 1 s a row and 0.1 s a token. 40 tokens: 5 s for 4 pages; 10: 2 s for 2; 90: 10 s for 6.
    model = Fixed(step_s=7.0, row_s=1.0, token_s=0.1)
    view = table_of(computed=[40, 10, 90], pages_held=[4, 2, 6])
    decision = CheapestRecompute().decide_preemption(preemption_query(view, step_time=model))
    assert rows_of(view, decision.victims) == [1, 0, 2]
    assert decision.reason == "least recomputation a page, 1000000.0 us the first"


def test_cheapest_recompute_counts_context_and_pairs():
    # 10 tokens are 55 pairs on a page, 50 are 1275 on five: 255 a page. A row is one on either.
    view = table_of(computed=[50, 10], pages_held=[5, 1])
    by_pairs = preemption_query(view, step_time=Fixed(0.0, 0.0, 0.0, 0.0, pair_s=1.0))
    by_rows = preemption_query(view, step_time=Fixed(0.0, 1.0, 0.0, 0.0, 0.0))
    policy = CheapestRecompute()
    assert rows_of(view, policy.decide_preemption(by_pairs).victims) == [1, 0]
    assert rows_of(view, policy.decide_preemption(by_rows).victims) == [0, 1]


def test_cheapest_recompute_puts_last_who_frees_nothing():
    view = table_of(computed=[0, 90], pages_held=[0, 6], admitted_order=[9, 1])
    assert rank(CheapestRecompute(), view) == [1, 0]
    assert rank(CheapestRecompute(), table_of(2)) == [1, 0]


def test_random_is_drawn_from_the_querys_generator():
    view = table_of(6)
    draws = {tuple(rank(RandomVictim(), view, seed=seed)) for seed in range(30)}
    assert rank(RandomVictim(), view, seed=3) == rank(RandomVictim(), view, seed=3)
    assert len(draws) > 20
    assert all(sorted(draw) == list(range(6)) for draw in draws)
    assert {draw[0] for draw in draws} == set(range(6))


def test_priority_takes_the_least_urgent_first_then_the_latest():
    view = table_of(priority=[3, 9, 9, -1], admitted_order=[1, 2, 3, 4])
    assert rank(PreemptLowestPriority(), view) == [2, 1, 0, 3]


@pytest.mark.parametrize("cause", [Cause.SLOTS, Cause.DISPLACE])
def test_priority_displaces_the_strictly_less_urgent_only(cause):
    view = table_of(priority=[3, 9, 5, 4])
    policy = PreemptLowestPriority()

    def displaced(priority):
        return rank(policy, view, cause=cause, beneficiary=table_of(priority=[priority]))

    assert displaced(4) == [1, 2]
    assert displaced(0) == [1, 2, 3, 0]
    assert displaced(9) == []


@pytest.mark.parametrize("name", CALM)
@pytest.mark.parametrize("cause", [Cause.SLOTS, Cause.DISPLACE])
def test_policies_for_pages_displace_nobody(name, cause):
    policy = VICTIMS[name]()["mine"]
    query = preemption_query(table_of(3), cause=cause, beneficiary=table_of(1))
    assert policy.decide_preemption(query) is None
    assert not getattr(policy, "displaces", False)


@pytest.mark.parametrize("name", VICTIMS)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_policy_brings_all_requests_to_their_end_under_pressure(name, overlap):
    engine = make_engine(pages=8, overlap=overlap, plugins=VICTIMS[name]())
    arrivals = [Arrival(i, f"r{i}", 20 + 3 * i, 30, fields={"priority": i % 3}) for i in range(6)]
    out = run(engine, arrivals)
    assert out.preemptions() > 0
    assert {choice.plugin for choice in out.choices("preempted")} == {"mine"}
    assert {record.finish_reason for record in out.records.values()} == {"length"}


def test_evict_shortest_spares_the_request_that_has_generated_most():
    engine = make_engine(pages=9, preemption=EvictShortest(), admission=PromptFits(0.0))
    out = run(engine, [Arrival(0, "A", 60, 40), Arrival(8, "B", 60, 40)])
    assert {choice.request_id for choice in out.choices("preempted")} == {"B"}
    assert out.records["A"].preemptions == 0


def test_with_an_oracle_who_is_about_to_end_is_spared():
    """Both ask for 60 tokens; A emits 20 of them and B 44, and the pool holds not even both."""
    gate = {"admission": PromptFits(0.0), "predictor": Oracle()}
    asks = {"params": {"ignore_eos": False}}
    arrivals = [
        Arrival(0, "A", 60, 60, fields={"forced_output": 20}, **asks),
        Arrival(0, "B", 60, 60, fields={"forced_output": 44}, **asks),
    ]

    def victims(policy):
        out = run(make_engine(pages=9, preemption=policy, **gate), arrivals)
        return [choice.request_id for choice in out.choices("preempted")]

    assert victims(MostRemaining()) == ["B"]
    assert victims(LeastRemaining()) == ["A"]


def test_last_admitted_and_evict_shortest_choose_differently():
    """B comes second and has the shorter prompt, so it has generated more when pages run out."""
    arrivals = [Arrival(0, "A", 100, 30), Arrival(0, "B", 8, 60)]

    def first_victim(policy):
        gate = PromptFits(0.0)
        engine = make_engine(pages=8, budget=16, preemption=policy, admission=gate)
        return run(engine, arrivals).choices("preempted")[0].request_id

    assert first_victim(LastAdmitted()) == "B"
    assert first_victim(EvictShortest()) == "A"


def test_random_victims_depend_on_the_runs_seed_alone():
    arrivals = [Arrival(0, f"r{i}", 20, 40) for i in range(6)]

    def victims(seed):
        out = run(make_engine(pages=9, seed=seed, preemption=RandomVictim()), arrivals)
        return [choice.request_id for choice in out.choices("preempted")]

    runs = [victims(seed) for seed in (1, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) > 1


def test_urgent_requests_end_earlier_under_priority():
    engine = make_engine(pages=9, plugins={"first": Priority(), "victims": PreemptLowestPriority()})
    arrivals = [Arrival(0, f"r{i}", 30, 40, fields={"priority": 9 - i}) for i in range(5)]
    out = run(engine, arrivals)
    ends = [out.last_token_step(f"r{i}") for i in range(5)]
    assert ends == sorted(ends, reverse=True)
    assert np.mean(ends[3:]) < np.mean(ends[:2])
