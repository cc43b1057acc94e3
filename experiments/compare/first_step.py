"""The first step at which two runs decided differently (plugins/shared/first_step.py)."""

from experiments.paper.folders import Run
from plugins.shared import first_step
from plugins.shared.first_step import Divergence, describe

__all__ = ["Divergence", "describe", "first_difference"]


def first_difference(base: Run, own: Run) -> Divergence | int:
    """The first step whose decisions differ; the number of steps if none does. Raises ConfigError
    without steps.jsonl."""
    return first_step.first_difference(base.steps(), own.steps(), (base.policy, own.policy))
