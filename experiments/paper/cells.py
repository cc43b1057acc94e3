"""Cells of a table over seeds."""

from collections.abc import Sequence

from experiments.paper.intervals import over_seeds


def spread(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Mean and half of its 95 % interval (Student's t over seeds), as `12.3 ± 0.4`."""
    interval = over_seeds(values)
    text = form.format(interval.mean)
    if interval.high is None:
        return text
    return f"{text} ± {form.format(interval.high - interval.mean)}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
