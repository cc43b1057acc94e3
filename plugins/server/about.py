"""Endpoints that generate nothing: models, tokens, the engine's state, health."""

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from plugins.server.asked import ask_text, ask_tokens
from plugins.server.checks import check_model
from plugins.server.chunks import compact
from plugins.server.client import Client
from plugins.server.errors import worker_not_found
from plugins.server.generation import parsed
from plugins.server.metrics import Metrics
from plugins.server.responses import json_response
from plugins.server.schema import DetokenizeBody, TokenizeBody
from plugins.server.settings import Settings
from plugins.server.stream import EventStream


class About:
    """Handlers, one an endpoint."""

    def __init__(self, client: Client, settings: Settings, metrics: Metrics) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a chat through its template."""
        facts = self._client.facts
        tokenizer = facts.tokenizer

        def answer(body: TokenizeBody) -> dict[str, Any]:
            ids = ask_tokens(body, facts)
            names = None
            if body.return_token_strs and tokenizer is not None:
                names = tokenizer.convert_ids_to_tokens(ids)
            return {
                "count": len(ids),
                "max_model_len": facts.max_model_len,
                "tokens": ids,
                "token_strs": names,
            }

        return json_response(await parsed(request, self._settings, TokenizeBody, answer))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        facts = self._client.facts
        text = await parsed(
            request, self._settings, DetokenizeBody, lambda body: ask_text(body, facts)
        )
        return json_response({"prompt": text})

    async def models(self, request: Request) -> Response:
        """The served model, as a list."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, model_id: str) -> Response:
        """One model."""
        check_model(model_id, self._client.facts)
        return json_response(self._model())

    async def engine(self, request: Request) -> Response:
        """A snapshot: what runs under which policy, pool, queues, the last steps."""
        facts = self._client.facts
        about = {
            "model": facts.model,
            "vocab_size": facts.vocab_size,
            "max_model_len": facts.max_model_len,
            "pool_tokens": facts.pool_tokens,
            "policy": facts.policy,
            "hooks": facts.hooks,
        }
        return json_response(about | asdict(self._client.state()))

    async def workers(self, request: Request) -> Response:
        """The replicas: state, load, memory, device. Empty where there is one engine alone."""
        return json_response({"object": "list", "data": self._client.state().workers or []})

    async def drain(self, worker_id: str) -> Response:
        """Send a replica nothing more; what it has runs to its end."""
        return self._steer(worker_id, True)

    async def undrain(self, worker_id: str) -> Response:
        """Send to a replica again."""
        return self._steer(worker_id, False)

    async def steps(self, request: Request) -> Response:
        """Step records as they come, as server-sent events; `lost` counts what a slow reader
        missed."""
        return EventStream(self._records(), self._settings.keepalive_s, close=_nothing)

    async def no_steps(self, request: Request) -> Response:
        """What `steps` begins with."""
        return Response(media_type=EventStream.media_type)

    async def health(self, request: Request) -> Response:
        """This process answers."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 if new requests are served, else 503 with the reason."""
        state = self._client.state()
        if state.ready:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "reason": state.reason}, 503)

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(self._metrics.page(), headers={"content-type": self._metrics.content_type})

    async def _records(self) -> AsyncIterator[bytes]:
        async for record in self._client.steps():
            yield f"data: {compact(record)}\n\n".encode()

    def _steer(self, worker_id: str, draining: bool) -> Response:
        known = self._client.state().workers or []
        if worker_id not in [one["id"] for one in known]:
            raise worker_not_found(worker_id)
        self._client.drain(worker_id, draining)
        return json_response({"id": worker_id, "draining": draining}, 202)

    def _model(self) -> dict[str, Any]:
        facts = self._client.facts
        return {
            "id": facts.model,
            "object": "model",
            "created": facts.created,
            "owned_by": "tritium",
            "max_model_len": facts.max_model_len,
        }


def _nothing() -> None:
    pass
