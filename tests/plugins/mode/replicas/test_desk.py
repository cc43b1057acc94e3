"""What a replica's server does with orders, whichever way they come."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from core.queries import StepEvent
from core.records import ChoiceRecord, RequestRecord, StepRecord
from plugins.mode.replicas.desk import Desk
from plugins.mode.replicas.devices import DeviceWatch
from plugins.mode.replicas.messages import Ask, Drop, Orders
from plugins.shared.replica_report import Reporter
from tests.patience import SOON_S
from tests.plugins.mode.replicas.step_fleet import ask, make


@pytest.fixture
def desk():
    return Desk(make(), Reporter("0"), DeviceWatch(None))


def orders(*items, sent_s=0.0):
    return Orders(sent_s, list(items))


def test_batches_that_come_out_of_turn_are_read_in_turn(desk):
    asks = [Ask(index, index, ask(f"r{index}")) for index in range(3)]
    desk.take(2, orders(asks[2], Drop(1)))
    desk.take(1, orders(asks[1]))
    assert list(desk.poll(0.0)) == []
    desk.take(0, orders(asks[0]))
    names = [item if isinstance(item, str) else item.request_id for item in desk.poll(0.0)]
    assert names == ["r0", "r1", "r2", "r1"]


def test_a_batch_that_comes_twice_is_read_once(desk):
    batch = orders(Ask(0, 1, ask("a")))
    for _ in range(2):
        desk.take(0, batch)
    assert [item.request_id for item in desk.poll(0.0)] == ["a"]
    assert not desk._early


def test_times_move_by_the_same_amount_for_a_whole_batch(desk):
    first = dataclasses.replace(ask("a"), arrival_s=1000.0, deadline_s=1005.0)
    second = dataclasses.replace(ask("b"), arrival_s=1000.0 + 1e-6)
    desk.take(0, orders(Ask(0, 1, first), Ask(1, 2, second), sent_s=1002.0))
    before_s = time.perf_counter()
    one, two = desk.poll(0.0)
    assert before_s - 2.0 <= one.arrival_s <= time.perf_counter() - 2.0
    assert one.deadline_s - one.arrival_s == pytest.approx(5.0)
    assert two.arrival_s - one.arrival_s == pytest.approx(1e-6, rel=0.01)
    assert two.deadline_s is None


def test_an_order_to_drop_what_is_not_there_is_ignored(desk):
    desk.take(0, orders(Drop(7)))
    assert list(desk.poll(0.0)) == []


def test_a_refusal_is_news_under_the_key_of_the_request(desk):
    desk.take(0, orders(Ask(5, 1, ask("a"))))
    desk.poll(0.0)
    desk.refuse("a", "too long")
    (news,) = next(desk.news())
    (end,) = news.ended
    assert (end.key, end.finish_reason, end.error) == (5, "error", "too long")


def test_news_of_a_choice_have_its_key_and_how_it_ended(desk):
    desk.take(0, orders(Ask(5, 1, ask("a", n=2)), Ask(7, 2, ask("b"))))
    desk.poll(0.0)
    done = ChoiceRecord(finish_reason="stop")
    records = {
        "a": RequestRecord("a", "", 0.0, 3, choices=[ChoiceRecord(), done]),
        "b": RequestRecord("b", "", 0.0, 3, choices=[ChoiceRecord()]),
    }
    rows = [("b", 0), ("a", 0), ("a", 1)]
    event = StepEvent(StepRecord(1, 0.0), rows, np.array([1, 2, 3], np.int32))
    desk.publish(event, records)
    (news,) = next(desk.news())
    assert (news.keys, news.tokens) == ([7, 5, 6], [1, 2, 3])
    assert news.finish_reasons == {2: "stop"}
    assert news.ended == []


def test_reports_are_numbered_and_say_what_had_arrived(desk):
    desk.report({"waiting": 0})
    desk.take(0, orders(Ask(0, 4, ask("a")), Ask(1, 3, ask("b"))))
    desk.poll(0.0)
    desk.report({"waiting": 0})
    snapshots = [news.snapshot for news in next(desk.news())]
    assert [(one.number, one.received) for one in snapshots] == [(1, 0), (2, 4)]


def test_a_stop_wakes_the_engine_and_ends_the_news(desk):
    polled = threading.Event()

    def wait() -> None:
        desk.poll(SOON_S)
        polled.set()

    thread = threading.Thread(target=wait)
    thread.start()
    desk.stop()
    assert polled.wait(SOON_S / 2)
    thread.join()
    assert desk.draining
    desk.close()
    assert list(desk.news()) == []


def test_the_last_news_of_an_engine_that_broke_is_why(desk):
    desk.fail("RuntimeError: no")
    (batch,) = list(desk.news())
    assert [news.fault for news in batch] == ["RuntimeError: no"]
