"""How far simulated runs are from a device's: python -m experiments.sim_vs_gpu.report FOLDER
[POLICY,POLICY…].

error    |simulated / device - 1| of a run's number; MAPE is its mean over runs
ranking  Kendall's tau-b over pairs of policies, of one workload and number, that the device tells
         apart: the differences paired by seed have a 95 % interval (Student's t) without zero. A
         pair that the simulation ties counts in the denominator alone. A workload with fewer than
         ten pairs does not count.
pressed  runs on the device in which requests queued, and pages were preempted or evicted"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import mean

from core.config import require
from experiments.paper.cells import markdown
from experiments.paper.folders import Run, read_run, select
from experiments.paper.intervals import over_seeds
from experiments.sim_vs_gpu.cells import SIDES

NUMBERS = {
    "output tokens/s": "throughput.output_tokens_per_s",
    "TTFT p50": "latency.ttft_s.p50",
    "TTFT p99": "latency.ttft_s.p99",
    "ITL p50": "latency.itl_s.p50",
    "ITL p99": "latency.itl_s.p99",
    "E2E mean": "latency.e2e_s.mean",
    "E2E p50": "latency.e2e_s.p50",
    "E2E p99": "latency.e2e_s.p99",
}
LEAST_PAIRS = 10
QUEUED_S = 1e-3  # a request that waits less was admitted in its first step
Values = dict[str, dict[int, tuple[float, float]]]
"""Policy -> seed -> (device, simulated)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same cell on both sides. policy: the cell's name of it."""

    workload: str
    policy: str
    device: Run
    simulated: Run

    def values(self, path: str) -> tuple[float, float] | None:
        """A number of both summaries; None where one has none."""
        found = select(self.device.summary, path), select(self.simulated.summary, path)
        return None if None in found else (float(found[0]), float(found[1]))

    @property
    def pressed(self) -> bool:
        """Whether requests queued and pages ran short on the device."""
        summary = self.device.summary
        waited_s = select(summary, "latency.queue_s.p99") or 0.0
        return waited_s > QUEUED_S and summary["preemptions"] + summary["evicted_pages"] > 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """Pairs of policies that the device tells apart: how many the simulation orders alike, the
    other way round, and not at all."""

    concordant: int = 0
    discordant: int = 0
    tied: int = 0

    @property
    def num_pairs(self) -> int:
        """All of them."""
        return self.concordant + self.discordant + self.tied

    @property
    def tau_b(self) -> float | None:
        """Kendall's tau-b; None for too few pairs, and where all are tied."""
        told = self.concordant + self.discordant
        if self.num_pairs < LEAST_PAIRS or not told:
            return None
        return (self.concordant - self.discordant) / sqrt(self.num_pairs * told)


def main(folder: Path, policies: Sequence[str] | None = None) -> str:
    """The report in Markdown; of these policies alone, None = all that ran."""
    pairs, alone = find_pairs(folder)
    if policies is not None:
        known = sorted({pair.policy for pair in pairs})
        require(set(policies) <= set(known), "POLICY", f"of {', '.join(known)}", list(policies))
        pairs = [pair for pair in pairs if pair.policy in policies]
    pressed = sum(pair.pressed for pair in pairs)
    simulated = pairs[0].simulated.summary.get("simulated") or {}
    rows = []
    for name, path in NUMBERS.items():
        by_workload: dict[str, list[float]] = defaultdict(list)
        for pair in pairs:
            values = pair.values(path)
            if values is not None:
                by_workload[pair.workload].append(error(values))
        errors = [one for own in by_workload.values() for one in own]
        rankings = rank_all(pairs, path)
        counted = {name: one for name, one in rankings.items() if one.num_pairs >= LEAST_PAIRS}
        told = ", ".join(
            f"{name} {one.concordant} of {one.num_pairs}" for name, one in rankings.items()
        )
        taus = ", ".join(
            f"{name} {'all tied' if one.tau_b is None else f'{one.tau_b:.2f}'}"
            for name, one in counted.items()
        )
        rows.append(
            [
                name,
                str(len(errors)),
                f"{100 * mean(errors):.1f} %" if errors else "",
                ", ".join(f"{name} {100 * mean(own):.1f} %" for name, own in by_workload.items()),
                f"{100 * max(errors):.1f} %" if errors else "",
                told,
                taus or f"too few (< {LEAST_PAIRS})",
            ]
        )
    lines = [
        f"{len(pairs)} cells, {pressed} of them pressed; {alone} runs without a partner.",
        f"Simulated by {simulated.get('source')}; error of its steps: {simulated.get('error')}",
        "",
        markdown(
            [
                "number",
                "cells",
                "MAPE",
                "by workload",
                "largest",
                "pairs told apart that it orders alike",
                "tau-b",
            ],
            rows,
        ),
    ]
    return "\n".join(lines)


def find_pairs(folder: Path) -> tuple[list[Pair], int]:
    """The cells that ran on both sides, and how many ran on one alone. Raises ConfigError if none
    ran on both."""
    sides = [
        {path.parent.relative_to(folder / side): path.parent for path in found}
        for side in SIDES
        for found in [sorted((folder / side).glob("*/*/summary.json"))]
    ]
    both = sorted(sides[0].keys() & sides[1].keys())
    rule = f"a folder with runs below both {SIDES[0]}/ and {SIDES[1]}/"
    require(bool(both), "FOLDER", rule, str(folder))
    pairs = [
        Pair(
            name.parts[0],
            name.parts[1].rpartition("-s")[0],
            read_run(sides[0][name]),
            read_run(sides[1][name]),
        )
        for name in both
    ]
    return pairs, len(sides[0].keys() ^ sides[1].keys())


def error(values: tuple[float, float]) -> float:
    """Relative error of the simulated value; 0 where both are 0."""
    device, simulated = values
    if device == 0:
        return 0.0 if simulated == 0 else float("inf")
    return abs(simulated / device - 1)


def rank_all(pairs: Sequence[Pair], path: str) -> dict[str, Ranking]:
    """The ranking of each workload by one number."""
    workloads: dict[str, Values] = defaultdict(lambda: defaultdict(dict))
    for pair in pairs:
        values = pair.values(path)
        if values is not None:
            workloads[pair.workload][pair.policy][pair.device.seed] = values
    return {workload: rank(own) for workload, own in workloads.items()}


def rank(values: Mapping[str, Mapping[int, tuple[float, float]]]) -> Ranking:
    """Policies of one workload: by pairs that the device tells apart."""
    counts = [0, 0, 0]
    for first, second in combinations(sorted(values), 2):
        seeds = sorted(values[first].keys() & values[second].keys())
        if len(seeds) < 2:
            continue
        device, simulated = (
            [values[second][seed][side] - values[first][seed][side] for seed in seeds]
            for side in (0, 1)
        )
        interval = over_seeds(device)
        if not interval.clear:
            continue
        product = mean(simulated) * interval.mean
        counts[0 if product > 0 else 1 if product < 0 else 2] += 1
    return Ranking(*counts)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else None))
