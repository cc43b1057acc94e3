"""What computes nothing: an executor, and a model for the torch runner. host.py times steps on
them."""

from collections import deque
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch

from core.hookspecs import hookimpl
from core.launch import Launch, LaunchResult, PoolLayout
from core.queries import ExecutorQuery, ModelQuery
from plugins.shared.model_protocols import AttentionQuery

MAX_MODEL_LEN = 4096
VOCAB = 8


class NullExecutor:
    """core.protocols.Executor: every token is 0. device_us: what a launch takes on its device."""

    vocab_size, max_model_len, end_token_ids, tokenizer = VOCAB, MAX_MODEL_LEN, (), None
    computes = True

    def __init__(self, device_us: float = 0.0) -> None:
        self._device_s = device_us / 1e6
        self._free_s = 0.0  # when the device is through with all launches
        self._launches: deque[tuple[int, int, float]] = deque()

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "NullExecutor":  # noqa: ARG002
        """Itself."""
        return self

    def prepare(self, layout: PoolLayout) -> None:
        """Nothing to allocate."""

    def launch(self, launch: Launch) -> None:
        """Remember how many tokens it yields, and when."""
        self._free_s = max(self._free_s, perf_counter()) + self._device_s
        self._launches.append((launch.launch_id, int(launch.samples.sum()), self._free_s))

    def collect(self) -> LaunchResult:
        """Zeros, once the device had its time."""
        launch_id, size, ready_s = self._launches.popleft()
        if self._device_s:
            sleep(max(ready_s - perf_counter(), 0.0))
        return LaunchResult(launch_id, np.zeros(size, np.int32), 0.0)

    def describe(self) -> dict[str, Any]:
        """Its name."""
        return {"executor": "null"}

    def close(self) -> None:
        """Nothing to release."""


class EmptyModel:
    """model_protocols.Model and AttentionBackend without a layer: logits are zeros."""

    name, num_layers, num_q_heads, num_kv_heads, head_dim = "empty", 1, 1, 1, 1
    vocab_size, max_model_len, end_token_ids, tokenizer = VOCAB, MAX_MODEL_LEN, (), None
    dtype, device = torch.float32, torch.device("cpu")

    @hookimpl
    def build_model(self, query: ModelQuery) -> "EmptyModel":  # noqa: ARG002
        """Itself."""
        return self

    @hookimpl
    def build_attention(self, query: AttentionQuery) -> "EmptyModel":  # noqa: ARG002
        """Itself."""
        return self

    def plan(self, batch: Any) -> None:
        """No metadata."""

    def describe(self) -> dict[str, Any]:
        """Its name."""
        return {"attention": "empty"}

    def forward(
        self,
        token_ids: Any,  # noqa: ARG002
        positions: Any,  # noqa: ARG002
        attend: Any,  # noqa: ARG002
        logits_rows: Any,
    ) -> Any:
        """Logits float32 [k, VOCAB]."""
        return torch.zeros(len(logits_rows), VOCAB)
