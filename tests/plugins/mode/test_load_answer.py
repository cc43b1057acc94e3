"""What chunks amount to: counts of tokens, their times, endings."""

from typing import Any

import numpy as np
import pytest

from core.request import Request, SamplingParams
from plugins.mode.load_answer import UNKNOWN_ID, Answer, placed, record_of


def request(max_tokens: int = 64, **params: Any) -> Request:
    given = SamplingParams(max_tokens=max_tokens, **params)
    return Request("r", np.arange(5, dtype=np.int32), given, client="c", arrival_s=1.0)


def text(piece: str, reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": piece, "finish_reason": reason, **more}]}


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def usage(output: int, prompt: int = 5, **more: Any) -> dict[str, Any]:
    counted = {"prompt_tokens": prompt, "completion_tokens": output, **more}
    return {"choices": [], "usage": counted}


def heard(*events: Any, n: int = 1) -> Answer:
    """Event i at time 2 + i."""
    answer = Answer(1.5, n)
    for number, event in enumerate(events):
        answer.take(event, 2.0 + number)
    answer.ended_s = 2.0 + len(events)
    return answer


@pytest.mark.parametrize(
    ("chars", "total", "counts"),
    [
        ([3, 3, 3], 3, [1, 1, 1]),
        ([3, 3, 0], 3, [1, 1, 1]),  # the end token has no text
        ([3, 3, 0], 2, [1, 1, 0]),
        ([3, 9, 3], 5, [1, 3, 1]),
        ([2, 8, 0], 6, [1, 4, 1]),
        ([0, 0], 3, [2, 1]),
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),
        ([5, 0], 0, [0, 0]),
    ],
)
def test_tokens_go_where_text_is(chars: list[int], total: int, counts: list[int]):
    assert placed(chars, total) == counts


def test_tokens_of_a_chunk_have_its_time():
    answer = heard(text("one"), text(" two three four"), text("", "length"), usage(4))
    record, counts, by = record_of(request(), answer)
    assert (counts, by) == ([1, 3], "usage")
    (choice,) = record.choices
    assert list(choice.times_s) == [2.0, 3.0, 3.0, 3.0]
    assert list(choice.steps) == [0, 1, 1, 1]
    assert set(choice.token_ids) == {UNKNOWN_ID}
    assert (record.finish_reason, choice.finish_reason, record.error) == ("length", "length", "")
    assert (record.arrival_s, record.finished_s, record.client) == (1.0, 4.0, "c")


def test_end_token_counts_when_it_comes():
    answer = heard(text("a"), text("b"), text("", "stop"), usage(3))
    record, counts, _ = record_of(request(), answer)
    assert counts == [1, 1, 1]
    assert list(record.choices[0].times_s) == [2.0, 3.0, 4.0]


def test_last_text_may_come_with_the_finish():
    record, counts, _ = record_of(request(), heard(text("a"), text("b", "stop"), usage(2)))
    assert (counts, record.finish_reason) == ([1, 1], "stop")


def test_listed_tokens_are_believed_if_usage_agrees():
    events = (text("abc", logprobs={"tokens": ["a", "b"]}), text("", logprobs={"tokens": ["c"]}))
    end = text("", "length")
    assert record_of(request(), heard(*events, end, usage(3)))[1:] == ([2, 1], "logprobs")
    assert record_of(request(), heard(*events, end))[1:] == ([2, 1], "logprobs")
    assert record_of(request(), heard(*events, end, usage(2)))[1:] == ([1, 1], "usage")


def test_without_usage_a_chunk_is_a_token():
    record, counts, by = record_of(request(), heard(text("ab"), text("cd"), text("", "stop")))
    assert (counts, by) == ([1, 1, 0], "chunks")
    assert record.prompt_tokens == 5


def test_chat_chunks_count_without_their_opening():
    opening = delta(role="assistant", content="")
    thought, said = delta(reasoning_content="hm"), delta(content="yes")
    answer = heard(opening, thought, said, delta("length"), usage(2, prompt=30))
    record, counts, _ = record_of(request(), answer)
    assert counts == [1, 1]
    assert list(record.choices[0].times_s) == [3.0, 4.0]
    assert record.prompt_tokens == 30


def test_tokens_without_any_text_come_at_the_end():
    record, counts, _ = record_of(request(), heard(text("", "length"), usage(2)))
    assert counts == [2]
    assert list(record.choices[0].times_s) == [2.0, 2.0]


def test_choices_keep_their_own_times_and_ends():
    events = (text("a", index=1), text("b", index=0), text("", "stop", 1), text("", "length", 0))
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    answer = heard(*events, usage(3, **details), n=2)
    record, _, _ = record_of(request(n=2), answer)
    assert [list(choice.times_s) for choice in record.choices] == [[3.0], [2.0, 4.0]]
    assert [choice.finish_reason for choice in record.choices] == ["length", "stop"]
    assert (record.finish_reason, record.cached_tokens) == ("length", 4)


@pytest.mark.parametrize(
    ("events", "reason", "kind"),
    [
        ([text("a")], "error", "cut_short"),
        ([text("a"), {"error": {"message": "it broke"}}], "error", "error_event"),
        ([text("a", "content_filter")], "error", "finish_reason"),
        ([text("a", "stop"), usage(65)], "error", "usage"),
        ([text("a", "abort")], "abort", ""),
        ([text("a", "tool_calls"), usage(1)], "stop", ""),
    ],
)
def test_endings(events: list[Any], reason: str, kind: str):
    answer = heard(*events)
    record, _, _ = record_of(request(), answer)
    assert (record.finish_reason, answer.kind) == (reason, kind)
    assert bool(record.error) == bool(kind)
    assert record.output_tokens == 1


@pytest.mark.parametrize(
    "event",
    [
        [],
        7,
        {"choices": [7]},
        {"choices": [{"index": 1, "text": "a"}]},
        {"choices": [{"index": "x"}]},
        {"choices": [{"delta": {"content": 3}}]},
        {"usage": {"prompt_tokens": None}},
        {"usage": 3},
    ],
)
def test_event_of_another_form_is_refused(event: Any):
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        heard(event)
