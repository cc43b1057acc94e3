"""The scripted executor: its streams, its clock, and that it catches every broken launch."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from core.config import EngineConfig
from core.errors import ConfigError, InvariantError
from core.queries import ExecutorQuery
from core.request import Request, SamplingParams
from plugins.executor.fake import Fake
from plugins.shared.clocks import VirtualClock
from tests.plugins.executor.launch_driver import Driver

PROMPT = list(range(40))


def query(clock):
    return ExecutorQuery(EngineConfig(), 0, clock, model=None, attention=None)


def driver(page_size=4, clock=None, **options):
    executor = Fake(**options).build_executor(query(clock or VirtualClock()))
    return Driver(executor, page_size, num_tokens=256)


def script(plugin, seed, choice, num_tokens, **params):
    request = Request("r", np.ones(1, np.int32), SamplingParams(seed=seed, **params))
    return plugin.stream(0, request, choice, num_tokens)


def test_stream_is_the_same_for_any_schedule():
    expected = script(Fake(), 5, 1, 20)
    for page_size, chunk in ((1, None), (4, 7), (16, 1)):
        core = driver(page_size)
        core.start(3, PROMPT, seed=5, choice=1)
        core.start(0, PROMPT, seed=6)
        core.run(0, 3)
        assert core.run(3, 20, chunk) == expected
    core = driver()
    core.start(2, PROMPT, seed=5, choice=1, outputs=expected[:7])
    assert core.run(2, 20, chunk=9) == expected
    assert script(Fake(), 5, 0, 20) != expected != script(Fake(), 6, 1, 20)


def test_feedback_and_overlap_keep_the_stream():
    core = driver()
    core.start(1, PROMPT, seed=5)
    core.launch((1, 40))
    for _ in range(9):
        core.launch((1, 1))
        core.collect()
    core.collect()
    assert core.outputs[1] == script(Fake(), 5, 0, 10)


def test_end_token_comes_where_scripted_and_not_before():
    core = driver(vocab_size=8, end_token_ids=(2, 6), end_at={5: 9})
    core.start(0, [1], seed=5)
    tokens = core.run(0, 10)
    assert tokens[9] == 2
    assert not {2, 6} & set(tokens[:9])
    core.start(1, [1], seed=4)
    assert {2, 6} & set(core.run(1, 40))  # unscripted: end tokens are tokens like any other


def test_min_tokens_keep_end_and_stop_tokens_away():
    params = SamplingParams(min_tokens=30, max_tokens=60, stop_token_ids=(1,))
    core = driver(vocab_size=4, end_token_ids=(2,))
    core.start(0, [1], params, seed=5, ends=(2,))
    tokens = core.run(0, 60)
    assert set(tokens[:30]) == {0, 3}
    assert {1, 2} <= set(tokens[30:])
    plugin = Fake(vocab_size=4, end_token_ids=(2,))
    expected = script(plugin, 5, 0, 60, min_tokens=30, max_tokens=60, stop_token_ids=(1,))
    assert tokens == expected


def test_logprobs_follow_the_contract():
    core = driver(vocab_size=64)
    core.start(0, PROMPT, SamplingParams(logprobs=2, prompt_logprobs=1))
    core.start(1, PROMPT)
    first = core.step((0, 10), (1, 3))
    assert len(first.prompt_logprobs[0]) == 10
    assert first.logprobs == {}
    last = core.step((0, 30))
    assert len(last.prompt_logprobs[0]) == 29
    assert last.prompt_logprobs[0][0].top_ids.tolist() == [11]
    assert last.logprobs[0].top_ids.tolist() == [last.tokens[0], (last.tokens[0] + 1) % 64]
    assert core.step((0, 1)).prompt_logprobs == {}


def test_launches_run_one_after_another_in_virtual_time():
    clock = VirtualClock()
    core = driver(clock=clock, step_s=1.0, token_s=0.5)
    core.start(0, PROMPT)
    core.launch((0, 40))
    core.launch((0, 1))
    assert clock.now() == 0
    assert core.collect().finished_s == clock.now() == 21.0
    clock.wait_until(22.0)
    core.launch((0, 1))
    assert core.collect().finished_s == 22.5
    assert core.collect().finished_s == 24.0
    clock.wait_until(30.0)
    assert core.step((0, 1)).finished_s == 31.5


def broken(mend=None, **changes):
    """A row of 40 known tokens after 8 computed ones; its next launch changed by `changes` or
    `mend`."""
    core = driver()
    core.start(0, PROMPT, seed=1)
    core.start(1, PROMPT[::-1], seed=2)
    core.step((0, 8))
    core.step((1, 8))
    core.alter = mend or (lambda launch: replace(launch, **changes))
    return core


def array(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_ids": array(8)}, r"row_ids must be distinct and in \[0, 8\)"),
        ({"row_ids": array(3)}, "row_ids must be rows that were set up; got \\[3\\]"),
        (
            {"first_positions": array(9)},
            "first_positions must be row: computed {0: 8}; got \\[9\\]",
        ),
        (
            {"first_positions": array(4)},
            "first_positions must be row: computed {0: 8}; got \\[4\\]",
        ),
        ({"token_ids": array(8, 9, 10, 12)}, "token_ids must be row 0: 11 at position 11; got 12"),
        ({"token_ids": array(8, 9, 10, 1000)}, r"token_ids must be in \[0, 1000\)"),
        ({"token_ids": array(8, 9, 10)}, "token_ids must be 4 tokens; got 3"),
        ({"samples": np.ones(1, np.bool_)}, "samples must be rows that end at their last known"),
        ({"feedback": np.ones(1, np.bool_)}, "feedback must be exactly rows whose last token"),
        ({"num_decode_rows": 1}, "num_decode_rows must be rows of one token each; got 1"),
        ({"table_updates": array(0, 2, 65).reshape(1, 3)}, r"table_updates must be in \[1, 65\)"),
        ({"table_updates": array(0, 2, 0).reshape(1, 3)}, r"table_updates must be in \[1, 65\)"),
        ({"table_updates": array(0, 64, 1).reshape(1, 3)}, r"table_updates must be in \[0, 64\)"),
        ({"table_updates": array().reshape(0, 3)}, "page for every position; got row 0 position 8"),
        ({"launch_id": 1}, "launch_id must be above 1; got 1"),
        ({"num_tokens": array(0)}, "num_tokens must be at least one row of at least one token"),
    ],
)
def test_broken_launch_is_refused(changes, message):
    core = broken(**changes)
    with pytest.raises(InvariantError, match=message):
        core.launch((0, 4))


def test_read_of_another_rows_page_is_caught():
    core = broken()
    updates = [(0, 0, core.pages[1][0])]
    core.alter = lambda launch: replace(
        launch, table_updates=np.array([*updates, *launch.table_updates.tolist()], np.int32)
    )
    rule = "row 0 reads page .* offset 0 must be token 0 of position 0; got token 39 of position 0"
    with pytest.raises(InvariantError, match=rule):
        core.launch((0, 4))


def test_overwritten_page_is_caught_at_the_next_read():
    core = broken()
    core.free.append(core.pages[0][1])  # handed out while row 0 still reads it
    core.alter = None
    core.step((1, 4))
    with pytest.raises(InvariantError, match=r"row 0 reads page .* got token 31 of position 8"):
        core.launch((0, 4))


def test_same_token_after_another_prefix_is_caught():
    core = driver()
    core.start(0, [1, 1, 1, 1, 2, 2, 2, 2, 9])
    core.start(2, [3, 3, 3, 3, 4])
    core.step((0, 8))
    core.step((2, 4))
    core.start(1, [3, 3, 3, 3, 2, 2, 2, 2, 9])  # a cache that compares pages one by one
    core.pages[1] = [core.pages[2][0], core.pages[0][1]]
    core.computed[1] = 8
    shared = [(1, index, page) for index, page in enumerate(core.pages[1])]
    core.alter = lambda launch: replace(
        launch, table_updates=np.array([*shared, *launch.table_updates.tolist()], np.int32)
    )
    with pytest.raises(InvariantError, match="got token 2 of position 4 after another prefix"):
        core.launch((1, 1))


def test_two_rows_writing_one_slot_are_caught():
    core = driver()
    core.start(0, PROMPT)
    core.start(1, PROMPT)
    core.alter = lambda launch: replace(launch, table_updates=array(0, 0, 5, 1, 0, 5).reshape(2, 3))
    with pytest.raises(InvariantError, match="one writer for each slot"):
        core.launch((0, 4), (1, 4))


def test_row_set_up_while_in_flight_is_caught():
    core = driver()
    core.start(0, PROMPT)
    core.launch((0, 4))
    core.start(0, PROMPT)
    with pytest.raises(InvariantError, match="setups must be for rows without a launch in flight"):
        core.launch((0, 4))


def test_table_entry_moved_while_in_flight_is_caught():
    core = broken()
    core.alter = None
    core.launch((0, 2))
    updates = array(0, 0, 50).reshape(1, 3)
    core.alter = lambda launch: replace(launch, table_updates=updates)
    with pytest.raises(
        InvariantError, match="table_updates must be no entry of a launch in flight"
    ):
        core.launch((0, 2))


def test_resume_with_a_lost_token_is_caught():
    core = driver()
    core.start(0, PROMPT, seed=5, outputs=[*script(Fake(), 5, 0, 3), 0])
    with pytest.raises(InvariantError, match="row 0 resumes with the tokens it was given"):
        core.launch((0, 44))


def test_third_launch_in_flight_is_refused_by_the_fake():
    core = driver()
    core.start(0, PROMPT)
    core.launch((0, 4))
    core.launch((0, 4))
    with pytest.raises(InvariantError, match="at most 2 launches"):
        core.launch((0, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 1}, r"executor\.vocab_size must be >= 2, got 1"),
        ({"end_token_ids": (1000,)}, r"executor\.end_token_ids must be in \[0, 1000\), got"),
        ({"step_s": -1.0}, r"executor\.step_s must be >= 0, got -1\.0"),
        ({"end_at": {1: 1}}, r"executor\.end_token_ids must be given with end_at"),
    ],
)
def test_bad_fake_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Fake(**arguments)


def test_fake_imports_no_torch():
    code = "import sys, plugins.executor.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
