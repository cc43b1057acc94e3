"""When front ends that died are replaced."""

from plugins.server.restarts import Restarts


def test_those_that_die_young_are_replaced_later_each_time_until_there_is_no_hope():
    restarts = Restarts()
    waits = [restarts.died(2.0, 100.0) for _ in range(4)]
    assert waits == [0.5, 1.0, 2.0, 4.0]
    assert not restarts.hopeless
    assert restarts.died(2.0, 100.0) == 8.0
    assert restarts.hopeless
    assert [restarts.died(2.0, 100.0) for _ in range(3)] == [16.0, 30.0, 30.0]


def test_one_that_lived_long_is_replaced_soon_again():
    restarts = Restarts()
    for _ in range(5):
        restarts.died(2.0, 0.0)
    assert restarts.died(60.0, 0.0) == 0.5
    assert not restarts.hopeless


def test_each_is_due_once_when_its_time_has_come():
    restarts = Restarts()
    for _ in range(3):  # due at 10.5, 11 and 12
        restarts.died(1.0, 10.0)
    assert [restarts.due(now_s) for now_s in (10.4, 10.5, 10.6, 12.5, 99.0)] == [0, 1, 0, 2, 0]
