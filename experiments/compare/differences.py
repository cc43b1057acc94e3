"""Paired differences: the same seed and setting under two policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import ConfigError
from experiments.paper.folders import Run
from experiments.paper.groups import Group
from experiments.paper.intervals import Counts, Interval, over_requests, over_seeds
from experiments.paper.metrics import Metric
from experiments.paper.samples import statistic

ASKED = ("client", "prompt_tokens")  # of a request, before any policy acts on it
MACHINE = ("commit", "dirty", "device", "platform", "hook_version")
PLACES = 5  # differing requests named in an error


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one policy against the baseline, in the unit shown.

    own, baseline: means over the shared seeds. difference: own - baseline, paired."""

    setting: str
    metric: Metric
    policy: str
    own: float
    baseline: float
    difference: Interval

    @property
    def relative(self) -> float | None:
        """Difference / baseline; None for a baseline of zero."""
        return self.difference.mean / self.baseline if self.baseline else None

    @property
    def verdict(self) -> str:
        """better, worse, higher, lower where the interval lies on one side of zero, else ""."""
        if not self.difference.clear:
            return ""
        grows = self.difference.mean > 0
        if not self.metric.better:
            return "higher" if grows else "lower"
        return "better" if grows == (self.metric.better == "higher") else "worse"


@dataclass(slots=True)
class Comparison:
    """All differences of some groups, and what a reader must know of them."""

    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add it once."""
        if text not in self.notes:
            self.notes.append(text)


def compare(
    groups: Sequence[Group], metrics: Sequence[Metric], baseline: str, closed_loop: bool = False
) -> Comparison:
    """Differences from `baseline` in each group that has it.

    Raises ConfigError if no group has it beside another, or two runs to be paired were not given
    the same requests; closed_loop: arrival times may differ, since they follow from what ended."""
    result = Comparison()
    for group in groups:
        if baseline not in group.runs:
            result.note(f"left out, without a run of {baseline}: {group.setting or 'the setting'}")
            continue
        for policy in group.runs:
            if policy != baseline:
                _one(result, group, metrics, policy, baseline, closed_loop)
    labels = sorted({label for group in groups for label in group.runs})
    rule = f"a label with another beside it, of {', '.join(labels)}"
    require(bool(result.differences), "--baseline", rule, baseline)
    return result


def _one(
    result: Comparison,
    group: Group,
    metrics: Sequence[Metric],
    policy: str,
    baseline: str,
    closed_loop: bool,
) -> None:
    own, base = group.runs[policy], group.runs[baseline]
    seeds = sorted(own.keys() & base.keys())
    where = f" ({group.setting})" if group.setting else ""
    if not seeds:
        result.note(f"left out, no seed in common with {baseline}: {policy}{where}")
        return
    alone = len(own.keys() ^ base.keys())
    if alone:
        result.note(f"{alone} seeds of {policy} or {baseline} have no partner{where}: left out")
    pairs = [(base[seed], own[seed]) for seed in seeds]
    for first, second in pairs:
        _check_pair(result, first, second, closed_loop)
    for metric in metrics:
        values = [(metric.value(first), metric.value(second)) for first, second in pairs]
        known = [(a, b) for a, b in values if a is not None and b is not None]
        if len(known) < len(values):
            result.note(f"{metric.label}: no number in {len(values) - len(known)} pairs{where}")
        if known:
            result.differences.append(_difference(group, metric, policy, known, pairs))


def _difference(
    group: Group,
    metric: Metric,
    policy: str,
    values: Sequence[tuple[float, float]],
    pairs: Sequence[tuple[Run, Run]],
) -> Difference:
    base, own = np.array(values).T
    interval = over_seeds((own - base).tolist())
    if len(pairs) == 1:
        interval = _within_run(metric, interval.mean, *pairs[0]) or interval
    return Difference(
        group.setting, metric, policy, float(own.mean()), float(base.mean()), interval
    )


def _within_run(metric: Metric, value: float, base: Run, own: Run) -> Interval | None:
    """One seed: the bootstrap draws the same requests for both runs. None where the metric is no
    function of requests, or the runs hold no requests.csv."""
    if not all((run.folder / "requests.csv").is_file() for run in (base, own)):
        return None
    order: NDArray[np.str_] = np.intersect1d(
        base.requests["request_id"][base.measured], own.requests["request_id"][own.measured]
    )
    first, second = statistic(metric, base, order), statistic(metric, own, order)
    if first is None or second is None:
        return None

    def difference(counts: Counts) -> float | None:
        before, after = first(counts), second(counts)
        return None if before is None or after is None else after - before

    return over_requests(value, difference, len(order))


def _check_pair(result: Comparison, base: Run, own: Run, closed_loop: bool) -> None:
    """The same requests, on the same machine and code. Raises ConfigError, or notes."""
    for key in MACHINE:
        if base.manifest.get(key) != own.manifest.get(key):
            values = f"{base.manifest.get(key)} and {own.manifest.get(key)}"
            result.note(f"not like with like: {key} differs within pairs: {values}")
    if not all((run.folder / "requests.csv").is_file() for run in (base, own)):
        result.note("requests.csv missing (records=summary): the request lists were not compared")
        return
    first, second = (_by_id(run) for run in (base, own))
    _check_ids(base, own, first, second)
    for name in ASKED if closed_loop else (*ASKED, "arrival_s"):
        _check_field(base, own, first, second, name)
    lengths = [
        (base.requests["output_tokens"][row], own.requests["output_tokens"][second[name]])
        for name, row in first.items()
        if base.completed[row] and own.completed[second[name]]
    ]
    differing = sum(a != b for a, b in lengths)
    if differing:
        result.note(
            f"{own.policy}, seed {own.seed}: {differing} of {len(lengths)} requests ended with"
            " another number of tokens; force output lengths for a fair comparison"
        )


def _by_id(run: Run) -> dict[str, int]:
    ids = run.requests["request_id"].tolist()
    return {request_id: row for row, request_id in enumerate(ids)}


def _check_ids(base: Run, own: Run, first: dict[str, int], second: dict[str, int]) -> None:
    alone = sorted(first.keys() ^ second.keys())
    if alone:
        raise ConfigError(
            f"{_names(base, own)} must have the same requests to be paired; request_id differs: "
            f"{len(alone)} are in one alone, such as {', '.join(alone[:PLACES])}"
        )


def _check_field(
    base: Run, own: Run, first: dict[str, int], second: dict[str, int], name: str
) -> None:
    for request_id, row in first.items():
        values = base.requests[name][row], own.requests[name][second[request_id]]
        if values[0] != values[1]:
            arrives = name == "arrival_s"
            hint = " (--closed-loop if arrivals follow from what ended)" if arrives else ""
            raise ConfigError(
                f"{_names(base, own)} must have the same requests to be paired; {name} of "
                f"{request_id} differs: {values[0]} and {values[1]}{hint}"
            )


def _names(base: Run, own: Run) -> str:
    return f"{base.folder} and {own.folder}"
