"""A request goes on where its replica dies: no token lost, repeated or changed."""

import numpy as np
import pytest

from core.hookspecs import hookimpl
from plugins.mode.replicas.streams import MOST_BLAMES
from plugins.shared.routing import ReplicaState, RouteDecision
from plugins.shared.server_protocol import Steer
from tests.plugins.mode.replicas.step_fleet import DEAD_S, SUSPECT_S, Poison, Rig, ask


def several(num, **params):
    return [ask(f"r{index}", tokens=20 + index, **params) for index in range(num)]


def test_requests_are_spread_and_served():
    rig, requests = Rig(), several(6)
    rig.send(*requests)
    assert {rig.place_of(request.request_id) for request in requests} == {"0", "1"}
    rig.finish()
    rig.check(*requests)
    assert rig.traffic.failovers == 0


@pytest.mark.parametrize("after", [0, 1, 2, 3, 7, 15])
@pytest.mark.parametrize("n", [1, 3])
def test_streams_of_a_replica_that_dies_are_those_of_an_undisturbed_run(after, n):
    rig, requests = Rig(), several(6, n=n)
    rig.send(*requests)
    rig.tick(after)
    rig.fleet.kill("0")
    rig.finish()
    rig.check(*requests)
    assert rig.traffic.failovers == 3


def test_streams_outlive_a_death_every_few_steps():
    rig, requests = Rig(replicas=3), [ask(f"r{index}", tokens=60, n=2) for index in range(9)]
    rig.send(*requests)
    for death in range(12):
        name = str(death % 3)
        rig.fleet.kill(name)
        rig.tick(3)
        rig.fleet.start(name)
        rig.tick(3)
    rig.finish()
    rig.check(*requests)
    assert rig.traffic.failovers > 20
    assert rig.loop.births == {"0": 5, "1": 5, "2": 5}


def test_choices_that_ended_before_do_not_run_again():
    rig = Rig(end_token_ids=tuple(range(1, 60)))
    request = ask("A", tokens=200, n=4, ignore_eos=False)
    rig.send(request)
    rig.tick(12)
    record = rig.traffic.streams["A"].record
    ended = [choice for choice in record.choices if choice.finish_reason]
    assert 0 < len(ended) < 4, "some have ended, and some have not"
    rig.fleet.kill(rig.place_of("A"))
    rig.finish()
    reasons = [choice.finish_reason for choice in rig.client.ended["A"].choices]
    for choice, reason in enumerate(reasons):
        stream = rig.whole(request, choice)
        length = next((i + 1 for i, token in enumerate(stream) if 1 <= token < 60), 200)
        assert rig.client.tokens["A", choice] == stream[:length]
        assert reason == ("stop" if length < 200 else "length")


def test_log_probabilities_come_with_each_token_and_those_of_the_prompt_at_the_end():
    rig, request = Rig(), ask("A", logprobs=2, prompt_logprobs=1)
    rig.send(request)
    rig.tick(8)
    rig.fleet.kill(rig.place_of("A"))
    rig.finish()
    rig.check(request)
    tops = [entry.top_ids[0] for entry in rig.client.logprobs["A", 0]]
    assert tops == rig.client.tokens["A", 0]
    assert len(rig.client.ended["A"].prompt_logprobs) == len(request.prompt) - 1


def test_what_a_replica_says_after_it_was_given_up_is_dropped():
    rig, request = Rig(), ask("A")
    rig.send(request)
    rig.tick(3)
    name = rig.place_of("A")
    one = rig.fleet.alive[name]
    one.silent = True
    rig.tick(round(DEAD_S / 0.1) + 2)
    assert rig.fleet.restarted == [name]
    assert rig.place_of("A") != name
    one.silent = False
    rig.fleet.alive[name] = one  # it wakes up, and goes on with its own copy
    rig.finish()
    rig.check(request)


def test_a_silent_replica_gets_nothing_more_and_holds_up_nobody():
    """R16: it accepts everything and answers nothing."""
    rig = Rig()
    rig.fleet.alive["0"].silent = True
    rig.tick(round(SUSPECT_S / 0.1) + 2)
    assert rig.registry.state("0", rig.now_s) is ReplicaState.suspect
    requests = several(4)
    rig.send(*requests)
    assert {rig.place_of(request.request_id) for request in requests} == {"1"}
    rig.fleet.alive["0"].silent = False
    rig.tick(2)
    assert rig.registry.state("0", rig.now_s) is ReplicaState.ready
    rig.finish()
    rig.check(*requests)
    assert rig.fleet.restarted == []


def test_without_a_replica_requests_wait_and_clients_are_told():
    """R01: all die; new ones bring everything back."""
    rig, requests = Rig(), several(4)
    rig.send(*requests)
    rig.tick(5)
    for name in ("0", "1"):
        rig.fleet.kill(name)
    rig.tick(2)
    assert [rig.place_of(request.request_id) for request in requests] == [None] * 4
    report = rig.client.reports[-1]
    assert not report["ready"]
    assert report["reason"] == "no replica is ready: 0 is dead, 1 is dead"
    assert report["retry_after_s"] >= 1
    assert report["waiting"] == 4
    rig.fleet.start("1")
    rig.finish()
    rig.check(*requests)
    assert rig.client.reports[-1]["ready"]


def test_no_request_goes_to_a_replica_before_its_first_report():
    """R04: it is there, and its engine is not."""
    rig = Rig(replicas=1)
    rig.fleet.kill("0")
    rig.tick()
    rig.fleet.start("0").silent = True
    rig.tick()
    assert rig.registry.state("0", rig.now_s) is ReplicaState.joining
    request = ask("A")
    rig.send(request)
    rig.tick(3)
    assert rig.place_of("A") is None
    assert not rig.client.reports[-1]["ready"]
    rig.fleet.alive["0"].silent = False
    rig.finish()
    rig.check(request)


def test_counts_return_to_zero_after_aborts_refusals_and_deaths():
    """R12."""
    rig = Rig()
    requests = [ask(f"a{index}", tokens=100) for index in range(20)]
    too_long = [ask(f"b{index}", prompt_tokens=1024, tokens=1024) for index in range(20)]
    rig.send(*requests, *too_long)
    rig.tick(4)
    rig.client.items += [request.request_id for request in requests[:10]]
    rig.fleet.kill("1")
    rig.tick()
    rig.client.items += [request.request_id for request in requests[10:]]
    rig.finish()  # checks every ticket
    assert rig.registry.num_open("0") == 0
    assert rig.registry.table(rig.now_s).requests.tolist() == [0]
    assert rig.traffic.finished["capacity"] == 20
    assert rig.traffic.finished["abort"] == 20


def test_a_replica_that_leaves_and_comes_back_while_its_requests_run():
    """R14: ends of the old incarnation do not count in the new one."""
    rig, requests = Rig(replicas=2), several(8)
    rig.send(*requests)
    rig.tick(4)
    rig.fleet.kill("0")
    rig.fleet.start("0")
    rig.tick()
    assert rig.registry.num_open("0") + rig.registry.num_open("1") == 8
    rig.finish()
    rig.check(*requests)
    assert [rig.registry.num_open(name) for name in ("0", "1")] == [0, 0]


def test_draining_a_replica_moves_nothing_and_loses_nothing():
    rig, requests = Rig(), several(4)
    rig.send(*requests)
    placed = {request.request_id: rig.place_of(request.request_id) for request in requests}
    rig.client.items.append(Steer("0", True))
    rig.tick()
    later = [ask(f"later{index}") for index in range(3)]
    rig.send(*later)
    assert {rig.place_of(request.request_id) for request in later} == {"1"}
    assert {name: rig.place_of(name) for name in placed} == placed
    rig.finish()
    rig.check(*requests, *later)
    assert rig.traffic.failovers == 0
    rig.client.items.append(Steer("0", False))
    rig.tick()
    again = [ask(f"again{index}") for index in range(2)]
    rig.send(*again)
    assert {rig.place_of(request.request_id) for request in again} == {"0", "1"}
    rig.finish()


def test_an_abort_of_a_request_without_a_replica_ends_it():
    rig = Rig(replicas=1)
    rig.fleet.kill("0")
    rig.tick()
    rig.send(ask("A"))
    rig.client.items.append("A")
    rig.tick()
    assert "aborted" in rig.client.refused["A"]
    assert not rig.traffic.streams


def test_an_aborted_request_does_not_go_on_elsewhere():
    rig = Rig()
    rig.send(ask("A", tokens=100))
    rig.tick(3)
    name = rig.place_of("A")
    rig.client.items.append("A")
    rig.fleet.kill(name)
    rig.tick()
    assert "aborted" in rig.client.refused["A"]
    rig.finish()


class Homesick:
    """A policy that fails for one request."""

    @hookimpl
    def decide_route(self, query):
        if query.request.request_id == "bad":
            raise ValueError("no idea")


def test_a_policy_that_fails_for_one_request_fails_that_one_alone():
    rig, request = Rig(policy=Homesick()), ask("bad")
    rig.send(request)
    assert "no idea" in rig.client.refused["bad"]
    assert not rig.traffic.streams


def test_seeds_are_settled_by_the_first_that_sees_the_request():
    """Whatever replicas believe their run's seed to be."""
    rig, request = Rig(seed=99), ask("A")
    rig.send(request)
    rig.tick(5)
    rig.fleet.kill(rig.place_of("A"))
    rig.finish()
    rig.check(request)


def test_a_request_that_breaks_every_replica_is_refused_after_it_ran_alone():
    poison = Poison(prompt_tokens=13)
    rig = Rig(replicas=3, plugins={"poison": poison})
    good = several(6)
    rig.send(*good, ask("bad", prompt_tokens=13))
    for _ in range(60):
        rig.tick()
        for name in set(rig.fleet.names) - set(rig.fleet.alive):
            rig.fleet.start(name)
    rig.finish()
    assert "ran alone: broke: poison" in rig.client.refused["bad"]
    assert len(poison.met) == MOST_BLAMES + 1
    assert poison.met[-1] == 1, "nobody was beside it the last time"
    rig.check(*good)


def test_one_that_breaks_replicas_in_the_middle_gets_no_more_chances():
    poison = Poison(prompt_tokens=13, at=7)
    rig = Rig(replicas=2, plugins={"poison": poison})
    rig.send(ask("bad", prompt_tokens=13))
    for _ in range(80):
        rig.tick()
        for name in set(rig.fleet.names) - set(rig.fleet.alive):
            rig.fleet.start(name)
    rig.finish()
    assert "bad" in rig.client.refused
    # The first time it had tokens to show; then twice none; then alone.
    assert len(poison.met) == 1 + MOST_BLAMES + 1
    got = rig.client.tokens["bad", 0]
    assert got == rig.whole(ask("bad", prompt_tokens=13))[: len(got)]


def test_a_bystander_of_many_deaths_is_served():
    """Blamed each time, as it waits behind others and gets no token; alone, it runs."""
    rig = Rig(replicas=1, seqs=1)
    first, second = ask("first", tokens=300), ask("second")
    rig.send(first, second)
    for _ in range(MOST_BLAMES):
        rig.tick(3)
        rig.fleet.kill("0")
        rig.fleet.start("0")
        rig.tick()
    assert rig.traffic.streams["second"].blames == MOST_BLAMES
    rig.finish()
    rig.check(first, second)


def test_a_report_tells_sums_and_workers():
    rig, requests = Rig(pages=64), several(4)
    rig.send(*requests)
    rig.tick(4)
    report = rig.client.reports[-1]
    assert report["slots"] == 16
    assert report["pool"]["total"] == 128
    assert report["pool"]["page_size"] == 16
    assert report["running"] == 4
    assert [line["id"] for line in report["workers"]] == ["0", "1"]
    assert [line["requests"] for line in report["workers"]] == [2, 2]
    assert report["workers"][0]["report"]["running"] == 2
    assert report["workers"][0]["device"]["temperature_c"] is None
    before = rig.client.reports[-1]["totals"]["sampled_tokens"]
    rig.fleet.kill("0")
    rig.tick()
    report = rig.client.reports[-1]
    assert report["totals"]["sampled_tokens"] >= before, "totals never fall"
    assert report["totals"]["failovers"] == 2
    assert report["workers"][0]["state"] == "dead"
    rig.finish()
    totals = rig.client.reports[-1]["totals"]
    assert totals["finished_length"] == 4
    assert totals["sampled_tokens"] >= sum(request.params.max_tokens for request in requests)


