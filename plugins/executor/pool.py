"""The KV pool on the device: K and V of every layer in pages, the block table, and each row's last
token."""

import torch
from torch import Tensor

from core.launch import PoolLayout


class KVPool:
    """Tensors of one run, allocated once.

    Per layer K and V are [num_pages, page_size, num_kv_heads, head_dim]. table: int32 [num_rows,
    max_pages] page ids, unused entries on page 0. last_tokens: int64 [num_rows], each row's latest
    sample."""

    def __init__(
        self,
        layout: PoolLayout,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, layout.num_pages, layout.page_size, num_kv_heads, head_dim)
        self.page_size = layout.page_size
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.table = torch.zeros(
            layout.num_rows, layout.max_pages, dtype=torch.int32, device=device
        )
        self.last_tokens = torch.zeros(layout.num_rows, dtype=torch.int64, device=device)
        self._layers = [(pair[0], pair[1]) for pair in self.kv]
        self._flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._layers]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self._layers[layer]

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] of any dtype at `slots`, int64
        [num_tokens]."""
        k_slots, v_slots = self._flat[layer]
        k_slots.index_copy_(0, slots, k.to(k_slots.dtype))
        v_slots.index_copy_(0, slots, v.to(v_slots.dtype))

    def update_table(self, reset_rows: Tensor, updates: Tensor) -> None:
        """Point `reset_rows` at page 0, then apply updates int64 [n, 3] of (row, page index, page
        id)."""
        self.table.index_fill_(0, reset_rows, 0)
        self.table[updates[:, 0], updates[:, 1]] = updates[:, 2].to(torch.int32)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """int64 slots of tokens at `positions` of table rows `rows`, both int64 [num_tokens]."""
        pages = self.table[rows, positions // self.page_size].to(torch.int64)
        return pages * self.page_size + positions % self.page_size
