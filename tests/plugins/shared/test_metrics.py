"""plugins/shared/metrics.py against hand-computed values; of a run: test_summary.py."""

from array import array

import pytest

from core.records import ChoiceRecord, RequestRecord
from plugins.shared.metrics import completed, e2e_s, queue_s, token_gaps_s, tpot_s, ttft_s


def request(*streams: list[float], reason: str = "length") -> RequestRecord:
    """Arrived at 1 s, admitted at 2 s; a token at each time of each choice's stream."""
    choices = [
        ChoiceRecord(
            array("i", range(len(times))), array("d", times), array("q", range(len(times)))
        )
        for times in streams
    ]
    ends = [times[-1] for times in streams if times]
    return RequestRecord(
        "a",
        client="",
        arrival_s=1.0,
        prompt_tokens=10,
        admitted_s=2.0,
        finished_s=max(ends, default=2.0),
        finish_reason=reason,
        choices=choices,
    )


def test_latencies_of_one_stream() -> None:
    one = request([3.0, 3.5, 5.0])
    assert (ttft_s(one), e2e_s(one), queue_s(one)) == (2.0, 4.0, 1.0)
    assert tpot_s(one) == pytest.approx((4.0 - 2.0) / 2)
    assert token_gaps_s([one]).tolist() == [0.5, 1.5]


def test_choices_have_gaps_of_their_own_and_the_longest_counts() -> None:
    two = request([3.0, 4.0], [2.5, 4.5, 6.5])
    assert ttft_s(two) == 1.5
    assert tpot_s(two) == pytest.approx((5.5 - 1.5) / 2)
    assert token_gaps_s([two, request([9.0])]).tolist() == [1.0, 2.0, 2.0]


def test_what_never_happened_is_none() -> None:
    nothing = request([])
    assert (ttft_s(nothing), tpot_s(nothing)) == (None, None)
    assert tpot_s(request([3.0])) is None
    assert len(token_gaps_s([nothing])) == 0


@pytest.mark.parametrize(
    ("reason", "counts"),
    [("stop", True), ("length", True), ("abort", False), ("capacity", False), ("error", False)],
)
def test_only_stop_and_length_complete_a_request(reason: str, counts: bool) -> None:
    one = request([3.0], reason=reason)
    assert completed([one]) == ([one] if counts else [])
