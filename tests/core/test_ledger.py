"""The page ledger: every transition, and what it refuses without changing anything."""

import numpy as np
import pytest

from core.errors import InvariantError
from core.ledger import PageClass, PageLedger


def pages(*ids):
    return np.array(ids, np.int32)


def ledger(num_pages=8, taken=(), tree=()):
    """A ledger with some pages taken once, some of them given to the cache and let go."""
    book = PageLedger(num_pages)
    book.take(pages(*taken, *tree), "test")
    book.to_tree(pages(*tree))
    book.drop(pages(*tree))
    return book


def books(book):
    return (
        book.classes.tolist(),
        book.refs.tolist(),
        book.num_free,
        book.num_tree,
        book.num_request,
        book.request_refs,
    )


def test_new_ledger_is_free_but_for_page_0():
    book = PageLedger(3)
    reserved, free = PageClass.RESERVED, PageClass.FREE
    assert books(book) == ([reserved, free, free, free], [0] * 4, 3, 0, 0, 0)


def test_take_and_drop():
    book = ledger(taken=(1, 2, 5))
    assert (book.num_free, book.num_request, book.request_refs) == (5, 3, 3)
    assert book.classes[[1, 2, 5]].tolist() == [PageClass.REQUEST] * 3
    assert book.drop(pages(2, 5)).tolist() == [2, 5]
    assert (book.num_free, book.num_request, book.request_refs) == (7, 1, 1)


def test_nothing_moves_no_page():
    book = ledger(taken=(1,))
    before = books(book)
    book.take(pages(), "test")
    book.share(pages())
    book.to_tree(pages())
    assert len(book.drop(pages())) == len(book.from_tree(pages())) == 0
    assert books(book) == before


def test_shared_page_comes_free_with_its_last_user():
    book = ledger(taken=(1, 2))
    book.share(pages(1))
    assert (book.num_request, book.request_refs) == (2, 3)
    assert book.drop(pages(1, 2)).tolist() == [2]
    assert book.drop(pages(1)).tolist() == [1]
    assert (book.num_free, book.request_refs) == (8, 0)


def test_page_of_the_cache_stays_when_its_users_go():
    book = ledger(taken=(1,))
    book.share(pages(1))
    book.to_tree(pages(1))
    assert (book.num_tree, book.num_request, book.request_refs) == (1, 0, 0)
    assert len(book.drop(pages(1))) == 0
    assert len(book.drop(pages(1))) == 0
    assert book.num_free == 7
    assert book.from_tree(pages(1)).tolist() == [1]
    assert book.num_free == 8


def test_page_the_cache_drops_stays_with_its_users():
    book = ledger(tree=(3, 4))
    book.share(pages(3))
    assert book.from_tree(pages(3, 4)).tolist() == [4]
    assert book.classes[3] == PageClass.REQUEST
    assert (book.num_tree, book.num_request, book.request_refs) == (0, 1, 1)
    assert book.drop(pages(3)).tolist() == [3]


REFUSALS = {
    "take reserved": (lambda b: b.take(pages(0), "it"), "it handed out pages that are not FREE: 0"),
    "take used": (lambda b: b.take(pages(5, 1), "it"), r"not FREE: 1 \(REQUEST, 1 users\)$"),
    "take cached": (lambda b: b.take(pages(3), "it"), r"not FREE: 3 \(TREE, 0 users\)$"),
    "take beyond": (lambda b: b.take(pages(9), "it"), r"not FREE: 9 \(no such page\)$"),
    "take negative": (lambda b: b.take(pages(-1), "it"), r"not FREE: -1 \(no such page\)$"),
    "take twice": (
        lambda b: b.take(pages(6, 5, 6), "it"),
        r"handed out a page twice: \[5, 6, 6",
    ),
    "share free": (lambda b: b.share(pages(1, 5)), "shared pages that nobody owns: .*5 .FREE"),
    "share reserved": (lambda b: b.share(pages(0)), "shared pages that nobody owns"),
    "share negative": (lambda b: b.share(pages(-1)), "shared pages that nobody owns"),
    "drop free": (lambda b: b.drop(pages(1, 5)), r"more often than used: 5 \(FREE, 0 users\)$"),
    "drop unused": (lambda b: b.drop(pages(3)), r"more often than used: 3 \(TREE, 0 users\)$"),
    "cache takes free": (
        lambda b: b.to_tree(pages(5)),
        "cache took pages that are not REQUEST",
    ),
    "cache takes its own": (lambda b: b.to_tree(pages(3)), "not REQUEST: 3 .TREE"),
    "cache drops used": (lambda b: b.from_tree(pages(1)), "dropped pages that are not TREE: 1"),
    "cache drops beyond": (lambda b: b.from_tree(pages(99)), "dropped pages that are not TREE: 99"),
    "cache drops last": (lambda b: b.from_tree(pages(-5)), "dropped pages that are not TREE: -5"),
    "cache drops twice": (
        lambda b: b.from_tree(pages(3, 3)),
        r"dropped a page twice: \[3, 3",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_move_is_refused_and_changes_nothing(name):
    move, text = REFUSALS[name]
    book = ledger(taken=(1, 2), tree=(3, 4))
    before = books(book)
    with pytest.raises(InvariantError, match=text):
        move(book)
    assert books(book) == before


def test_random_moves_agree_with_a_plain_model():
    rng = np.random.default_rng(0)
    book = PageLedger(20)
    users = dict.fromkeys(range(1, 21), 0)
    cached = set()
    for _ in range(3000):
        page = int(rng.integers(1, 21))
        owned = users[page] > 0 or page in cached
        move = rng.integers(4)
        if move == 0 and not owned:
            book.take(pages(page), "model")
            users[page] = 1
        elif move == 1 and owned:
            book.share(pages(page))
            users[page] += 1
        elif move == 2 and users[page]:
            users[page] -= 1
            free = not users[page] and page not in cached
            assert book.drop(pages(page)).tolist() == [page] * free
        elif move == 3 and users[page] and page not in cached:
            book.to_tree(pages(page))
            cached.add(page)
        elif move == 3 and page in cached:
            cached.remove(page)
            assert book.from_tree(pages(page)).tolist() == [page] * (not users[page])
        private = [p for p in users if users[p] and p not in cached]
        assert book.num_tree == len(cached)
        assert book.num_request == len(private)
        assert book.request_refs == sum(users[p] for p in private)
        assert book.refs[1:].tolist() == list(users.values())
