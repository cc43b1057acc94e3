"""A live server in a thread: uvicorn on a free port, the application, a fake client."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from plugins.server.app import make_app
from plugins.server.client import Facts
from plugins.server.settings import Settings
from plugins.server.sse import listen
from plugins.server.worker import make_server
from tests.patience import SOON_S
from tests.plugins.server.fake_client import FakeClient

TIMEOUT_S = SOON_S


@dataclass
class Live:
    url: str
    client: FakeClient
    loop: asyncio.AbstractEventLoop
    http: httpx.Client
    failures: list[BaseException]  # that the loop or the application let through
    app: "Watched"

    @contextlib.contextmanager
    def scripted(self, **changes: Any) -> Iterator[FakeClient]:
        """The fake client with other attributes for a while."""
        before = {name: getattr(self.client, name) for name in changes}
        for name, value in changes.items():
            setattr(self.client, name, value)
        try:
            yield self.client
        finally:
            for name, value in before.items():
                setattr(self.client, name, value)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = options.pop("content", None)
        if content is None:
            content = json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.http.post(self.url + path, content=content, headers=headers, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""

        async def wait() -> None:
            start_s = self.loop.time()
            while not condition():
                assert self.loop.time() - start_s < SOON_S, "the condition never came true"
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result()


@dataclass
class Watched:
    """An ASGI application whose exceptions are kept. open: calls that have not ended."""

    app: Any
    failures: list[BaseException]
    open: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.open += 1
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            self.failures.append(error)
            raise
        finally:
            self.open -= 1


@contextlib.contextmanager
def serving(facts: Facts, **settings: Any) -> Iterator[Live]:
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # to meet slow readers soon
    started: list[Live] = []
    failures: list[BaseException] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        client = FakeClient(facts)
        app = Watched(make_app(client, Settings(**settings), now=lambda: 7.0), failures)
        server = make_server(app, False)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, what: failures.append(what.get("exception")))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started.append(Live(url, client, loop, http, failures, app))
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        server.should_exit = True
        await running

    http = httpx.Client(timeout=TIMEOUT_S)
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S), "the server did not start"
        yield started[0]
        assert failures == [], "the application raised"
    finally:
        http.close()
        stop.set()
        thread.join(TIMEOUT_S)


@dataclass(frozen=True)
class Events:
    """A stream, read to its end: the raw lines and the JSON of its data lines but [DONE]."""

    lines: list[str]
    chunks: list[dict[str, Any]]

    @property
    def done(self) -> bool:
        return self.lines[-1:] == ["data: [DONE]"]

    def joined(self, index: int) -> tuple[str, Any, str | None]:
        """Text, log-probabilities (as a plain answer has them) and finish reason of a choice."""
        text, reason, scored = "", None, None
        for choice in self.choices(index):
            part = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            text += part
            reason = choice["finish_reason"] or reason
            if choice["logprobs"]:
                scored = scored or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    scored[key] += values
        return text, scored, reason

    def choices(self, index: int) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == index]


def events(raw: str) -> Events:
    """Checks the form: each line is empty, a comment or `data: `, and [DONE] is the last one."""
    lines = [line for line in raw.split("\n") if line]
    assert all(line.startswith((":", "data: ")) for line in lines), lines[:3]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert "[DONE]" not in data[:-1]
    return Events(lines, [json.loads(one) for one in data if one != "[DONE]"])
