"""What a client asks (Request) and the token streams that answer it (Sequence)."""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from core.errors import RequestError

if TYPE_CHECKING:
    from core.records import ChoiceRecord


class FinishReason(Enum):
    """Why a request ended. Exactly one a request."""

    stop = "stop"  # an end token
    length = "length"  # max_tokens or max_model_len reached
    abort = "abort"  # the client went away
    capacity = "capacity"  # it cannot fit the pool, at once or when it had to grow
    error = "error"  # its logits held no token, its launch failed, or the engine stopped


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Defaults: greedy off, nothing masked.

    temperature 0 = greedy. top_k 0 = off. top_p 1 = off, 0 = the top token only. min_p 0 = off.
    presence and frequency penalties count output tokens, repetition_penalty prompt and output once.
    logit_bias: token id -> added to its logit. min_tokens: end and stop tokens are masked before
    it. logprobs: how many top entries to return beside the chosen token, None = none.
    prompt_logprobs: likewise for each prompt token after the first; such a request skips the prefix
    cache. n: choices. seed: None = derived from the run's seed and the request's id."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                bounds = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
                raise RequestError(f"{name} must be {bounds}, got {value!r}")
        if self.repetition_penalty <= 0:
            raise RequestError(f"repetition_penalty must be > 0, got {self.repetition_penalty!r}")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be <= max_tokens ({self.max_tokens}), got {self.min_tokens!r}"
            )
        for token, bias in self.logit_bias.items():
            if token < 0 or not math.isfinite(bias):
                raise RequestError(
                    f"logit_bias must map ids >= 0 to finite numbers, got {{{token!r}: {bias!r}}}"
                )
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be >= 0, got {self.stop_token_ids!r}")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, math.inf),
    ("temperature", 0, 100),
    ("top_k", 0, math.inf),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, math.inf),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
    ("min_tokens", 0, math.inf),
    ("logprobs", 0, math.inf),
    ("prompt_logprobs", 0, math.inf),
    ("n", 1, math.inf),
    ("seed", -(2**63), 2**63 - 1),
)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One client's ask. `prompt` int32 [prompt_len] token ids.

    arrival_s: seconds since the run began. priority: smaller is more urgent. namespace: prefixes
    are shared only within one (a tenant's salt). client and session: free labels for fairness and
    routing. deadline_s: absolute, None = none. forced_output: emit exactly this many tokens,
    ignoring end tokens (recorded traces); it bounds max_tokens. cache: False keeps the request out
    of the prefix cache. resumed: choice -> output tokens that another engine made; only these
    choices run, and go on from there. Empty: all begin."""

    request_id: str
    prompt: NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    priority: int = 0
    client: str = ""
    session: str = ""
    namespace: str = ""
    deadline_s: float | None = None
    forced_output: int | None = None
    cache: bool = True
    resumed: Mapping[int, NDArray[np.int32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise RequestError(f"prompt of request {self.request_id!r} must hold >= 1 token, got 0")
        if not -(2**31) <= self.priority < 2**31:
            raise RequestError(f"priority must be in [-2**31, 2**31), got {self.priority!r}")
        if self.forced_output is not None and self.forced_output < 1:
            raise RequestError(f"forced_output must be >= 1, got {self.forced_output!r}")

    @property
    def output_limit(self) -> int:
        """Most tokens a choice will generate. Policies see params.max_tokens instead: a forced
        length is the truth that they must not know."""
        if self.forced_output is None:
            return self.params.max_tokens
        return min(self.forced_output, self.params.max_tokens)


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream of a request; numbers that policies see live in core/table.py under `id`.

    record, tokens (prompt and generated ids, int32) lack the latest: see core/recent.py. page_keys:
    digests of the whole pages of `tokens`, grown on demand. prefix: the cache's lock handle, or
    None. row: device table row while running or draining."""

    id: int
    key: tuple[str, int]  # request_id, choice
    request: Request
    choice: int
    record: "ChoiceRecord"
    tokens: "array[int]"
    page_keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    prefix: Any | None = None
    row: int | None = None
    cacheable: int | None = None  # leading pages that the cache may keep, None = not asked yet
    ending: FinishReason = FinishReason.length  # why it drains, once it does
    error: str = ""

    @property
    def slot(self) -> int:
        """Index into the table's columns."""
        return self.id & SLOT_MASK


SLOT_BITS = 20
SLOT_MASK = (1 << SLOT_BITS) - 1
