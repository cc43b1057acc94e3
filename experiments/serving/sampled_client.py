"""Streams of sampled tokens over plain sockets, kept as they came: for comparing two servers, or
one with itself. For models without a tokenizer, whose text is token ids."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of /v1/completions; everything in it follows from `number`."""

    number: int
    tokens: int
    vocab_size: int

    @property
    def n(self) -> int:
        """Every fourth has two choices."""
        return 2 if self.number % 4 == 0 else 1

    def body(self, model: str) -> bytes:
        """Prompts of 8 to 63 tokens, temperature 0.8; every third call has penalties and a least
        length."""
        rng = np.random.default_rng(self.number)
        prompt = rng.integers(3, self.vocab_size, int(rng.integers(8, 64))).tolist()
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "seed": self.number,
            "max_tokens": self.tokens,
            "temperature": 0.8,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.number % 3 == 0:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "min_tokens": 20}
        return json.dumps(body).encode()


@dataclass(slots=True)
class Got:
    """What its client got: the text and the end of each choice, usage, [DONE]. fault: why it is no
    whole answer, "" if it is. gap_s: the longest wait between two parts of it, once it had begun;
    first_s: for the first."""

    number: int
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    done: bool = False
    fault: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0

    @property
    def answer(self) -> tuple[dict[int, str], dict[int, str], int]:
        """What must not depend on the server: texts, ends, and the count of output tokens."""
        usage = self.usage or {}
        return self.texts, self.reasons, int(usage.get("completion_tokens", -1))


async def stream(port: int, asked: Asked, model: str, give_up_s: float = LIMIT_S) -> Got:
    """Send a call and read its stream to the end. Raises nothing: see Got.fault."""
    got = Got(asked.number)
    try:
        async with asyncio.timeout(give_up_s):
            await _read(port, asked.body(model), got)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        got.fault = got.fault or f"{type(error).__name__}: {error}"
    if not got.fault and not (got.done and len(got.reasons) == asked.n and got.usage):
        got.fault = f"not whole: {got.reasons}, done {got.done}"
    return got


async def _read(port: int, body: bytes, got: Got) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    last_s = sent_s = time.perf_counter()
    try:
        status = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data: "):
                now_s = time.perf_counter()
                if got.first_s:
                    got.gap_s = max(got.gap_s, now_s - last_s)
                else:
                    got.first_s = now_s - sent_s
                last_s = now_s
                _take(line[6:].strip(), got)
        if b" 200 " not in status:
            got.fault = status.decode(errors="replace").strip()
    finally:
        writer.close()


def _take(data: bytes, got: Got) -> None:
    if data == b"[DONE]":
        got.done = True
        return
    event = json.loads(data)
    if "error" in event:
        got.fault = event["error"]["message"]
        return
    got.usage = event.get("usage") or got.usage
    for choice in event["choices"]:
        index = choice["index"]
        got.texts[index] = got.texts.get(index, "") + choice["text"]
        if choice["finish_reason"]:
            got.reasons[index] = choice["finish_reason"]
