"""Launches that nobody asked for, computed before the first request: what they compile, load and
allocate no request waits for.

Kernels are compiled when they are first used, each in a few forms. The forms depend on how many
tokens and rows a launch has, on whether chunks are long, or few over long contexts, and on what
rows ask of the sampler. The sizes here lie on both sides of every limit that is a power of two; a
kernel with another limit compiles while requests wait, which plugins/executor/compile_watch.py
reports."""

from collections.abc import Iterator, Sequence

import numpy as np

from core.launch import Launch, PoolLayout, RowSetup
from core.request import SamplingParams

Part = tuple[int, int]
"""First position and tokens of a row."""

SHORT, LONG, DEEP = 32, 512, 1024
TOTALS = (128, 1024)
"""Tokens of launches of many short chunks."""

SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(top_p=0.9, min_p=0.1),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    SamplingParams(logit_bias={0: 1.0}),
    SamplingParams(logprobs=1),
    SamplingParams(prompt_logprobs=1),
)
PROMPT_TOKENS = 2


def warm_up_launches(
    layout: PoolLayout, max_model_len: int, compiles: bool = True
) -> Iterator[Launch]:
    """Launches over the reserved page, those that fit the layout. compiles: the device's kernels
    are compiled when they are first used; else one token, which shows a misfit, is enough."""
    yield _launch([(0, 1)])
    if not compiles:
        return
    longest = min(max_model_len, layout.max_pages * layout.page_size)
    most = min(layout.num_rows, layout.max_num_batched_tokens)
    ones = [[(0, 1)] * rows for rows in row_counts(most)]
    for parts in [*_chunks(layout, longest), *ones]:
        total = sum(count for _, count in parts)
        fits = total <= layout.max_num_batched_tokens and len(parts) <= layout.num_rows
        if fits and all(count > 0 and first + count <= longest for first, count in parts):
            yield _launch(parts)
    if min(longest, layout.max_num_batched_tokens) >= PROMPT_TOKENS:
        for params in SAMPLED:  # each alone: what one asks may change how all rows are served
            yield _launch([(0, PROMPT_TOKENS)], params)


def warm_up_decodes(layout: PoolLayout) -> Iterator[Launch]:
    """Launches of two or more one-token rows over the reserved page."""
    most = min(layout.num_rows, layout.max_num_batched_tokens)
    return (_launch([(0, 1)] * rows) for rows in row_counts(most) if rows > 1)


def row_counts(largest: int) -> list[int]:
    """Powers of two and their successors up to `largest`, and `largest`, ascending."""
    powers = [1 << i for i in range(largest.bit_length())]
    counts = {*powers, *(power + 1 for power in powers), largest}
    return sorted(count for count in counts if count <= largest)


def _chunks(layout: PoolLayout, longest: int) -> list[list[Part]]:
    """Short chunks, few and many; long ones, also behind a prefix; a short one over a long context,
    and one beside a one-token row; as much as a launch can hold, also behind a prefix."""
    budget = layout.max_num_batched_tokens
    most = min(longest, budget)
    rows = min(layout.num_rows, budget // most)
    return [
        [(0, min(SHORT, longest))],
        *(_spread(min(total, budget), layout, longest) for total in TOTALS),
        [(0, LONG)],
        [(LONG, LONG)],
        [(DEEP, SHORT)],
        [(0, 1), (0, SHORT)],
        [(0, most)] * rows,
        [(LONG, most - LONG)] * rows,
    ]


def _spread(total: int, layout: PoolLayout, longest: int) -> list[Part]:
    """About `total` tokens in equal chunks, as short as the rows allow."""
    count = min(longest, max(2, -(-total // layout.num_rows)))
    return [(0, count)] * max(1, total // count)


def _launch(parts: Sequence[Part], params: SamplingParams | None = None) -> Launch:
    """params: of row 0, None = as it is."""
    if params is None:
        return page_0_launch(parts)
    prompt = np.zeros(PROMPT_TOKENS, np.int32)
    setup = RowSetup(0, params, PROMPT_TOKENS, prompt, seed=0, choice=0, end_token_ids=())
    return page_0_launch(parts, (setup,))


def page_0_launch(parts: Sequence[Part], setups: Sequence[RowSetup] = ()) -> Launch:
    """Row i computes parts[i], one-token parts first, and samples; every token goes to page 0."""
    firsts, counts = np.array(parts, np.int32).T
    return Launch(
        launch_id=-1,
        row_ids=np.arange(len(parts), dtype=np.int32),
        first_positions=firsts,
        num_tokens=counts,
        token_ids=np.zeros(counts.sum(), np.int32),
        feedback=counts == 1,
        samples=np.ones(len(parts), np.bool_),
        num_decode_rows=int((counts == 1).sum()),
        table_updates=np.zeros((1, 3), np.int32),
        setups=tuple(setups),
    )
