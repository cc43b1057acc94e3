"""What the console says of a run whose times a model made."""

from pathlib import Path

from plugins.executor.simulated import Simulated
from plugins.mode.simulate import Simulate
from plugins.sink.console import Console, beside_bounds, routed_by, simulated_by
from plugins.step_time.roofline import Roofline
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, make_session


def test_error_of_a_calibration_is_said():
    error = {"points": 34, "mape": 0.0423, "p90": 0.1, "max": 0.2}
    told = {"source": "calibrated", "device": "H200", "model": "llama", "error": error}
    assert simulated_by(told) == (
        "simulated by calibrated (H200 llama), error 4.2 % over 34 steps held out of the fit"
    )


def test_model_that_was_never_compared_says_so():
    told = {"source": "fixed", "error": None}
    assert simulated_by(told) == "simulated by fixed, never compared with a device"


def test_bounds_stand_in_one_line():
    bounds = {
        "load": 0.5,
        "e2e_slowdown": {"p50": 1.25, "p99": 3.0},
        "min_hit_rate": 0.4,
        "infinite_hit_rate": 0.6,
    }
    assert beside_bounds({"bounds": bounds, "hit_rate": 0.3}) == (
        "bounds: load 50.0 % of what any schedule could serve; E2E 1.25 (p50) and 3.00 (p99) times"
        " that of a request alone; hit rate 30.0 % of 40.0 % (MIN), 60.0 % (cache without end)"
    )
    none = bounds | {"load": None, "min_hit_rate": None, "infinite_hit_rate": None}
    assert "hit rate" not in beside_bounds({"bounds": none, "hit_rate": 0.3})


def test_replicas_stand_in_one_line():
    told = {
        "count": 8,
        "router": "kv_headroom",
        "load_cv": 0.25,
        "regret_s": {"mean": 0.125, "p99": 1.5},
    }
    assert routed_by(told) == (
        "8 replicas behind kv_headroom: load varies by 25.0 % between them; starts 125 ms (mean)"
        " and 1.5 s (p99) after the earliest possible"
    )
    assert routed_by(told | {"load_cv": None, "regret_s": None}) == "8 replicas behind kv_headroom"


def test_simulated_run_prints_the_line_and_another_does_not(tmp_path: Path, capsys):
    executor = Simulated(Roofline(), vocab_size=VOCAB, max_model_len=512)
    session = make_session(tmp_path, Synthetic(2), executor=executor, console=Console())
    Simulate().run(session)
    line = "simulated by roofline (h200 llama_8b), never compared with a device"
    assert line in capsys.readouterr().out
    (tmp_path / "b").mkdir()
    Simulate().run(make_session(tmp_path / "b", Synthetic(2), console=Console()))
    assert "simulated by" not in capsys.readouterr().out
