"""What holds for every order: overlap changes no decision and no token, and everyone ends."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.executor.fake import Fake
from tests.core.test_joined_steps import assert_same, make, workload
from tests.core.test_overlap import play
from tests.engine_harness import VOCAB, Arrival, make_engine, run
from tests.plugins.order.order_tables import ORDERS

STATEFUL = ("trail_oracle", "k_lpm", "hrrn", "vtc", "dlpm", "mlfq")
EVERY = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


def requests(ignore_eos: bool) -> list[Request]:
    """16 requests of three clients, a third with a common prefix, some with deadlines: past or far,
    since the clock itself runs otherwise where launches overlap."""
    rng, out = np.random.default_rng(0), []
    for index in range(16):
        prompt = rng.integers(1, VOCAB, rng.integers(1, 90)).astype(np.int32)
        if index % 3 == 0:
            prompt[:40] = 7
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)), ignore_eos=ignore_eos, n=1 + index % 2
        )
        request = Request(
            f"r{index}",
            prompt,
            params,
            priority=int(rng.integers(0, 3)),
            client=f"c{rng.integers(0, 3)}",
            deadline_s=[None, 0.0, 1000.0 + float(rng.integers(0, 9))][index % 3],
        )
        out.append(request)
    return out


def engine(order, overlap, **more):
    return make_engine(
        pages=12,
        seqs=4,
        overlap=overlap,
        admission=PromptFits(growth_share=0),
        plugins=order(),
        **more,
    )


@EVERY
def test_same_decisions_with_and_without_overlap(order):
    runs = [play(engine(order, overlap), requests(ignore_eos=True)) for overlap in (False, True)]
    assert any(kind == "preempted" for step in runs[0] for _, _, kind, *_ in step[1])
    for step, (plain, overlapped) in enumerate(itertools.zip_longest(*runs)):
        assert plain == overlapped, f"step {step}"


@pytest.mark.parametrize("name", STATEFUL)
def test_same_tokens_of_each_request_where_end_tokens_stop_them(name):
    tokens = []
    for overlap in (False, True):
        plugins = {role: one for role, one in ORDERS[name]().items() if role != "oracle"}
        fake = Fake(vocab_size=VOCAB, end_token_ids=tuple(range(24)))
        one = engine(lambda plugins=plugins: plugins, overlap, executor=fake)
        play(one, [replace(request) for request in requests(ignore_eos=False)])
        tokens.append({k: [list(c.token_ids) for c in r.choices] for k, r in one.records.items()})
        assert {"stop", "length"} <= {r.finish_reason for r in one.records.values()}
    assert tokens[0] == tokens[1]


@EVERY
def test_everyone_ends_while_more_arrive_and_some_leave(order):
    rng = np.random.default_rng(1)
    arrivals = [
        Arrival(
            int(rng.integers(0, 60)),
            f"r{i}",
            int(rng.integers(1, 80)),
            int(rng.integers(1, 40)),
            shares=("base", 48) if i % 2 else None,
            fields={"client": f"c{i % 3}", "priority": i % 4},
        )
        for i in range(16)
    ]
    aborts = {f"r{i}": 30 + i for i in range(0, 16, 5)}
    out = run(engine(order, overlap=True), arrivals, aborts)
    assert {r.finish_reason for r in out.records.values()} <= {"length", "abort"}
    assert {choice.plugin for choice in out.choices("preempted")} <= {"mine", "preemption"}


@pytest.mark.parametrize("name", ORDERS)
def test_same_decisions_where_steps_that_only_decode_go_in_one(name):
    def one():
        return make(ORDERS[name](), pages=40)

    assert one().hooks.steady
    assert_same(one, workload(gap_s=0.4))


@pytest.mark.parametrize("name", ORDERS)
def test_same_decisions_where_launches_overlap_and_steps_go_in_one(name):
    def one():
        return make(ORDERS[name](), seqs=3, overlap=True)

    assert_same(one, workload(num=40, gap_s=0.35))
