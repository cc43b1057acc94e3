"""plugins/mode/explain.py and story.py: made-up steps, and a real run's folder."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from plugins.mode.bench import Bench
from plugins.mode.explain import Explain
from plugins.mode.story import tell
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import make_session

ROW = {
    "arrival_s": "0.5",
    "prompt_tokens": "10",
    "output_tokens": "1",
    "first_token_s": "2.5",
    "finished_s": "9.0",
    "finish_reason": "length",
    "recomputed_tokens": "0",
    "client": "",
    "error": "",
}


def step(number: int, *choices: Any, rows: Any = ()) -> dict[str, Any]:
    """One second a step. choices: (request, kind, reason[, detail])."""
    return {
        "step": number,
        "start_s": float(number),
        "end_s": number + 1.0,
        "steps": 1,
        "rows": [list(row) for row in rows],
        "choices": [
            {
                "request_id": name,
                "choice": 0,
                "kind": kind,
                "plugin": "policy",
                "reason": reason,
                "detail": detail[0] if detail else {},
            }
            for name, kind, reason, *detail in choices
        ],
    }


def whats(events: Any) -> list[tuple[str, Any, Any]]:
    return [(event.what, event.first, event.last) for event in events]


def test_waiting_behind_others_is_merged_and_names_them_in_turn() -> None:
    steps = [
        step(0, ("x", "refused", "needs 9, 1 left")),  # before it arrived
        step(1, ("x", "refused", "needs 9, 2 left")),
        step(2, ("x", "refused", "needs 9, 3 left")),
        step(3, ("x", "admitted", "fits"), ("y", "refused", "needs 7, 0 left")),
        step(4, ("a", "refused", "needs 3, 0 left")),
        step(5, ("a", "refused", "needs 3, 1 left")),
        step(6, ("a", "admitted", "fits", {"cached_tokens": 4}), rows=[("a", 0, 6)]),
    ]
    events = tell("a", ROW, steps)
    assert whats(events) == [
        ("arrived", None, None),
        ("waited", 1, 3),
        ("waited", 4, 5),
        ("admitted", 6, 6),
        ("prefill", 6, 6),
        ("finished", None, None),
    ]
    assert events[1].why == (
        "behind x, y, in turn refused by policy: needs 9, 2 left; at last: needs 7, 0 left"
    )
    assert events[2].why == "refused by policy: needs 3, 0 left; at last: needs 3, 1 left"
    assert events[3].why == "policy: fits, 4 tokens found in the prefix cache"


@pytest.mark.parametrize(("first_token_s", "turn"), [("2.5", (2.5, 2.5)), ("", (7.0, 1.0))])
def test_steps_that_went_in_one_are_told_apart_where_a_prompt_ends(
    first_token_s: str, turn: tuple[float, float]
) -> None:
    rows = [("a", 0, 10 + 4), ("b", 0, 6)]  # two slices, then four tokens; a token each time
    joined = step(1, ("a", "admitted", "fits"), rows=rows)
    joined |= {"steps": 6, "slices": 2, "end_s": 7.0}
    steps = [joined, step(7, rows=[("a", 0, 1)])]
    events = tell("a", ROW | {"first_token_s": first_token_s}, steps)[2:4]
    assert whats(events) == [("prefill", 1, 2), ("decode", 3, 7)]
    assert [event.why for event in events] == ["10 tokens in 2 steps", "5 tokens in 5 steps"]
    prefill, decode = events
    assert (prefill.start_s, prefill.end_s, decode.start_s, decode.end_s) == (1.0, *turn, 8.0)
    assert ("decode", 1, 6) in whats(tell("b", None, [joined]))


def test_another_reason_begins_another_line() -> None:
    steps = [
        step(1, ("x", "refused", "needs 9, 2 left")),
        step(2, ("x", "refused", "all 8 slots are taken")),
        step(3),
        step(4, ("b", "preempted", "newest")),
        step(5, ("a", "skipped", "a twin runs")),
    ]
    whys = [event.why for event in tell("a", ROW, steps) if event.what == "waited"]
    assert whys == [
        "behind x, refused by policy: needs 9, 2 left",
        "behind x, refused by policy: all 8 slots are taken",
        "its turn did not come in this step",
        "the step preempted or took back others: nobody else starts",
        "skipped by policy: a twin runs",
    ]


def test_preemption_says_by_whom_why_for_whom_and_at_what_cost() -> None:
    cost = {"cause": "displace", "pages_freed": 1, "lost_tokens": 22, "beneficiary": "vip"}
    steps = [
        step(1, ("a", "admitted", "fits"), rows=[("a", 0, 10)]),
        step(2, rows=[("a", 0, 1)]),
        step(3, rows=[("a", 0, 1)]),
        step(4, ("a", "preempted", "least urgent", cost), rows=[("vip", 0, 5)]),
        step(5, ("a", "refused", "needs 2, 0 left")),
        step(6, ("a", "resumed", "fits", {"cached_tokens": 16}), rows=[("a", 0, 7)]),
        step(7, ("a", "finished", "length"), rows=[("a", 0, 1)]),
    ]
    events = tell("a", ROW | {"recomputed_tokens": "7"}, steps)
    assert whats(events)[1:] == [
        ("admitted", 1, 1),
        ("prefill", 1, 1),
        ("decode", 2, 3),
        ("preempted", 4, 4),
        ("waited", 5, 5),
        ("resumed", 6, 6),
        ("prefill", 6, 6),
        ("decode", 7, 7),
        ("finished", None, None),
    ]
    assert events[3].why == "2 tokens in 2 steps"
    assert events[4].why == (
        "policy: least urgent, for vip; lost 22 computed tokens, freed 1 page at once"
    )
    assert events[-1].why == "length after 1 output token, 7 tokens computed again after preemption"


def test_record_of_several_steps_counts_as_these() -> None:
    several = step(3, rows=[("x", 0, 4)]) | {"steps": 4}
    steps = [
        step(2, ("x", "admitted", "room"), rows=[("x", 0, 9)]),
        several,
        step(7, rows=[("x", 0, 1)]),
    ]
    *_, decode, _ = tell("x", ROW, steps)
    assert (decode.what, decode.first, decode.last, decode.steps) == ("decode", 3, 7, 5)
    assert decode.why == "5 tokens in 5 steps"


def test_request_that_never_ended_is_told_from_its_steps() -> None:
    steps = [step(1, ("a", "admitted", "fits"), rows=[("a", 0, 3)]), step(2, rows=[("a", 0, 1)])]
    assert whats(tell("a", None, steps)) == [
        ("admitted", 1, 1),
        ("prefill", 1, 1),
        ("decode", 2, 2),
    ]
    assert tell("b", None, steps) == []


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    """A run under pressure, with preemptions."""
    workload = Synthetic(
        12,
        prompt={"kind": "uniform", "low": 20, "high": 60},
        output={"kind": "uniform", "low": 10, "high": 60},
    )
    Bench().run(make_session(tmp_path, workload))
    return tmp_path


def test_story_of_a_real_run_agrees_with_its_record(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(finished_run / "requests.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert any(int(row["preemptions"]) for row in rows)
    for row in rows:
        mode = Explain(str(finished_run), row["request_id"])
        events = mode.run(make_session(finished_run))["events"]
        whats = [event["what"] for event in events]
        assert whats.count("admitted") == 1
        assert whats.count("preempted") == whats.count("resumed") == int(row["preemptions"])
        assert sum(e["tokens"] for e in events) == int(row["computed_tokens"])
        admitted = next(event for event in events if event["what"] == "admitted")
        assert admitted["start_s"] == float(row["admitted_s"])
        times = [event["start_s"] for event in events]
        assert times == sorted(times)
        json.dumps(events, allow_nan=False)
    out = capsys.readouterr().out
    for row in rows:
        assert row["request_id"] in out
    assert "lost" in out


def test_unknown_request_is_answered_with_near_matches(finished_run: Path) -> None:
    mode = Explain(str(finished_run), "sinthetic-3")
    message = "one of the run's 12 requests, got 'sinthetic-3'; did you mean synthetic-3"
    with pytest.raises(ConfigError, match=message):
        mode.run(make_session(finished_run))


def test_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run must be the folder of a run, got"):
        Explain(str(tmp_path / "none"), "a").run(make_session(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"a run folder with requests.csv \(records=full\)"):
        Explain(str(empty), "a").run(make_session(tmp_path))


def test_explain_needs_no_torch() -> None:
    code = "import sys, plugins.mode.explain; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_line_cut_off_by_a_crash_is_left_out(finished_run: Path) -> None:
    with open(finished_run / "steps.jsonl", "a") as lines:
        lines.write('{"step": 9')
    Explain(str(finished_run), "synthetic-0").run(make_session(finished_run))


def test_replicas_that_a_request_was_sent_to_are_told(finished_run: Path) -> None:
    routes = [
        {"request_id": name, "time_s": 0.5, "replica": where, "plugin": "mine", "reason": "why not"}
        for name, where in (("synthetic-1", "0"), ("synthetic-0", "1"), ("synthetic-0", "2"))
    ]
    scores: list[dict[str, float]] = [{}, {"1": 2.0, "2": 3.5}, {}]
    lines = [json.dumps(route | {"scores": one}) for route, one in zip(routes, scores, strict=True)]
    (finished_run / "routes.jsonl").write_text("\n".join(lines) + "\n")
    story = Explain(str(finished_run), "synthetic-0").run(make_session(finished_run))["events"]
    assert [event["what"] for event in story[:3]] == ["arrived", "routed", "routed"]
    told = "to replica 1 by mine: why not (1 2, 2 3.5)", "to replica 2 by mine: why not"
    assert (story[1]["why"], story[2]["why"]) == told
