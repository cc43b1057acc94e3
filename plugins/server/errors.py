"""What goes wrong with a call, in the shape of OpenAI's API."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from core.errors import RequestError

INVALID_REQUEST = "invalid_request_error"
SHOWN_CHARS = 60  # of a value, in a message
PARAM_CHARS = 120

_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}
_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported": "unsupported_value",
}


class ApiError(Exception):
    """An answer other than success. status: HTTP's. param: the field at fault, as a path into the
    body (`messages[0].content`). headers: to send along."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body, ready to encode."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def invalid(param: str, rule: str, code: str = "invalid_value") -> ApiError:
    """400 for a field. rule: continues a sentence that begins with the field."""
    return ApiError(400, f"{param} {rule}", param=param, code=code)


def unsupported(param: str, rule: str) -> ApiError:
    """400 for a field that is known but cannot be honoured with this value."""
    return invalid(param, rule, "unsupported_value")


def model_not_found(model: str) -> ApiError:
    """404 for a model that is not served here."""
    message = f"the model {shown(model)} does not exist here: /v1/models lists what is served"
    return ApiError(404, message, param="model", code="model_not_found")


def too_busy(reason: str, retry_after_s: float = 1.0) -> ApiError:
    """429 for a call that found the queue full; it may be sent again after retry_after_s."""
    return ApiError(
        429,
        reason,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": _seconds(retry_after_s)},
    )


def unavailable(reason: str, retry_after_s: float | None = None) -> ApiError:
    """503 while the server drains, its engine has stopped or is stuck, or no replica is there."""
    headers = None if retry_after_s is None else {"Retry-After": _seconds(retry_after_s)}
    return ApiError(503, reason, type="server_error", code="unavailable", headers=headers)


def worker_not_found(worker: str) -> ApiError:
    """404 for a replica that is not here."""
    message = f"the worker {shown(worker)} does not exist here: /v1/workers lists them"
    return ApiError(404, message, param="worker", code="worker_not_found")


def from_request_error(error: RequestError) -> ApiError:
    """400 for a request that the core refused; its messages begin with the field's name."""
    message = str(error)
    named = re.match(r"([a-z_]+) (?:of request|must)\b", message)
    param = named[1] if named and named[1] != "request_id" else None
    return ApiError(400, message, param=param, code="invalid_value")


def from_validation(error: ValidationError) -> ApiError:
    """400 for a body that does not follow its schema; tells of the first fault."""
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    if kind == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body must be valid JSON: {reason}", code=_CODES[kind])
    param = _path(first["loc"])
    fallback = "invalid_type" if kind.endswith("_type") else "invalid_value"
    message = f"{param or 'the body'} {_rule(first)}"
    return ApiError(400, message, param=param or None, code=_CODES.get(kind, fallback))


def shown(value: Any) -> str:
    """A value as JSON, cut to what a message can carry."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _seconds(retry_after_s: float) -> str:
    return str(max(1, round(retry_after_s)))


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(("<", "[")):  # a union's tag, a dict's key: no part of the body
            path += f".{step}" if path else step
    return path[:PARAM_CHARS]


def _rule(fault: Any) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "is not a known field"
    if kind in ("unsupported", "too_short", "too_long", "string_too_short", "string_too_long"):
        return _sentence(fault["msg"])
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        bound = context[name]
        whole = int(bound) if bound == int(bound) else bound
        return f"must be {sign} {whole}, got {shown(fault['input'])}"
    if kind == "string_pattern_mismatch":  # logit_bias alone has one, for its keys
        return f"must be a token id, got {shown(fault['input'])}"
    return f"{_sentence(fault['msg'])}, got {shown(fault['input'])}"


def _sentence(message: str) -> str:
    message = message.removesuffix(f", not {message.rpartition(' ')[2]}")
    return re.sub(r"^[A-Z]\w* should ", "must ", message).replace(" after validation", "")
