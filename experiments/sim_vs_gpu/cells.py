"""The settings that run on a device and simulated: workloads that queue and run short of pages, and
policies to rank.

None of them is what mode=calibrate measured: that times single steps of a grid."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Overrides = Sequence[str]

# {seed} moves the part of a trace that is replayed; workloads that draw do so by the run's seed.
WORKLOADS: Mapping[str, Overrides] = {
    "conv": (
        "workload=azure_conv",
        "workload.num_requests=600",
        "workload.start={seed}000",
        "workload.rate_scale=12",
        "workload.max_prompt=4096",
    ),
    "code": (
        "workload=azure_code",
        "workload.num_requests=400",
        "workload.start={seed}000",
        "workload.rate_scale=24",
        "workload.max_prompt=4096",
    ),
    "long_answers": (
        "workload=synthetic",
        "workload.num_requests=400",
        "workload.rate=60",
        "workload.prompt={kind: lognormal, median: 128, sigma: 1.0, low: 8, high: 2048}",
        "workload.output={kind: lognormal, median: 256, sigma: 1.0, low: 8, high: 2048}",
    ),
    "shared": (
        "workload=shared_prefix",
        "workload.num_groups=32",
        "workload.requests_per_group=16",
        "workload.prefix_tokens=2048",
        "workload.max_tokens=128",
        "workload.rate=60",
    ),
}
POLICIES: Mapping[str, Overrides] = {
    "default": (),
    "sjf": ("+policy=[sjf,oracle]",),
    "srtf": ("+policy=[srtf,oracle]",),
    "reserve_max": ("+policy=reserve_max",),
    "evict_longest": ("+policy=evict_longest",),
    "prefill_first": ("batching=prefill_first",),
}
ENGINE: Overrides = (
    "engine.overlap=true",
    "engine.pool_tokens=16384",
    "engine.max_num_seqs=256",
    "engine.max_num_batched_tokens=2048",
    "engine.max_model_len=8192",
    "defaults_behind.prompt_fits.growth_share=0.0",  # victims are needed
)
SIDES = ("device", "simulated")


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. overrides: of its workload, policy and seed, for run.py."""

    workload: str
    policy: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Of its run, below that of a side."""
        return f"{self.workload}/{self.policy}-s{self.seed}"


def cells(
    workloads: Sequence[str], policies: Sequence[str], seeds: Sequence[int]
) -> Iterator[Cell]:
    """Every seed with every workload and policy; the policy varies fastest, so that what drifts on
    the device meets all of them, the seed slowest: with it random weights are drawn anew."""
    for seed in seeds:
        for workload in workloads:
            own = [option.replace("{seed}", str(seed)) for option in WORKLOADS[workload]]
            for policy in policies:
                options = (*own, *POLICIES[policy], f"seed={seed}", *ENGINE)
                yield Cell(workload, policy, seed, options)
