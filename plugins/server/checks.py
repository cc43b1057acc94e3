"""What a body that follows its schema may still not ask of this model and this server.

Each `check_` raises ApiError: 404 for a model that is not served, 400 with the field for the rest.
"""

from collections.abc import Sequence
from typing import Any

from plugins.server.client import Facts
from plugins.server.errors import ApiError, invalid, model_not_found, shown, unsupported
from plugins.server.schema import CompletionBody, SampledBody


def check_shared(body: SampledBody, facts: Facts) -> None:
    """Fields of both completion endpoints."""
    check_model(body.model, facts)
    limits = facts.limits
    if given(body.n, 1) > limits.max_choices:
        raise invalid("n", f"must be <= {limits.max_choices}, got {body.n}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is allowed with stream true alone")
    stop = stop_strings(body)
    if stop and facts.tokenizer is None:
        raise unsupported("stop", "needs a tokenizer, and this model has none")
    if len(stop) > limits.max_stop:
        raise invalid("stop", f"must hold <= {limits.max_stop} texts, got {len(stop)}")
    if any(not 1 <= len(text) <= limits.max_stop_chars for text in stop):
        rule = f"must hold texts of 1 to {limits.max_stop_chars} characters, got {shown(stop)}"
        raise invalid("stop", rule)
    for name, tokens in (
        ("logit_bias", [int(token) for token in body.logit_bias or ()]),
        ("stop_token_ids", body.stop_token_ids or []),
    ):
        most = limits.max_listed_tokens
        if len(tokens) > most:
            raise invalid(name, f"must hold <= {most} tokens, got {len(tokens)}")
        check_vocabulary(tokens, facts, name)


def check_completion(body: CompletionBody, facts: Facts) -> None:
    """Fields of /v1/completions alone."""
    check_logprobs("logprobs", body.logprobs, facts)
    if body.best_of is not None and body.best_of != given(body.n, 1):
        raise unsupported("best_of", f"must equal n = {given(body.n, 1)}, got {body.best_of}")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be >= 1 without echo, got 0")
    if body.echo and facts.tokenizer is None:
        raise unsupported("echo", "needs a tokenizer, and this model has none")


def check_model(model: str | None, facts: Facts) -> None:
    """None where the endpoint lets it be left out."""
    if model is not None and model != facts.model:
        raise model_not_found(model)


def check_logprobs(name: str, count: int | None, facts: Facts) -> None:
    """Top entries of a position, asked for in field `name`."""
    most = facts.limits.max_logprobs
    if count is not None and count > most:
        raise invalid(name, f"must be <= {most}, got {count}")


def check_ids(ids: Sequence[int], facts: Facts, where: str) -> None:
    """A prompt's ids; where: the field they come from."""
    if not ids:
        rule = "must hold >= 1 token, got 0 (the tokenizer added none)"
        raise invalid(where, rule)
    check_vocabulary(ids, facts, where)


def check_vocabulary(ids: Sequence[int], facts: Facts, where: str) -> None:
    """ids >= 0; where: the field they come from."""
    if ids and max(ids) >= facts.vocab_size:
        raise invalid(where, f"must hold token ids in [0, {facts.vocab_size}), got {max(ids)}")


def output_limit(
    num_tokens: int, name: str, wanted: int | None, default: int | None, facts: Facts, where: str
) -> int:
    """max_tokens of a choice: as wanted in field `name`, else the default or all the room.

    Raises ApiError 400 if prompt and output do not fit the context, or the prompt not the pool.
    """
    room = facts.max_model_len - num_tokens
    needed = 1 if wanted is None else wanted
    if needed > room:
        at_least = " at least" if wanted is None else ""
        raise ApiError(
            400,
            f"this model's context is {facts.max_model_len} tokens, and {num_tokens + needed} were"
            f" requested: {num_tokens} in {where} and{at_least} {needed} in {name}",
            param=where if room < 1 else name,
            code="context_length_exceeded",
        )
    if num_tokens > facts.pool_tokens:
        rule = f"must fit the KV pool of {facts.pool_tokens} tokens, got {num_tokens}"
        raise invalid(where, rule, "context_length_exceeded")
    most = facts.limits.max_tokens
    if wanted is not None:
        if most is not None and wanted > most:
            raise invalid(name, f"must be <= {most}, got {wanted}")
        return wanted
    bounds = [room, facts.pool_tokens - num_tokens + 1]  # the last token needs no place in the pool
    return min(bound for bound in [*bounds, most, default] if bound is not None)


def stop_strings(body: SampledBody) -> tuple[str, ...]:
    """`stop` in its one form."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def given(value: Any, default: Any) -> Any:
    """The value, or the default for one that was left out."""
    return default if value is None else value
