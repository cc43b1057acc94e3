"""Launches: what the packed arrays say of rows that prefill, decode and wait for a late token."""

import numpy as np
import pytest

from core.pack import request_seed
from core.queries import BatchDecision
from core.request import Request, SamplingParams
from tests.core.hook_spies import spy
from tests.engine_harness import Arrival, finish, make_engine, prompt, script, sequence_of

END = 9


def launched(engine, arrivals, steps):
    """The launches of the first steps. Steps at which requests arrive are the arrivals'."""
    launches, launch = [], engine.executor.launch
    engine.executor.launch = lambda one: (launches.append(one), launch(one))
    for step in range(steps):
        for arrival in [a for a in arrivals if a.step == step]:
            engine.submit(arrival.request())
        engine.step()
    return launches


def test_prefill_launch_holds_the_prompt_and_samples_at_its_end():
    engine = make_engine(budget=16)
    first, second = launched(engine, [Arrival(0, "A", 20, 5)], 2)
    assert first.token_ids.tolist() == prompt("A", 20)[:16].tolist()
    assert (first.first_positions[0], first.num_tokens[0]) == (0, 16)
    assert (first.samples.tolist(), first.feedback.tolist()) == ([False], [False])
    assert second.token_ids.tolist() == prompt("A", 20)[16:].tolist()
    assert (second.first_positions[0], second.num_tokens[0]) == (16, 4)
    assert second.samples.tolist() == [True]
    assert [launch.launch_id for launch in (first, second)] == [0, 1]
    assert first.row_ids.dtype == first.token_ids.dtype == np.int32
    assert first.feedback.dtype == first.samples.dtype == np.bool_


def test_table_updates_name_each_new_page_once_and_setup_comes_with_the_first():
    engine = make_engine(budget=24)
    launches = launched(engine, [Arrival(0, "A", 40, 20)], 14)
    memory = engine.state.memory
    pages = memory.pages_of(sequence_of(engine, "A")).tolist()
    row = int(launches[0].row_ids[0])
    updates = np.concatenate([launch.table_updates for launch in launches])
    assert updates.tolist() == [[row, index, page] for index, page in enumerate(pages)]
    assert [len(launch.setups) for launch in launches] == [1] + [0] * 13
    assert all(launch.table_updates.shape[1] == 3 for launch in launches)


def test_setup_describes_the_request():
    engine = make_engine(end_token_ids=(END,), seed=4)
    arrival = Arrival(0, "A", 20, 5, params={"ignore_eos": False, "min_tokens": 2})
    request = arrival.request()
    (launch,) = launched(engine, [arrival], 1)
    (setup,) = launch.setups
    assert setup.row == launch.row_ids[0]
    assert setup.prompt_len == 20
    assert setup.tokens.tolist() == request.prompt.tolist()
    assert (setup.choice, setup.end_token_ids) == (0, (END,))
    assert setup.params.min_tokens == 2
    assert setup.seed == request_seed(4, request)


@pytest.mark.parametrize(
    ("params", "fields", "ends"),
    [
        ({"ignore_eos": True}, {}, ()),
        ({"stop_token_ids": (3, 4)}, {}, (3, 4, END)),
        ({"stop_token_ids": (3, 4), "ignore_eos": True}, {}, (3, 4)),
        ({}, {"forced_output": 3}, ()),
    ],
)
def test_setup_names_the_end_tokens_that_count(params, fields, ends):
    engine = make_engine(end_token_ids=(END,))
    arrival = Arrival(0, "A", 20, 5, params={"ignore_eos": False} | params, fields=fields)
    (launch,) = launched(engine, [arrival], 1)
    assert launch.setups[0].end_token_ids == ends


def test_setup_of_a_resumed_request_holds_all_its_tokens():
    engine = make_engine(pages=9, budget=128)
    arrivals = [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)]
    launches = launched(engine, arrivals, 45)
    setups = [setup for launch in launches for setup in launch.setups]
    resumed = [setup for setup in setups if len(setup.tokens) > setup.prompt_len]
    assert resumed
    for setup in resumed:
        outputs = setup.tokens[60:].tolist()
        streams = [script(engine, a.request(), len(outputs)) for a in arrivals]
        assert outputs in streams


