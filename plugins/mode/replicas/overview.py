"""How the replicas stand, as the server tells it: sums over them, and a line for each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plugins.mode.replicas.messages import Born
from plugins.mode.step_totals import StepTotals
from plugins.shared.replica_registry import Incarnation
from plugins.shared.routing import ReplicaState

POOL = ("total", "free", "tree", "evictable", "request")
FACTS = (
    *("number", "page_size", "pool_pages", "pages_free", "pages_evictable", "pages_promised"),
    *("running", "waiting", "prompt_tokens", "kv_tokens", "step_s"),
)
Listed = Sequence[tuple[Incarnation, ReplicaState]]


@dataclass(slots=True, eq=False)
class Alive:
    """An incarnation that runs. state: its engine's latest report, empty before the first. waiting:
    token streams, by its latest step. steps: its sums."""

    born: Born
    incarnation: int
    state: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    steps: StepTotals | None = None


def summed(alive: Mapping[str, Alive]) -> dict[str, Any]:
    """running, slots and pool of all that have reported, in the form of an engine's report."""
    states = [one.state for one in alive.values() if one.state]
    pools = [state["pool"] for state in states]
    pool = {name: sum(pool[name] for pool in pools) for name in POOL}
    return {
        "running": sum(state["running"] for state in states),
        "slots": sum(state["slots"] for state in states),
        "pool": {"page_size": pools[0]["page_size"] if pools else 0, **pool},
    }


def why_not(listed: Listed, names: Sequence[str]) -> str:
    """Why no replica takes requests."""
    states = {one.replica: state.value for one, state in listed}
    told = ", ".join(f"{name} is {states.get(name, 'starting')}" for name in names)
    return f"no replica is ready: {told}"


def workers(
    listed: Listed, alive: Mapping[str, Alive], births: Mapping[str, int], now_s: float
) -> list[dict[str, Any]]:
    """A line a replica: who it is, how it stands, its latest report."""
    return [
        _worker(one, state, alive.get(one.replica), births[one.replica], now_s)
        for one, state in listed
    ]


def _worker(
    one: Incarnation, state: ReplicaState, living: Alive | None, births: int, now_s: float
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": one.replica,
        "state": state.value,
        "reason": one.why,
        "process_id": None if living is None else living.born.process_id,
        "host": None if living is None else living.born.host,
        "restarts": births - 1,
        "requests": len(one.open),
        "silent_s": round(now_s - one.heard_s, 3),
    }
    if one.snapshot is not None:
        facts = {name: getattr(one.snapshot, name) for name in FACTS}
        line |= {"report": facts, "device": asdict(one.snapshot.device)}
    return line
