"""The sequence table: slots and ids, growth, and the read-only view that policies get."""

import numpy as np
import pytest

from core.errors import InvariantError
from core.records import ChoiceRecord
from core.request import SLOT_BITS, SLOT_MASK, Request, SamplingParams
from core.table import FACTS, PRIVATE, EndTokens, SequenceTable, State


def add(table, name="r", prompt_tokens=3, choice=0, predicted=4.0, **fields):
    prompt = np.arange(1, prompt_tokens + 1, dtype=np.int32)
    return table.add(Request(name, prompt, **fields), choice, ChoiceRecord(), predicted)


def table(capacity=4):
    return SequenceTable(max_model_len=100, capacity=capacity)


def test_new_sequence_starts_waiting_with_its_numbers():
    rows = table()
    params = SamplingParams(max_tokens=20)
    sequence = add(rows, prompt_tokens=5, params=params, priority=-2, deadline_s=3.5, arrival_s=1.0)
    slot = sequence.slot
    expected = {
        "state": State.WAITING,
        "prompt": 5,
        "known": 5,
        "computed": 0,
        "in_flight": 0,
        "max_output": 20,
        "length_limit": 25,
        "priority": -2,
        "deadline_s": 3.5,
        "arrival_s": 1.0,
        "last_step": -1,
        "row": -1,
        "last_token": 5,
        "predicted_output": 4.0,
        "preemptions": 0,
    }
    assert {name: rows.columns[name][slot] for name in expected} == expected
    assert rows.token_array(sequence).tolist() == [1, 2, 3, 4, 5]


def test_columns_of_a_reused_slot_start_afresh():
    rows = table(capacity=1)
    first = add(rows, deadline_s=1.0)
    for name in FACTS | PRIVATE:
        if name not in ("id", "state"):
            rows.columns[name][first.slot] = 7
    rows.remove(first)
    second = add(rows)
    assert second.slot == first.slot
    assert rows.preemptions[second.slot] == rows.computed_max[second.slot] == 0
    assert rows.deadline_s[second.slot] == np.inf


def test_output_columns_are_bounded_by_the_models_length():
    rows = table()
    huge = add(rows, prompt_tokens=10, params=SamplingParams(max_tokens=10**12))
    forced = add(rows, params=SamplingParams(max_tokens=50), forced_output=20)
    assert rows.max_output[[huge.slot, forced.slot]].tolist() == [90, 50]
    assert rows.length_limit[[huge.slot, forced.slot]].tolist() == [100, 23]


def test_ids_never_repeat_and_old_ids_find_nothing():
    rows = table(capacity=2)
    seen = set()
    for _ in range(200):
        sequence = add(rows)
        assert sequence.id not in seen
        seen.add(sequence.id)
        assert rows.get(sequence.id) is sequence
        rows.remove(sequence)
        assert rows.get(sequence.id) is None
    assert {one & SLOT_MASK for one in seen} <= {0, 1}
    assert all(one >> SLOT_BITS > 0 for one in seen)


@pytest.mark.parametrize("id", [0, -1, 5 << SLOT_BITS, (9 << SLOT_BITS) | 77])
def test_unknown_id_finds_nothing(id):
    rows = table()
    add(rows)
    assert rows.get(id) is None


def test_remove_twice_and_empty_slots_are_refused():
    rows = table()
    sequence = add(rows)
    rows.remove(sequence)
    with pytest.raises(InvariantError, match=f"sequence {sequence.id} is not in the table"):
        rows.remove(sequence)
    with pytest.raises(InvariantError, match=f"slot {sequence.slot} is empty"):
        rows.at(sequence.slot)


def test_growth_keeps_numbers_and_sequences():
    rows = table(capacity=2)
    sequences = [add(rows, f"r{i}", prompt_tokens=i + 1, priority=i) for i in range(37)]
    assert len(rows) == 37
    assert [rows.at(s.slot) for s in sequences] == sequences
    assert [int(rows.prompt[s.slot]) for s in sequences] == list(range(1, 38))
    assert [int(rows.priority[s.slot]) for s in sequences] == list(range(37))
    assert rows.prompt is rows.columns["prompt"], "attributes follow when columns are rebound"
    assert {s.slot for s in filter(None, rows.sequences)} == {s.slot for s in sequences}


def test_labels_are_numbered_as_they_come():
    rows = table()
    a, b, c = (add(rows, client=client, session="s") for client in ("x", "y", "x"))
    clients = rows.client[[a.slot, b.slot, c.slot]].tolist()
    assert clients[0] == clients[2] != clients[1]


def test_view_gathers_columns_read_only_and_derives_the_rest():
    rows = table()
    sequences = [add(rows, prompt_tokens=p, predicted=6.0) for p in (3, 5)]
    slots = np.array([s.slot for s in sequences])
    rows.known[slots] = [5, 5]
    rows.in_flight[slots] = [1, 0]
    rows.computed[slots] = [5, 2]
    rows.pages_held[slots] = [4, 3]
    rows.pages_shared[slots] = [1, 3]
    view = rows.view(slots)
    assert len(view) == 2
    assert view.id.tolist() == [s.id for s in sequences]
    assert view.generated.tolist() == [2, 0]
    assert view.emitted.tolist() == [3, 0]
    assert view.remaining.tolist() == [1, 3]
    assert view.pages_freed_if_preempted.tolist() == [3, 0]
    with pytest.raises(ValueError, match="read-only"):
        view.prompt[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        view.remaining[0] = 9
    assert rows.prompt[slots].tolist() == [3, 5]
    before = view.computed
    rows.computed[slots] = 99
    assert view.computed is before, "one answer for the whole of a decision"


def test_predicted_remaining_is_at_least_one_and_at_most_the_limit():
    rows = table()
    limit = SamplingParams(max_tokens=10)
    sequences = [add(rows, predicted=p, params=limit) for p in (4.0, 4.0, 30.0, 4.0)]
    slots = np.array([s.slot for s in sequences])
    rows.known[slots] += np.array([0, 6, 2, 10], np.int32)
    assert rows.view(slots).predicted_remaining.tolist() == [4.0, 1.0, 8.0, 0.0]


@pytest.mark.parametrize("name", PRIVATE)
def test_policies_cannot_see_the_cores_own_columns(name):
    rows = table()
    view = rows.view(np.array([add(rows).slot]))
    with pytest.raises(AttributeError, match=f"no fact '{name}'; there are id, arrival_s"):
        getattr(view, name)


@pytest.mark.parametrize(
    ("params", "fields", "kind"),
    [
        ({}, {}, EndTokens.MODEL),
        ({"ignore_eos": True}, {}, EndTokens.NONE),
        ({"stop_token_ids": (3,)}, {}, EndTokens.OWN),
        ({"stop_token_ids": (3,), "ignore_eos": True}, {}, EndTokens.OWN),
        ({"stop_token_ids": (3,)}, {"forced_output": 4}, EndTokens.NONE),
    ],
)
def test_kind_of_end_tokens(params, fields, kind):
    rows = table()
    sequence = add(rows, params=SamplingParams(**params), **fields)
    assert rows.end_tokens[sequence.slot] == kind
