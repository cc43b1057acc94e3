"""A front end without HTTP: a line `NAME MAX_TOKENS` in, a line of token ids an update out, then
`end REASON ERROR`. Run by plugins.server.workers in a process of its own."""

import asyncio
import os
import socket
import time

import numpy as np

from core.request import Request, SamplingParams
from plugins.server.client import Facts, Unavailable
from plugins.server.engine_client import EngineClient
from plugins.server.settings import Settings


def work(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    asyncio.run(_serve(settings, listener, address, facts))


def fails(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    raise SystemExit(3)


def hangs(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    """Connects, and never looks at the channel again."""

    async def connect() -> None:
        EngineClient(address, facts, settings)
        await asyncio.sleep(0.2)
        time.sleep(600)

    asyncio.run(connect())


def leaves(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    """Connects, and ends at once."""

    async def connect() -> None:
        EngineClient(address, facts, settings).close()

    asyncio.run(connect())


async def _serve(settings: Settings, listener: socket.socket, address: str, facts: Facts) -> None:
    client = EngineClient(address, facts, settings)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, max_tokens = (await reader.readline()).decode().split()
        writer.write(f"pid {os.getpid()}\n".encode())
        params = SamplingParams(max_tokens=int(max_tokens))
        try:
            stream = client.submit(Request(name, np.arange(1, 9, dtype=np.int32), params))
        except Unavailable as error:
            writer.write(f"end unavailable {error.reason}\n".encode())
            writer.close()
            return
        async for update in stream:
            if update.tokens:
                ids = " ".join(str(token.token_id) for token in update.tokens)
                writer.write(f"{ids}\n".encode())
            if update.ended is not None:
                ended = update.ended
                writer.write(f"end {ended.finish_reasons[0]} {ended.error}\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    await client.closed.wait()
    server.close()
    await asyncio.sleep(0.05)
    client.close()
