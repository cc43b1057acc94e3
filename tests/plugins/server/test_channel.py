"""The channel's two ends: order, no loss, counts, wake-ups."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.records import StepRecord
from plugins.server.channel import EngineEnd, FrontEnd
from plugins.server.messages import Abort, Goodbye, Hello, StepNews, Watch, step_facts
from tests.patience import SOON_S
from tests.plugins.server.rig import until


class Both:
    """Both ends in one asyncio loop, front ends 1 .. n."""

    def __init__(self, folder: Path, fronts: int = 1) -> None:
        address = f"ipc://{folder}/c"
        self.engine = EngineEnd(address)
        self.came: list[list[Any]] = [[] for _ in range(fronts)]
        self.fronts = [
            FrontEnd(address, self.came[number].append, 1 + number) for number in range(fronts)
        ]

    def receive(self, count: int) -> list[Any]:
        messages: list[Any] = []
        end_s = time.monotonic() + SOON_S
        while len(messages) < count:
            assert time.monotonic() < end_s, f"only {messages} came"
            messages += self.engine.receive(0.1)[0]
        return messages

    def close(self) -> None:
        for front in self.fronts:
            front.close()
        self.engine.close(0)


def with_both(test: Any, folder: Path, fronts: int = 1) -> None:
    async def work() -> None:
        both = Both(folder, fronts)
        try:
            await asyncio.wait_for(test(both), 2 * SOON_S)
        finally:
            both.close()

    asyncio.run(work())


def test_front_ends_say_hello_and_messages_keep_their_order(tmp_path: Path):
    async def test(both: Both):
        assert sorted(both.receive(2), key=lambda one: one[0]) == [(1, Hello()), (2, Hello())]
        assert both.engine.connected == {1, 2}
        for key in range(100):
            both.fronts[key % 2].send(Abort(key))
        came = both.receive(100)
        for front in (1, 2):
            keys = [message.key for sender, message in came if sender == front]
            assert keys == list(range(front - 1, 100, 2))

    with_both(test, tmp_path, fronts=2)


def test_sender_never_waits_and_nothing_is_lost(tmp_path: Path):
    """30,000 messages with nobody reading, more than any default limit of ZeroMQ's; both ends are
    in this thread, so that a sender that waited would wait for ever."""

    async def test(both: Both):
        both.receive(1)
        for number in range(30_000):
            both.engine.send(1, StepNews(keys=[number]))
        assert both.engine.backlog(1) == 30_000
        await until(lambda: len(both.came[0]) == 30_000)
        assert [news.keys[0] for news in both.came[0]] == list(range(30_000))

        def taken() -> bool:
            both.engine.receive(0)
            return both.engine.backlog(1) <= 256

        await until(taken)

    with_both(test, tmp_path)


def test_other_work_has_its_turn_while_messages_pour_in(tmp_path: Path):
    async def test(both: Both):
        both.receive(1)
        for number in range(5_000):
            both.engine.send(1, StepNews(keys=[number]))
        time.sleep(0.2)  # all have arrived
        turns = 0
        while len(both.came[0]) < 5_000:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 5_000 // 64

    with_both(test, tmp_path)


def test_message_that_arrives_while_sending_is_seen(tmp_path: Path):
    """The descriptor of a ZeroMQ socket tells of changes alone: each message is answered, and an
    answer that was overlooked would be the last."""

    async def test(both: Both):
        both.receive(1)
        for number in range(300):
            both.fronts[0].send(Watch(True))
            both.receive(1)
            both.engine.send(1, StepNews(keys=[number]))
            both.fronts[0].send(Watch(False))
            both.receive(1)
            await until(lambda number=number: len(both.came[0]) == number + 1)

    with_both(test, tmp_path)


def test_idle_count_is_acknowledged_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("plugins.server.channel.time", clock)

    async def test(both: Both):
        nonlocal now_s
        both.receive(1)
        for number, moment_s in enumerate((0.1, 0.19, 0.25)):  # the third is due
            now_s = moment_s
            assert both.engine.backlog(1) == number
            both.engine.send(1, StepNews(keys=[number]))
            await until(lambda number=number: len(both.came[0]) == number + 1)

        def acknowledged() -> bool:
            both.engine.receive(0)
            return both.engine.backlog(1) == 0

        await until(acknowledged)

    with_both(test, tmp_path)


def test_send_to_one_that_is_unknown_or_forgotten_is_dropped(tmp_path: Path):
    async def test(both: Both):
        both.receive(1)
        both.engine.send(7, Goodbye("nobody"))
        both.engine.forget(1)
        both.engine.send(1, Goodbye("forgotten"))
        assert both.engine.connected == set()
        both.fronts[0].send(Hello())
        both.receive(1)
        both.engine.send(1, StepNews(keys=[5]))  # would come behind the others
        await until(lambda: bool(both.came[0]))
        assert [news.keys for news in both.came[0]] == [[5]]

    with_both(test, tmp_path)


def test_watched_descriptor_ends_the_wait(tmp_path: Path):
    async def test(both: Both):
        both.receive(1)
        read_end, write_end = os.pipe()
        both.engine.watch(read_end)
        os.write(write_end, b"x")
        assert both.engine.receive(SOON_S) == ([], {read_end})
        both.engine.unwatch(read_end)
        assert both.engine.receive(0.05) == ([], set())
        os.close(read_end)
        os.close(write_end)

    with_both(test, tmp_path)


def test_goodbye_sent_just_before_closing_arrives(tmp_path: Path):
    async def test(both: Both):
        both.receive(1)
        both.engine.send(1, Goodbye("done"))
        both.engine.close()
        await until(lambda: both.came[0] == [Goodbye("done")])

    async def work() -> None:
        both = Both(tmp_path)
        await test(both)
        both.fronts[0].close()

    asyncio.run(work())


def test_step_facts_are_values_that_json_takes():
    import json

    import numpy as np

    from core.records import Choice

    record = StepRecord(3, 0.5, rows=[("a", 0, 1)], attention={"plan": np.arange(2)})
    record.choices.append(
        Choice("a", 0, "admitted", "fcfs", "first", {"cached_tokens": np.int32(4)})
    )
    facts = json.loads(json.dumps(step_facts(record), allow_nan=False))
    assert facts["step"] == 3
    assert facts["rows"] == [["a", 0, 1]]
    assert facts["attention"] == {"plan": [0, 1]}
    assert facts["choices"][0]["detail"] == {"cached_tokens": 4}


@pytest.mark.parametrize("front", [1, 2**22])
def test_process_ids_survive_the_way(tmp_path: Path, front: int):
    async def work() -> None:
        engine = EngineEnd(f"ipc://{tmp_path}/c")
        end = FrontEnd(f"ipc://{tmp_path}/c", lambda message: None, front)
        try:
            messages, _ = engine.receive(SOON_S)
            assert messages == [(front, Hello())]
        finally:
            end.close()
            engine.close(0)

    asyncio.run(work())
