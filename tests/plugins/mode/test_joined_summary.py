"""The summary of a simulated run whose steps of decodes go in one: as if each went alone."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.hookspecs import hookimpl
from plugins.executor.simulated import Simulated
from plugins.mode.bench import Bench
from plugins.shared.measure import Measure, Slo
from tests.core.test_joined_steps import TIMES, workload
from tests.plugins.mode.mode_session import Given, Recorder, make_session

# Who decides is asked once for all steps; hosts take their time.
APART = ("steps.host_us", "plugins", "hooks")


class Unsteady:
    """Observes, and does not say that it takes records of several steps."""

    @hookimpl
    def on_step(self, query: Any) -> None:
        pass


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not path.startswith(APART):
        yield path, value


def simulated(
    folder: Path, joins: bool, overlap: bool, measure: Measure, pages: int
) -> tuple[Any, Recorder]:
    recorder, folder = Recorder(), folder / str(joins)
    folder.mkdir()
    device = Simulated(TIMES, vocab_size=500, host_s=0.0003, graph_sizes=[2, 4, 8])
    plugins = {} if joins else {"unsteady": Unsteady()}
    session = make_session(
        folder, Given(workload()), pages=pages, executor=device, recorder=recorder, **plugins
    )
    session.engine = replace(session.engine, overlap=overlap)
    session.measure, session.slo = measure, Slo(ttft_s=0.05, tpot_s=0.01)
    return Bench(warmup=False, lock="off").run(session), recorder


@pytest.mark.parametrize(
    ("pages", "overlap", "measure"),
    [
        (160, False, Measure()),
        (160, True, Measure(0.2, 0.2)),
        (24, True, Measure()),  # evicts and preempts
        (24, False, Measure(0.2, 0.2)),
    ],
)
def test_summary_is_that_of_single_steps(
    tmp_path: Path, pages: int, overlap: bool, measure: Measure
) -> None:
    (apart, single), (joined, several) = (
        simulated(tmp_path, joins, overlap, measure, pages) for joins in (False, True)
    )
    assert max(record.steps for record in single.steps) == 1
    assert max(record.steps for record in several.steps) > 8
    expected, found = dict(numbers(apart)), dict(numbers(joined))
    assert expected["graphs.padding_share"] > 0
    for name, value in expected.items():
        assert found.pop(name) == pytest.approx(value, rel=1e-9), name
    assert not found
