"""How many KV slots fit, for engine.pool_tokens=auto: measured with the largest launches that the
engine can make, over a pool of one page.

What a launch takes depends on its tokens, its rows and their lengths, not on the pool's size. Not
in it: log-probabilities of whole prompts, which take tokens x vocabulary; such a launch may find no
memory and then fails its requests alone."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.errors import ConfigError
from core.launch import Launch, PoolLayout, RowSetup
from core.request import SamplingParams
from plugins.executor.warm_up import page_0_launch

CPU_POOL_BYTES = 4 << 30
"""The most that a CPU's pool takes: there is no telling what else the machine is for."""
GRAPH_BYTES = 16 << 20
"""Reserved for what the driver keeps of a captured graph besides its tensors."""
HEAVIEST = SamplingParams(top_p=0.9, min_p=0.1, repetition_penalty=1.1, logprobs=20)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of a device. total_bytes: all, on a CPU those free now. others_bytes: in use outside
    torch: by other programs, the driver, kernels. work_bytes: of the largest launches.
    graphs_bytes: for CUDA graphs. most_bytes: a bound on the pool, None = none."""

    share: float
    total_bytes: int
    others_bytes: int = 0
    weights_bytes: int = 0
    work_bytes: int = 0
    graphs_bytes: int = 0
    most_bytes: int | None = None

    @property
    def pool_bytes(self) -> int:
        """What is left for the pool; below 0 where the rest is too large."""
        used = self.others_bytes + self.weights_bytes + self.work_bytes + self.graphs_bytes
        left = int(self.share * self.total_bytes) - used
        return left if self.most_bytes is None else min(left, self.most_bytes)

    def __str__(self) -> str:
        bound = "" if self.most_bytes is None else f", at most {gib(self.most_bytes)}"
        terms = {name: getattr(self, f"{name}_bytes") for name in NAMES}
        used = "".join(f" - {gib(size)} {NAMES[name]}" for name, size in terms.items() if size)
        return f"{self.share:g} x {gib(self.total_bytes)}{used}{bound}"


NAMES = {"others": "other programs", "weights": "weights", "work": "launches", "graphs": "graphs"}


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The outcome. page_bytes: K and V of one page in all layers."""

    num_pages: int
    page_size: int
    page_bytes: int
    budget: Budget

    @property
    def num_tokens(self) -> int:
        """KV slots that can be handed out: page 0 is not."""
        return (self.num_pages - 1) * self.page_size

    def __str__(self) -> str:
        size = gib(self.num_pages * self.page_bytes)
        return f"KV pool of {self.num_tokens:,} tokens, {size}, within {self.budget}"

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        facts = {"pool_tokens": self.num_tokens, "page_bytes": self.page_bytes}
        return facts | asdict(self.budget)


def fit_pool(budget: Budget, layout: PoolLayout, page_bytes: int) -> PoolSize:
    """The largest pool of at most layout.num_pages. Raises ConfigError if it cannot hold one
    request of layout.max_pages beside page 0."""
    num_pages = min(budget.pool_bytes // page_bytes, layout.num_pages)
    longest = layout.max_pages * layout.page_size
    if num_pages <= layout.max_pages:
        raise ConfigError(
            f"engine.pool_tokens=auto must hold one request of {longest:,} tokens"
            f" ({gib((layout.max_pages + 1) * page_bytes)}), got {gib(budget.pool_bytes)} ="
            f" {budget}: raise engine.memory_share, or lower engine.max_model_len,"
            " engine.max_num_batched_tokens or engine.max_num_seqs"
        )
    return PoolSize(num_pages, layout.page_size, page_bytes, budget)


def cuda_budget(
    device: torch.device,
    share: float,
    run: Callable[[list[Launch]], None],
    largest: list[Launch],
    graph_rows: int,
    num_graphs: int,
    layered: bool,
) -> Budget:
    """The budget of a CUDA device whose weights are loaded. run: computes launches, one after the
    other. graph_rows: rows of the largest graph of one-token rows, 0 = no graphs; num_graphs: of
    whole launches; layered: launches with chunks have graphs too."""
    cuda = torch.cuda
    cuda.empty_cache()
    weights = cuda.memory_reserved(device)
    run(largest)  # what is loaded lazily is loaded now
    work = _peak(partial(run, largest), device)[1] - weights
    graphs = 0
    if graph_rows:  # their tensors come from a pool of their own, as large as the largest needs
        before, peak = _peak(partial(run, [graph_launch(graph_rows)]), device)
        graphs = peak - before + num_graphs * GRAPH_BYTES
        graphs += work if layered else 0  # they hold what such a launch takes
    free, total = cuda.mem_get_info(device)
    others = total - free - cuda.memory_reserved(device)
    return Budget(share, total, others, weights, work, graphs)


def cpu_budget(share: float) -> Budget:
    """A share of the memory that is free now, up to CPU_POOL_BYTES."""
    return Budget(share, free_memory(), most_bytes=CPU_POOL_BYTES)


def free_memory() -> int:
    """Bytes of the machine that programs may still take; all of it where only that is known."""
    known = Path("/proc/meminfo")
    if known.exists():
        lines = dict(line.split(":", 1) for line in known.read_text("utf-8").splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def largest_launches(layout: PoolLayout, num_seqs: int, max_model_len: int) -> list[Launch]:
    """All tokens a step may have: in one chunk for each of `num_seqs` rows, then at the end of one
    long row; and one token for each of `num_seqs` long rows. All rows sample in the dearest way;
    all tokens go to page 0."""
    longest = min(max_model_len, layout.max_pages * layout.page_size)
    budget = layout.max_num_batched_tokens
    num_rows = min(num_seqs, budget)
    each, more = divmod(budget, num_rows)
    spread = [each] * (num_rows - more) + [each + 1] * more
    count = min(budget, longest)
    return [
        _launch([(0, min(one, longest)) for one in spread], HEAVIEST),
        _launch([(longest - count, count)], HEAVIEST),
        _launch([(longest - 1, 1)] * num_rows, HEAVIEST),
    ]


def graph_launch(num_rows: int) -> Launch:
    """One token for each of `num_rows` rows, drawn and nothing else."""
    return _launch([(0, 1)] * num_rows, SamplingParams())


def gib(size: int) -> str:
    """Bytes as text."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 1 << 24 else f"{size:,} bytes"


def _peak(run: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """Bytes that torch holds of the device before `run`, and the most during it."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return before, torch.cuda.max_memory_reserved(device)


def _launch(parts: list[tuple[int, int]], params: SamplingParams) -> Launch:
    """Row i computes parts[i] (first position, tokens), one-token rows first."""
    one = np.zeros(1, np.int32)
    rows = range(len(parts))
    return page_0_launch(parts, [RowSetup(row, params, 1, one, row, 0, ()) for row in rows])
