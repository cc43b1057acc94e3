"""A step's time from a device's data sheet and a model's shape, for what was never measured.

Each part takes the longer of its arithmetic and its memory traffic (Williams, Waterman, Patterson,
"Roofline", CACM 2009), at a share of the data sheet's rates:

  matrix products   max(2 * weights * tokens / FLOP/s, weight bytes / bandwidth), with the output
                    head for one token a row
  attention         4 * q heads * head size * layers * pairs / FLOP/s + KV bytes read / bandwidth: a
                    step's chunks are bound by the one, its decode rows by the other
  the rest          norms, rotary and SwiGLU: their activations' bytes / bandwidth
  fixed             step_s + layers * layer_s: launches, sampling, gaps between kernels

With num_devices > 1 weights, heads and cache are split evenly (tensor parallelism), and each layer
adds two ring all-reduces of its activations: 2 (n - 1) / n of their bytes over one link."""

from typing import Any

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import StepTimeQuery
from plugins.step_time.devices import Device, device_of
from plugins.step_time.shapes import BYTES, ModelShape, shape_of


class Roofline:
    """The plugin, and the model of the step's time.

    device, model: names in devices.py and shapes.py. num_devices: of one replica. Shares of the
    data sheet's rates that kernels reach: product_share of FLOP/s in matrix products,
    attention_share of them in attention, bandwidth_share of the bandwidth. step_s, layer_s: fixed
    seconds of a step and of each layer in it; reduce_s: of an all-reduce. reserve_bytes: memory of
    a device that neither weights nor cache get. The defaults are what experiments/engines measured
    on an H200: products at 705 of 989 TFLOP/s, chunks at half of that, decode attention at 3.9 of
    4.8 TB/s."""

    def __init__(
        self,
        device: str = "h200",
        model: str = "llama_8b",
        num_devices: int = 1,
        product_share: float = 0.7,
        attention_share: float = 0.35,
        bandwidth_share: float = 0.8,
        step_s: float = 2e-4,
        layer_s: float = 1e-5,
        reduce_s: float = 1e-5,
        reserve_bytes: int = 4_000_000_000,
    ) -> None:
        shape = shape_of(model)
        for name, share in (
            ("product_share", product_share),
            ("attention_share", attention_share),
            ("bandwidth_share", bandwidth_share),
        ):
            require(0 < share <= 1, f"step_time.{name}", "in (0, 1]", share)
        for name, fixed in (("step_s", step_s), ("layer_s", layer_s), ("reduce_s", reduce_s)):
            require(fixed >= 0, f"step_time.{name}", ">= 0", fixed)
        require(reserve_bytes >= 0, "step_time.reserve_bytes", ">= 0", reserve_bytes)
        divides = num_devices >= 1 and shape.num_kv_heads % num_devices == 0
        rule = f">= 1 and a divisor of {shape.num_kv_heads} KV heads"
        require(divides, "step_time.num_devices", rule, num_devices)
        self.device, self.model, self.num_devices = device, model, num_devices
        self.product_share = product_share
        self.attention_share = attention_share
        self.bandwidth_share = bandwidth_share
        self.step_s, self.layer_s, self.reduce_s = step_s, layer_s, reduce_s
        self.reserve_bytes = reserve_bytes
        self._rates = _rates(self, device_of(device), shape)

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Roofline":
        """Itself: it learns nothing."""
        return self

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps; numbers or arrays that broadcast."""
        rates = self._rates
        products = rates["token"] * num_tokens + rates["row"] * num_rows
        if isinstance(products, float):
            products = max(products, rates["weights"])
        else:
            products = np.maximum(products, rates["weights"])
        rest = rates["pair"] * attended + rates["kv_token"] * kv_tokens
        return rates["fixed"] + products + rest + rates["moved_token"] * num_tokens

    def attention_seconds(self, kv_tokens: Any, attended: Any) -> Any:
        """Of that, attention's part in all layers."""
        return self._rates["pair"] * attended + self._rates["kv_token"] * kv_tokens

    def head_seconds(self, num_rows: Any) -> Any:
        """What the output head takes on its own."""
        return np.maximum(self._rates["row"] * num_rows, self._rates["head_weights"])

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots in that share of the devices' memory, beside weights and reserve."""
        shape, device = shape_of(self.model), device_of(self.device)
        memory = self.num_devices * (memory_share * device.memory_bytes - self.reserve_bytes)
        tokens = int((memory - shape.weight_bytes) // shape.kv_bytes)
        rule = f"a device that holds {self.model} on {self.num_devices}"
        require(tokens >= 1, "step_time.device", rule, self.device)
        return tokens

    def describe(self) -> dict[str, Any]:
        """What the figures stand for, and that they have no measured error."""
        return {
            "source": "roofline",
            "device": self.device,
            "model": self.model,
            "num_devices": self.num_devices,
            "error": None,
            "note": "computed from a data sheet, never measured",
        }


def _rates(plugin: Roofline, device: Device, shape: ModelShape) -> dict[str, float]:
    """Seconds a unit of each fact of a step."""
    num = plugin.num_devices
    flops = num * device.flops
    products, attention = flops * plugin.product_share, flops * plugin.attention_share
    bandwidth = num * device.bandwidth * plugin.bandwidth_share
    layers = shape.num_layers * shape.layer_weights
    reduced = 2 * (num - 1) / num * 2 * shape.num_layers * BYTES * shape.hidden / device.link
    reduces = 2 * shape.num_layers * plugin.reduce_s if num > 1 else 0.0
    return {
        "fixed": plugin.step_s + shape.num_layers * plugin.layer_s + reduces,
        "weights": BYTES * (layers + shape.head_weights) / bandwidth,
        "head_weights": BYTES * shape.head_weights / bandwidth,
        "token": 2 * layers / products,
        "row": 2 * shape.head_weights / products,
        "pair": 4 * shape.num_layers * shape.num_q_heads * shape.head_dim / attention,
        "kv_token": shape.kv_bytes / bandwidth,
        "moved_token": shape.activation_bytes / bandwidth + reduced,
    }
