"""mode=simulate: labelled, without torch, and only under a virtual clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import ConfigError
from plugins.executor.simulated import Simulated
from plugins.mode.simulate import Simulate
from plugins.shared.clocks import RealClock
from plugins.step_time.roofline import Roofline
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, make_session

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ["torch", "triton", "transformers", "wandb"]


def test_command_ends_without_torch_and_says_that_it_simulated(tmp_path: Path):
    script = (
        "import sys; import run; code = run.command_line(run.job);"
        f"print('CODE', code, [name for name in {HEAVY} if name in sys.modules])"
    )
    arguments = ["mode=simulate", "workload.num_requests=8", "executor.step_time.device=a100"]
    folder = ["progress=false", "hydra.run.dir=out"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, *folder],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CODE 0 []" in done.stdout, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert summary["mode"] == "simulate"
    assert summary["requests"]["completed"] == 8
    assert summary["simulated"]["device"] == "a100"
    assert summary["simulated"] == manifest["executor"]["step_time"]
    assert {"source", "model", "error"} <= summary["simulated"].keys()


def test_same_seed_gives_the_same_summary(tmp_path: Path):
    summaries = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        executor = Simulated(Roofline(), vocab_size=VOCAB, max_model_len=512)
        workload = Synthetic(12, output={"kind": "uniform", "low": 10, "high": 60}, rate=200.0)
        summary = Simulate().run(make_session(folder, workload, executor=executor))
        del summary["steps"]["host_us_mean"]
        summaries.append(summary)
    assert summaries[0] == summaries[1]


def test_real_clock_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="clock must be virtual in mode=simulate"):
        Simulate().run(make_session(tmp_path, clock=RealClock()))
