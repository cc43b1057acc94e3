"""Thousands of broken calls: each gets 200 or a 4xx in the error's shape; the server goes on."""

import json
import random
from typing import Any

import pytest

from plugins.server.limits import Limits
from plugins.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.plugins.server.asking import CASES, with_facts
from tests.plugins.server.live import serving

pytestmark = pytest.mark.live
CALLS = 2000
BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**30),
    *("", "a", "MODEL", "\x00", "\ud83d", "é" * 300, "💥", [], {}, [[]], [[1]], [1, 2], ["a", 1]),
    *([None], [True], {"a": 1}, {"5": 1}, {"type": "text"}, [{"role": "user", "content": "a"}]),
    *([{"role": "user"}], [{"type": "text", "text": "a"}], {"include_usage": True}, [1e9], [-1]),
]


def mutated(rng: random.Random, good: list[dict[str, Any]]) -> tuple[str, bytes]:
    path = rng.choice(list(BODIES))
    body = dict(rng.choice([one["body"] for one in good if one["path"] == path] or [{}]))
    fields = [*BODIES[path].model_fields, "unknown"]
    for _ in range(rng.randint(0, 2)):
        body[rng.choice(fields)] = rng.choice(VALUES)
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        cut = rng.randrange(len(raw))
        raw = raw[:cut] + rng.choice([b"", b"\xff", b"\x00", b"}", b'"', b"NaN"]) + raw[cut + 1 :]
    return path, raw


def test_mutated_bodies_never_fail_the_server():
    rng = random.Random(5)
    lines = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    good = [line for line in lines if line["expect"]["status"] == 200 and "body" in line]
    good = [line for line in good if "client" not in line]
    statuses: dict[int, int] = {}
    with serving(with_facts(limits=Limits(max_tokens=16, max_choices=8))) as live:
        for _ in range(CALLS):
            path, raw = mutated(rng, good)
            answer = live.post(path, content=raw)
            assert answer.status_code in (200, 400, 404), (path, raw, answer.text)
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        live.until(lambda: not live.client.live)
    assert statuses.keys() == {200, 400, 404}
    assert min(statuses.values()) >= 2, statuses
