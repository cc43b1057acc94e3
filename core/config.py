"""Typed settings of everything that is not a plugin. Ranges are checked on construction."""

from dataclasses import dataclass
from enum import Enum

from core.errors import ConfigError


def require(holds: bool, field: str, rule: str, value: object) -> None:
    """Raise ConfigError naming field, rule and value unless `holds`."""
    if not holds:
        raise ConfigError(f"{field} must be {rule}, got {value!r}")


class Records(Enum):
    """How much a run writes: every step, only requests, or only the summary."""

    full = "full"
    requests = "requests"
    summary = "summary"


@dataclass
class EngineConfig:
    """Limits and switches of one engine.

    max_num_seqs: sequences running at once. max_num_batched_tokens: tokens computed in one step.
    max_model_len: longest prompt + output in tokens, None = the model's own limit. pool_tokens: KV
    slots; must be a multiple of the allocator's page size. overlap: plan and launch step N+1 before
    step N's tokens are collected. strict: check every invariant after every step, and fail when a
    configured policy is never asked.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    pool_tokens: int = 4096
    overlap: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        require(self.max_num_seqs >= 1, "engine.max_num_seqs", ">= 1", self.max_num_seqs)
        budget = self.max_num_batched_tokens
        require(budget >= 1, "engine.max_num_batched_tokens", ">= 1", budget)
        length = self.max_model_len
        require(length is None or length >= 2, "engine.max_model_len", ">= 2 or null", length)
        require(self.pool_tokens >= 1, "engine.pool_tokens", ">= 1", self.pool_tokens)
