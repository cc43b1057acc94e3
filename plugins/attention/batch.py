"""What a launch gives an attention backend: device tensors, and the same lengths as host integers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """N rows of a launch, one-token rows first, their tokens packed row by row.

    page_table: int32 [N, max_pages], the rows' page ids, tails on page 0. context_lens: int32 [N], tokens
    a row holds once the launch has stored its own. query_starts: int32 [N + 1], where a row's new tokens
    begin in the packed order. host_context_lens and host_query_lens: [N], the lengths and the numbers of
    new tokens as integers, so that planning waits for no device. num_decode_rows: rows [0, that) have one
    new token each and go to the decode kernel.
    """

    page_table: Tensor
    context_lens: Tensor
    query_starts: Tensor
    host_context_lens: Sequence[int]
    host_query_lens: Sequence[int]
    num_decode_rows: int
    page_size: int
