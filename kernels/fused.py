"""The fused neighbours of matrix products and attention as one part of a decoder: four launches a
layer."""

from typing import Any

import torch
from torch import Tensor

from kernels import rms_norm as norms
from kernels import swiglu as gates
from kernels.check import require
from kernels.jit import INTERPRETED
from kernels.matmul import matmul
from kernels.page_table import StepTables, step_tables, update_table
from kernels.rms_norm import rms_norm
from kernels.rotary_store import DTYPES, pinned_choice, rotary_store
from kernels.swiglu import swiglu

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""A model config's names of activations -> the kernel's."""


class FusedOps:
    """Layer operations of a decoder by Triton kernels. N packed tokens, H hidden, D head_dim.

    invariant: a token's results have the same bits whatever tokens stand beside it: matrix products
    by kernels/matmul.py too, and launch parameters that do not follow N."""

    def __init__(self, invariant: bool = False) -> None:
        self.batch_invariant = invariant

    def check(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raise ValueError for a model that the kernels cannot serve."""
        rule = "cuda (on a CPU set TRITON_INTERPRET=1 before Triton is imported)"
        require(device.type == "cuda" or INTERPRETED, "device", rule, str(device))
        require(dtype in DTYPES, "dtype", f"one of {DTYPES}", dtype)
        require(head_dim % 2 == 0 and head_dim <= 256, "head_dim", "even and <= 256", head_dim)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm(x + delta) * weight and x + delta, of x, delta [N, H]; delta None = 0."""
        config = norms.default_config(1, x.shape[1]) if self.batch_invariant else None
        return rms_norm(x, weight, eps, delta, config)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight^T + bias, of x [N, I] and weight [O, I]."""
        if self.batch_invariant:
            return matmul(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    def rotate_store(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        qk_norm: Tensor | None,
        eps: float,
        num_q_heads: int,
        attend: Any,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k inside qkv [N, Hq + 2 Hkv, D] and store K and V where
        attend.target(layer) says (fields as kernels.rotary_store.StoreTarget). rotation: cos and
        signed sin [N, 1, D], whose second half is that of the plain sin. qk_norm: weights
        [Hq + Hkv, D], the same for all query heads and for all key heads. Returns views q, k, v."""
        cos = sin = weights = None
        if rotation is not None:
            half = qkv.shape[2] // 2
            cos, sin = rotation[0][:, 0, :half], rotation[1][:, 0, half:]
        if qk_norm is not None:
            weights = qk_norm[0], qk_norm[num_q_heads]
        target, config = attend.target(layer), None
        num_kv_heads = (qkv.shape[1] - num_q_heads) // 2
        if self.batch_invariant:
            counts = num_q_heads, num_kv_heads, qkv.shape[2]
            config = pinned_choice(qkv.device, counts, target.k_cache.dtype, True).config
        rotary_store(qkv, num_q_heads, target, cos, sin, weights, eps, config=config)
        q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
        return q, k, v

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, of gate_up [N, 2 I]. activation: a model config's name. Raises
        ValueError for one that the kernel does not know."""
        require(activation in ACTIVATIONS, "activation", f"one of {[*ACTIVATIONS]}", activation)
        config = gates.default_config(1, gate_up.shape[1] // 2) if self.batch_invariant else None
        return swiglu(gate_up, ACTIVATIONS[activation], config)

    def describe(
        self, device: torch.device, counts: tuple[int, int, int], kv_dtype: torch.dtype
    ) -> dict[str, Any]:
        """Name and measured launch parameters, for the manifest. counts: query heads, KV heads,
        head_dim."""
        kinds = {"rotary_store": False, "rotary_store_few": True}
        if self.batch_invariant:
            kinds = {"rotary_store": True}
        choices = {
            name: pinned_choice(device, counts, kv_dtype, few).describe()
            for name, few in kinds.items()
        }
        return {"name": "fused", "invariant": self.batch_invariant, **choices}


class FusedPaging:
    """The executor's block-table work by Triton kernels: two launches a step."""

    def update(self, table: Tensor, reset_rows: Tensor, updates: Tensor) -> None:
        """See kernels.page_table.update_table."""
        update_table(table, reset_rows, updates)

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
        """See kernels.page_table.step_tables."""
        given = (rows, context_lens, query_starts, token_rows, positions)
        return step_tables(table, *given, page_size)
