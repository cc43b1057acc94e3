"""Log-probabilities of chosen tokens and of the best ones, without sorting the vocabulary.

`scan` (kernels/vocabulary.py) leaves the maximum of each group of 32 tokens. The best token lies in
the group with the largest maximum; taking it leaves that group a smaller maximum, and so on: an
entry costs a look at the maxima, in registers, and one at 32 logits. Equal logits come in ascending
order of token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_column, require
from kernels.jit import LOG2E
from kernels.vocabulary import (
    BOTTOM,
    GROUP,
    ScanConfig,
    check_logits,
    clean,
    key_of,
    peak_and_sum,
    scan,
    value_of,
)

NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["p_tokens"])
def _logprobs_kernel(
    p_logits,
    p_tokens,
    p_maxima,
    p_peaks,
    p_sums,
    p_chosen,
    p_ids,
    p_values,
    row_stride,
    num_top,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    MAXIMA: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * row_stride
    peak, total = peak_and_sum(p_peaks, p_sums, row, LOG2E, NUM_CHUNKS, CHUNKS)
    # A row of -inf alone has no distribution: -inf for every token, and no NaN.
    none = peak == float("-inf")
    base = tl.where(none, 0.0, peak) + tl.log(tl.where(total > 0.0, total, 1.0))
    base = tl.where(total < float("inf"), base, float("nan"))  # a NaN or +inf among the logits
    token = tl.load(p_tokens + row)
    tl.store(p_chosen + row, clean(tl.load(p_row + token)) - base)
    o = tl.arange(0, MAXIMA)
    maxima = tl.load(p_maxima + row * GROUPS + o, mask=o < GROUPS, other=float("-inf"))
    keys = tl.where(o * GROUP < VOCAB, key_of(maxima), BOTTOM)
    last_key, last = tl.zeros((), tl.int32) + BOTTOM, tl.zeros((), tl.int32)
    entry = 0
    while entry < num_top:
        best = tl.max(keys, 0)
        group = tl.min(tl.where(keys == best, o, MAXIMA), 0)
        o_token = group * GROUP + tl.arange(0, GROUP)
        inside = o_token < VOCAB
        key = key_of(clean(tl.load(p_row + o_token, mask=inside, other=float("-inf"))))
        # Of equals, those up to the last entry are taken.
        left = inside & ((last_key != best) | (o_token > last))
        last = tl.min(tl.where(left & (key == best), o_token, VOCAB - 1), 0)
        last_key = best
        tl.store(p_ids + row * num_top + entry, last.to(tl.int64))
        tl.store(p_values + row * num_top + entry, value_of(best) - base)
        rest = inside & ((key < best) | ((key == best) & (o_token > last)))
        keys = tl.where(o == group, tl.max(tl.where(rest, key, BOTTOM), 0), keys)
        entry += 1


def logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, config: ScanConfig | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities under logits float32 [n, vocab_size]: of tokens int64 [n], float32
    [n]; and the num_top best, ids int64 and values float32 [n, num_top], best first. A masked token
    gets -inf, and every token of a row that holds a NaN or +inf gets NaN. Raises ValueError."""
    config = config or ScanConfig()
    check_logits(logits)
    rows, vocab_size = logits.shape
    check_column("tokens", tokens, rows, logits, torch.int64)
    require(0 <= num_top <= vocab_size, "num_top", f"in 0 .. {vocab_size}", num_top)
    chosen = logits.new_empty(rows)
    ids = torch.empty(rows, num_top, dtype=torch.int64, device=logits.device)
    values = logits.new_empty(rows, num_top)
    if not rows:
        return chosen, ids, values
    passed = scan(logits, None, config)
    groups, chunks = passed.maxima.shape[1], passed.peaks.shape[1]
    _logprobs_kernel[(rows,)](
        logits,
        tokens,
        passed.maxima,
        passed.peaks,
        passed.sums,
        chosen,
        ids,
        values,
        logits.stride(0),
        num_top,
        VOCAB=vocab_size,
        GROUPS=groups,
        MAXIMA=triton.next_power_of_2(groups),
        NUM_CHUNKS=chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=NUM_WARPS,
    )
    return chosen, ids, values
