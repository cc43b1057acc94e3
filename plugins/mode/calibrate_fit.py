"""From timed steps to the coefficients of a step's time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plugins.mode.calibrate_traffic import Ran
from plugins.shared.calibration import TERMS, seconds_of
from plugins.shared.launch_sizes import KINDS, LaunchSizes
from plugins.shared.least_squares import non_negative

Float = NDArray[np.float64]
WAITING = tuple(kind for kind in KINDS if kind != "decode")
"""Kinds of launches that may take the host longer than the device."""
WORTH = 0.9
"""A kind has such steps if that leaves at most this share of the squared error."""
ROUNDS = 30
QUANTILES = 50


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Facts of steps as a calibration counts them, padding included, float64 [n] each; the kind of
    launch, index into KINDS, int64 [n]; and how long they took."""

    num_rows: Float
    num_tokens: Float
    kv_tokens: Float
    attended: Float
    kind: NDArray[np.int64]
    seconds: Float

    def __len__(self) -> int:
        return len(self.seconds)

    def part(self, chosen: NDArray[np.bool_]) -> "Steps":
        """Those chosen; bool [n]."""
        return Steps(**{name: getattr(self, name)[chosen] for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class Fit:
    """coefficients by term and knee in tokens: see plugins/shared/calibration.py. launch_s: seconds
    that a step of a kind lasts at least, for kinds that have such steps."""

    coefficients: Mapping[str, float]
    knee_tokens: int
    launch_s: Mapping[str, float]

    def seconds(self, steps: Steps) -> Float:
        """Of steps, one launched as soon as there is room for it."""
        return np.maximum(self.device_s(steps), of_kinds(self.launch_s, steps))

    def device_s(self, steps: Steps) -> Float:
        """Of the device alone."""
        facts = steps.num_rows, steps.num_tokens, steps.kv_tokens, steps.attended
        seconds: Float = seconds_of(self.coefficients, self.knee_tokens, *facts)
        return seconds


def steps_of(
    rows: Iterable[tuple[int, int, int, int, int, float]], sizes: LaunchSizes | None = None
) -> Steps:
    """Steps from (one-token rows, rows, tokens, kv_tokens, attended, seconds) of each."""
    padding = sizes or LaunchSizes()
    facts = []
    for decodes, num_rows, num_tokens, kv_tokens, attended, seconds in rows:
        padded_rows, padded_tokens, kind = padding.padded(decodes, num_rows, num_tokens)
        facts.append((padded_rows, padded_tokens, kv_tokens, attended, KINDS.index(kind), seconds))
    counts = np.array(facts, np.float64).reshape(-1, 6).T
    rows_n, tokens_n, kv_n, pairs, kinds, took_s = counts
    return Steps(rows_n, tokens_n, kv_n, pairs, kinds.astype(np.int64), took_s)


def fit(steps: Steps, host_waits: bool = True) -> Fit:
    """Coefficients of least squared relative error, none below 0. Every number of tokens that a
    step has is tried as the knee; where no step needs one, the smallest stands and its term is 0.
    host_waits: steps of a kind may last as long as it takes the host to launch them."""
    knees = np.unique(steps.num_tokens).astype(int).tolist()
    best, least = _best_knee(steps, {}, knees)
    for kind in WAITING if host_waits else ():
        own = steps.seconds[steps.kind == KINDS.index(kind)]
        if len(own):
            start = {**best.launch_s, kind: float(np.percentile(own, 10))}
            found, cost = _best_knee(steps, start, [best.knee_tokens])
            if cost <= WORTH * least:
                best, least = found, cost
    return _best_knee(steps, best.launch_s, knees)[0] if best.launch_s else best


def fit_host(num_rows: Float, seconds: Float) -> tuple[float, float]:
    """Seconds of a step and of a row in it that the host takes."""
    if not len(seconds):
        return 0.0, 0.0
    columns = np.stack([np.ones_like(num_rows), num_rows], axis=1) / seconds[:, None]
    step, row = non_negative(columns, np.ones(len(seconds))).tolist()
    return step, row


def of_ran(ran: Ran, sizes: LaunchSizes) -> Steps:
    """The steps of a run: each lasts from its start, or the end of the one before if that is later,
    until its tokens are there."""
    seconds = ran.end_s - np.maximum(ran.start_s, np.concatenate(([-np.inf], ran.end_s[:-1])))
    columns = ran.decode_tokens, ran.num_rows, ran.num_tokens, ran.kv_tokens, ran.attended, seconds
    return steps_of(zip(*(column.tolist() for column in columns), strict=True), sizes)


def host_times(
    ran: Ran, kinds: NDArray[np.int64], parts: Sequence[str], between_s: float
) -> tuple[float, float, dict[str, list[float]]]:
    """Seconds of the host's `parts` of a step and of a row in it, of launches of one-token rows;
    and what launches of other kinds that the run had take beyond that, as equally likely values.
    kinds: indices into KINDS. between_s: of every step beside its parts."""
    seconds = np.full(len(ran), between_s) + sum(getattr(ran, part) for part in parts)
    decodes = kinds == KINDS.index("decode")
    host_s, row_s = fit_host(ran.num_rows[decodes], seconds[decodes])
    beyond = seconds - host_s - row_s * ran.num_rows
    own = {kind: beyond[kinds == KINDS.index(kind)] for kind in WAITING}
    return host_s, row_s, {kind: _values(one) for kind, one in own.items() if len(one)}


def between_steps_s(ran: Ran, overlap: bool) -> float:
    """Seconds from a step's beginning to the next one's that are in none of its parts: the median,
    as a run may be idle between two. overlap: a step collects the one before."""
    if len(ran) < 3:
        return 0.0
    collect_s = np.concatenate(([0.0], ran.collect[:-1])) if overlap else ran.collect
    parts_s = ran.plan + ran.pack + ran.launch + ran.commit + ran.observers + collect_s
    return max(float(np.nanmedian((ran.next_s - ran.start_s - parts_s)[1:])), 0.0)


def _values(seconds: Float) -> list[float]:
    """A distribution as quantiles of equal weight with its mean."""
    seconds = np.maximum(seconds, 0.0)
    ranks = (np.arange(QUANTILES) + 0.5) / QUANTILES
    values: Float = np.quantile(seconds, ranks)
    mean = values.mean()
    scaled: list[float] = (values * (seconds.mean() / mean if mean else 1.0)).tolist()
    return scaled


def of_kinds(launch_s: Mapping[str, float], steps: Steps) -> Float:
    """Each step's value by its kind, 0 where there is none."""
    return np.array([launch_s.get(kind, 0.0) for kind in KINDS])[steps.kind]


def _best_knee(
    steps: Steps, launch_s: Mapping[str, float], knees: Sequence[int]
) -> tuple[Fit, float]:
    best: tuple[Fit, float] | None = None
    for knee in knees:
        found = _settled(steps, launch_s, knee)
        cost = float(np.square(found.seconds(steps) / steps.seconds - 1).sum())
        if best is None or cost < best[1] * (1 - 1e-9):
            best = found, cost
    assert best is not None, "a fit needs steps"
    return best


def _settled(steps: Steps, launch_s: Mapping[str, float], knee: int) -> Fit:
    """A fit of the device to the steps that it takes longer for than the host, and of the host to
    the others, in turn until neither moves."""
    columns = _columns(steps, knee) / steps.seconds[:, None]
    on_device = np.ones(len(steps), np.bool_)
    for _ in range(ROUNDS):
        costs = non_negative(columns[on_device], np.ones(int(on_device.sum()))).tolist()
        found = Fit(dict(zip(TERMS, costs, strict=True)), knee, launch_s)
        if not launch_s:
            break
        waits = found.device_s(steps) < of_kinds(launch_s, steps)
        launch_s = {kind: _mean(steps, kind, waits, was) for kind, was in launch_s.items()}
        if (waits == ~on_device).all():
            return Fit(found.coefficients, knee, launch_s)
        on_device = ~waits
    return found


def _mean(steps: Steps, kind: str, waits: NDArray[np.bool_], before: float) -> float:
    """The value of least squared relative error to those of a kind that wait."""
    own = 1 / steps.seconds[waits & (steps.kind == KINDS.index(kind))]
    return float(own.sum() / np.square(own).sum()) if len(own) else before


def _columns(steps: Steps, knee: int) -> Float:
    columns: Mapping[str, Float] = {
        "step": np.ones(len(steps)),
        "chunks": (steps.num_tokens > steps.num_rows).astype(np.float64),
        "row": steps.num_rows,
        "token": steps.num_tokens,
        "more_token": np.maximum(steps.num_tokens - knee, 0.0),
        "kv_token": steps.kv_tokens,
        "pair": steps.attended,
    }
    return np.stack([columns[name] for name in TERMS], axis=1)
