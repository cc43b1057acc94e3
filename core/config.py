"""Typed settings of everything that is not a plugin. Ranges are checked on construction."""

from dataclasses import dataclass

from core.errors import ConfigError


def require(holds: bool, field: str, rule: str, value: object) -> None:
    """Raise ConfigError naming field, rule and value unless `holds`."""
    if not holds:
        raise ConfigError(f"{field} must be {rule}, got {value!r}")


AUTO = "auto"


@dataclass
class EngineConfig:
    """Limits and switches of one engine.

    max_num_seqs: sequences running at once. max_num_batched_tokens: tokens computed in one step.
    max_model_len: longest prompt + output in tokens, None = the model's own limit. pool_tokens: KV
    slots, a multiple of the allocator's page size, or auto: what fits into memory_share, in (0, 1],
    of the device's memory beside weights, work space and other programs. overlap: plan and launch
    step N+1 before step N's tokens are collected. strict: check every invariant after every step,
    and fail when a configured policy is never asked. deterministic: a request's tokens depend on
    nothing that runs beside it, nor on chunks, cache hits or preemption; refused otherwise."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    pool_tokens: int | str = 4096
    memory_share: float = 0.9
    overlap: bool = False
    strict: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        require(self.max_num_seqs >= 1, "engine.max_num_seqs", ">= 1", self.max_num_seqs)
        budget = self.max_num_batched_tokens
        require(budget >= 1, "engine.max_num_batched_tokens", ">= 1", budget)
        length = self.max_model_len
        require(length is None or length >= 2, "engine.max_model_len", ">= 2 or null", length)
        pool, share = self.pool_tokens, self.memory_share
        holds = pool >= 1 if isinstance(pool, int) else pool == AUTO
        require(holds, "engine.pool_tokens", ">= 1 or auto", pool)
        require(0 < share <= 1, "engine.memory_share", "in (0, 1]", share)
