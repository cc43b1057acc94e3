"""A request that breaks whoever serves it, through `python run.py mode=serve replicas=2` on Ray."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.serving.chaos import all_of, model, wait_for_ready, workers
from experiments.serving.sampled_client import Asked, stream
from experiments.serving.server_process import FAKE, ServerProcess, idle, serving
from tests.patience import SOON_S

VOCAB, TOKENS, AT = 1000, 60, 20
POISON = f"""
from core.hookspecs import hookimpl


class Poison:
    def __init__(self, prompt_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens

    @hookimpl
    def decide_batch(self, query):
        running = query.running
        if ((running.prompt == self.prompt_tokens) & (running.emitted >= {AT})).any():
            raise RuntimeError("it was poisoned")
"""


def prompt_tokens(asked: Asked) -> int:
    return len(json.loads(asked.body("any"))["prompt"])


BAD = Asked(1, TOKENS, VOCAB)
GOOD = [
    asked
    for asked in (Asked(number, TOKENS, VOCAB) for number in range(100, 140))
    if prompt_tokens(asked) != prompt_tokens(BAD)
][:8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("poison")
    (folder / "outside.py").write_text(POISON)
    poison = f"+plugins.poison={{_target_:outside.Poison,prompt_tokens:{prompt_tokens(BAD)}}}"
    options = ("replicas=2", "executor.step_s=0.02", f"plugin_path={folder}", poison)
    with serving(Path(folder) / "run", *FAKE, *options) as server:
        wait_for_ready(server, 2)
        yield server


def test_it_ends_with_an_error_event_and_the_others_end_well(server: ServerProcess) -> None:
    """R05: nothing is repeated, and no [DONE] says that it is whole."""
    name = model(server)

    async def both() -> tuple[object, list[object]]:
        return await asyncio.gather(
            stream(server.port, BAD, name), all_of(server.port, GOOD, name, len(GOOD))
        )

    undisturbed = asyncio.run(all_of(server.port, GOOD, name, len(GOOD)))
    bad, good = asyncio.run(both())
    assert [one.fault for one in good] == [""] * len(GOOD)
    assert {one.number: one.answer for one in good} == {
        one.number: one.answer for one in undisturbed
    }
    assert "ran alone: RuntimeError: it was poisoned; raised by plugin poison" in bad.fault
    assert not bad.done
    assert bad.reasons == {}
    assert len(bad.texts[0].split()) == AT
    assert sum(line["restarts"] for line in workers(server)) >= 3
    server.wait_for(idle, SOON_S)
    wait_for_ready(server, 2)