def test_mixed_launch_has_one_token_rows_first():
    engine = make_engine()
    launches = launched(engine, [Arrival(0, "A", 10, 9), Arrival(2, "B", 20, 5)], 4)
    mixed = launches[2]
    assert mixed.num_tokens.tolist() == [1, 20]
    assert mixed.num_decode_rows == 1
    stream = script(engine, Arrival(0, "A", 10, 9).request(), 2)
    assert mixed.token_ids.tolist() == [stream[1], *prompt("B", 20).tolist()]
    assert mixed.first_positions.tolist() == [11, 0]
    assert mixed.samples.tolist() == [True, True]


def test_rows_stay_in_batch_order_within_each_kind():
    def reverse(query):
        return BatchDecision(query.running.id[::-1], query.running.remaining[::-1])

    engine = make_engine(plugins={"mine": spy("decide_batch", reverse)}, budget=200)
    arrivals = [Arrival(0, name, length, 4) for name, length in [("A", 1), ("B", 9), ("C", 1)]]
    arrivals.append(Arrival(0, "D", 7, 4))
    (launch,) = launched(engine, arrivals, 1)
    assert launch.num_tokens.tolist() == [1, 1, 7, 9]
    assert launch.token_ids[:2].tolist() == [prompt("C", 1)[0], prompt("A", 1)[0]]


def test_token_in_flight_is_fed_back_on_the_device():
    engine = make_engine(overlap=True)
    launches = launched(engine, [Arrival(0, "A", 10, 9), Arrival(2, "B", 20, 5)], 5)
    assert [launch.feedback.tolist() for launch in launches] == [
        [False],
        [True],
        [True, False],
        [True, True],
        [True, True],
    ]
    assert [launch.token_ids.tolist()[:1] for launch in launches[1:]] == [[0]] * 4
    assert launches[1].first_positions.tolist() == [10]


def test_without_overlap_nothing_is_fed_back():
    engine = make_engine()
    launches = launched(engine, [Arrival(0, "A", 10, 9)], 6)
    stream = script(engine, Arrival(0, "A", 10, 9).request(), 5)
    assert not any(launch.feedback.any() for launch in launches)
    assert [launch.token_ids.tolist() for launch in launches[1:]] == [[token] for token in stream]


def test_row_resumed_with_a_late_token_recomputes_it_from_the_host():
    """The token in flight at a preemption is known by the time the request resumes."""
    engine = make_engine(pages=9, budget=128, overlap=True)
    arrivals = [Arrival(0, "A", 60, 40), Arrival(0, "B", 60, 40)]
    launches = launched(engine, arrivals, 45)
    preempted = [r for r in engine.records.values() if r.preemptions]
    assert preempted
    resumed = next(
        launch
        for launch in launches
        if any(len(setup.tokens) > setup.prompt_len for setup in launch.setups)
    )
    row = next(s for s in resumed.setups if len(s.tokens) > s.prompt_len)
    index = resumed.row_ids.tolist().index(row.row)
    assert not resumed.feedback[index]
    assert resumed.first_positions[index] + resumed.num_tokens[index] == len(row.tokens)
    finish(engine)


def test_last_token_that_needs_no_kv_is_never_run():
    engine = make_engine()
    launched(engine, [Arrival(0, "A", 10, 4)], 1)
    finish(engine)
    assert engine.executor.num_tokens == 10 + 3


def test_request_seed_depends_on_run_and_id_unless_given():
    def seed(run, name, **params):
        return request_seed(run, Request(name, np.ones(1, np.int32), SamplingParams(**params)))

    assert seed(0, "A") == seed(0, "A")
    assert len({seed(0, "A"), seed(1, "A"), seed(0, "B")}) == 3
    assert seed(0, "A", seed=5) == seed(9, "B", seed=5) == 5
    assert -(2**63) <= seed(0, "A") < 2**63
