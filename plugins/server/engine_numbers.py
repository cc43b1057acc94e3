"""The engine's latest report as numbers for Prometheus."""

from plugins.server.client import State
from plugins.server.metrics import Numbers


def gauges(state: State) -> Numbers:
    """What goes up and down. pool_use counts pages that requests hold; cached ones are free to be
    evicted, unless a request reads them."""
    numbers = {
        "ready": ("1 if new requests are served", float(state.ready)),
        "report_age_seconds": ("Since the engine's latest report", state.age_s),
        "running": ("Token streams in the batch", state.running),
        "waiting": ("Token streams not admitted", state.waiting),
        "requests_open": ("Requests not ended, of all front ends", state.requests),
    }
    if state.workers is not None:
        ready = sum(one["state"] == "ready" for one in state.workers)
        numbers["workers"] = ("Replicas behind the router", len(state.workers))
        numbers["workers_ready"] = ("Of them those that requests are sent to", ready)
    for name, value in state.pool.items():
        numbers[f"pool_{name}"] = (f"KV pool: {name.replace('_', ' ')}", value)
    return numbers


def totals(state: State) -> Numbers:
    """What only grows, since the engine started."""
    return {
        f"engine_{name}": (f"{name.replace('_', ' ').capitalize()}", value)
        for name, value in state.totals.items()
    }
