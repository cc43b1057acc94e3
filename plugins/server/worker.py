"""A front-end process: uvicorn around the application and a client of the engine."""

import asyncio
import contextlib
import logging.config
import os
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from plugins.server.client import Facts
from plugins.server.engine_client import EngineClient
from plugins.server.settings import Settings
from plugins.shared.event_loop import allow_many_files, run_loop

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
IDLE_CONNECTION_S = 65  # longer than clients' pools keep theirs: they never reuse a closing one
GRACE_S = 3  # for answers to be written out once the engine has said goodbye
BACKLOG = 4096


def serve_worker(
    settings: Settings, listener: socket.socket, channel_address: str, facts: Facts
) -> None:
    """Serve until the engine says goodbye or is gone. channel_address: ipc://FOLDER/NAME; with
    several workers, metrics are shared through files in that folder."""
    if settings.workers > 1:  # read when prometheus_client is first imported, by the application
        folder = os.path.join(os.path.dirname(channel_address.removeprefix("ipc://")), "metrics")
        os.makedirs(folder, exist_ok=True)
        os.environ[METRICS_VARIABLE] = folder
    logging.config.dictConfig(LOGGING_CONFIG)
    allow_many_files()
    run_loop(_serve(settings, listener, channel_address, facts))


def make_server(app: Any, access_log: bool) -> uvicorn.Server:
    """uvicorn for an ASGI application; it leaves signals alone."""
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,  # it would close the handlers of whoever runs it in their process
            log_level="info" if access_log else "warning",
            access_log=access_log,
            interface="asgi3",
            lifespan="off",
            ws="none",
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The engine's process ends this one."""
        yield


async def _serve(
    settings: Settings, listener: socket.socket, channel_address: str, facts: Facts
) -> None:
    from plugins.server.app import make_app

    client = EngineClient(channel_address, facts, settings)
    server = make_server(make_app(client, settings), settings.access_log)

    async def end() -> None:
        await client.closed.wait()
        server.should_exit = True

    ending = asyncio.ensure_future(end())
    try:
        await server.serve(sockets=[listener])
    finally:
        ending.cancel()
        client.close()
