"""Every line of requests.jsonl against `python run.py mode=serve` with SmolLM2 on the CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.serving.server_process import ServerProcess, idle, serving
from tests.plugins.server import test_cases as cases
from tests.plugins.server.live import TIMEOUT_S

SMOLLM2 = ("device=cpu", "engine.pool_tokens=16384", "mode.warmup=false", "mode.lock=off")
ID = itemgetter("id")
SENDINGS = 2  # of lines that repeat: a token takes 0.1 s here
LINES = [pytest.param(line, id=line["id"]) for line in cases.LINES]


pytestmark = pytest.mark.live


class Remote:
    """What the checks use of tests.plugins.server.live.Live, of a server in other processes."""

    def __init__(self, server: ServerProcess, http: httpx.Client) -> None:
        self.server = server
        self.url = server.url
        self.http = http

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        sent = {"content": options.pop("content")} if "content" in options else {"json": body}
        headers = {"content-type": "application/json"}
        return self.http.post(self.url + path, headers=headers, **sent, **options)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)


def remote(folder: Path, *overrides: str) -> Iterator[Remote]:
    named = "server.model_name=MODEL"
    with httpx.Client(timeout=TIMEOUT_S) as http, serving(folder, named, *overrides) as server:
        yield Remote(server, http)
        assert "Traceback" not in server.messages


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    yield from remote(tmp_path_factory.mktemp("smollm2"), *SMOLLM2)


@pytest.fixture(scope="module")
def outcomes(smollm2: Remote) -> dict[str, BaseException | None]:
    """How each line went: those that compare answers one after the other, the rest eight at once,
    for a step of eight rows takes hardly longer than one."""
    together = [line for line in cases.LINES if not alone(line)]
    with ThreadPoolExecutor(8) as pool:
        found = dict(
            zip(map(ID, together), pool.map(partial(outcome, smollm2), together), strict=True)
        )
    left = [brief(line) for line in cases.LINES if alone(line)]
    return found | {line["id"]: outcome(smollm2, line) for line in left}


def alone(line: dict[str, Any]) -> bool:
    compares = {"repeat_equal", "stream_equals_plain"} & set(line["expect"]["checks"])
    return bool(compares) or "client" in line


def brief(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"repeat": min(line.get("repeat", 1), SENDINGS)}


def outcome(remote: Remote, line: dict[str, Any]) -> BaseException | None:
    try:
        if "client" in line:
            leave_early(remote, line)
        else:
            cases.test_line_gives_its_status_and_passes_its_checks(remote, line)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("line", LINES)
def test_line_with_a_model(outcomes: dict[str, BaseException | None], line: dict[str, Any]) -> None:
    if (error := outcomes[line["id"]]) is not None:
        raise error


def leave_early(remote: Remote, line: dict[str, Any]) -> None:
    url, client = remote.url + line["path"], line["client"]
    options = {"json": line["body"], "timeout": client.get("close_after_seconds", TIMEOUT_S)}
    if "close_after_events" in client:
        with httpx.stream("POST", url, **options) as answer:
            assert answer.status_code in (200, line["expect"]["status"])
            next(line for line in answer.iter_lines() if line.startswith("data: "))
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, **options)
    remote.server.wait_for(idle, TIMEOUT_S)
    cases.check_canary(remote)  # type: ignore[arg-type]
