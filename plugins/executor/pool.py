"""The KV pool on the device: K and V of every layer in pages, the block table, and each row's last
token."""

import torch
from torch import Tensor

from core.launch import PoolLayout
from plugins.shared.model_protocols import KVTarget

FLOAT8 = torch.float8_e4m3fn
FLOAT8_LIMIT = torch.finfo(FLOAT8).max


def kv_page_bytes(
    page_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """K and V of one page in all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


class KVPool:
    """Tensors of one run, allocated once.

    Per layer K and V are [num_pages, page_size, num_kv_heads, head_dim]. table: int32 [num_rows +
    1, max_pages] page ids, unused entries on page 0; its last row, pad_row, is for padding.
    last_tokens: int64 [num_rows + 1], each row's latest sample. A pool of float8_e4m3fn holds K /
    k_scale and V / v_scale, clamped to its range; NaN stays NaN."""

    def __init__(
        self,
        layout: PoolLayout,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        shape = (num_layers, 2, layout.num_pages, layout.page_size, num_kv_heads, head_dim)
        self.page_size = layout.page_size
        self.dtype = dtype
        self.scales = (k_scale, v_scale)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.pad_row = layout.num_rows
        rows = layout.num_rows + 1
        self.table = torch.zeros(rows, layout.max_pages, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._layers = [(pair[0], pair[1]) for pair in self.kv]
        self._flat = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._layers]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self._layers[layer]

    def target(self, layer: int, slots: Tensor) -> KVTarget:
        """Where K and V of tokens at `slots` go, for whoever stores them himself."""
        return KVTarget(*self._flat[layer], slots, *self.scales)

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] of any dtype at `slots`, int64
        [num_tokens], all >= 0."""
        for cache, new, scale in zip(self._flat[layer], (k, v), self.scales, strict=True):
            if self.dtype == FLOAT8:
                scaled = (new.float() / scale).clamp_(-FLOAT8_LIMIT, FLOAT8_LIMIT).to(FLOAT8)
                # torch copies bytes by index, but not every float8 type.
                cache.view(torch.uint8).index_copy_(0, slots, scaled.view(torch.uint8))
            else:
                cache.index_copy_(0, slots, new.to(self.dtype))

    def as_queries(self, q: Tensor) -> Tensor:
        """q as attention over this pool takes it: in the pool's dtype unless that is float8."""
        return q if self.dtype == FLOAT8 else q.to(self.dtype)
