"""The experiment from its command to its last lines, on a CPU."""

import json
import sys

from experiments.deterministic import run

SMALL = [
    *("--model", "tiny_llama", "--device", "cpu", "--requests", "4", "--prompt", "3,40"),
    *("--output", "3", "--running", "2", "--speed-output", "8", "--rounds", "1"),
]


def keep(monkeypatch, schedules, caches):
    monkeypatch.setattr(run, "SCHEDULES", {name: run.SCHEDULES[name] for name in schedules})
    monkeypatch.setattr(run, "CACHES", caches)


def call(monkeypatch, path, *options):
    monkeypatch.setattr(sys, "argv", ["run", *SMALL, *options, "--out", str(path)])
    code = run.main()
    return code, [json.loads(line) for line in path.read_text().splitlines()]


def test_no_token_differs_and_both_modes_are_timed(monkeypatch, tmp_path, capsys):
    keep(monkeypatch, ("fcfs, chunked", "page of 1"), ("radix",))
    code, lines = call(monkeypatch, tmp_path / "out.jsonl")
    assert code == 0
    compared = [line for line in lines if line["part"] == "tokens"]
    assert len(compared) == 4
    assert all(line["tokens"] == 12 and line["differ"] == 0 for line in compared)
    assert all(line["preemptions"] > 0 for line in compared)
    assert {line["mode"] for line in lines if line["part"] == "speed"} == set(run.MODES)
    out = capsys.readouterr().out
    assert "deterministic: 0 of 24 tokens differ in 2 runs" in out
    assert "2 running, step_ms" in out


def test_a_token_that_differs_fails_the_run(monkeypatch, tmp_path):
    keep(monkeypatch, ("fcfs, chunked",), ("none",))
    serve = run._serve

    def wrong(engine, requests, forced=False):
        found = serve(engine, requests, forced)
        if forced:
            found["2"][1] += 1
        return found

    monkeypatch.setattr(run, "_serve", wrong)
    code, lines = call(monkeypatch, tmp_path / "out.jsonl", "--without", "speed")
    assert code == 1
    assert all(line["differ"] == 1 for line in lines if line["part"] == "tokens")
