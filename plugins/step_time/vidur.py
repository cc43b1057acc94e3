"""A step's time from Vidur's profiles (Agrawal et al., MLSys 2024, arXiv:2405.05465).

Their tables have the time of each operation of a layer by the number of tokens and the degree of
tensor parallelism, and that of an all-reduce by its bytes (NVLink of a DGX H100). A step is

  layers * (norms, projections, rotary, MLP and two residual additions, medians, linear between
            the numbers of tokens measured)
  + the embedding + layers * 2 all-reduces of the tokens' activations with num_devices > 1
  + attention and the output head, whose tables are not here: as plugins/step_time/roofline.py
    computes them, at its shares of the data sheet's rates
  + step_s: gaps between kernels and sampling, which profiles of operations leave out."""

from functools import cached_property
from typing import Any

from core.config import require
from core.hookspecs import hookimpl
from core.queries import StepTimeQuery
from plugins.step_time.roofline import Roofline
from plugins.step_time.shapes import BYTES, shape_of
from plugins.step_time.tables import DATA, Curve, curve, rows

FOLDER = DATA / "vidur"
# (device, model) -> file
FILES = {
    ("h100", "llama2_7b"): "vidur_h100_llama2-7b_mlp.csv.gz",
    ("a100", "llama_8b"): "vidur_a100_llama3-8b_mlp.csv.gz",
}
REDUCES = {"h100": "vidur_h100_dgx_all_reduce.csv.gz"}
# operation of a layer -> times in it
OPERATIONS = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}


class Vidur:
    """device, model: h100 with llama2_7b on 1, 2, 4 or 8 devices, a100 with llama_8b on 1 (its
    all-reduces were not measured). attention_share, bandwidth_share, reserve_bytes: as
    Roofline's."""

    def __init__(
        self,
        device: str = "h100",
        model: str = "llama2_7b",
        num_devices: int = 1,
        attention_share: float = 0.35,
        bandwidth_share: float = 0.8,
        step_s: float = 2e-4,
        reserve_bytes: int = 4_000_000_000,
    ) -> None:
        known = ", ".join(f"{one} with {name}" for one, name in FILES)
        pair = f"{device} with {model}"
        require((device, model) in FILES, "step_time.device and model", f"one of {known}", pair)
        require(step_s >= 0, "step_time.step_s", ">= 0", step_s)
        can_reduce = num_devices == 1 or device in REDUCES
        rule = f"1 on {device}, whose all-reduces were not measured"
        require(can_reduce, "step_time.num_devices", rule, num_devices)
        self.device, self.model, self.num_devices = device, model, num_devices
        self.step_s = step_s
        self.attention_share, self.bandwidth_share = attention_share, bandwidth_share
        self.reserve_bytes = reserve_bytes
        self._shape = shape_of(model)
        self._rest = Roofline(
            device,
            model,
            num_devices,
            attention_share=attention_share,
            bandwidth_share=bandwidth_share,
            reserve_bytes=reserve_bytes,
        )

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Vidur":
        """Itself: it learns nothing."""
        return self

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps; numbers or arrays that broadcast."""
        reduces: Any = 0.0
        if self._reduce is not None:
            size = BYTES * self._shape.hidden * num_tokens
            reduces = 2 * self._shape.num_layers * self._reduce.at(size)
        rest = self._rest.attention_seconds(kv_tokens, attended) + self._rest.head_seconds(num_rows)
        return self.step_s + self._products.at(num_tokens) + reduces + rest

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots in that share of the devices' memory, beside weights and reserve."""
        return self._rest.pool_tokens(memory_share)

    def describe(self) -> dict[str, Any]:
        """What was measured, and that nobody compared the sum with a device."""
        return {
            "source": "vidur",
            "device": self.device,
            "model": self.model,
            "num_devices": self.num_devices,
            "error": None,
            "note": "published profiles of single operations; attention from a data sheet",
        }

    @cached_property
    def _products(self) -> Curve:
        """All operations but attention, in all layers, by tokens; the embedding with them."""
        layers = self._shape.num_layers
        own = [
            row
            for row in rows(FOLDER / FILES[self.device, self.model])
            if int(row["num_tensor_parallel_workers"]) == self.num_devices
        ]
        require(bool(own), "step_time.num_devices", "1, 2, 4 or 8", self.num_devices)
        return curve(
            (
                int(row["num_tokens"]),
                _seconds(row, "emb")
                + layers * sum(times * _seconds(row, name) for name, times in OPERATIONS.items()),
            )
            for row in own
        )

    @cached_property
    def _reduce(self) -> Curve | None:
        if self.num_devices == 1:
            return None
        return curve(
            (int(row["size"]), _seconds(row, "all_reduce"))
            for row in rows(FOLDER / REDUCES[self.device])
            if int(row["num_workers"]) == self.num_devices
        )


def _seconds(row: dict[str, str], operation: str) -> float:
    return float(row[f"time_stats.{operation}.median"]) / 1000
