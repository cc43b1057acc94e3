"""The experiment from its command to its table, on one CPU; two devices are tested elsewhere."""

import json
import sys

from experiments.tensor_parallel import run


def test_command_writes_lines_and_a_table(monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    given = ["--model", "tiny_llama", "--device", "cpu", "--sizes", "1", "--running", "2"]
    given += ["--prompt", "6", "--output", "12", "--budget", "16", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["run", *given, "--out", str(path)])
    assert run.main() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["tensor_parallel"], one["running"], one["round"]) for one in lines] == [
        (1, 2, 1),
        (1, 2, 2),
    ]
    assert all(0 < one["step_ms"] / 1000 <= one["wall_s"] for one in lines)
    assert "| 2 | 1 | " in capsys.readouterr().out


def test_report_compares_medians_with_one_device():
    """Medians 20 and 10 ms: twice as fast."""
    rounds = {1: (19.0, 20.0, 30.0), 2: (10.0, 9.0, 11.0)}
    lines = [
        {"running": 64, "tensor_parallel": size, "step_ms": step, "first_s": 1.0, "wall_s": 2.0,
         "pool_tokens": 1000 * size}
        for size, steps in rounds.items() for step in steps
    ]  # fmt: skip
    rows = run.report(lines).splitlines()
    assert rows[2] == "| 64 | 1 | 20.000 | 1.000 | 2.000 | 1,000 | 1.00 |"
    assert rows[3] == "| 64 | 2 | 10.000 | 1.000 | 2.000 | 2,000 | 2.00 |"
