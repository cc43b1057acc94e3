"""Mode calibrate: measure steps on the engine's executor and fit a model of their time.

Steps of a grid go straight to the executor, so that no policy, cache or prompt is in the way: rows
of one token at several contexts, chunks behind several contexts, both together, several short
chunks, and rows that share a prefix. A step's time is the median from one launch's end to the
next's with two in flight. Then the session's workload runs through the engine: of its steps, which
no grid chose, the fit takes every other stretch, and their host times give those of planning, and
of starting each kind of launch; of a kind that the run hardly had, launches tell that come after
steps of one-token rows (plugins/mode/calibrate_starts.py). They are kept in steps.npz
(plugins/mode/calibrate_traffic.py). The other stretches and a part of the grid are held out; the
error of that part is what a simulation's summary carries.

On a CPU a launch computes before it returns, so nothing is hidden behind it: simulate what was
measured there with engine.overlap=false."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.engine import Engine
from plugins.mode.calibrate_fit import (
    Fit,
    Steps,
    fit,
    of_kinds,
    of_ran,
    steps_of,
    typical,
)
from plugins.mode.calibrate_grid import Point, Room, Timed, grid, time_point
from plugins.mode.calibrate_host import between_steps_s, host_of, host_times
from plugins.mode.calibrate_starts import time_starts
from plugins.mode.calibrate_table import show
from plugins.mode.calibrate_traffic import STRETCH, Ran, ran_of, serve
from plugins.mode.device_lock import check_lock, lock_of
from plugins.mode.outlet import Outlet
from plugins.mode.running import running
from plugins.shared.calibration import Calibration, Residuals, residuals
from plugins.shared.clocks import RealClock
from plugins.shared.launch_sizes import GRAPHED_WORK, LaunchSizes
from plugins.shared.session import Session

Float = NDArray[np.float64]
FILE = "calibration.json"
STEPS = "steps.npz"
HOST_PARTS = ("plan", "pack", "launch", "commit", "observers")
LEAST = 14  # points of a fit


class Calibrate:
    """rows, contexts, chunks, prefixes: the grid, see plugins/mode/calibrate_grid.py; steps that
    the engine has no room for are left out and counted. prefixes: whole pages, [] = none. warmup,
    repeats: launches of each step before and under the clock. test_share: of the grid, held out of
    the fit, chosen by the run's seed. path: where else than in the run's folder the file goes.
    lock: as in mode bench."""

    def __init__(
        self,
        rows: list[int],
        contexts: list[int],
        chunks: list[int],
        prefixes: list[int],
        warmup: int = 3,
        repeats: int = 15,
        test_share: float = 0.25,
        path: str | None = None,
        lock: str = "fail",
    ) -> None:
        axes = ("rows", rows, 1), ("contexts", contexts, 1), ("chunks", chunks, 2)
        for name, values, least in axes:
            known = bool(values) and all(value >= least for value in values)
            require(known, f"mode.{name}", f"numbers >= {least}", values)
        require(min(prefixes, default=1) >= 1, "mode.prefixes", "numbers >= 1, or []", prefixes)
        require(warmup >= 0, "mode.warmup", ">= 0", warmup)
        require(repeats >= 1, "mode.repeats", ">= 1", repeats)
        require(0 < test_share < 1, "mode.test_share", "in (0, 1)", test_share)
        check_lock(lock)
        self.grid = grid(rows, contexts, chunks, prefixes)
        self.warmup, self.repeats, self.test_share = warmup, repeats, test_share
        self.path, self.lock = path, lock

    def run(self, session: Session) -> dict[str, Any]:
        """Measure, fit, write calibration.json; returns its figures without the points."""
        with lock_of(session, self.lock), running(session) as (engine, outlet):
            session.run.manifest["executor"] = engine.executor.describe()
            found = self._measured(session, engine, outlet)
        paths = [session.folder / FILE, *([Path(self.path).expanduser()] if self.path else [])]
        for path in paths:
            found.save(path)
        show(found, paths)
        forms = {name: asdict(form) for name, form in found.forms.items()}
        fields = ("model", "device", "fit", "test", "traffic")
        return {
            "name": f"calibrate {found.model} on {found.device}",
            "mode": "calibrate",
            "file": str(paths[-1]),
            "points": len(found.points),
            "skipped": found.skipped,
            "forms": forms,
            **{name: getattr(found, name) for name in fields},
        }

    def _measured(self, session: Session, engine: Engine, outlet: Outlet) -> Calibration:
        rng = np.random.default_rng(session.run.seed)
        facts = engine.executor.describe()
        on_host = facts.get("device") == "cpu"  # a launch computes before it returns
        sizes = _sizes(facts)
        points, timed = self._timed(engine, rng)
        steps = steps_of(map(Point.facts, points, timed), sizes, self.repeats)
        held_out = rng.permutation(len(points)) < round(self.test_share * len(points))
        starts_s = {} if on_host else time_starts(engine.executor, _room(engine), sizes, rng)
        ran = ran_of(serve(session, engine, outlet))
        ran.save(session.folder / STEPS)
        found = fit_all(steps.part(~held_out), ran, sizes, on_host)
        guessed = found.seconds(steps)
        traffic = traffic_of(ran, sizes, found, starts_s, on_host, session.engine.overlap)
        memory = engine.state.memory
        return Calibration(
            model=str(facts.get("model", "none")),
            device=str(facts.get("device_name", facts["device"])),
            dtype=str(facts.get("model_dtype", "none")),
            num_devices=facts.get("tensor_parallel", 1),
            forms=found.forms,
            sizes=sizes,
            host_s=traffic.host_s,
            host_row_s=traffic.host_row_s,
            host_new_s=traffic.host_new_s,
            launch_s=traffic.launch_s,
            pool_tokens=memory.ledger.num_pages * memory.page_size,
            memory_share=session.engine.memory_share,
            fit=residuals(guessed[~held_out], steps.seconds[~held_out]),
            test=residuals(guessed[held_out], steps.seconds[held_out]),
            traffic=traffic.error,
            measured=_origin(session),
            repeats=self.repeats,
            points=points_of(points, timed, guessed, held_out),
            skipped=len(self.grid) - len(points),
            starts_s=starts_s,
        )

    def _timed(self, engine: Engine, rng: np.random.Generator) -> tuple[list[Point], list[Timed]]:
        """The steps of the grid that the engine has room for, and what each took."""
        room = _room(engine)
        points = [one for one in self.grid if room.holds(one)]
        rule = f"at least {LEAST} steps that the engine has room for ({room})"
        require(len(points) >= LEAST, "mode.rows, contexts and chunks", rule, len(points))
        times = self.warmup, self.repeats
        return points, [time_point(engine.executor, one, room, rng, *times) for one in points]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a run tells beside the grid; fields as of Calibration."""

    host_s: float
    host_row_s: float
    host_new_s: float
    launch_s: dict[str, list[float]]
    error: Residuals


