"""Requests that wait for others' ends, and steps that go in one: nobody comes too late."""

from dataclasses import replace

import numpy as np
import pytest

from core.request import Request, SamplingParams
from plugins.admission.prompt_fits import PromptFits
from plugins.mode.pending import Pending
from plugins.order.priority import Priority
from plugins.preemption.priority import PreemptLowestPriority
from tests.core.test_joined_steps import make, told

TURNS = 4


class Dialogues:
    """Each question comes `think_s` after the answer before it."""

    def __init__(self, seed, num, think_s, urgent=False):
        self.seed, self.num, self.think_s, self.urgent = seed, num, think_s, urgent

    def ask(self, number, turn, arrival_s):
        rng = np.random.default_rng([self.seed, number, turn])
        prompt = rng.integers(1, 500, int(rng.integers(5, 120))).astype(np.int32)
        request = Request(
            f"{number}-{turn}",
            prompt,
            SamplingParams(max_tokens=200),
            arrival_s=arrival_s,
            forced_output=int(rng.integers(1, 90)),
        )
        return replace(request, priority=(number + turn) % 4) if self.urgent else request

    def follow_up(self, record):
        number, turn = map(int, record.request_id.split("-"))
        if turn + 1 == TURNS:
            return []
        return [self.ask(number, turn + 1, record.finished_s + self.think_s)]


def play(engine, dialogues, joins):
    """As mode bench does; all events."""
    pending = Pending([dialogues.ask(number, 0, 0.0) for number in range(dialogues.num)])
    events = []
    while pending or engine.has_work:
        while pending.next_s <= engine.clock.now():
            engine.submit(pending.pop())
        event = engine.step(pending.next_s if joins and not engine.ending else 0.0)
        if event is not None:
            events.append(event)
            for record in event.finished:
                for request in dialogues.follow_up(record):
                    pending.add(request, record.finished_s)
        if pending and (engine.stalled or not engine.has_work):
            engine.clock.wait_until(pending.next_s)
    return events


def assert_same(make_one, dialogues):
    apart, joined = make_one(), make_one()
    single, several = play(apart, dialogues, False), play(joined, dialogues, True)
    assert len(several) < len(single), "no step went with another"
    assert told(apart, single) == told(joined, several)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("think_s", [0.0, 0.05])
def test_follow_ups_start_when_they_would_if_steps_went_alone(overlap, think_s):
    assert_same(lambda: make(overlap=overlap), Dialogues(1, 6, think_s))


def test_follow_up_may_displace_who_has_tokens_in_flight():
    def one():
        plugins = {"urgent": Priority(), "victims": PreemptLowestPriority()}
        admission = PromptFits(growth_share=0)
        return make(plugins, overlap=True, pages=21, seqs=5, admission=admission)

    assert_same(one, Dialogues(11, 5, 0.0, urgent=True))
