"""The registry: states, numbered snapshots, tickets that are counted once and given back once."""

import threading

import pytest

from core.errors import ConfigError
from plugins.shared.replica_registry import Registry
from plugins.shared.routing import DeviceFacts, ReplicaState
from tests.plugins.router.route_tables import snapshot


def joined(*replicas, now_s=0.0, **silence):
    registry = Registry(**silence)
    numbers = [registry.join(one, now_s) for one in replicas]
    for one, number in zip(replicas, numbers, strict=True):
        registry.report(number, snapshot(one), now_s)
    return registry, numbers


def states(registry, now_s):
    return {one.replica: state.value for one, state in registry.listed(now_s)}


def test_nobody_is_ready_before_the_first_report():
    """R04: a port that is open and a beat are not readiness."""
    registry = Registry()
    number = registry.join("a", 0.0)
    assert registry.heartbeat(number, 0.5)
    assert registry.state("a", 0.5) is ReplicaState.joining
    assert registry.table(0.5).ids == ()
    registry.report(number, snapshot("a"), 1.0)
    assert registry.state("a", 1.0) is ReplicaState.ready
    assert registry.table(1.0).ids == ("a",)


def test_silence_makes_suspect_then_dead_and_a_beat_makes_ready_again():
    registry, (number,) = joined("a", suspect_after_s=3.0, dead_after_s=10.0)
    assert registry.state("a", 3.0) is ReplicaState.ready
    assert registry.state("a", 3.1) is ReplicaState.suspect
    assert registry.table(3.1).ids == ()
    assert registry.heartbeat(number, 4.0)
    assert registry.state("a", 7.0) is ReplicaState.ready
    assert registry.expire(14.0) == []
    registry.expire(14.1)
    assert registry.state("a", 14.1) is ReplicaState.dead
    assert not registry.heartbeat(number, 14.2), "the dead do not come back but by joining"
    assert not registry.report(number, snapshot("a", 2), 14.2)
    again = registry.join("a", 15.0)
    assert registry.state("a", 15.0) is ReplicaState.joining
    assert registry.report(again, snapshot("a"), 15.0)
    assert registry.table(15.0).ids == ("a",)


def test_draining_takes_nothing_new_and_keeps_what_it_has():
    registry, _ = joined("a", "b")
    ticket = registry.write("a", "r", 0.0, 3, 40, 0)
    assert registry.drain("a")
    assert states(registry, 0.0) == {"a": "draining", "b": "ready"}
    assert registry.table(0.0).ids == ("b",)
    assert registry.num_open("a") == 1
    assert registry.close(ticket)
    assert registry.drain("a", draining=False)
    assert registry.table(0.0).ids == ("a", "b")


def test_older_and_repeated_snapshots_are_dropped():
    registry, (number,) = joined("a")
    assert registry.report(number, snapshot("a", 3, pages_free=50), 1.0)
    assert not registry.report(number, snapshot("a", 2, pages_free=90), 1.1)
    assert not registry.report(number, snapshot("a", 3, pages_free=90), 1.2)
    assert registry.table(2.0).pages_free.tolist() == [50]
    assert registry.table(2.0).age_s.tolist() == [1.0]


def test_stale_figures_are_corrected_by_what_was_sent_since():
    """Report 2 knows of the first of three tickets; its own figures stand for that one."""
    registry, (number,) = joined("a")
    first = registry.write("a", "r1", 0.0, 3, 40, 0)
    second = registry.write("a", "r2", 0.0, 5, 60, 16)
    registry.write("a", "r3", 0.0, 7, 100, 0)
    row = registry.table(0.0)
    assert (row.requests[0], row.pages_promised[0], row.prompt_tokens[0]) == (3, 15, 200)
    assert row.kv_tokens[0] == 216, "cached tokens are context, too"
    facts = {"pages_promised": 2, "prompt_tokens": 30, "kv_tokens": 10, "running": 1}
    registry.report(number, snapshot("a", 2, received=first.number, **facts), 0.1)
    row = registry.table(0.1)
    assert (row.requests[0], row.pages_promised[0], row.prompt_tokens[0]) == (3, 14, 190)
    registry.close(second)
    row = registry.table(0.1)
    assert (row.requests[0], row.pages_promised[0], row.prompt_tokens[0]) == (2, 9, 130)
    registry.close(first)
    row = registry.table(0.1)
    assert (row.requests[0], row.pages_promised[0]) == (1, 9), "the report's figures stand"


def test_requests_that_came_another_way_count_as_load():
    registry, (number,) = joined("a")
    registry.report(number, snapshot("a", 2, running=5, foreign=3), 0.0)
    registry.write("a", "r", 0.0, 1, 16, 0)
    assert registry.table(0.0).requests.tolist() == [4]


