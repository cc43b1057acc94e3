"""experiments/compare/first_step.py."""

import pytest

from core.errors import ConfigError
from experiments.compare.first_step import Divergence, describe, first_difference
from tests.experiments.paper.run_folders import step, write_run

ADMIT = ("admitted", "a", "prompt_fits", "room")


def between(tmp_path, first, second):
    base = write_run(tmp_path, "base", steps=first)
    return first_difference(base, write_run(tmp_path, "own", steps=second))


def test_equal_decisions_do_not_differ_whatever_their_order_time_and_reason(tmp_path):
    one = [step(1, [ADMIT, ("admitted", "b", "p", "x")], rows=[["a", 0, 4], ["b", 0, 4]])]
    two = [step(1, [("admitted", "b", "q", "y"), ADMIT], rows=[["b", 0, 4], ["a", 0, 4]])]
    two[0]["start_s"] = 7.5
    assert between(tmp_path, one, two) == 1


def test_first_difference_carries_both_reasons(tmp_path):
    same = step(1, [ADMIT])
    first = step(2, [("preempted", "a", "last_admitted", "youngest")])
    second = step(2, [("preempted", "b", "random", "drawn")])
    found = between(tmp_path, [same, first, step(3)], [same, second, step(3)])
    assert isinstance(found, Divergence)
    assert found.step == 2
    assert [side.decisions for side in found.sides] == [
        ("preempted a by last_admitted: youngest",),
        ("preempted b by random: drawn",),
    ]
    assert "- **own** (at 2.000 s):" in describe(found)


def test_rows_that_differ_are_named_with_the_batch_policy(tmp_path):
    first = step(1, rows=[["a", 0, 4], ["b", 0, 1]])
    second = step(1, rows=[["a", 0, 8], ["b", 0, 1]], batch_plugin="prefill_first")
    found = between(tmp_path, [first], [second])
    assert isinstance(found, Divergence)
    assert found.sides[0].decisions == ("ran a 4 tokens by chunked: decode",)
    assert found.sides[1].decisions == ("ran a 8 tokens by prefill_first: decode",)


def test_records_that_stand_for_several_steps_are_compared_expanded(tmp_path):
    row, end = [["a", 0, 1]], ("finished", "a", "", "")
    joined = [step(1, [ADMIT, end], rows=row, steps=3), step(4)]
    apart = [step(1, [ADMIT], rows=row), step(2, rows=row), step(3, [end], rows=row), step(4)]
    assert between(tmp_path, joined, apart) == 4
    late = [*apart[:2], step(3, rows=row), step(4, [end])]
    found = between(tmp_path, joined, late)
    assert isinstance(found, Divergence)
    assert found.step == 3


def test_a_run_that_ends_earlier_differs(tmp_path):
    found = between(tmp_path, [step(1)], [step(1), step(2, [ADMIT])])
    assert isinstance(found, Divergence)
    assert (found.step, found.sides[0].ended) == (2, True)
    assert found.sides[1].decisions == ("admitted a by prompt_fits: room",)


def test_records_of_steps_are_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"a run folder with steps.jsonl \(records=full\)"):
        between(tmp_path, None, [step(1)])
