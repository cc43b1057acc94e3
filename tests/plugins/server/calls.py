"""Bodies of calls, and what the tests of the HTTP side read of a server."""

import socket
from typing import Any

from tests.plugins.server.asking import facts
from tests.plugins.server.live import Live

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Say hi in one word."}]


def ask(**changes: Any) -> dict[str, Any]:
    return {"model": "MODEL", "prompt": "Hello", "max_tokens": 6, **changes}


def talk(**changes: Any) -> dict[str, Any]:
    return {"model": "MODEL", "messages": MESSAGES, "max_tokens": 6, **changes}


def ids_of(text: str) -> list[int]:
    return list(facts().tokenizer(text)["input_ids"])


def total(live: Live, name: str, **labels: str) -> float:
    """A metric's value; 0 before it was first counted."""
    wanted = "".join(f'{key}="{value}"' for key, value in labels.items())
    start = f"tritium_{name}{{{wanted}}} " if wanted else f"tritium_{name} "
    lines = [line for line in live.get("/metrics").text.splitlines() if line.startswith(start)]
    return float(lines[0].split()[-1]) if lines else 0.0


def raw_call(live: Live, body: bytes, length: int | None = None) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.connect((host, int(port)))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection
