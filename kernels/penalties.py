"""Penalties, biases and masks on logits in place, and the counts that penalties read.

Repetition divides a positive logit and multiplies a negative one for a token of prompt or output
(Keskar et al., arXiv:1909.05858); presence and frequency subtract for tokens of the output, once
and per occurrence. A launch touches the rows or the single logits it is given, nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.check import check_column, check_contiguous, check_device, check_runs, require
from kernels.vocabulary import check_logits

CHUNK = 4096
EDITS = 128


# What is read once a row or an edit is a slice of a launch's one upload, at a multiple of 8 bytes.
@triton.jit(
    do_not_specialize_on_alignment=["p_at", "p_rows", "p_repetition", "p_presence", "p_frequency"]
)
def _penalise_kernel(
    p_logits,
    p_at,
    p_rows,
    p_outputs,
    p_prompts,
    p_repetition,
    p_presence,
    p_frequency,
    row_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = tl.program_id(1)
    at = tl.load(p_at + i).to(tl.int64)
    held = tl.load(p_rows + at).to(tl.int64) * VOCAB
    repetition = tl.load(p_repetition + i).to(tl.float32)
    presence = tl.load(p_presence + i).to(tl.float32)
    frequency = tl.load(p_frequency + i).to(tl.float32)
    o = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = o < VOCAB
    x = tl.load(p_logits + at * row_stride + o, mask=inside, other=0.0)
    counts = tl.load(p_outputs + held + o, mask=inside, other=0)
    prompt = tl.load(p_prompts + held + o, mask=inside, other=0) != 0
    produced = counts > 0
    factor = tl.zeros_like(x) + repetition
    scaled = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x = tl.where(prompt | produced, scaled, x)
    x = x - frequency * counts.to(tl.float32) - tl.where(produced, presence, 0.0)
    tl.store(p_logits + at * row_stride + o, x, mask=inside)


@triton.jit(
    do_not_specialize=["num_edits"],
    do_not_specialize_on_alignment=["p_at", "p_tokens", "p_values"],
)
def _edit_kernel(p_logits, p_at, p_tokens, p_values, row_stride, num_edits, EDITS: tl.constexpr):
    o = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    inside = o < num_edits
    at = tl.load(p_at + o, mask=inside, other=0).to(tl.int64)
    token = tl.load(p_tokens + o, mask=inside, other=0).to(tl.int64)
    value = tl.load(p_values + o, mask=inside, other=0.0).to(tl.float32)
    # A token may be biased and masked at once.
    tl.atomic_add(p_logits + at * row_stride + token, value, mask=inside)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["p_at", "p_rows", "p_tokens"],
)
def _count_kernel(p_outputs, p_at, p_rows, p_tokens, vocab_size, num_rows, ROWS: tl.constexpr):
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = o < num_rows
    at = tl.load(p_at + o, mask=inside, other=0).to(tl.int64)
    row = tl.load(p_rows + at, mask=inside, other=0).to(tl.int64)
    token = tl.load(p_tokens + at, mask=inside, other=0).to(tl.int64)
    p_count = p_outputs + row * vocab_size + token
    tl.store(p_count, tl.load(p_count, mask=inside, other=0) + 1, mask=inside)


def penalise(
    logits: Tensor,
    at: Tensor,
    rows: Tensor,
    outputs: Tensor,
    prompts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise rows `at` int64 [n] of logits float32 [k, vocab_size] in place. rows int64 [k]: the
    row of outputs int32 and prompts bool [num_rows, vocab_size] that belongs to each row of logits.
    repetition, presence, frequency [n], floats of any type. Raises ValueError for what it cannot
    take; the values of indices are the caller's word."""
    check_logits(logits)
    vocab_size = logits.shape[1]
    _check_counts("outputs", outputs, torch.int32, logits)
    fits = outputs.shape[1] == vocab_size
    require(fits, "outputs", f"[rows, {vocab_size}]", tuple(outputs.shape))
    _check_counts("prompts", prompts, torch.bool, logits)
    require(prompts.shape == outputs.shape, "prompts", "shaped as outputs", tuple(prompts.shape))
    _check_indices(logits, at=(at, len(at)), rows=(rows, len(logits)))
    factors = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, factor in factors.items():
        check_column(name, factor, len(at), logits)
    if not len(at):
        return
    _penalise_kernel[(triton.cdiv(vocab_size, CHUNK), len(at))](
        logits,
        at,
        rows,
        outputs,
        prompts.view(torch.uint8),
        repetition,
        presence,
        frequency,
        logits.stride(0),
        VOCAB=vocab_size,
        CHUNK=CHUNK,
        num_warps=8,
    )


def edit(logits: Tensor, at: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values [e], floats of any type, to logits[at, tokens] in place; repeated places add up,
    -inf masks. logits float32 [k, vocab_size]; at, tokens int64 [e]. Raises ValueError as
    `penalise`."""
    check_logits(logits)
    count = len(at)
    _check_indices(logits, at=(at, count), tokens=(tokens, count))
    check_column("values", values, count, logits)
    if count:
        grid = (triton.cdiv(count, EDITS),)
        _edit_kernel[grid](logits, at, tokens, values, logits.stride(0), count, EDITS=EDITS)


def count_tokens(outputs: Tensor, at: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """One more of tokens[at] in row rows[at] of outputs int32 [num_rows, vocab_size], rows
    distinct; at int64 [n], rows and tokens int64 [k]. Raises ValueError as `penalise`."""
    _check_counts("outputs", outputs, torch.int32, outputs)
    check_runs(outputs)
    count = len(at)
    _check_indices(outputs, at=(at, count), rows=(rows, len(rows)), tokens=(tokens, len(rows)))
    if count:
        grid = (triton.cdiv(count, EDITS),)
        _count_kernel[grid](outputs, at, rows, tokens, outputs.shape[1], count, ROWS=EDITS)


def _check_counts(name: str, counts: Tensor, dtype: torch.dtype, like: Tensor) -> None:
    wanted = str(dtype).removeprefix("torch.")
    require(counts.dtype == dtype, f"{name} dtype", wanted, str(counts.dtype))
    require(counts.dim() == 2, name, "[rows, vocab_size]", tuple(counts.shape))
    check_contiguous(name, counts)
    check_device(name, counts, like)


def _check_indices(like: Tensor, **columns: tuple[Tensor, int]) -> None:
    for name, (column, length) in columns.items():
        check_column(name, column, length, like, torch.int64)