def test_counters_are_back_at_zero_after_aborts_and_refusals():
    """R12, in the registry: whatever became of a request, its ticket is closed once."""
    registry, _ = joined("a", "b")
    before = registry.table(0.0)
    tickets = [registry.write("ab"[i % 2], f"r{i}", 0.0, 2, 30, 0) for i in range(200)]
    assert registry.table(0.0).requests.tolist() == [100, 100]
    assert all(registry.close(ticket) for ticket in tickets)
    assert not any(registry.close(ticket) for ticket in tickets), "closing twice changes nothing"
    after = registry.table(0.0)
    for name in ("requests", "pages_promised", "prompt_tokens", "kv_tokens"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist() == [0, 0]


def test_old_completion_hits_the_old_incarnation_alone():
    """R14: a leaves and joins again while a request of it runs."""
    registry, (old,) = joined("a")
    running = registry.write("a", "r1", 0.0, 2, 30, 0)
    assert registry.fail(old, "deregistered") == [running]
    new = registry.join("a", 2.0)
    registry.report(new, snapshot("a"), 2.0)
    later = registry.write("a", "r2", 2.0, 4, 50, 0)
    assert registry.close(running)
    assert registry.table(2.0).requests.tolist() == [1]
    assert registry.table(2.0).pages_promised.tolist() == [4]
    assert not registry.report(old, snapshot("a", 9, pages_free=1), 2.1), "nor do old reports"
    assert registry.close(later)
    assert registry.table(2.0).requests.tolist() == [0]


def test_joining_again_without_leaving_buries_the_first():
    registry, (old,) = joined("a")
    registry.write("a", "r1", 0.0, 2, 30, 0)
    registry.join("a", 1.0)
    assert registry.num_open("a") == 0
    assert not registry.heartbeat(old, 1.0)


def test_one_that_joins_and_says_nothing_holds_up_nobody():
    """R16: joining waits for no probe."""
    registry = Registry()
    registry.join("black hole", 0.0)
    number = registry.join("good", 0.0)
    registry.report(number, snapshot("good"), 0.0)
    assert registry.table(0.0).ids == ("good",)
    registry.write("good", "r", 0.0, 1, 16, 0)
    assert states(registry, 20.0) == {"black hole": "suspect", "good": "suspect"}


def test_the_dead_are_known_to_have_left_their_requests_undone():
    registry, (a, b) = joined("a", "b", suspect_after_s=1.0, dead_after_s=2.0)
    left = [registry.write("a", f"r{i}", 0.0, 1, 16, 0) for i in range(3)]
    registry.heartbeat(b, 3.0)
    assert registry.expire(3.0) == left
    assert registry.expire(3.0) == [], "told once"
    with pytest.raises(KeyError):
        registry.write("a", "r", 3.0, 1, 16, 0)
    registry.forget("a")
    assert list(states(registry, 3.0)) == ["b"]
    assert registry.fail(b, "its process ended") == []
    assert states(registry, 3.0) == {"b": "dead"}
    assert a != b


def test_absent_device_facts_are_unknown_and_never_zero():
    registry, (number,) = joined("a")
    row = registry.table(0.0)
    for name in ("step_s", "temperature_c", "memory_share", "utilisation"):
        assert getattr(row, name)[0] != getattr(row, name)[0], f"{name} is NaN"
    device = DeviceFacts(temperature_c=61.0, memory_used_bytes=30, memory_bytes=40)
    registry.report(number, snapshot("a", 2, step_s=0.01, device=device), 0.0)
    row = registry.table(0.0)
    assert (row.temperature_c[0], row.memory_share[0], row.step_s[0]) == (61.0, 0.75, 0.01)


def test_a_table_is_read_only_and_stays_as_it_was():
    registry, _ = joined("a")
    row = registry.table(0.0)
    registry.write("a", "r", 0.0, 1, 16, 0)
    assert row.requests.tolist() == [0]
    with pytest.raises(ValueError, match="read-only"):
        row.requests[0] = 1
    with pytest.raises(AttributeError, match="no fact 'load'; there are ids, requests"):
        _ = row.load


def test_threads_leave_the_books_in_balance():
    registry, _ = joined(*"abcd")

    def work(name):
        for number in range(200):
            ticket = registry.write(name, f"{name}{number}", 0.0, 1, 16, 0)
            registry.table(0.0)
            registry.close(ticket)

    threads = [threading.Thread(target=work, args=("abcd"[i % 4],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.table(0.0).requests.tolist() == [0, 0, 0, 0]
    assert registry.table(0.0).pages_promised.tolist() == [0, 0, 0, 0]


def test_bad_silence_is_refused():
    with pytest.raises(ConfigError, match=r"router\.suspect_after_s must be > 0, got 0"):
        Registry(suspect_after_s=0)
    with pytest.raises(ConfigError, match=r"router\.dead_after_s must be >= suspect_after_s = 3"):
        Registry(suspect_after_s=3, dead_after_s=2)
