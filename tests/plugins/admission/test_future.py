"""The fullest moment to come, against a simulation token by token."""

import numpy as np

from plugins.admission.future import copies, own_tokens, peak_pages, supply
from tests.core.policy_tables import admission_query, table_of


def peak(tokens, left, copies, page_size):
    return peak_pages(np.array(tokens), np.array(left), np.array(copies), page_size)


def simulated(tokens, left, copies, page_size):
    """Everyone emits a token a step and ends with its last, whose KV is never stored."""
    most = 0
    for step in range(1, max(left) + 1):
        stored = [t + step - 1 if step <= n else 0 for t, n in zip(tokens, left, strict=True)]
        pages = [-(-s // page_size) * c for s, c in zip(stored, copies, strict=True)]
        most = max(most, sum(pages))
    return most


def test_two_requests_are_fullest_when_the_shorter_one_ends():
    # 10 tokens and 2 to come: 11 stored at its end, when the other has 4 + 1. Later 9 alone.
    assert peak([10, 4], [2, 6], [1, 1], page_size=1) == 16


def test_one_that_goes_on_alone_may_be_the_peak():
    assert peak([10, 4], [1, 60], [1, 1], page_size=1) == 63


def test_pages_are_rounded_up_for_each_request():
    assert peak([16, 16], [1, 1], [1, 1], page_size=16) == 2
    assert peak([16, 16], [2, 2], [1, 1], page_size=16) == 4


def test_choices_to_come_count_as_requests():
    assert peak([10, 4], [2, 6], [1, 3], page_size=1) == 3 * 9
    assert peak([10, 4], [3, 6], [1, 3], page_size=1) == 12 + 3 * 6


def test_random_sets_are_as_simulated():
    rng = np.random.default_rng(0)
    for _ in range(200):
        num = int(rng.integers(1, 9))
        facts = [rng.integers(low, high, num).tolist() for low, high in ((1, 70), (1, 40), (1, 3))]
        page_size = int(rng.choice([1, 2, 16]))
        assert peak(*facts, page_size) == simulated(*facts, page_size)


def test_tokens_and_supply_leave_out_what_the_cache_holds_for_them():
    running = table_of(known=[50], in_flight=[1], pages_held=[4], pages_shared=[2], forks=[1])
    facts = {"cached_tokens": 16, "pages_free": 3, "pages_evictable": 5}
    query = admission_query(running, candidate=table_of(prompt=[40]), **facts)
    assert own_tokens(query).tolist() == [51 - 32, 40 - 16]
    assert copies(query).tolist() == [2, 1]
    assert supply(query) == 3 + 5 + 2


def test_supply_is_at_most_the_pool():
    """Choices of a request hold the same pages: summed up they would be more than there are."""
    running = table_of(pages_held=[40, 40, 40])
    assert supply(admission_query(running, pages_free=30)) == 100
