"""A policy that chooses replicas: valid answers, determinism, isolation, load, exceptions, cost."""

import pytest

from tests.plugins.conformance import routers


def test_router_keeps_its_contract(subject, routed, holds):
    holds(routers.keeps_its_contract, subject)


def test_router_spreads_load(subject, routed, holds):
    holds(routers.spreads_load, subject)


def test_router_lets_exceptions_pass(subject, routed, holds):
    holds(routers.lets_exceptions_pass, subject)


@pytest.mark.thorough
def test_cost_of_a_route(subject, routed, request):
    """Reported, never judged."""
    for one in routers.costs(subject):
        row = (one.hook, one.running, 0, one.calls, float(one.mean_us), float(one.p99_us))
        request.node.user_properties.append(("cost", row))
