"""What a decoder layer computes beside attention, as a part that config chooses: plain torch here,
fused kernels elsewhere."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from plugins.model.rope import rotate
from plugins.shared.model_protocols import Attend

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class LayerOps(Protocol):
    """N packed tokens, H hidden, D head_dim, I intermediate. Rounds where transformers does, or
    less often. batch_invariant: a token's results have the same bits whatever tokens stand beside
    it."""

    batch_invariant: bool

    def check(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """Raise ValueError, saying why, for a model it cannot serve."""

    def describe(
        self, device: torch.device, counts: tuple[int, int, int], kv_dtype: torch.dtype
    ) -> dict[str, Any]:
        """Names and launch parameters, for the manifest. counts: query heads, KV heads,
        head_dim."""

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """RMSNorm(x + delta) * weight and x + delta, of x, delta [N, H]; delta None = 0."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight^T + bias, of x [N, in], weight [out, in], bias [out]."""

    def rotate_store(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        qk_norm: Tensor | None,
        eps: float,
        num_q_heads: int,
        attend: Attend,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm and rotate q and k of qkv [N, Hq + 2 Hkv, D], which may be overwritten; store K and
        V. rotation: cos and sin of plugins.model.rope.Rotary, None = none. qk_norm: weights
        [Hq + Hkv, D], one for all query heads and one for all key heads, None = none. Returns q, k,
        v [N, heads, D], whose tokens may be strided."""

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, of gate_up [N, 2 I]. activation: one of plugins.model.spec's."""


class TorchOps:
    """A LayerOps of torch operations, on any device. invariant: token by token where the number of
    tokens could change the order of sums or the last bit of a function; slow, for a CPU alone."""

    def __init__(self, invariant: bool = False) -> None:
        self.batch_invariant = invariant

    def check(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
        """It serves every model; invariant, on a CPU."""
        if self.batch_invariant and device.type != "cpu":
            rule = "ops must be fused for engine.deterministic on a GPU"
            raise ValueError(f"{rule}, got torch's on {device}")

    def describe(
        self,
        device: torch.device,
        counts: tuple[int, int, int],
        kv_dtype: torch.dtype,
    ) -> dict[str, Any]:
        """See LayerOps."""
        return {"name": "torch", "invariant": self.batch_invariant}

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See LayerOps."""
        total = x if delta is None else x + delta
        return self._each(_norm, total, weight, eps), total

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See LayerOps."""
        return self._each(F.linear, x, weight, bias)

    def rotate_store(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        qk_norm: Tensor | None,
        eps: float,
        num_q_heads: int,
        attend: Attend,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See LayerOps."""
        num_qk_heads = (qkv.shape[1] + num_q_heads) // 2
        qk, v = qkv[:, :num_qk_heads], qkv[:, num_qk_heads:]
        if qk_norm is not None:
            qk = self._each(_norm, qk, qk_norm, eps)
        if rotation is not None:
            qk = rotate(qk, *rotation)
        q, k = qk[:, :num_q_heads], qk[:, num_q_heads:]
        attend.store(layer, k, v)
        return q, k, v

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """See LayerOps."""
        gate, up = gate_up.chunk(2, -1)
        return self._each(_ACTIVATIONS[activation], gate) * up

    def _each(self, function: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
        """function(x, *rest), in one call or, invariant, token by token."""
        if not self.batch_invariant or len(x) == 0:
            return function(x, *rest)
        # A copy, since a library may follow the alignment of its input too.
        return torch.cat([function(row.clone(), *rest) for row in torch.split(x, 1)])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The weight is applied after the cast back to x's dtype, as transformers does; F.rms_norm with
    # a weight would round once less in half precision.
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight
