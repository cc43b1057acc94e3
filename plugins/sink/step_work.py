"""What a step has to read and to compute, from its record, and the least time that takes.

Attention of one-token rows reads K and V of their contexts; that of longer rows is counted in
operations, 4 for each pair of a query's and a key's number; matrix products read every weight once,
the output head's if a row is sampled. Norms, sampling, copies and activations count as nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config import require
from core.records import StepRecord

DECODE, EXTEND, GEMM = "attention decode", "attention extend", "GEMM"
ONE_TOKEN, CHUNKS = "decode-only", "with chunks"
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

Work = tuple[float, float]
"""Bytes and floating-point operations."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reaches: bytes copied and operations of matrix products, a second."""

    bytes_s: float
    flops: float

    def least_s(self, work: Work) -> float:
        """The longer of the two parts' least times."""
        return max(work[0] / self.bytes_s, work[1] / self.flops)


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step's rows and tokens. contexts: tokens that its one-token rows see, themselves included;
    pairs: of a token of the longer rows and a token that it sees. graph: a captured graph ran
    it."""

    rows: int
    tokens: int
    sampled: int
    contexts: int
    pairs: int
    graph: bool

    @property
    def kind(self) -> str:
        """ONE_TOKEN or CHUNKS."""
        return CHUNKS if self.tokens > self.rows else ONE_TOKEN


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of weights in the layers' products and in the head, bytes of one; query numbers and
    bytes of K and V of a token, in all layers."""

    layer_weights: int
    head_weights: int
    weight_bytes: int
    q_width: int
    kv_token_bytes: int

    @classmethod
    def of(cls, executor: Mapping[str, Any]) -> "ModelShape | None":
        """From an executor's description; None if it does not tell."""
        shape = executor.get("shape")
        if shape is None:
            return None
        layers, kv_heads, head_dim = (
            shape[name] for name in ("num_layers", "num_kv_heads", "head_dim")
        )
        return cls(
            layer_weights=shape["layer_weights"],
            head_weights=shape["head_weights"],
            weight_bytes=ITEM_BYTES[executor["model_dtype"]],
            q_width=layers * shape["num_q_heads"] * head_dim,
            kv_token_bytes=2 * layers * kv_heads * head_dim * ITEM_BYTES[executor["kv_dtype"]],
        )

    def work(self, step: StepWork) -> dict[str, Work]:
        """By group of kernels."""
        weights = self.layer_weights + (self.head_weights if step.sampled else 0)
        products = self.layer_weights * step.tokens + self.head_weights * step.sampled
        return {
            DECODE: (self.kv_token_bytes * step.contexts, 0.0),
            EXTEND: (0.0, 4.0 * self.q_width * step.pairs),
            GEMM: (self.weight_bytes * weights, 2.0 * products),
        }


class WorkCounter:
    """Follows the length of every token stream through a run's records, one number a stream."""

    def __init__(self) -> None:
        self._computed: dict[tuple[str, int], int] = {}

    def of(self, record: StepRecord) -> StepWork:
        """The work of a step; records come in order. Raises ConfigError for one without rows."""
        listed = len(record.rows)
        require(listed == record.num_rows, "rows of a record", f"{record.num_rows}", listed)
        computed, tokens, contexts, pairs = self._computed, 0, 0, 0
        for choice in record.choices:
            if choice.kind in ("admitted", "resumed"):
                key = choice.request_id, choice.choice
                computed[key] = int(choice.detail["cached_tokens"])
        for request_id, choice_number, count in record.rows:
            key = request_id, choice_number
            before = computed.get(key)
            if before is None:  # forked: it computes the end of the prompt that the first one has
                before = max(computed.get((request_id, 0), count) - count, 0)
            computed[key] = before + count
            tokens += count
            if count == 1:
                contexts += before + 1
            else:
                pairs += count * before + count * (count + 1) // 2
        return StepWork(
            rows=record.num_rows,
            tokens=tokens,
            sampled=record.sampled_tokens,
            contexts=contexts,
            pairs=pairs,
            graph=record.graph_tokens > 0,
        )
