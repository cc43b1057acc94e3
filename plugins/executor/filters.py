"""Top-k, top-p and min-p as one threshold a row: tokens below it are out, ties with it stay in.

Order as in transformers' generate: top-k, then top-p over what is left, then min-p. A threshold
depends on its own row alone and not on the order of equal values, so that a row keeps the same
tokens in any batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

PREFIX = 1024
"""Largest values looked at first for top-p on a CPU, where a full sort costs ten times as much."""


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Rows to filter, as indices into the scores. Values are float64 or int64 on the scores'
    device.

    k_rows: rows with top_k, and their top_k (below the vocabulary's size) and top_p. max_k: the
    largest. p_rows: rows with top_p alone. min_p_log: log of min_p for every row, -inf = off."""

    k_rows: Tensor
    k_top_k: Tensor
    k_top_p: Tensor
    max_k: int
    p_rows: Tensor
    p_top_p: Tensor
    min_p_log: Tensor


def thresholds(scores: Tensor, filters: Filters) -> Tensor:
    """float32 [rows]: the least score kept in each row. scores: float32 [rows, vocab_size], each
    row's maximum is 0; its softmax is the distribution to cut."""
    out = filters.min_p_log.to(torch.float32)
    if len(filters.k_rows):
        cut = _top_k(scores[filters.k_rows], filters)
        out[filters.k_rows] = torch.maximum(out[filters.k_rows], cut)
    if len(filters.p_rows):
        cut = _top_p(scores[filters.p_rows], filters.p_top_p)
        out[filters.p_rows] = torch.maximum(out[filters.p_rows], cut)
    return out


def _top_k(scores: Tensor, filters: Filters) -> Tensor:
    values = _largest(scores, filters.max_k)
    rank = torch.arange(filters.max_k, device=scores.device)
    kept = values.masked_fill(rank >= filters.k_top_k.unsqueeze(1), -torch.inf)
    least = values.gather(1, filters.k_top_k.unsqueeze(1) - 1).squeeze(1)
    weights = kept.to(torch.float64).softmax(-1)
    return torch.maximum(least, _least_kept(values, weights, filters.k_top_p))


def _top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    total = scores.to(torch.float64).logsumexp(-1, keepdim=True)
    if scores.is_cuda:  # looking whether a prefix is enough would wait for the device
        values = scores.sort(dim=-1, descending=True).values
        return _least_kept(values, (values.to(torch.float64) - total).exp(), top_p)
    values = _largest(scores, min(PREFIX, scores.shape[1]))
    weights = (values.to(torch.float64) - total).exp()
    out = _least_kept(values, weights, top_p)
    short = (weights.sum(-1) < top_p).nonzero().squeeze(1)
    if len(short):
        values = scores[short].sort(dim=-1, descending=True).values
        weights = (values.to(torch.float64) - total[short]).exp()
        out[short] = _least_kept(values, weights, top_p[short])
    return out


def _largest(scores: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, descending."""
    if count > scores.shape[1] // 8:
        return scores.sort(dim=-1, descending=True).values[:, :count]
    return scores.topk(count, dim=-1).values


def _least_kept(values: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The last of the descending `values` before which less than top_p of the weight lies."""
    before = weights.cumsum(-1) - weights
    kept = before < top_p.unsqueeze(1)
    kept[:, 0] = True
    return values.masked_fill(~kept, torch.inf).amin(-1)
