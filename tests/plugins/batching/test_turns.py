"""Nobody who runs is passed over for ever, even where a step has less room than streams."""

import numpy as np
import pytest

from plugins.batching.budget import in_turn, longest_unserved
from tests.core.policy_tables import BATCHINGS, table_of
from tests.engine_harness import Arrival, make_engine, run


def test_longest_unserved_takes_turns_and_keeps_the_order_of_those_that_all_fit():
    running = table_of(last_step=[5, 3, 9, 3, 4])
    assert longest_unserved(running, np.array([0, 1, 3, 4]), 2).tolist() == [1, 3]
    assert longest_unserved(running, np.array([0, 1, 3, 4]), 4).tolist() == [0, 1, 3, 4]
    assert longest_unserved(running, np.array([0, 1]), 0).tolist() == []


def test_in_turn_serves_the_first_in_full():
    assert in_turn(np.array([5, 7, 2], np.int32), 9).tolist() == [5, 4, 0]
    assert in_turn(np.array([5, 7, 2], np.int32), 90).tolist() == [5, 7, 2]
    assert in_turn(np.array([], np.int32), 9).tolist() == []


@pytest.mark.parametrize(
    ("name", "most_steps"),
    [
        ("static", 8 * 20 // 4),  # all prompts of the batch, four tokens a step
        ("interleaved", 2 * 2),  # eight streams, four a step, and a slice after each
        ("slo_chunked", 4),  # eight streams, two a step while prompts want the other half
    ],
)
def test_streams_take_turns_in_steps_with_less_room(name, most_steps):
    """Eight requests in steps of four tokens: how many steps a stream waits for its next."""
    engine = make_engine(pages=40, budget=4, seqs=8, batching=BATCHINGS[name]())
    out = run(engine, [Arrival(0, f"r{i}", 20, 30) for i in range(8)])
    waits = [int(np.diff(out.token_steps(f"r{i}")).max()) for i in range(8)]
    assert max(waits) <= most_steps
    firsts = [out.first_token_step(f"r{i}") for i in range(8)]
    assert max(firsts) <= 8 * 20 // 2 + 8, "prompts get at least half of every two steps"
