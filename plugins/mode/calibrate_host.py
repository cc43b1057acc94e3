"""From a run's steps to the host's time of a launch."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from plugins.mode.calibrate_fit import LEAST_ALIKE
from plugins.mode.calibrate_traffic import Ran
from plugins.shared.launch_sizes import KINDS
from plugins.shared.least_squares import non_negative

Float = NDArray[np.float64]
QUANTILES = 50
Hosts = tuple[float, float, float]
"""Seconds of a step, of a row in it, and of a sequence that it admits."""


def fit_host(num_rows: Float, seconds: Float) -> tuple[float, float]:
    """Seconds of a step and of a row in it that the host takes."""
    if not len(seconds):
        return 0.0, 0.0
    columns = np.stack([np.ones_like(num_rows), num_rows], axis=1) / seconds[:, None]
    step, row = non_negative(columns, np.ones(len(seconds))).tolist()
    return step, row


def host_times(
    ran: Ran,
    kinds: NDArray[np.int64],
    parts: Sequence[str],
    between_s: float,
    starts_s: Mapping[str, float],
) -> tuple[Hosts, dict[str, list[float]]]:
    """Seconds of the host's `parts` of a step and of a row in it, of launches of one-token rows;
    of an admitted sequence, as launches of one kind differ by their number of them; and what
    launches of other kinds take beyond that, as equally likely values. kinds: indices into KINDS.
    between_s: of every step beside its parts. starts_s: by kind, seconds in which the host started
    launches outside of the run: of a kind of which the run had none, or few, they tell the time, as
    many times longer as those of the run's most frequent kind were there."""
    seconds = np.full(len(ran), between_s) + sum(getattr(ran, part) for part in parts)
    decodes = kinds == KINDS.index("decode")
    host_s, row_s = fit_host(ran.num_rows[decodes], seconds[decodes])
    beyond = seconds - host_of((host_s, row_s, 0.0), ran)
    hosts_s = host_s, row_s, _slope(kinds, ran.num_new, beyond)
    beyond = seconds - host_of(hosts_s, ran)
    own = {kind: beyond[kinds == KINDS.index(kind)] for kind in KINDS if kind != "decode"}
    found = {kind: _values(one) for kind, one in own.items() if len(one)}
    return hosts_s, found | _few(ran, kinds, beyond, starts_s)


def host_of(hosts_s: Hosts, ran: Ran) -> Float:
    """What a run's steps take the host, float64 [n], but for their own kind of launch."""
    host_s, row_s, new_s = hosts_s
    return host_s + row_s * ran.num_rows + new_s * ran.num_new


def between_steps_s(ran: Ran, overlap: bool) -> float:
    """Seconds from a step's beginning to the next one's that are in none of its parts: the median,
    as a run may be idle between two. overlap: a step collects the one before."""
    if len(ran) < 3:
        return 0.0
    collect_s = np.concatenate(([0.0], ran.collect[:-1])) if overlap else ran.collect
    parts_s = ran.plan + ran.pack + ran.launch + ran.commit + ran.observers + collect_s
    return max(float(np.nanmedian((ran.next_s - ran.start_s - parts_s)[1:])), 0.0)


def _slope(kinds: NDArray[np.int64], counts: Float, values: Float) -> float:
    """Of values over counts within one kind, 0 or more; the same for all."""
    counts, values = counts.astype(np.float64), values.copy()
    for kind in np.unique(kinds).tolist():
        own = kinds == kind
        counts[own] -= counts[own].mean()
        values[own] -= values[own].mean()
    spread = float(counts @ counts)
    return max(float(counts @ values) / spread, 0.0) if spread else 0.0


def _few(
    ran: Ran, kinds: NDArray[np.int64], beyond: Float, starts_s: Mapping[str, float]
) -> dict[str, list[float]]:
    """Of host_times, what launches outside of the run tell."""
    often = {kind: int((kinds == KINDS.index(kind)).sum()) for kind in starts_s}
    known = [kind for kind, count in often.items() if count >= LEAST_ALIKE]
    if not known:
        return {}
    like = max(known, key=lambda kind: (kind != "decode", often[kind]))
    alike = kinds == KINDS.index(like)
    launch_s = float(ran.launch[alike].mean())
    rest_s, longer = float(beyond[alike].mean()) - launch_s, launch_s / starts_s[like]
    few = starts_s.keys() - {"decode", *known}
    return {kind: [max(rest_s + longer * starts_s[kind], 0.0)] for kind in sorted(few)}


def _values(seconds: Float) -> list[float]:
    """A distribution as quantiles of equal weight with its mean."""
    seconds = np.maximum(seconds, 0.0)
    ranks = (np.arange(QUANTILES) + 0.5) / QUANTILES
    values: Float = np.quantile(seconds, ranks)
    mean = values.mean()
    scaled: list[float] = (values * (seconds.mean() / mean if mean else 1.0)).tolist()
    return scaled
