"""A step's time from what Splitwise's authors measured (Patel et al., ISCA 2024, arXiv:2311.18677).

Their table has the time of a prompt phase by prompt size and batch size, and the time between
tokens by batch size, for Llama2-70B and BLOOM-176B on DGX servers with A100, H100 and H100 capped
at 350 W. Here:

  steps of one-token rows  the time between tokens, linear between the batch sizes measured
  steps with chunks        the time of a prompt phase of as many tokens (prompts of 512 in a batch
                           and one long prompt take the same within 6 %), and never less than that
                           of the step's rows

Prompts were measured whole and contexts up to 8,192 tokens at batch size 1, where the time between
tokens does not change: what a long context costs in a large batch is not in the table, nor is what
a chunk pays for the tokens before it."""

from typing import Any

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import StepTimeQuery
from plugins.step_time.devices import device_of
from plugins.step_time.tables import DATA, curve, rows

FILE = DATA / "splitwise" / "splitwise_perf_model.csv"
DEVICES = {"a100": "a100-80gb", "h100": "h100-80gb", "h100_capped": "h100-80gb-pcap"}
MODELS = {"llama2_70b": "llama2-70b", "bloom_176b": "bloom-176b"}
# model -> bytes of weights in bfloat16, and of K and V a token; from the models' config.json
SIZES = {
    "llama2_70b": (2 * 68_976_648_192, 2 * 2 * 80 * 1024),
    "bloom_176b": (2 * 176_247_271_424, 2 * 2 * 70 * 14336),
}


class Splitwise:
    """device: a100, h100 or h100_capped. model: llama2_70b on num_devices 2, 4 or 8, bloom_176b on
    8. reserve_bytes: memory of a device that neither weights nor cache get."""

    def __init__(
        self,
        device: str = "h100",
        model: str = "llama2_70b",
        num_devices: int = 8,
        reserve_bytes: int = 4_000_000_000,
    ) -> None:
        require(device in DEVICES, "step_time.device", f"one of {', '.join(DEVICES)}", device)
        require(model in MODELS, "step_time.model", f"one of {', '.join(MODELS)}", model)
        require(reserve_bytes >= 0, "step_time.reserve_bytes", ">= 0", reserve_bytes)
        self.device, self.model, self.num_devices = device, model, num_devices
        self.reserve_bytes = reserve_bytes
        every = _measured(device, model)
        known = sorted({row["tensor_parallel"] for row in every})
        rule = f"one of {', '.join(known)}, on which {model} was measured"
        require(str(num_devices) in known, "step_time.num_devices", rule, num_devices)
        chosen = [row for row in every if row["tensor_parallel"] == str(num_devices)]
        self._prompt = curve(
            (int(row["prompt_size"]) * int(row["batch_size"]), float(row["prompt_time"]) / 1000)
            for row in chosen
        )
        self._token = curve(
            (int(row["batch_size"]), float(row["token_time"]) / 1000) for row in chosen
        )

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Splitwise":
        """Itself: it learns nothing."""
        return self

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps; numbers or arrays that broadcast."""
        token = self._token.at(num_rows)
        whole = np.maximum(token, self._prompt.at(num_tokens))
        found = np.where(num_tokens > num_rows, whole, token)
        return np.broadcast_arrays(found, kv_tokens, attended)[0]

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots in that share of the devices' memory, beside weights and reserve."""
        weights, kv = SIZES[self.model]
        memory_bytes = device_of(self.device.removesuffix("_capped")).memory_bytes
        memory = self.num_devices * (memory_share * memory_bytes - self.reserve_bytes)
        tokens = int((memory - weights) // kv)
        rule = f"enough for {self.model} on {self.num_devices} devices"
        require(tokens >= 1, "engine.memory_share", rule, memory_share)
        return tokens

    def describe(self) -> dict[str, Any]:
        """What was measured, and that nobody compared the interpolation with a device."""
        return {
            "source": "splitwise",
            "device": self.device,
            "model": self.model,
            "num_devices": self.num_devices,
            "error": None,
            "note": "published measurements of whole prompts and batches, interpolated",
        }


def _measured(device: str, model: str) -> list[dict[str, str]]:
    names = MODELS[model], DEVICES[device]
    return [row for row in rows(FILE) if (row["model"], row["hardware"]) == names]
