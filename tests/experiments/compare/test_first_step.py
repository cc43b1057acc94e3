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
    joined = [step(1, [ADMIT, end], rows=[["a", 0, 3]], steps=3), step(4)]
    apart = [step(1, [ADMIT], rows=row), step(2, rows=row), step(3, [end], rows=row), step(4)]
    assert between(tmp_path, joined, apart) == 4
    late = [*apart[:2], step(3, rows=row), step(4, [end])]
    found = between(tmp_path, joined, late)
    assert isinstance(found, Divergence)
    assert found.step == 3


def test_who_is_refused_in_steps_that_went_in_one_is_refused_in_each(tmp_path):
    full = ("refused", "b", "core", "all slots are taken")
    joined = [step(1, [full], rows=[["a", 0, 2]], steps=2)]
    apart = [step(number, [full], rows=[["a", 0, 1]]) for number in (1, 2)]
    assert between(tmp_path, joined, apart) == 2


@pytest.mark.parametrize(
    ("slices", "sums", "apart", "differ"),
    [
        (1, 5 + 2, [5, 1, 1], None),
        (1, 5 + 2, [6, 1, 1], 1),
        (2, 9 + 1, [5, 4, 1], None),  # how long each was is not on record
        (2, 9 + 1, [5, 1, 4], 3),
        (3, 9, [4, 4, 1], None),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_slices_that_went_in_one_are_compared(tmp_path, slices, sums, apart, differ, listed):
    def one(number, tokens, decodes, **facts):
        rows = [["a", 0, tokens], ["b", 0, decodes]] if listed else []
        return step(number, rows=rows, num_rows=2, prefill_tokens=facts.pop("new"), **facts)

    joined = one(1, sums, 3, new=sums - (3 - slices), steps=3, slices=slices)
    singles = [
        one(number, tokens, 1, new=tokens * (tokens > 1)) for number, tokens in enumerate(apart, 1)
    ]
    found = between(tmp_path, [joined, step(4)], [*singles, step(4)])
    if differ is None:
        assert found == 4
    else:
        assert isinstance(found, Divergence)
        assert found.step == differ


def test_a_run_that_ends_earlier_differs(tmp_path):
    found = between(tmp_path, [step(1)], [step(1), step(2, [ADMIT])])
    assert isinstance(found, Divergence)
    assert (found.step, found.sides[0].ended) == (2, True)
    assert found.sides[1].decisions == ("admitted a by prompt_fits: room",)


def test_records_of_steps_are_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"a run folder with steps.jsonl \(records=full\)"):
        between(tmp_path, None, [step(1)])
