"""The block table's work in a step, as a part that config chooses: plain torch here, kernels
elsewhere."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StepTables(Protocol):
    """What attention needs of a step with N rows and T tokens: page_table int32 [N, max_pages],
    context_lens int32 [N], query_starts int32 [N + 1], slots int64 [T]."""

    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    slots: Tensor


class Paging(Protocol):
    """table: int32 [num_rows, max_pages] page ids. All other tensors are int64."""

    def update(self, table: Tensor, reset_rows: Tensor, updates: Tensor) -> None:
        """Point `reset_rows` at page 0, then apply updates [n, 3] of (row, page index, page id)."""

    def step(
        self,
        table: Tensor,
        rows: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        page_size: int,
    ) -> StepTables:
        """Tables of launch rows `rows` and slots of tokens at `positions` of table rows
        `token_rows`."""


@dataclass(slots=True, eq=False)
class Tables:
    """A StepTables."""

    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    slots: Tensor


class TorchPaging:
    """A Paging of torch operations, on any device."""

    def update(self, table: Tensor, reset_rows: Tensor, updates: Tensor) -> None:
        """See Paging."""
        table.index_fill_(0, reset_rows, 0)
        table[updates[:, 0], updates[:, 1]] = updates[:, 2].to(torch.int32)

    def step(
        self,
        table: Tensor,
        rows: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        page_size: int,
    ) -> Tables:
        """See Paging."""
        pages = table[token_rows, positions // page_size].to(torch.int64)
        return Tables(
            table[rows],
            context_lens.to(torch.int32),
            query_starts.to(torch.int32),
            pages * page_size + positions % page_size,
        )
