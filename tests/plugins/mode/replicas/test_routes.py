"""How even a serving router's decisions left the load."""

import io
import json

import pytest

from plugins.mode.replicas.routes import Routes
from plugins.shared.replica_registry import Registry
from plugins.shared.routing import RouteRecord


def test_each_decision_is_weighed_before_its_request_counts_and_written():
    registry, lines = Registry(), io.StringIO()
    for name in ("0", "1", "gone"):
        registry.join(name, 0.0)
    registry.fail(3, "it died")
    routes = Routes(registry, lines)
    assert routes.summary() == {"decisions": 0, "load_cv": None, "regret_s": None}
    for number, name in enumerate(("0", "0", "1")):
        registry.write(name, str(number), 0.0, 1, 1, 0)
        routes.decided(RouteRecord(0.0, str(number), name, "mine", "its turn", {}, 0, 0.0))
    # Before: nothing, then 1 and 0, then 2 and 0: standard deviation / mean = 1 both times.
    assert routes.summary()["decisions"] == 3
    assert routes.summary()["load_cv"] == pytest.approx(1.0)
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["replica"] for line in written] == ["0", "0", "1"]
