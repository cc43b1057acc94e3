"""Host time of a decode-only step by part, for 1 to 1,024 running requests.

Run from the clone: `python -m experiments.planning_cost.plan`. Each time is a median over steps;
beside it stands its multiple of a fixed reference loop timed in the same run, which travels better
between machines.
"""

from statistics import median
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from core.build import build_engine
from core.config import EngineConfig
from core.hooks import Hooks
from core.request import Request, SamplingParams
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

PROMPT_TOKENS = 200
WARM_STEPS = 50
STEPS = 400
PARTS = ("plan", "pack", "commit", "observers")


def reference_us() -> float:
    """Microseconds of one fixed loop: 64 additions of two int32 arrays of 256."""
    array = np.arange(256, dtype=np.int32)
    times = []
    for _ in range(200):
        start = perf_counter()
        for _ in range(64):
            array + array
        times.append((perf_counter() - start) * 1e6)
    return median(times)


def decode_steps(running: int, page_size: int) -> dict[str, float]:
    """Median microseconds a part over decode-only steps of `running` requests."""
    plugins: list[object] = [Fcfs(), PromptFits(), Chunked(), LastAdmitted(), Paged(page_size)]
    plugins += [Radix(), Lru(), AdmitAll(), MaxTokensShare(), Fixed()]
    plugins += [Fake(max_model_len=2048, check=False)]
    config = EngineConfig(
        max_num_seqs=running, max_num_batched_tokens=8192, pool_tokens=running * 2048
    )
    hooks = Hooks({type(plugin).__name__: plugin for plugin in plugins}, {})
    engine = build_engine(hooks, config, 0, VirtualClock(), record_rows=False)
    rng = np.random.default_rng(0)
    for index in range(running):
        prompt = rng.integers(1, 1000, PROMPT_TOKENS).astype(np.int32)
        params = SamplingParams(max_tokens=1500, ignore_eos=True)
        engine.submit(Request(str(index), prompt, params))
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    decoded = 0
    while decoded < WARM_STEPS + STEPS:
        event = engine.step()
        if event is None or event.record.decode_tokens != running:
            continue
        decoded += 1
        if decoded > WARM_STEPS:
            for part in PARTS:
                times[part].append(event.record.host_us[part])
    return {part: median(values) for part, values in times.items()}


def main() -> None:
    """Print the table."""
    reference = reference_us()
    table = Table(title=f"decode-only step, microseconds (x reference loop of {reference:.1f} µs)")
    for column in ("running", "page size", *PARTS):
        table.add_column(column, justify="right")
    for running, page_size in ((1, 16), (64, 16), (256, 16), (1024, 16), (256, 1)):
        parts = decode_steps(running, page_size)
        cells = [f"{parts[part]:.0f} (x{parts[part] / reference:.1f})" for part in PARTS]
        table.add_row(str(running), str(page_size), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
