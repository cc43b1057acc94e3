"""Bounds that a server sets on one call, whatever the model could take."""

from dataclasses import dataclass, fields

from core.config import require


@dataclass(frozen=True, slots=True)
class Limits:
    """A call beyond one of these gets a 400 that names the field.

    max_choices: prompts times n. max_tokens: output of a choice, None = what the context has room
    for. max_stop: stop strings; max_stop_chars: characters of one. max_logprobs: top entries a
    position. max_listed_tokens: entries of logit_bias, and of stop_token_ids.
    """

    max_choices: int = 1024
    max_tokens: int | None = None
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_logprobs: int = 20
    max_listed_tokens: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = (
                getattr(self, field.name),
                int(field.name in ("max_choices", "max_tokens")),
            )
            require(value is None or value >= least, f"server.{field.name}", f">= {least}", value)
