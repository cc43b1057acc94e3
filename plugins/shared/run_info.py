"""What sinks and observers are told of a run."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What is known of a run before it starts.

    hooks: hook -> plugin in charge. policy: flat label of the `+policy=` plugins, "default" without
    any. config: the resolved one. manifest: commit, versions, device, seeds, kernels' choices."""

    name: str
    seed: int
    policy: str
    hooks: dict[str, str]
    config: dict[str, Any]
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SinkQuery:
    """run: what is known of the run before it starts. folder: where it writes, absolute."""

    run: RunInfo
    folder: str
