"""Draws a launch's tokens on the device, every row by its own parameters.

Order: penalties, biases and minimum-token masks change the logits (log-probabilities are of these);
then temperature, top-k, top-p and min-p; then the Gumbel-max draw, argmax(score + noise), which
equals a draw from the softmax of the scores. A row whose largest logit is NaN or infinite (a NaN
anywhere, +inf, or every token masked) yields NO_TOKEN. Greedy rows take a plain argmax; only rows
that draw spend random numbers, and a filtered row on a CPU only for the tokens that survive, which
changes no draw. Kernels named in the config (plugins/executor/sampling.py) do the same for all
rows at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugins.executor.filters import Filters, thresholds
from plugins.executor.logprobs import Entries, score
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.philox import gumbel_at, gumbel_rows
from plugins.executor.rows import DRAWS, SamplingRows
from plugins.executor.sampling import SamplingKernels

Int64 = NDArray[np.int64]
COLUMNS = (*DRAWS, "position")
"""What decides a row's draw, as kernels take it."""
NO_TOKEN = -1
"""Drawn for a row without a finite maximum: a mark on its way from the device to the host."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePlan:
    """A launch's k sampled rows: what to upload, and what the host must know to choose its path.

    arrays: see plan_samples. num_logprobs: top entries of each row that asked, in row order.
    """

    arrays: dict[str, NDArray[Any]]
    num_rows: int
    num_random: int
    num_penalised: int
    num_edits: int
    max_top_k: int
    asked: Int64
    num_logprobs: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """tokens int64 [k] on the device, or NO_TOKEN; logprobs of the rows that asked, or None."""

    tokens: Tensor
    logprobs: Entries | None


def plan_samples(
    rows: SamplingRows, row_ids: Int64, output_positions: Int64, for_kernels: bool = False
) -> SamplePlan:
    """Gather the parameters of the sampled rows. row_ids, output_positions: int64 [k]. for_kernels:
    as COLUMNS of all rows, instead of those of the rows that draw and their filters."""
    random = np.flatnonzero(rows.random[row_ids])
    penalised = np.flatnonzero(rows.penalised[row_ids])
    asked = np.flatnonzero(rows.asks[row_ids])
    edits = rows.edits(row_ids, output_positions)
    arrays: dict[str, NDArray[Any]] = {"sampled_rows": row_ids}
    max_top_k = 0
    if for_kernels:
        arrays |= rows.draw_columns(row_ids) | {"position": output_positions}
    elif len(random):
        drawing = row_ids[random]
        arrays |= {
            "random": random,
            "seed": rows.seed[drawing],
            "choice": rows.choice[drawing],
            "position": output_positions[random],
            "temperature": rows.temperature[drawing],
        }
        filters, max_top_k = _filter_arrays(rows, drawing)
        arrays |= filters
    if len(penalised):
        ids = row_ids[penalised]
        arrays |= {
            "penalised": penalised,
            "repetition": rows.repetition[ids],
            "presence": rows.presence[ids],
            "frequency": rows.frequency[ids],
        }
    if len(edits.index):
        arrays |= {"edit_at": edits.index, "edit_token": edits.token, "edit_value": edits.value}
    if len(asked):
        arrays["asked"] = asked
    return SamplePlan(
        arrays=arrays,
        num_rows=len(row_ids),
        num_random=len(random),
        num_penalised=len(penalised),
        num_edits=len(edits.index),
        max_top_k=max_top_k,
        asked=asked,
        num_logprobs=rows.logprobs[row_ids[asked]],
    )


def sample(
    logits: Tensor,
    plan: SamplePlan,
    inputs: dict[str, Tensor],
    penalties: PenaltyCounts,
    kernels: SamplingKernels | None = None,
) -> Samples:
    """Tokens for logits [k, vocab_size], which it may overwrite. inputs: plan.arrays uploaded, made
    for these kernels or for none."""
    if kernels is None or plan.num_penalised or plan.num_edits:
        logits = logits.float()  # drawing kernels widen what they read
    if kernels is not None:
        return _sample_by_kernels(logits, plan, inputs, penalties, kernels)
    logits = _adjusted(logits, plan, inputs, penalties)
    if 0 < plan.num_random == plan.num_rows:
        peak = logits.amax(-1)
        tokens = _draw(logits, peak, plan, inputs)
    else:
        tokens = logits.argmax(-1)  # the place of a NaN, if there is one
        peak = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        if plan.num_random:
            drawing = inputs["random"]
            tokens[drawing] = _draw(logits[drawing], peak[drawing], plan, inputs)
    if plan.num_penalised:
        penalised = inputs["penalised"]
        penalties.count(inputs["sampled_rows"][penalised], tokens[penalised])
    entries = None
    if len(plan.asked):
        asked = inputs["asked"]
        entries = score(logits[asked], tokens[asked], int(plan.num_logprobs.max()))
    return Samples(torch.where(peak.abs() < torch.inf, tokens, NO_TOKEN), entries)


def _sample_by_kernels(
    logits: Tensor,
    plan: SamplePlan,
    inputs: dict[str, Tensor],
    penalties: PenaltyCounts,
    kernels: SamplingKernels,
) -> Samples:
    rows = inputs["sampled_rows"]
    if plan.num_penalised:
        factors = inputs["repetition"], inputs["presence"], inputs["frequency"]
        kernels.penalise(logits, inputs["penalised"], rows, penalties.tables(), factors)
    if plan.num_edits:
        kernels.edit(logits, inputs["edit_at"], inputs["edit_token"], inputs["edit_value"])
    tokens = kernels.draw(logits, {name: inputs[name] for name in COLUMNS})
    if plan.num_penalised:
        outputs, _ = penalties.tables()
        kernels.count(outputs, inputs["penalised"], rows, tokens.clamp(min=0))
    if not len(plan.asked):
        return Samples(tokens, None)
    asked = inputs["asked"]
    num_top = int(plan.num_logprobs.max())
    return Samples(tokens, score(logits[asked], tokens[asked].clamp(min=0), num_top, kernels))


def _filter_arrays(rows: SamplingRows, drawing: Int64) -> tuple[dict[str, NDArray[Any]], int]:
    top_k, top_p = rows.top_k[drawing], rows.top_p[drawing]
    by_k = (top_k > 0) & (top_k < rows.vocab_size)
    by_p = ~by_k & (top_p < 1)
    min_p = rows.min_p[drawing]
    if not (by_k.any() or by_p.any() or min_p.any()):
        return {}, 0
    with np.errstate(divide="ignore"):
        min_p_log = np.log(min_p)
    arrays = {
        "k_rows": np.flatnonzero(by_k),
        "k_top_k": top_k[by_k],
        "k_top_p": top_p[by_k],
        "p_rows": np.flatnonzero(by_p),
        "p_top_p": top_p[by_p],
        "min_p_log": min_p_log,
    }
    return arrays, int(top_k[by_k].max(initial=0))


def _adjusted(
    logits: Tensor, plan: SamplePlan, inputs: dict[str, Tensor], penalties: PenaltyCounts
) -> Tensor:
    if plan.num_penalised:
        at = inputs["penalised"]
        factors = [
            inputs[name].to(torch.float32).unsqueeze(1)
            for name in ("repetition", "presence", "frequency")
        ]
        rows = inputs["sampled_rows"][at]
        logits = logits.index_copy(0, at, penalties.apply(logits[at], rows, *factors))
    if plan.num_edits:
        values = inputs["edit_value"].to(torch.float32)
        where = (inputs["edit_at"], inputs["edit_token"])
        logits = logits.index_put(where, values, accumulate=True)
    return logits


def _draw(logits: Tensor, peak: Tensor, plan: SamplePlan, inputs: dict[str, Tensor]) -> Tensor:
    """Tokens int64 [r] for the drawing rows' logits float32 [r, vocab_size]; peak [r]: the
    largest."""
    # The largest becomes 0, so no temperature can overflow.
    scores = logits - peak.unsqueeze(1)
    scores /= inputs["temperature"].to(torch.float32).unsqueeze(1)
    keys = inputs["seed"], inputs["position"], inputs["choice"]
    if "min_p_log" not in inputs:
        return scores.add_(gumbel_rows(*keys, scores.shape[1])).argmax(-1)
    filters = Filters(
        k_rows=inputs["k_rows"],
        k_top_k=inputs["k_top_k"],
        k_top_p=inputs["k_top_p"],
        max_k=plan.max_top_k,
        p_rows=inputs["p_rows"],
        p_top_p=inputs["p_top_p"],
        min_p_log=inputs["min_p_log"],
    )
    survives = scores >= thresholds(scores, filters).unsqueeze(1)
    if not scores.is_cuda:
        scores.add_(_noise_where(survives, keys))
    else:  # counting survivors would wait for the device
        scores.add_(gumbel_rows(*keys, scores.shape[1]))
    return scores.masked_fill_(~survives, -torch.inf).argmax(-1)


def _noise_where(survives: Tensor, keys: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """`gumbel_rows` where a token survives, 0 elsewhere in rows of few survivors."""
    vocab_size = survives.shape[1]
    noise = torch.zeros(survives.shape, dtype=torch.float32)
    # A single token costs its whole block of four, and the gathering besides.
    wide = (survives.sum(-1) > vocab_size // 8).nonzero().squeeze(1)
    if len(wide):
        seeds, positions, choices = (key[wide] for key in keys)
        noise[wide] = gumbel_rows(seeds, positions, choices, vocab_size)
        survives = survives.index_fill(0, wide, False)
    row, token = survives.nonzero(as_tuple=True)
    seeds, positions, choices = (key[row] for key in keys)
    noise[row, token] = gumbel_at(seeds, positions, choices, token)
    return noise
