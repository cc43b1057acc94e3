"""JSON responses, and every error as one in OpenAI's shape."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from plugins.server.chunks import compact
from plugins.server.errors import ApiError

CLIENT_LEFT = 499  # nginx's number: nobody sees it, the count of responses does


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON. Raises ValueError for numbers that JSON cannot hold."""
    return Response(compact(value), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """What the client gets."""
    response = json_response(error.body(), error.status)
    response.headers.update(error.headers)
    return response


async def on_api_error(_: Request, error: Exception) -> Response:
    """Handler of ApiError."""
    assert isinstance(error, ApiError), "registered for ApiError"
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of what the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException), "registered for HTTPException"
    path, method = request.url.path[:200], request.method
    code, message = "http_error", error.detail
    if error.status_code == 404:
        code, message = "not_found", f"there is no {path}: see /docs"
    elif error.status_code == 405:
        code, message = "method_not_allowed", f"{path} does not take {method}"
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"  # has a route of its own
    return error_response(ApiError(error.status_code, message, code=code, headers=headers))


async def on_disconnect(_: Request, __: Exception) -> Response:
    """Handler for a client that left: nobody reads this."""
    return Response(status_code=CLIENT_LEFT)


async def on_bug(_: Request, __: Exception) -> Response:
    """Handler of anything else: the server logs the exception, the client is told no detail."""
    return error_response(
        ApiError(500, "the server failed on this call", type="server_error", code="internal_error")
    )
