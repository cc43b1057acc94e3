"""When hooks are asked, and when they are not: what their docstrings promise beside the answer."""

from core.queries import AdmissionDecision, Cause, OrderDecision, Verdict
from plugins.preemption.priority import PreemptLowestPriority
from tests.core.hook_spies import spied, spy
from tests.engine_harness import Arrival, make_engine, run


def test_decide_order_sees_cached_tokens_and_is_asked_again_when_a_request_changes():
    found = []

    def by_arrival(query):
        found.append(query.cached_tokens(query.waiting.id).tolist())
        return OrderDecision(query.waiting.arrival_s)

    seen = spy("decide_order", by_arrival)
    arrivals = [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40), Arrival(2, "C", 70, 4, ("A", 60))]
    out = spied(seen, arrivals, pages=9)
    assert found[:2] == [[0, 0], [48]]
    preempted = out.choices("preempted")
    assert preempted
    again = [q for q in seen.asked if q.waiting.preemptions.any()]
    assert len(again) == len(preempted)
    assert all(len(q.waiting) == 1 for q in again), "only those that changed"


def test_decide_order_is_asked_at_most_once_a_step_also_when_it_displaces():
    order = spy("decide_order", lambda q: OrderDecision(q.waiting.priority.astype(float)))
    engine = make_engine(seqs=1, plugins={"mine": order, "victims": PreemptLowestPriority()})
    arrivals = [Arrival(i, f"r{i}", 8, 20, fields={"priority": 9 - i}) for i in range(5)]
    out = run(engine, arrivals)
    assert out.preemptions() == 4
    steps = [query.step for query in order.asked]
    assert len(set(steps)) == len(steps)


def test_decide_admission_is_asked_in_order_until_the_first_wait_and_only_with_a_slot_free():
    verdicts = {"A": Verdict.ADMIT, "B": Verdict.WAIT, "C": Verdict.ADMIT}
    asked = []

    def answer(query):
        name = "ABC"[int(query.candidate.arrival_order[0]) - 1]
        asked.append((query.step, name))
        wait = name == "B" and query.step < 2
        return AdmissionDecision(Verdict.WAIT if wait else verdicts["A"])

    arrivals = [Arrival(0, name, 10, 6) for name in "ABC"]
    spied(spy("decide_admission", answer), arrivals, seqs=2)
    assert asked[:4] == [(0, "A"), (0, "B"), (1, "B"), (2, "B")]
    assert asked[4][0] > 4, "no slot, no question"


def test_decide_batch_is_asked_once_more_after_a_preemption():
    seen = spy("decide_batch")
    out = spied(seen, [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)], pages=9)
    (preempted,) = {
        event.record.step
        for event in out.events
        for choice in event.record.choices
        if choice.kind == "preempted"
    }
    replanned = [query.step for query in seen.asked if query.replanning]
    assert replanned == [preempted]
    assert sum(query.step == preempted for query in seen.asked) == 2


def test_decide_preemption_is_asked_for_the_waiting_only_if_a_plugin_displaces():
    arrivals = [Arrival(0, "A", 20, 20), Arrival(1, "B", 20, 4)]
    calm = spy("decide_preemption")
    spied(calm, arrivals, seqs=1)
    assert calm.asked == []
    eager = spy("decide_preemption", displaces=True)
    spied(eager, arrivals, seqs=1)
    query = eager.asked[0]
    assert query.cause is Cause.SLOTS
    assert query.pages_short == 0
    assert query.beneficiary.prompt.tolist() == [20]
    short = spy("decide_preemption", displaces=True)
    spied(short, [Arrival(0, "A", 100, 20), Arrival(1, "B", 60, 4)], pages=8)
    displacing = [q.pages_short for q in short.asked if q.cause is Cause.DISPLACE]
    assert displacing[0] == 0, "B's 4 pages are free, but promised to A's prompt"
    assert 3 in displacing, "B needs 4 pages; once A has its seven, one is free"
