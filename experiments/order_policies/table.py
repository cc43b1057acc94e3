"""What each order of the waiting does at each rate, from the runs of a sweep:
python -m experiments.order_policies.table FOLDER...

Requests of one run share its queue: where a load has one seed alone there is no interval. Goodput:
the highest rate at which the share of requests within the SLO, straight between the rates tried, is
still the target (experiments/figure/rates.py)."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from core.errors import ConfigError
from experiments.figure.rates import crossing
from experiments.paper.cells import markdown, spread
from experiments.paper.folders import Run, find_runs, numbers, select

RATES = ("workload.rate_scale", "workload.rate")
# column -> (path in summary.json, scale, format)
COLUMNS = {
    "normalised, ms/token": ("latency.normalised_s.mean", 1e3, "{:.0f}"),
    "TTFT p50, s": ("latency.ttft_s.p50", 1, "{:.2f}"),
    "TTFT p99, s": ("latency.ttft_s.p99", 1, "{:.2f}"),
    "E2E mean, s": ("latency.e2e_s.mean", 1, "{:.2f}"),
    "in SLO, %": ("slo.attainment", 100, "{:.1f}"),
    "hit rate, %": ("hit_rate", 100, "{:.1f}"),
    "preemptions": ("preemptions", 1, "{:,.0f}"),
}
SORTED = "latency.normalised_s.mean"
ATTAINMENT = "slo.attainment"
Policies = dict[str, list[Run]]


def main(folders: Sequence[Path]) -> str:
    """For each workload a table a rate, least normalised latency first, and one of goodput, which
    takes more than one rate to tell."""
    found, _ = find_runs(folders)
    loads: dict[str, dict[float, Policies]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run in found:
        loads[run.summary["workload"]][rate_of(run)][run.policy].append(run)
    parts = []
    for load, rates in loads.items():
        for rate, policies in sorted(rates.items()):
            parts.append(f"{load} at rate {rate:g}\n\n{table(policies)}")
        if len(rates) > 1:
            parts.append(f"{load}, goodput\n\n{goodputs(rates)}")
    return "\n\n".join(parts)


def table(policies: Policies) -> str:
    """One row a policy."""
    keys = {policy: mean(numbers(runs, SORTED)) for policy, runs in policies.items()}
    rows = [
        [
            policy,
            str(len(policies[policy])),
            *(
                spread(numbers(policies[policy], path, scale), form)
                for path, scale, form in COLUMNS.values()
            ),
        ]
        for policy in sorted(policies, key=keys.__getitem__)
    ]
    return markdown(["order", "runs", *COLUMNS], rows)


def goodputs(rates: dict[float, Policies]) -> str:
    """One row a policy, highest first: where a seed's curve crosses the target, mean over seeds."""
    curves: dict[str, dict[int, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    target = 0.0
    for rate, policies in sorted(rates.items()):
        for policy, runs in policies.items():
            for run in runs:
                target = float(select(run.summary, "slo.target"))
                curves[policy][run.seed][rate] = float(select(run.summary, ATTAINMENT))
    found = {
        policy: [crossing(list(own), list(own.values()), target) for own in seeds.values()]
        for policy, seeds in curves.items()
    }
    rows = [
        [policy, spread(found[policy], "{:.2f}")]
        for policy in sorted(found, key=lambda policy: -mean(found[policy]))
    ]
    return markdown(["order", f"rate at which {target:.0%} keep the SLO"], rows)


def rate_of(run: Run) -> float:
    """What the load's rate is set by: requests a second, or a multiple of the recorded one."""
    for path in RATES:
        value = select(run.config, path)
        if value is not None:
            return float(value)
    raise ConfigError(f"FOLDER must hold runs with a rate, got {run.folder}")


if __name__ == "__main__":
    try:
        print(main([Path(name) for name in sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(str(error))
