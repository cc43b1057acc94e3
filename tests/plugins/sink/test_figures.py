"""plugins/sink/figures.py, plots.py and series.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.records import Choice, StepRecord
from plugins.shared.run_info import SinkQuery
from plugins.sink import figures
from plugins.sink.figures import Figures
from plugins.sink.plots import latency_figure, memory_figure
from plugins.sink.series import StepSeries
from tests.plugins.sink.sink_run import RUN, feed, requests, steps

PNG = b"\x89PNG\r\n\x1a\n"


def step(index: int, **fields: Any) -> StepRecord:
    return StepRecord(step=index, start_s=float(index), end_s=index + 1.0, **fields)


def test_series_is_exact_while_it_is_short() -> None:
    series = StepSeries(limit=100)
    for record in steps():
        series.add(record)
    read = series.read()
    assert read.edges_s.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert read.levels["pages_request"].tolist() == [3] * 6
    assert read.counts["preemptions"].tolist() == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("limit", [4, 5, 16])
def test_long_series_stays_bounded_and_keeps_sums_and_means(limit: int) -> None:
    series = StepSeries(limit)
    gone = [Choice("a", 0, "preempted", "p", "r")]
    num = 1000
    for index in range(num):
        choices = gone if index % 10 == 0 else []
        series.add(step(index, waiting=index, decode_tokens=2, choices=choices))
    read = series.read()
    assert len(read.edges_s) <= limit + 1
    assert read.edges_s[0] == 0
    assert read.edges_s[-1] == num
    assert (np.diff(read.edges_s) > 0).all()
    assert read.counts["preemptions"].sum() == num / 10
    assert read.counts["decode_tokens"].sum() == 2 * num
    mean = (read.levels["waiting"] * np.diff(read.edges_s)).sum() / num
    assert mean == pytest.approx((num - 1) / 2)


def test_bins_hold_equally_many_steps_but_the_last() -> None:
    series = StepSeries(limit=8)
    for index in range(77):
        series.add(step(index))
    sizes = np.diff(series.read().edges_s)
    assert len(set(sizes[:-1])) == 1
    assert sizes[-1] <= sizes[0]


def test_figures_are_written_as_png(tmp_path: Path) -> None:
    feed(Figures(), tmp_path)
    for name in ("memory.png", "latency.png"):
        assert (tmp_path / "figures" / name).read_bytes().startswith(PNG)


def test_memory_figure_stacks_pages_to_the_pool_and_counts_preemptions() -> None:
    series = StepSeries()
    for record in steps():
        series.add(record)
    pages, batch = memory_figure(series.read(), "title").axes
    labels = pages.get_legend_handles_labels()[1]
    assert labels == ["requests", "cached, in use", "cached, evictable", "free", "preemption (1)"]
    assert pages.get_ylim()[1] == pytest.approx(8 * 1.09)
    assert batch.get_xlabel() == "time since start (s)"


def test_latency_figure_names_percentiles_of_completed_requests_alone() -> None:
    first, gaps = latency_figure(requests(), "title").axes
    assert "(2 requests)" in first.get_title(loc="left")
    assert "(5 gaps)" in gaps.get_title(loc="left")
    assert [text.get_text().split()[0] for text in first.texts] == ["p50"]


def test_run_without_any_step_draws_what_it_can(tmp_path: Path) -> None:
    sink: Any = Figures().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.close(RUN, {})
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["latency.png"]


def test_long_run_keeps_its_last_requests_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    titles = []
    last = requests()[1:3]
    room = sum(record.output_tokens + figures.RECORD_TOKENS for record in last)
    monkeypatch.setattr(figures, "MAX_TOKENS", room)
    draw = figures.latency_figure
    monkeypatch.setattr(
        figures, "latency_figure", lambda kept, title: titles.append(title) or draw(kept, title)
    )
    sink: Any = Figures().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    for record in requests()[:3]:
        sink.request(record)
    sink.close(RUN, {})
    assert titles[0].endswith("the last 2 of 3 requests")
    assert [one.request_id for one in sink._records] == [one.request_id for one in last]
