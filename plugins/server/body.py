"""The body of a request, read with a bound."""

from starlette.requests import Request

from plugins.server.errors import ApiError

JSON_TYPE = "application/json"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """All of a JSON body. A request without a content type is taken for JSON.

    Raises ApiError 400 for another content type, 413 for more than `limit_bytes`: once as many
    again were read, as a client that is still writing would not see the answer.
    """
    kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        message = f"content-type must be {JSON_TYPE}, got {kind[:60]!r}"
        raise ApiError(400, message, code="unsupported_content_type")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > 2 * limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length <= limit_bytes:
            parts.append(part)
        else:
            parts.clear()
        if length > 2 * limit_bytes:
            break
    if length > limit_bytes:
        raise _too_large(limit_bytes)
    return b"".join(parts)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body must be <= {limit_bytes} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
