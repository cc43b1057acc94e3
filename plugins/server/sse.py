"""The server plugin: OpenAI's API over HTTP, answers as server-sent events, from processes of its
own (plugins/server/worker.py)."""

import json
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

from core.config import require
from core.errors import ConfigError
from core.hookspecs import hookimpl
from plugins.server.channel import EngineEnd
from plugins.server.client import Facts
from plugins.server.hub import Hub
from plugins.server.limits import Limits
from plugins.server.messages import FromFront
from plugins.server.settings import Settings
from plugins.server.signals import StopSignals
from plugins.server.workers import Work, Workers
from plugins.shared.server_protocol import Server, ServerQuery

START_S = 120.0  # for front ends to import what they need
BACKLOG = 4096  # connections that wait to be accepted


class Sse:
    """The plugin. Arguments as in plugins.server.settings and plugins.server.limits; model_name:
    the id that clients name the model by, None = the model's own."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        workers: int = 1,
        model_name: str | None = None,
        api_key: str | None = None,
        max_queue: int = 1024,
        max_body_bytes: int = 8 << 20,
        max_choices: int = 1024,
        max_tokens: int | None = None,
        max_stop: int = 16,
        max_stop_chars: int = 1024,
        max_logprobs: int = 20,
        max_listed_tokens: int = 1024,
        request_timeout_s: float = 3600.0,
        keepalive_s: float = 5.0,
        drain_s: float = 30.0,
        stuck_s: float = 10.0,
        access_log: bool = False,
    ) -> None:
        require(model_name != "", "server.model_name", "null or not empty", model_name)
        self.model_name = model_name
        self.settings = Settings(
            host=host,
            port=port,
            workers=workers,
            max_queue=max_queue,
            max_body_bytes=max_body_bytes,
            limits=Limits(
                max_choices=max_choices,
                max_tokens=max_tokens,
                max_stop=max_stop,
                max_stop_chars=max_stop_chars,
                max_logprobs=max_logprobs,
                max_listed_tokens=max_listed_tokens,
            ),
            request_timeout_s=request_timeout_s,
            keepalive_s=keepalive_s,
            drain_s=drain_s,
            stuck_s=stuck_s,
            api_key=api_key,
            access_log=access_log,
        )

    @hookimpl
    def build_server(self, query: ServerQuery) -> Server:
        """Listen, and start the front ends; returns when all are connected. The address goes to
        standard error and, with process ids, to server.json in the run's folder. Raises ConfigError
        if the port is taken or a front end does not start."""
        given = dict(query.facts)
        if self.model_name is not None:
            given["model"] = self.model_name
        facts = Facts(**given, created=int(time.time()), limits=self.settings.limits)
        hub, url, fronts = start(self.settings, facts)
        place = Path(query.folder) / "server.json"
        place.write_text(json.dumps({"url": url, "front_ends": fronts}) + "\n", encoding="utf-8")
        sys.stderr.write(f"serving {facts.model} on {url}/v1, API at {url}/docs\n")
        return hub


def start(settings: Settings, facts: Facts, work: Work | None = None) -> tuple[Hub, str, list[int]]:
    """The engine's side with front ends that run `work`, their URL and process ids."""
    listener = listen(settings.host, settings.port)
    folder = tempfile.mkdtemp(prefix="tritium-")  # its owner's alone
    address = f"ipc://{folder}/channel"
    channel = EngineEnd(address)
    workers = Workers.start(settings, listener, address, facts, work)
    fronts = sorted(workers.fronts)

    def let_go() -> None:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        early = _wait_for(channel, workers)
        signals = StopSignals()
    except BaseException:
        workers.stop(at_once=True)
        channel.close(0)
        let_go()
        raise
    hub = Hub(channel, workers, signals, settings.drain_s, let_go, early)
    return hub, _url(listener), fronts


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that all front ends accept from. Raises ConfigError if there is none to be
    had."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"server.host must be an address of this machine, got {host!r}"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        rule = f"free on {host} ({error.strerror})"
        raise ConfigError(f"server.port must be {rule}, got {port}") from error
    listener.setblocking(False)
    return listener


def _wait_for(channel: EngineEnd, workers: Workers) -> list[tuple[int, FromFront]]:
    """Returns when all are connected, with what they sent meanwhile."""
    early: list[tuple[int, FromFront]] = []
    until_s = time.monotonic() + START_S
    sentinels = workers.sentinels
    for descriptor in sentinels:
        channel.watch(descriptor)
    while not workers.fronts <= channel.connected:
        left_s = until_s - time.monotonic()
        messages, ready = channel.receive(max(left_s, 0))
        early += messages
        if ready or left_s <= 0:
            what = f"did not connect within {START_S:g} s" if left_s <= 0 else "ended at once"
            raise ConfigError(
                f"the server did not start: a front end {what}; see its messages above"
            )
    for descriptor in sentinels:
        channel.unwatch(descriptor)
    return early


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