def fit_all(steps: Steps, ran: Ran, sizes: LaunchSizes, on_host: bool) -> Fit:
    """The fit to steps of a grid, which say how far it goes, and of a run, which say what it is
    where an engine works, with pages as it hands them out. Every launch counts once."""
    host_s = np.zeros(len(ran)) if on_host else sum(getattr(ran, part) for part in HOST_PARTS)
    own = ~held_out(ran)
    run = typical(of_ran(ran, sizes).part(own), np.asarray(host_s)[own])
    return fit(steps + run, host_waits=not on_host)


def held_out(ran: Ran) -> NDArray[np.bool_]:
    """The stretches of a run that are not fitted: every other, the first among them."""
    return np.asarray(np.arange(len(ran)) // STRETCH % 2 == 0)


def traffic_of(
    ran: Ran,
    sizes: LaunchSizes,
    found: Fit,
    starts_s: Mapping[str, float],
    on_host: bool,
    overlap: bool,
) -> Traffic:
    """Host times of a run's steps, and how far the fit is from what stretches held out took.
    starts_s: see host_times. on_host: a launch computes before it returns."""
    parts = tuple(part for part in HOST_PARTS if not (on_host and part == "launch"))
    steps = of_ran(ran, sizes)
    between_s = between_steps_s(ran, overlap)
    hosts_s, own_s = host_times(ran, steps.kind, parts, between_s, starts_s)
    launch_s = {kind: [seconds] for kind, seconds in found.launch_s.items()} | own_s
    means_s = {kind: fmean(values) for kind, values in launch_s.items()}
    tested = held_out(ran) & (steps.seconds > 0)
    steps, host = steps.part(tested), host_of(hosts_s, ran)[tested]
    device_s, begun_s = found.device_s(steps), of_kinds(means_s, steps)
    if overlap and not on_host:
        whole_s = np.maximum(device_s, host + begun_s)
    else:
        whole_s = host + np.maximum(device_s, begun_s)
    # Where the host waits and where it does not, a step's tokens are seen at other moments.
    stretches = range(0, len(steps), STRETCH)
    sums = [np.add.reduceat(one, stretches) for one in (whole_s, steps.seconds)] if steps else []
    return Traffic(*hosts_s, launch_s, residuals(*(sums or 2 * [np.empty(0)])))


def _sizes(facts: Mapping[str, Any]) -> LaunchSizes:
    graphs = facts.get("graphs") or {}
    names = ("sizes", "sizes_of_tokens", "sizes_of_chunks", "sizes_of_mixed")
    rows, tokens, chunks, mixed = (list(graphs.get(name, [])) for name in names)
    return LaunchSizes(rows, tokens, chunks, mixed, mixed_pairs(facts.get("shape")))


def mixed_pairs(shape: Mapping[str, int] | None) -> int:
    """Of LaunchSizes, for a model of this shape; any number for one of none."""
    return (
        0 if shape is None else int(GRAPHED_WORK // (4 * shape["num_q_heads"] * shape["head_dim"]))
    )


def _room(engine: Engine) -> Room:
    state, memory = engine.state, engine.state.memory
    return Room(
        max_rows=state.config.max_num_seqs,
        max_tokens=state.config.max_num_batched_tokens,
        max_len=state.max_model_len,
        num_pages=memory.ledger.num_pages,
        page_size=memory.page_size,
    )


def points_of(
    points: Sequence[Point],
    timed: Sequence[Timed],
    guessed: Float,
    held_out: NDArray[np.bool_],
) -> list[Mapping[str, Any]]:
    """The points as a calibration file has them."""
    rows = zip(points, timed, guessed.tolist(), held_out.tolist(), strict=True)
    return [
        asdict(point) | asdict(took) | {"predicted_s": guess, "held_out": held}
        for point, took, guess, held in rows
    ]


def _origin(session: Session) -> dict[str, Any]:
    facts = session.run.manifest
    return {
        "commit": facts.get("commit"),
        "dirty": facts.get("dirty"),
        "command": facts.get("command"),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": facts.get("versions"),
        "platform": facts.get("platform"),
        "shape": (facts.get("executor") or {}).get("shape"),
        "clock": "real" if isinstance(session.clock, RealClock) else "virtual",
        "overlap": session.engine.overlap,
    }
