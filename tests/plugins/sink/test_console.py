"""plugins/sink/console.py: what a user reads at the end."""

import re
from pathlib import Path

import pytest

from core.records import RequestRecord
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summarise
from plugins.shared.measure import Measure, Slo, window_of
from plugins.shared.run_info import SinkQuery
from plugins.sink.console import Console
from tests.plugins.sink.sink_run import RUN, feed


def test_table_names_results_and_who_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(Console(), tmp_path)
    out = capsys.readouterr().out
    for text in (
        "evict_shortest",
        "output tokens/s",
        "first token (TTFT)",
        "token gap (ITL)",
        "end to end (E2E)",
        "prefix hit rate",
        "recomputed tokens",
        "wasted slots, internal",
        "2 of 3 completed",
        "length 2, capacity 1",
        "first error: ",
        "decide_preemption",
        str(tmp_path),
    ):
        assert text in out
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 100
    assert "\x1b" not in out  # no colours in a file


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal_without_wrapped_names(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    feed(Console(), tmp_path)
    out = capsys.readouterr().out
    for text in ("KV reserved, mean / peak", "per token (TPOT)", "waiting, mean / peak"):
        assert text in out
    lines = out.replace(str(tmp_path), "").splitlines()
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= columns


def test_plugins_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed(Console(show_plugins=False), tmp_path)
    assert "decide_preemption" not in capsys.readouterr().out


def test_empty_run_prints_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = Console().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.close(RUN, summarise([], StepTotals(16, 10)))
    assert "0 of 0 completed" in capsys.readouterr().out


def test_what_was_promised_and_what_is_not_counted_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Console().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    window = window_of([0.0, 1.0, 2.0, 3.0], Measure(warm_up=0.5))
    records = [
        RequestRecord(f"r{at}", "", float(at), 5, finished_s=9.0, finish_reason="error")
        for at in range(4)
    ]
    sink.close(RUN, summarise(records, StepTotals(16, 10), window, Slo(ttft_s=1.0)))
    out = capsys.readouterr().out
    assert re.search(r"requests within SLO +0.0 %", out)
    assert re.search(r"not counted +2 \(warm-up, drain\)", out)


def test_names_with_brackets_are_not_taken_for_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "[bold]run"
    folder.mkdir()
    feed(Console(), folder)
    assert "[bold]run" in capsys.readouterr().out