def test_work_without_progress_is_told_and_a_long_prompt_is_progress():
    rig = Rig(replicas=1, budget=16)
    rig.send(ask("A", prompt_tokens=400))
    for _ in range(20):
        rig.tick()
        assert rig.client.reports[-1]["idle_s"] <= 0.3, "each step computes a part of it"
    assert ("A", 0) not in rig.client.tokens
    rig.fleet.alive["0"].silent = True
    rig.tick(10)
    assert rig.client.reports[-1]["idle_s"] == pytest.approx(1.0, abs=0.3)
    rig.fleet.alive["0"].silent = False
    rig.finish()
    assert rig.client.reports[-1]["idle_s"] == 0.0


def test_the_record_of_a_request_is_one_timeline():
    rig, request = Rig(), ask("A", n=2)
    rig.send(request)
    rig.tick(6)
    rig.fleet.kill(rig.place_of("A"))
    rig.finish()
    record = rig.client.ended["A"]
    for choice in range(2):
        entry = record.choices[choice]
        assert list(entry.token_ids) == rig.whole(request, choice)
        assert len(entry.times_s) == len(entry.steps) == 30
        assert np.all(np.diff(entry.times_s) >= 0)
    assert record.finished_s is not None
    assert record.cached_tokens <= record.prompt_tokens


def test_a_suspect_that_is_aborted_ends_and_keeps_nobody_out():
    rig = Rig(replicas=1)
    rig.send(ask("bad"))
    for _ in range(MOST_BLAMES):
        if "0" not in rig.fleet.alive:
            rig.fleet.start("0")
            rig.tick(2)
        rig.fleet.kill("0")
        rig.loop.turn()
    assert list(rig.traffic._cell.suspects) == [rig.traffic.streams["bad"]]
    rig.client.items.append("bad")
    rig.tick()
    assert "aborted" in rig.client.refused["bad"]
    rig.fleet.start("0")
    good = ask("good")
    rig.send(good)
    rig.finish()
    rig.check(good)
    assert rig.traffic._cell.replica is None


def test_a_cell_moves_on_when_its_replica_is_drained():
    rig = Rig(replicas=2, seqs=4)
    long = [ask(f"long{index}", tokens=200) for index in range(2)]
    rig.send(*long)
    rig.tick(4)
    stream = rig.traffic.streams["long0"]
    stream.blames, stream.blamed_at = MOST_BLAMES, 10**6  # as if it had killed its replicas
    name = rig.place_of("long0")
    rig.fleet.kill(name)
    rig.fleet.start(name)
    rig.tick()
    kept = rig.traffic._cell.replica
    assert kept is not None
    rig.client.items.append(Steer(kept, True))
    rig.finish()
    rig.check(*long)


class Picky:
    """A policy that fails for a request from its second time on."""

    def __init__(self):
        self.seen = 0

    @hookimpl
    def decide_route(self, query):
        bad = query.request.request_id == "bad"
        self.seen += bad
        if bad and self.seen > MOST_BLAMES:
            raise ValueError("no idea")
        return RouteDecision(query.replicas.ids[0])


def test_a_policy_that_fails_for_a_suspect_ends_that_one_alone():
    rig = Rig(replicas=1, policy=Picky(), plugins={"poison": Poison(prompt_tokens=13)})
    rig.send(ask("bad", prompt_tokens=13))
    for _ in range(30):
        rig.tick()
        if "0" not in rig.fleet.alive:
            rig.fleet.start("0")
    good = ask("good")
    rig.send(good)
    rig.finish()
    assert "no idea" in rig.client.refused["bad"]
    rig.check(good)


def test_an_id_in_use_is_refused_and_the_first_goes_on():
    rig, request = Rig(), ask("A")
    rig.send(request)
    rig.tick(2)
    rig.traffic.submit(ask("A"))
    assert "still in use" in rig.client.refused.pop("A")
    rig.finish()
    rig.check(request)
