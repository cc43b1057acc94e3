"""What every HTTP request passes: the API key, and the count of responses."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plugins.server.docs import DOCS, FILES
from plugins.server.errors import ApiError
from plugins.server.metrics import Metrics
from plugins.server.responses import error_response

OPEN_PATHS = {
    "/health",
    "/ready",
    "/metrics",
    DOCS,
    "/openapi.json",
}  # no key needed, nor for FILES


class Gate:
    """ASGI middleware. api_key: a bearer token that all but OPEN_PATHS need, None = none asked."""

    def __init__(self, app: ASGIApp, api_key: str | None, metrics: Metrics) -> None:
        self.app = app
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.response(path, message["status"])
            await send(message)

        if (
            path in OPEN_PATHS
            or path.startswith(f"{FILES}/")
            or self._allowed(Headers(scope=scope))
        ):
            try:
                await self.app(scope, receive, counted)
            except Exception:
                self.metrics.response(path, 500)  # a bug, answered outside of this
                raise
            return
        message = "a valid API key must be given as `Authorization: Bearer KEY`"
        error = ApiError(
            401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )
        await error_response(error)(scope, receive, counted)

    def _allowed(self, headers: Headers) -> bool:
        if self.expected is None:
            return True
        given = headers.get("authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, self.expected)
