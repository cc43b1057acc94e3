"""The least time a device could take for a workload whose requests all start at once.

Prefill: floating-point operations of the matrix products and of causal attention at `flops`; the
output head on last tokens only; a shared prefix once. Each decode step: the longer of its matrix
products' operations and the weights' bytes, and the bytes of K and V of every context, at
`bytes_s`. No launch, no activation, no host."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.engines.workloads import Load

BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Device:
    """Measured ceilings of one NVIDIA H200: bfloat16 operations and copied bytes a second."""

    flops: float = 790e12
    bytes_s: float = 4.28e12


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model sets its floor. layer_weights, head_weights: numbers of weights in all
    layers' matrix products and in the output head; q_width, kv_width: heads * head_dim."""

    layers: int
    q_width: int
    kv_width: int
    layer_weights: int
    head_weights: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From a model's `config` (names of Hugging Face)."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        q_width, kv_width = heads * head_dim, config["num_key_value_heads"] * head_dim
        layer = hidden * (2 * q_width + 2 * kv_width + 3 * config["intermediate_size"])
        return cls(layers, q_width, kv_width, layers * layer, hidden * config["vocab_size"])

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.kv_width * BYTES * self.layers


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds by part. kv_once_s: as kv_s, a shared prefix read once a step."""

    prefill_s: float
    products_s: float
    kv_s: float
    kv_once_s: float

    @property
    def total_s(self) -> float:
        """All parts."""
        return self.prefill_s + self.products_s + self.kv_s

    @property
    def once_s(self) -> float:
        """All parts, a shared prefix read once a step."""
        return self.prefill_s + self.products_s + self.kv_once_s


def floor(load: Load, shape: Shape, device: Device | None = None) -> Floor:
    """The floor of a workload, every request started at once."""
    device = device or Device()
    prompts = np.array([len(prompt) for prompt in load.prompts])
    outputs = np.array(load.outputs)
    shared = load.shared_tokens
    flops = _prefill_flops(prompts, shared, shape)
    products_s, tokens, tokens_once = 0.0, 0, 0
    weight_bytes = (shape.layer_weights + shape.head_weights) * BYTES
    for step in range(1, int(outputs.max())):  # the first token comes with the prefill
        contexts = prompts[outputs > step] + step
        rows = len(contexts)
        gemm_s = 2 * (shape.layer_weights + shape.head_weights) * rows / device.flops
        products_s += max(gemm_s, weight_bytes / device.bytes_s)
        tokens += int(contexts.sum())
        tokens_once += int(contexts.sum()) - shared * (rows - 1)
    per_token_s = shape.kv_bytes / device.bytes_s
    return Floor(flops / device.flops, products_s, tokens * per_token_s, tokens_once * per_token_s)


def _prefill_flops(prompts: np.ndarray[Any, Any], shared: int, shape: Shape) -> int:
    new = prompts - shared
    computed = int(new.sum()) + shared
    seen = int((new * shared + new * (new + 1) // 2).sum()) + shared * (shared + 1) // 2
    attention = 4 * shape.q_width * shape.layers * seen
    return 2 * shape.layer_weights * computed + attention + 2 * shape.head_weights * len(prompts)
