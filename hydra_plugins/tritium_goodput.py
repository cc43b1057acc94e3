"""A Hydra sweeper whose rates follow from the results: goodput by bisection (conf/bisection.py).

Hydra takes sweepers from this namespace alone. Chosen by `hydra/sweeper=goodput`, as
`+experiment=goodput` does; every probe is a sweep's job like any other: it has a folder, goes
through the launcher, and is not run again when the sweep is."""

import csv
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from conf.bisection import Search
from core.config import require

SEED = "seed"


@dataclass(slots=True)
class Subject:
    """One combination of the axes but seed and rate, and the search for its goodput. label: the
    overrides in which combinations differ. shares: rate -> seed -> attainment."""

    label: str
    overrides: tuple[str, ...]
    search: Search
    shares: dict[float, dict[str, float]] = field(default_factory=dict)
    failed: bool = False


class GoodputSweeper(Sweeper):
    """For each combination of the swept axes: the highest `rate` at which the share of requests
    within `slo`, mean over the seeds, is at least slo.attainment.

    params: axes as of Hydra's basic sweeper; a seed among them. rate: config key of the load, which
    the workload must have (workload.rate; workload.rate_scale of a trace). low, high, tolerance,
    max_probes: see conf/bisection.py. Combinations take turns, within each seed, so that what
    drifts on a device meets all alike. Writes goodput.json and attainment.csv into the sweep's
    folder after every round."""

    def __init__(
        self,
        rate: str,
        low: float,
        high: float,
        tolerance: float,
        max_probes: int,
        params: dict[str, Any] | None = None,
        max_batch_size: int | None = None,  # noqa: ARG002 - a round is a batch
    ) -> None:
        self.rate = rate
        self.params = dict(params or {})
        self.limits: dict[str, Any] = {
            "low": low,
            "high": high,
            "tolerance": tolerance,
            "max_probes": max_probes,
        }
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None
        self.hydra_context: HydraContext | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """As Hydra asks."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Search; returns the goodput of each combination by its label."""
        assert self.config is not None
        target = self._target(self.config)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        seeds, subjects = self._subjects(arguments)
        num_jobs = 0
        for number in itertools.count(1):
            probes = [
                (subject, rate)
                for subject in subjects
                if not subject.failed and (rate := subject.search.next_rate()) is not None
            ]
            if not probes:
                break
            num_jobs += self._round(number, probes, seeds, num_jobs, target)
            self._write(folder, subjects, target)
        for subject in subjects:
            _say(_conclusion(subject, self.rate))
        return {subject.label: subject.search.meets for subject in subjects}

    def _round(
        self,
        number: int,
        probes: Sequence[tuple[Subject, float]],
        seeds: Sequence[str],
        first_job: int,
        target: float,
    ) -> int:
        """Run one rate of each search on every seed; returns the number of jobs."""
        assert self.launcher is not None
        jobs = [
            [*subject.overrides, f"{SEED}={seed}", f"{self.rate}={rate:g}"]
            for seed in seeds
            for subject, rate in probes
        ]
        if number == 1:  # later rounds differ in the rate alone
            self.validate_batch_is_legal(jobs)
        results = list(self.launcher.launch(jobs, initial_job_idx=first_job))
        for place, (subject, rate) in enumerate(probes):
            own = results[place :: len(probes)]
            shares = {
                seed: share
                for seed, job in zip(seeds, own, strict=True)
                if (share := _attainment(job)) is not None
            }
            if len(shares) < len(seeds):
                subject.failed = True
                _say(f"probe {number}: {subject.label} {self.rate}={rate:g}: a job failed")
                continue
            subject.shares[rate] = shares
            mean = sum(shares.values()) / len(shares)
            subject.search.tell(rate, mean >= target)
            _say(_probe(number, subject, f"{self.rate}={rate:g}", mean, target))
        return len(jobs)

    def _subjects(self, arguments: Sequence[str]) -> tuple[list[str], list[Subject]]:
        """Seeds, and the combinations of all other axes."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = [key if value is None else f"{key}={value}" for key, value in self.params.items()]
        axes: dict[str, list[str]] = {}
        for override in parser.parse_overrides([*given, *arguments]):
            key = override.get_key_element()
            require(key != self.rate, self.rate, "left to the search", override.input_line)
            if override.is_delete():
                axes[key] = [key]
            elif override.is_sweep_override():
                axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            else:
                axes[key] = [f"{key}={override.get_value_element_as_str()}"]
        default = OmegaConf.select(self.config, SEED) if self.config is not None else 0
        seeds = [one.partition("=")[2] for one in axes.pop(SEED, [f"{SEED}={default}"])]
        differing = [len(values) > 1 for values in axes.values()]
        subjects = []
        for combination in itertools.product(*axes.values()):
            label = " ".join(itertools.compress(combination, differing)) or "this setting"
            subjects.append(Subject(label, combination, Search(**self.limits)))
        return seeds, subjects

    def _target(self, config: DictConfig) -> float:
        """Raises ConfigError without any limit of an SLO, or for a workload without the rate."""
        limits = [config.slo[name] for name in ("ttft_s", "tpot_s", "itl_s")]
        given = any(limit is not None for limit in limits)
        require(given, "slo.ttft_s, slo.tpot_s or slo.itl_s", "given", limits)
        group, _, key = self.rate.rpartition(".")
        keys = sorted(map(str, OmegaConf.select(config, group) or {}))
        rule = f"a rate of the load, one of {group}'s {', '.join(keys)}"
        require(key in keys, "hydra.sweeper.rate", rule, self.rate)
        return float(config.slo.attainment)

    def _write(self, folder: Path, subjects: Sequence[Subject], target: float) -> None:
        found = [
            {
                "overrides": list(subject.overrides),
                "label": subject.label,
                "goodput": subject.search.meets,
                "lowest_failing": subject.search.fails,
                "settled": subject.search.settled,
                "failed": subject.failed,
                "attainment": {f"{rate:g}": one for rate, one in sorted(subject.shares.items())},
            }
            for subject in subjects
        ]
        text = json.dumps({"rate": self.rate, "target": target, "found": found}, indent=2)
        partial = folder / "goodput.json.partial"
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(folder / "goodput.json")
        with open(folder / "attainment.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["label", "rate", "seed", "attainment"])
            for subject in subjects:
                for rate, shares in sorted(subject.shares.items()):
                    writer.writerows((subject.label, rate, *pair) for pair in shares.items())


def _attainment(job: JobReturn) -> float | None:
    """Of a finished job; None if it failed, which conf/callbacks.py reports."""
    summary = job.return_value
    share = (summary or {}).get("slo", {}).get("attainment")
    return None if share is None else float(share)


def _probe(number: int, subject: Subject, rate: str, mean: float, target: float) -> str:
    shares = list(subject.shares.values())[-1].values()
    spread = f" ({100 * min(shares):.1f} to {100 * max(shares):.1f})" if len(shares) > 1 else ""
    verdict = "meets" if mean >= target else "misses"
    what = f"{100 * mean:.1f} %{spread} within SLO over {len(shares)} seeds"
    return f"probe {number}: {subject.label} {rate}: {what}, {verdict} {100 * target:g} %"


def _conclusion(subject: Subject, key: str) -> str:
    search = subject.search
    if subject.failed:
        return f"goodput of {subject.label}: not found, a job failed"
    if search.meets is None:
        return f"goodput of {subject.label}: below {key}={search.fails:g}, the lowest tried"
    above = "no higher one failed" if search.fails is None else f"{search.fails:g} misses"
    note = "" if search.settled else ", not settled"
    return f"goodput of {subject.label}: {key}={search.meets:g} ({above}{note})"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
