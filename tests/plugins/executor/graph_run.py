"""Executors with and without graphs, and a run that shows what they do alike."""

import numpy as np
import torch

from core.config import EngineConfig
from core.queries import ExecutorQuery
from core.request import SamplingParams
from kernels.declare import Capabilities, declare
from kernels.fused_sampling import FusedSampling
from kernels.torch_reference import paged_extend
from plugins.attention.paged import PagedAttention
from plugins.executor.filters import Filters, thresholds
from plugins.executor.philox import gumbel_rows
from plugins.executor.sampler import NO_TOKEN
from plugins.executor.torch_executor import TorchExecutor
from tests.plugins.executor.launch_driver import GREEDY, Driver
from tests.plugins.executor.toy_model import executor_query

BATCHES = (1, 3, 5, 7, 9)  # N14
NUM_ROWS = 12  # sizes 1, 2, 4, 8, 12
JUNK = 1 << 40
DRAWS = [
    GREEDY,
    SamplingParams(temperature=0.9),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.7, temperature=1.3),
    SamplingParams(min_p=0.1, top_p=0.9, top_k=20),
]


@declare(Capabilities(dtypes=("float32",), devices=("cpu", "cuda"), graph_safe=True))
def device_decode(q, k_cache, v_cache, page_table, context_lens, scale, window):
    """Attention over every slot of the table, masked: reads no length on the host."""
    positions = torch.arange(page_table.shape[1] * k_cache.shape[1], device=q.device)
    pages = page_table[:, positions // k_cache.shape[1]].long()
    slots = pages * k_cache.shape[1] + positions % k_cache.shape[1]
    distance = context_lens[:, None] - 1 - positions
    seen = (distance >= 0) & (distance < (window or len(positions)))
    group = q.shape[1] // k_cache.shape[2]
    k, v = (cache.flatten(0, 1)[slots].repeat_interleave(group, 2) for cache in (k_cache, v_cache))
    scores = torch.einsum("nhd,nchd->nhc", q, k) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("nhc,nchd->nhd", weights, v.masked_fill(~seen[:, :, None, None], 0.0))


class TorchDraw(FusedSampling):
    """FusedSampling whose draws are torch's: Triton's interpreter takes a second for a few rows."""

    def draw(self, logits, columns):
        vocab_size, top_k = logits.shape[1], columns["top_k"]
        greedy, peak = columns["temperature"] == 0, logits.amax(-1)
        temperature = columns["temperature"].masked_fill(greedy, 1.0).float()
        scores = (logits - peak[:, None]) / temperature[:, None]
        rows, filtered = torch.arange(len(logits)), (top_k > 0) & (top_k < vocab_size)
        k = torch.where(filtered, top_k, vocab_size)
        filters = Filters(
            rows, k, columns["top_p"], vocab_size, rows[:0], rows[:0], columns["min_p_log"]
        )
        kept = scores >= thresholds(scores, filters)[:, None]
        keys = columns["seed"], columns["position"], columns["choice"]
        noisy = (scores + gumbel_rows(*keys, vocab_size)).masked_fill(~kept, -torch.inf)
        tokens = torch.where(greedy, logits.argmax(-1), noisy.argmax(-1))
        return torch.where(peak.abs() < torch.inf, tokens, NO_TOKEN)


class Rerun:
    """Stands for a CUDA graph: every replay runs the function again, into the first tensors."""

    def __init__(self, run):
        self.run, self.results, self.replays = run, run(), 0

    def replay(self):
        self.replays += 1
        results, again = self.results, self.run()
        pairs = [(results, again)] if torch.is_tensor(results) else zip(results, again, strict=True)
        for result, one in pairs:
            result.copy_(one)


def rerun(run):
    """A Capture on any device."""
    graph = Rerun(run)
    return graph, graph.results


def make(
    model,
    capture=rerun,
    decode=device_decode,
    extend=paged_extend,
    paging=None,
    graphs="on",
    sampling=TorchDraw,
    engine=None,
    shared=None,
    **options,
):
    """An executor with sampling kernels; capture None: real CUDA graphs where there are any."""
    backend = PagedAttention(decode, extend, shared=shared)
    base = executor_query(model)
    query = ExecutorQuery(
        engine=engine or EngineConfig(), seed=0, clock=base.clock, model=base.model,
        attention=backend.build_attention,
    )  # fmt: skip
    kernels = paging, sampling()
    return TorchExecutor(
        model, model.dtype, query, (1.0, 1.0), *kernels, graphs, capture, **options
    )


def serve(executor, page_size=4, overlap=False, poisoned=True, num_tokens=2048, rounds=2):
    """Requests of all kinds of draws, decoded in batches of BATCHES rows with others between:
    mixed launches, and new requests in used rows. The driver, with all outputs in `served`."""
    core = Driver(executor, page_size, NUM_ROWS, num_tokens)
    core.served = []
    random = np.random.default_rng(7)
    if poisoned:
        core.alter = lambda launch: poison(core) or launch
    rows, index = range(max(BATCHES)), max(BATCHES)
    core.step(*(start(core, row, row, random) for row in rows))
    for turn in range(rounds):
        for batch in BATCHES:
            some = random.permutation(len(rows))[:batch].tolist()
            for _ in range(4):
                core.launch(*((row, 1) for row in some))
                if not overlap or len(core.sampling) == 2:
                    core.collect()
        while core.sampling:
            core.collect()
        for row in rows[turn::3]:
            core.served.append(core.outputs[row])
            core.release(row)
            core.step(start(core, row, index, random), *((other, 1) for other in range(row)))
            index += 1
    core.served += [core.outputs[row] for row in rows]
    return core


def start(core, row, index, random):
    """A new request in a row; its part of a launch."""
    length = int(random.integers(1, 40))
    prompt = random.integers(0, core.executor.vocab_size, length).tolist()
    core.start(row, prompt, DRAWS[index % len(DRAWS)], seed=index)
    return row, length


@torch.inference_mode()
def poison(core):
    """Junk in whatever the next launch must not read or has to write itself."""
    state = core.executor._state
    for graphs in state.graphs.values():
        graphs._device.fill_(JUNK)
    state.pool.last_tokens[state.pool.pad_row] = JUNK
    held = {page for pages in core.pages.values() for page in pages}
    free = [page for page in range(core.layout.num_pages) if page not in held]
    state.pool.kv[:, :, free] = torch.nan
