"""The settings that run on a device and simulated: workloads that queue and run short of pages, and
policies to rank.

More arrives at once than can be served, so that a policy's speed decides how long all wait. All
cells have one engine, so that a device keeps its model, pool and graphs from cell to cell. None of
them is what mode=calibrate measured: it times single steps of a grid, and a run of a workload that
is not among these."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Overrides = Sequence[str]

# {seed} moves the part of a trace that is replayed; workloads that draw do so by the run's seed.
WORKLOADS: Mapping[str, Overrides] = {
    "long_answers": (
        "workload=synthetic",
        "workload.num_requests=160",
        "workload.rate=300",
        "workload.prompt={kind: lognormal, median: 128, sigma: 1.0, low: 8, high: 2048}",
        "workload.output={kind: lognormal, median: 128, sigma: 1.0, low: 8, high: 1024}",
    ),
    "conv": (
        "workload=azure_conv",
        "workload.num_requests=160",
        "workload.start={seed}000",
        "workload.rate_scale=48",
        "workload.max_prompt=2048",
        "workload.max_output=512",
    ),
    "shared": (
        "workload=shared_prefix",
        "workload.num_groups=16",
        "workload.requests_per_group=12",
        "workload.prefix_tokens=1024",
        "workload.max_tokens=128",
        "workload.rate=200",
    ),
}
POLICIES: Mapping[str, Overrides] = {
    "default": (),
    "sjf": ("+policy=[sjf,oracle]",),
    "prefill_first": ("batching=prefill_first",),
    "interleaved": ("batching=interleaved",),
    "small_steps": ("batching.token_budget=64",),
    "static": ("batching=static",),
    "static_32": ("batching=static", "batching.batch_size=32"),
    "reserve_max": ("+policy=reserve_max",),
    "no_cache": ("cache=none",),
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
