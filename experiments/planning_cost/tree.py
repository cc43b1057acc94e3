"""Cost of the radix tree's operations as the tree grows. Run from the clone (15 seconds):

    python -m experiments.planning_cost.tree

Prints, for trees of 10^3 to 10^6 pages of 16 tokens, the time of one match + lock + unlock of a
stored prompt of 32 pages, of inserting one page behind such a prompt, and of evicting one page.
Beside each stands the time as a multiple of a fixed reference loop timed in the same run, which
makes machines comparable. What growth with the size remains is the processor's caches: the prompts
are drawn at random, so in a large tree their nodes come from main memory.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from core.keys import page_keys
from core.queries import EvictorQuery, PrefixCacheQuery
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix, RadixTree

PAGE_SIZE = 16
PROMPT_PAGES = 32
TRUNK_PAGES = 8  # shared by the prompts of one family
FAMILY = 50  # prompts a family
SIZES = (10**3, 10**4, 10**5, 10**6)
MAX_SAMPLES = 1000  # operations a timing; the best of ROUNDS timings is printed
ROUNDS = 7
PAGES_A_SAMPLE = (
    50  # fewer operations on small trees: what is evicted must not be what is asked for
)
REFERENCE_LOOPS = 1000
SEED = 0

Prompt = tuple[NDArray[np.uint64], NDArray[np.int32]]  # keys, tokens


def main() -> None:
    """Build a tree of each size and print one line a size."""
    reference_us = reference_loop_us()
    print(f"reference loop: {reference_us:.2f} us ({REFERENCE_LOOPS} additions and one dict each)")
    print("microseconds (multiples of the reference loop)")
    print(f"{'pages':>9} {'match+lock+unlock':>20} {'insert 1 page':>20} {'evict 1 page':>20}")
    for size in SIZES:
        costs = measure(size)
        cells = (f"{cost:12.2f} ({cost / reference_us:5.3f})" for cost in costs)
        print(f"{size:>9,} " + " ".join(cells), flush=True)


def measure(num_pages: int) -> tuple[float, float, float]:
    """Microseconds of (match + lock + unlock, insert of one page, evict of one page)."""
    random = np.random.default_rng(SEED)
    tree, prompts = build_tree(num_pages, random)
    samples = min(MAX_SAMPLES, num_pages // PAGES_A_SAMPLE)
    youngest = prompts[len(prompts) // 2 :]
    use, insert, evict = [], [], []
    for _ in range(ROUNDS):
        drawn = [youngest[i] for i in random.integers(0, len(youngest), samples).tolist()]
        # Copies: a request's own tokens are fresh in the caches, the tree's need not be.
        batch = [(keys.copy(), tokens.copy()) for keys, tokens in drawn]
        longer = [with_page(prompt, random) for prompt in batch]
        use.append(time_us(batch, lambda prompt: use_prompt(tree, prompt)))
        insert.append(time_us(longer, Inserter(tree, 2 * num_pages)))
        # As many evictions as insertions: the tree is at its size again.
        evict.append(time_us(batch, lambda _: tree.evict(1)))
    return min(use), min(insert), min(evict)


def build_tree(num_pages: int, random: np.random.Generator) -> tuple[RadixTree, list[Prompt]]:
    """A tree of about `num_pages` pages, families of prompts on shared trunks, and the prompts."""
    evictor = Lru().build_evictor(EvictorQuery(PAGE_SIZE))
    tree = Radix().build_prefix_cache(PrefixCacheQuery(PAGE_SIZE, evictor))
    insert = Inserter(tree, 1)
    prompts: list[Prompt] = []
    while tree.num_pages < num_pages:
        trunk = random_tokens(random, TRUNK_PAGES)
        for _ in range(FAMILY):
            tail = random_tokens(random, PROMPT_PAGES - TRUNK_PAGES)
            tokens = np.concatenate((trunk, tail))
            prompts.append((page_keys(tokens, PAGE_SIZE), tokens))
            insert(prompts[-1])
            if tree.num_pages >= num_pages:
                break
    return tree, prompts


class Inserter:
    """Stores prompts under page ids of its own and lets go of them."""

    def __init__(self, tree: RadixTree, first_page: int) -> None:
        self._tree = tree
        self._next_page = first_page

    def __call__(self, prompt: Prompt) -> None:
        """Insert and unlock."""
        keys, tokens = prompt
        pages = np.arange(self._next_page, self._next_page + len(keys), dtype=np.int32)
        self._next_page += len(keys)
        handle, _, _ = self._tree.insert(keys, tokens, pages, "")
        self._tree.unlock(handle)


def use_prompt(tree: RadixTree, prompt: Prompt) -> None:
    """What admitting and ending a request on a cached prompt costs."""
    tree.unlock(tree.lock(tree.match(*prompt, "")))


def with_page(prompt: Prompt, random: np.random.Generator) -> Prompt:
    """The prompt and one new page."""
    tokens = np.concatenate((prompt[1], random_tokens(random, 1)))
    return page_keys(tokens, PAGE_SIZE), tokens


def random_tokens(random: np.random.Generator, num_pages: int) -> NDArray[np.int32]:
    """Tokens of `num_pages` pages."""
    return random.integers(0, 32000, num_pages * PAGE_SIZE, dtype=np.int32)


def time_us(prompts: list[Prompt], operation: Callable[[Prompt], object]) -> float:
    """Mean microseconds of one operation over `prompts`."""
    start = time.perf_counter()
    for prompt in prompts:
        operation(prompt)
    return (time.perf_counter() - start) / len(prompts) * 1e6


def reference_loop_us() -> float:
    """Microseconds of a fixed piece of interpreted work, the best of many."""
    times = []
    for _ in range(101):
        start = time.perf_counter()
        total, seen = 0, {}
        for number in range(REFERENCE_LOOPS):
            total += number
            seen[number & 63] = total
        times.append((time.perf_counter() - start) * 1e6)
    return min(times)


if __name__ == "__main__":
    main()
