"""Host time of a step by the size of a page.

    python -m experiments.page_size.planning

The same requests of shared prefixes run through an engine for each size, on the scripted executor
(no check, no model) and a pool that holds all of them, so that steps hold as many requests whatever
the size. Counted is CPU time of the engine's thread over whole runs, sizes in turn, forwards and
back, so that what drifts on the machine hits all alike. Printed are medians of microseconds a step
and of the ratios to pages of 16 within each round.
"""

from statistics import median
from time import thread_time

from core.build import build_engine
from core.config import EngineConfig
from core.hooks import Hooks
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import VirtualClock
from plugins.step_time.fixed import Fixed
from plugins.workload.shared_prefix import SharedPrefix

SIZES = (1, 16, 64, 256)
BASELINE = 16
ROUNDS = 5
VOCAB_SIZE = 1000
POOL_TOKENS = 524_288
MAX_NUM_SEQS = 64


def main() -> None:
    """Print a Markdown row a size."""
    load = SharedPrefix(8, 32, prefix_tokens=1000, suffix_tokens=100, max_tokens=128)
    rounds = [_round(load) for _ in range(ROUNDS)]
    print(
        "| page, tokens | us a step | of pages of 16 | least and most |\n| --- | --- | --- | --- |"
    )
    for size in SIZES:
        ratios = [one[size] / one[BASELINE] for one in rounds]
        us = median(one[size] for one in rounds)
        print(
            f"| {size} | {us:.0f} | {median(ratios):.2f} | {min(ratios):.2f}, {max(ratios):.2f} |"
        )


def step_us(load: SharedPrefix, page_size: int) -> float:
    """CPU microseconds a step of a fresh engine that serves the load."""
    plugins: list[object] = [Fcfs(), PromptFits(), Chunked(), LastAdmitted(), Paged(page_size)]
    plugins += [Radix(), Lru(), AdmitAll(), MaxTokensShare(), Fixed()]
    plugins += [Fake(max_model_len=2048, check=False)]
    config = EngineConfig(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2048, pool_tokens=POOL_TOKENS
    )
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    engine = build_engine(hooks, config, 0, VirtualClock(), record_rows=False)
    for request in load.requests(None, VOCAB_SIZE, 0):
        engine.submit(request)
    steps, start = 0, thread_time()
    while engine.has_work:
        event = engine.step()
        steps += 0 if event is None else event.record.steps
    return (thread_time() - start) * 1e6 / steps


def _round(load: SharedPrefix) -> dict[int, float]:
    costs = [(size, step_us(load, size)) for size in (*SIZES, *reversed(SIZES))]
    return {size: sum(us for other, us in costs if other == size) / 2 for size in SIZES}


if __name__ == "__main__":
    main()
