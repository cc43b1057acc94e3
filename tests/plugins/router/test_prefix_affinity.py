"""prefix_affinity: home where the prefix is, each home bounded on its own."""

import pytest

from core.errors import ConfigError
from plugins.router.prefix_affinity import PrefixAffinity
from tests.plugins.router.route_tables import Rig, ask, query, snapshot


def loads(*requests):
    return [{"requests": one} for one in requests]


def test_goes_where_most_of_its_prompt_is():
    assert PrefixAffinity().decide_route(query(*loads(1, 1, 1), cached=[0, 64, 96])).replica == "c"


def test_half_of_the_prompt_makes_no_home():
    decision = PrefixAffinity(share=0.5).decide_route(query(*loads(1, 0), cached=[50, 0]))
    assert decision.replica == "b"


def test_one_hot_worker_leaves_the_affinity_of_others_alone():
    """R08: loads 90, 2, 3, and the second knows the prompt."""
    assert PrefixAffinity().decide_route(query(*loads(90, 2, 3), cached=[0, 96, 0])).replica == "b"


def test_miss_goes_to_the_idle_worker_and_not_to_the_smallest_tree():
    """R09: 10 and 1,000 blocks held, loads 50 and 0."""
    rig = Rig(PrefixAffinity(), [snapshot("a", foreign=50), snapshot("b")])
    rig.view.resize("a", 16 * 2000, 16)
    rig.view.resize("b", 16 * 2000, 16)
    rig.view.add("a", range(10))
    rig.view.add("b", range(1000, 2000))
    assert (rig.view.num_blocks("a"), rig.view.num_blocks("b")) == (10, 1000)
    assert rig.router.route(ask(prompt=100), 16.0, 0.0).replica == "b"


def test_a_full_home_passes_on_to_the_next_and_then_to_the_least_loaded():
    """Seven requests and this one on three replicas: ceil(1.25 * 8 / 3) = 4 at most."""
    rule = PrefixAffinity(slack=0.25, floor=1)
    full = query(*loads(4, 2, 1), cached=[96, 80, 0])
    assert rule.decide_route(full).replica == "b"
    both = query(*loads(4, 4, 0), cached=[96, 80, 0])  # ceil(1.25 * 9 / 3) = 4
    decision = rule.decide_route(both)
    assert (decision.replica, decision.reason) == ("c", "fewest requests; its homes have 4 or more")


def test_a_home_with_few_requests_is_not_full():
    """Three requests on eight replicas: ceil(1.25 * 4 / 8) = 1, which the floor lifts to 4."""
    few = query(*loads(3, *[0] * 7), cached=[96] + [0] * 7)
    assert PrefixAffinity(floor=4).decide_route(few).replica == "a"
    assert PrefixAffinity(floor=3).decide_route(few).replica == "b"


def test_an_idle_home_is_never_full():
    assert PrefixAffinity().decide_route(query(*loads(0, 0), cached=[0, 99])).replica == "b"


def test_bad_values_are_refused():
    with pytest.raises(ConfigError, match=r"share must be in \[0, 1\), got 1"):
        PrefixAffinity(share=1.0)
    with pytest.raises(ConfigError, match="slack must be > 0, got 0"):
        PrefixAffinity(slack=0.0)
    with pytest.raises(ConfigError, match="floor must be >= 1, got 0"):
        PrefixAffinity(floor=0)
