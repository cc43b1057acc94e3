"""Host time that a prefix cache costs where no prefix is ever shared.

    python -m experiments.prefix_cache.overhead

The same requests with random prompts run through two engines, cache=none and cache=radix, on the
scripted executor (no check, no model). Both take the same steps; the tree stores every prompt,
finds nothing and has to evict. Counted is the CPU time of the engine's thread over whole runs, in
turn none, radix, radix, none, so that what drifts on the machine hits both alike. Printed are
medians, and the median of the ratios within each four.
"""

from dataclasses import dataclass
from statistics import median
from time import thread_time

import numpy as np

from core.build import build_engine
from core.config import EngineConfig
from core.hooks import Hooks
from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import VirtualClock
from plugins.step_time.fixed import Fixed

NUM_REQUESTS = 256
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
MAX_NUM_SEQS = 64
POOL_TOKENS = 65_536  # a third of what all requests leave behind: two thirds are evicted
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of a whole run, and what it did."""

    total_us: float
    steps: int
    evicted_pages: int


def main() -> None:
    """Print steps, times and the ratio."""
    rounds = [(run(NoCache()), run(Radix()), run(Radix()), run(NoCache())) for _ in range(ROUNDS)]
    none = [cost for first, _, _, last in rounds for cost in (first, last)]
    radix = [cost for _, first, last, _ in rounds for cost in (first, last)]
    assert {cost.steps for cost in none} == {cost.steps for cost in radix}, "schedules differ"
    steps = radix[0].steps
    none_us = median(cost.total_us for cost in none) / steps
    radix_us = median(cost.total_us for cost in radix) / steps
    ratio = median((b.total_us + c.total_us) / (a.total_us + d.total_us) for a, b, c, d in rounds)
    each = (radix_us - none_us) * steps / NUM_REQUESTS
    print(f"{steps:,} steps, {radix[0].evicted_pages:,} pages evicted, {ROUNDS} rounds of four")
    print(f"none {none_us:.0f} us a step, radix {radix_us:.0f} us, ratio {ratio:.3f}")
    print(f"radix costs {each:.0f} us a request of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens")


def run(cache: NoCache | Radix) -> Cost:
    """All requests through a fresh engine."""
    plugins: list[object] = [Fcfs(), PromptFits(), Chunked(), LastAdmitted(), Paged(16)]
    plugins += [cache, Lru(), AdmitAll(), MaxTokensShare(), Fixed()]
    plugins += [Fake(max_model_len=2048, check=False)]
    config = EngineConfig(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2048, pool_tokens=POOL_TOKENS
    )
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    engine = build_engine(hooks, config, 0, VirtualClock(), record_rows=False)
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        prompt = random.integers(1, 1000, PROMPT_TOKENS).astype(np.int32)
        engine.submit(Request(str(index), prompt, params))
    steps = evicted = 0
    start = thread_time()
    while engine.has_work:
        event = engine.step()
        if event is not None:
            steps += event.record.steps
            evicted += event.record.pages_evicted
    return Cost((thread_time() - start) * 1e6, steps, evicted)


if __name__ == "__main__":
    main()
