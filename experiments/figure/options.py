"""What the command line asks of a figure, and runs read along one axis."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.config import require
from core.errors import ConfigError
from experiments.paper.folders import Run, select
from experiments.paper.groups import BY, arrange
from experiments.paper.intervals import Interval, over_seeds
from experiments.paper.metrics import Metric

RATES = ("workload.rate", "workload.rate_scale")
Series = dict[str, dict[float, dict[int, Run]]]  # label -> x -> seed -> run


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits a request must keep, seconds; None = no limit. itl_s: of its largest token gap.
    attainment: the share of requests that must keep them all."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    attainment: float = 0.9

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.itl_s))


@dataclass(frozen=True, slots=True)
class Options:
    """x: config path of the horizontal axis, None = the arrival rate. metrics: empty = the kind's
    own. by: config paths that are compared. baseline: a label. seed: of kinds that show one run;
    None = the lowest. measured: runs on a device, for `simulation`. slo: for attainment and
    goodput; without limits the runs' own summaries count. window_s: of `fairness`. limit: requests
    shown by `steps`. closed_loop: arrival times may differ between policies."""

    x: str | None = None
    metrics: tuple[Metric, ...] = ()
    by: tuple[str, ...] = BY
    baseline: str | None = None
    seed: int | None = None
    measured: Sequence[Run] = field(default_factory=tuple)
    slo: Slo = Slo()
    window_s: float | None = None
    limit: int = 40
    closed_loop: bool = False


def along(runs: Sequence[Run], options: Options, keys: Sequence[str] = RATES) -> tuple[str, Series]:
    """The axis (options.x, else the first of `keys` that is a number in the runs) and the runs by
    label, place on it, and seed. Settings that differ otherwise become part of the label."""
    key = options.x or _axis(runs, keys)
    series: Series = {}
    for group in arrange(runs, options.by):
        others = [
            f"{name.split('.')[-1]}={value}" for name, value in group.leaves.items() if name != key
        ]
        for label, seeds in group.runs.items():
            place = select(next(iter(seeds.values())).config, key)
            if isinstance(place, bool) or not isinstance(place, int | float):
                raise ConfigError(f"{key} must be a number in every run, got {place!r} of {label}")
            line = series.setdefault(" ".join([label, *others]), {})
            line[float(place)] = seeds
    return key, {label: dict(sorted(line.items())) for label, line in sorted(series.items())}


def mean(metric: Metric, runs: dict[int, Run]) -> Interval | None:
    """Of a metric over seeds; None if no run has it."""
    values = [value for run in runs.values() if (value := metric.value(run)) is not None]
    return over_seeds(values) if values else None


def one_seed(runs: Sequence[Run], options: Options) -> dict[str, Run]:
    """Label -> the run of options.seed, else of the lowest seed. Raises ConfigError for a seed that
    is not there, or more than one setting."""
    groups = arrange(runs, options.by)
    settings = [group.setting for group in groups]
    require(len(groups) == 1, "FOLDER", "runs of one setting for this figure", settings)
    chosen: dict[str, Run] = {}
    for label, seeds in sorted(groups[0].runs.items()):
        seed = min(seeds) if options.seed is None else options.seed
        require(seed in seeds, "--seed", f"one of {sorted(seeds)} ({label})", seed)
        chosen[label] = seeds[seed]
    return chosen


def _axis(runs: Sequence[Run], keys: Sequence[str]) -> str:
    for key in keys:
        values = [select(run.config, key) for run in runs]
        if all(isinstance(value, int | float) for value in values) and len(set(values)) > 1:
            return key
    for key in keys:
        if all(isinstance(select(run.config, key), int | float) for run in runs):
            return key
    raise ConfigError(f"--x must name a number in the runs' config; none has {' or '.join(keys)}")
