"""plugins/sink/files.py: what a run's folder holds."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.records import StepRecord
from plugins.shared.run_info import SinkQuery
from plugins.sink.files import Files
from tests.plugins.sink.sink_run import RUN, feed, steps, summary


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_full_records_write_every_file(tmp_path: Path) -> None:
    feed(Files("full"), tmp_path)
    assert names(tmp_path) == {"steps.jsonl", "requests.csv", "tokens.npz", "summary.json"}
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert lines[2]["choices"] == [
        {
            "request_id": "a",
            "choice": 0,
            "kind": "preempted",
            "plugin": "evict_shortest",
            "reason": "fewest generated",
            "detail": {"cause": "pages", "pages_freed": 2, "lost_tokens": 9},
        }
    ]
    assert lines[0]["choices"][0]["detail"] == {"cached_tokens": 4}  # numpy numbers are plain
    assert lines[0]["rows"] == [["a", 0, 1]]


def test_requests_csv_has_a_row_each_and_blanks_for_what_never_happened(tmp_path: Path) -> None:
    feed(Files(), tmp_path)
    with open(tmp_path / "requests.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["index"], row["request_id"]) for row in rows] == [
        ("0", "huge"),
        ("1", "b"),
        ("2", "a"),
    ]
    assert (rows[0]["ttft_s"], rows[0]["error"]) == ("", "needs 25 pages")
    assert float(rows[1]["ttft_s"]) == 1.5
    assert float(rows[2]["tpot_s"]) == pytest.approx((6.0 - 1.0) / 3)


def test_tokens_point_at_their_row(tmp_path: Path) -> None:
    feed(Files(), tmp_path)
    with np.load(tmp_path / "tokens.npz") as tokens:
        assert tokens["request"].tolist() == [1, 1, 1, 2, 2, 2, 2]
        assert tokens["token_id"].tolist() == [100, 101, 102, 100, 101, 102, 103]
        assert tokens["time_s"].tolist() == [2.0, 3.0, 4.0, 1.0, 2.0, 5.0, 6.0]
        assert tokens["step"].dtype == np.int64


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ("requests", {"requests.csv", "tokens.npz", "summary.json"}),
        ("summary", {"summary.json"}),
    ],
)
def test_lower_levels_write_less(tmp_path: Path, records: str, expected: set[str]) -> None:
    feed(Files(records), tmp_path)
    assert names(tmp_path) == expected
    assert json.loads((tmp_path / "summary.json").read_text()) == summary()


def test_failed_run_leaves_steps_and_no_summary(tmp_path: Path) -> None:
    sink: Any = Files().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.step(steps()[0])
    sink.fail(RuntimeError("boom"))
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
    assert "summary.json" not in names(tmp_path)


def test_summary_with_a_number_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    sink: Any = Files("summary").build_sink(query=SinkQuery(RUN, str(tmp_path)))
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.close(RUN, {"rate": float("nan")})
    assert "summary.json" not in names(tmp_path)


def test_rows_that_recur_are_written_as_they_are(tmp_path):
    rows = [[("a", 0, 1), ('"b\\', 2, 30)], [("a", 0, 1)], []]
    sink: Any = Files().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    for number, listed in enumerate(rows):
        sink.step(StepRecord(number, 0.5, rows=listed))
    sink.close(RUN, {})
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    read = [[tuple(row) for row in json.loads(line)["rows"]] for line in lines]
    assert read == rows
