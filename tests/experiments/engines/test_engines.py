"""Workloads as every engine gets them, their floors, and the chain from command to table."""

import hashlib
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.engines import host, report, run
from experiments.engines.floor import Device, Shape, floor
from experiments.engines.workloads import OFFLINE, Load, lines, load
from plugins.workload.file import File

MODELS = Path(__file__).parents[3] / "conf" / "model"
DIGESTS = {  # of the peers' script, json of (prompts, outputs, temperature)
    "nano": "c34e33bb593a8e54",
    "decode": "6590d869b0758e8e",
    "prefill": "157d5dbd339fde82",
    "prefix": "a18e081da5be674e",
}
FLOORS_S = {  # published beside the peers' figures: nano, decode, prefill, prefix, prefix once
    "qwen3_0_6b": (3.72, 1.58, 1.11, 2.06, 0.28),
    "llama_8b": (10.11, 4.60, 10.27, 3.51, 1.48),
}


def digest(one: Load) -> str:
    text = json.dumps([one.prompts, one.outputs, one.temperature])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shape(model: str) -> Shape:
    return Shape.of(yaml.safe_load((MODELS / f"{model}.yaml").read_text())["config"])


@pytest.mark.parametrize("name", OFFLINE)
def test_workload_has_the_peers_token_ids_and_lengths(name):
    assert digest(load(name)) == DIGESTS[name]


def test_scaled_workload_is_the_head_of_the_whole():
    for name in OFFLINE:
        whole, part = load(name), load(name, 0.1)
        assert part.prompts == whole.prompts[: len(part.prompts)]
        assert part.outputs == whole.outputs[: len(part.outputs)]
        assert len(part.prompts) == int(len(whole.prompts) * 0.1)


def test_online_workload_draws_prompts_then_lengths_then_gaps():
    draw = random.Random(0)
    prompts = []
    for _ in range(5):
        length = draw.randint(100, 1024)
        prompts.append([draw.randint(0, 10_000) for _ in range(length)])
    outputs = [draw.randint(64, 384) for _ in range(5)]
    gaps = [draw.expovariate(8.0) for _ in range(5)]
    one = load("online-8", online_requests=5)
    assert (one.prompts, one.outputs) == (prompts, outputs)
    assert one.arrivals_s == pytest.approx([sum(gaps[: n + 1]) for n in range(5)])


@pytest.mark.parametrize("name", ["nan", "online-0"])
def test_unknown_workload_is_refused(name):
    with pytest.raises(ValueError, match=r"must be"):
        load(name)


def test_file_gives_the_engine_the_same_requests(tmp_path):
    one = load("online-4", online_requests=3)
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(map(json.dumps, lines(one))))
    requests = File(str(path)).requests(None, 20_000, 0)
    assert [request.prompt.tolist() for request in requests] == one.prompts
    assert [request.params.max_tokens for request in requests] == one.outputs
    assert [request.arrival_s for request in requests] == one.arrivals_s
    assert all(r.params.ignore_eos and r.params.temperature == 0.6 for r in requests)


@pytest.mark.parametrize("model", FLOORS_S)
def test_floor_is_the_published_one(model):
    floors = [floor(load(name), shape(model)) for name in OFFLINE]
    found = [*(one.total_s for one in floors), floors[-1].once_s]
    assert found == pytest.approx(FLOORS_S[model], rel=0.015)  # 0.28 is 0.283, rounded


def test_floor_of_a_hand_computed_case():
    """One layer, 2 query heads and 1 KV head of 4: 8 * (16 + 8 + 3 * 16) weights; head 8 * 32."""
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    one = Load([[0] * 5, [0] * 3], [3, 2], [0.0, 0.0], shared_tokens=2)
    got = floor(one, Shape.of(config), Device(flops=1e3, bytes_s=1e3))
    layer, head = 8 * (16 + 8 + 48), 8 * 32
    computed, seen = 2 + 3 + 1, 3 + (3 + 4 + 5) + 3
    assert got.prefill_s == pytest.approx(
        (2 * layer * computed + 4 * 8 * seen + 2 * head * 2) / 1e3
    )
    gemm, weights = 2 * (layer + head), 2 * (layer + head)  # a row: operations = bytes
    assert got.products_s == pytest.approx((2 * gemm + weights) / 1e3)
    contexts = (6 + 4) + 7  # both rows, then the longer one
    assert got.kv_s == pytest.approx(contexts * 16 / 1e3)
    assert got.kv_once_s == pytest.approx((contexts - 2) * 16 / 1e3)


PEER = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("engine", "model", "out", "workloads", "scale", "repeat", "rates", "online-requests"):
    parser.add_argument("--" + name)
given = parser.parse_args()
more = {"wall_s": 2.0, "output_tok_s": 5.0, "total_tok_s": 9.0}
more |= dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"), 7.0)
more |= {"engine": given.engine, "model": given.model}
with open(given.out, "a") as out:
    for name in (given.workloads or "poisson").split(","):
        line = {"workload": name, "rate": float(given.rates or 0), **more}
        out.write(json.dumps(line) + "\\n")
"""


def measure(options, tmp_path, monkeypatch):
    """The lines that run.py writes for a tiny model on the CPU."""
    out = tmp_path / "out.jsonl"
    options = (
        f"--model tiny_llama --scale 0.008 --rounds 2 --folder {tmp_path} --out {out} {options}"
    )
    overrides = "device=cpu model.config.vocab_size=10001 +mode.warmup_requests=2 mode.lock=off"
    overrides += " model.config.max_position_embeddings=8192 engine.pool_tokens=16384"
    monkeypatch.setattr(sys, "argv", ["run", *options.split(), *overrides.split()])
    assert run.main() == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_command_measures_both_engines_and_makes_tables(tmp_path, monkeypatch, capsys):
    peers = tmp_path / "peers.py"
    peers.write_text(PEER)
    out, readme = tmp_path / "out.jsonl", tmp_path / "README.md"
    marks = ("tiny_llama", "online_tiny_llama")
    readme.write_text("".join(f"<!-- bench:{name} -->\nold\n<!-- /bench -->\n" for name in marks))
    monkeypatch.setattr(run, "PEER_MODELS", {"tiny_llama": "tiny"})
    options = f"--workloads prefill,prefix --rates 100 --online-requests 2 --peers {peers}"
    found = measure(options, tmp_path, monkeypatch)
    ours = [line for line in found if line["engine"] == "tritium"]
    names = ["prefill", "prefix", "online-100"]
    assert [(line["workload"], line["round"]) for line in ours] == [
        (name, number) for number in (0, 1) for name in names
    ]
    assert all(line["start_s"] > 0 and line["wall_s"] > 0 for line in ours)
    for name in names:  # a warm cache would find the prompts of the round before
        first, second = (line for line in ours if line["workload"] == name)
        assert first["output_tokens"] == second["output_tokens"] > 0
        assert first["cached_tokens"] == second["cached_tokens"]
    assert [line["workload"] for line in found if line["engine"] == "vllm"] == names
    assert found[0]["floor_s"] > 0
    assert "floor_s" not in ours[2]
    monkeypatch.setattr(sys, "argv", ["report", str(out), "--readme", str(readme)])
    report.main()
    text = readme.read_text()
    assert "old" not in text
    assert "| workload | tritium, s | vllm, s |" in text
    assert "| 100 | vllm | 7.0 | 7.0 | 7.0 | 7.0 |" in text
    assert "| prefill |" in capsys.readouterr().out


def test_hooks_called_directly_serve_the_same_requests_by_turns(tmp_path, monkeypatch):
    lines = measure("--workloads prefix --direct-hooks", tmp_path, monkeypatch)
    direct = "hooks called directly"
    turns = [("tritium", 0), (direct, 0), ("tritium", 1), (direct, 1)]
    assert [(line["engine"], line["round"]) for line in lines] == turns
    assert len({(line["output_tokens"], line["steps"]) for line in lines}) == 1
    asked = []
    for name in ("prefix-0", "prefix-0-direct", "prefix-1", "prefix-1-direct"):
        summary = json.loads((tmp_path / "tritium" / name / "summary.json").read_text())
        asked.append({one["hook"]: one["asked"] for one in summary["plugins"]}["decide_batch"])
    assert asked[0] == asked[1] < asked[2] == asked[3], "pluggy is asked in every other run alone"


def test_report_takes_medians_and_the_ratio_to_the_peer():
    common = {"kind": "engine", "model": "m", "workload": "nano", "floor_s": 1.0, "of_floor": 0.25}
    common |= {"floor_once_s": 1.0, "output_tok_s": 10.0, "total_tok_s": 20.0}
    walls = [("tritium", 4.0), ("vllm", 8.0), ("tritium", 6.0), ("tritium", 3.0)]
    made = report.tables([{**common, "engine": name, "wall_s": wall} for name, wall in walls])
    assert (
        made["m"].splitlines()[-1] == "| nano | 4.00 | 8.00 | 10 | 20 | 0.50 | 1.00 | 1.00 | 25% |"
    )


def test_timeline_profiles_ours_and_keeps_its_walls_out_of_the_comparison(tmp_path, monkeypatch):
    """A stand-in for the sink, which needs a GPU; all settings of --timeline reach it."""
    out = tmp_path / "out.jsonl"
    options = f"--model tiny_llama --scale 0.008 --workloads prefill --timeline --out {out}"
    overrides = "device=cpu model.config.vocab_size=10001 +mode.warmup_requests=2 mode.lock=off"
    overrides += " model.config.max_position_embeddings=8192 engine.pool_tokens=16384"
    overrides += " sinks.kernels._target_=tests.experiments.engines.stand_in.Kernels"
    monkeypatch.setattr(
        sys, "argv", ["run", *options.split(), "--folder", str(tmp_path), *overrides.split()]
    )
    assert run.main() == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["timeline"]["schedule"] == {"after": 2, "steps": 8, "windows": 40, "every": 32}
    assert line["timeline"]["listed_rows"]
    made = report.tables([line])
    assert set(made) == {"timeline_tiny_llama"}
    assert (
        "| prefill | 9.00 profiled | 0.00 | 6.00 | 3.00 | 0.0% | 66.7% | 33.3% |"
        in made.popitem()[1]
    )
    assert not (tmp_path / "tritium" / "prefill-0" / "steps.jsonl").exists()


def test_report_splits_the_time_of_runs_without_a_profiler():
    common = {"kind": "engine", "model": "m", "engine": "tritium", "floor_s": 4.0, "of_floor": 0.4}
    common |= {"floor_once_s": 2.0, "output_tok_s": 10.0, "total_tok_s": 20.0}
    walls = [("nano", 5.0), ("nano", 6.0), ("nano", 4.0), ("prefix", 3.0)]
    lines = [{**common, "workload": name, "wall_s": wall} for name, wall in walls]
    found = {"measured_s": 8.0, "busy_s": 3.5, "not_sampled": {}}
    missing = {"measured_s": 8.0, "busy_s": None, "not_sampled": {"decode-only": 15}}
    for name, one in (("nano", found), ("decode", missing)):
        lines.append({**common, "workload": name, "wall_s": 9.0, "timeline": one})
    made = report.tables(lines)
    assert made["timeline_m"].splitlines()[2:] == [
        "| nano | 5.00 | 2.00 | 1.50 | 1.50 | 40.0% | 30.0% | 30.0% |",
        "| decode | 8.00 profiled | 2.00 | not sampled: 15 steps decode-only | - | - | - | - |",
    ]
    assert "| nano | 5.00 |" in made["m"]
    assert "| decode |" not in made["m"]


def test_engine_that_hangs_is_stopped_at_the_limit(tmp_path, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def noted(*arguments, **options):
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    script = "import time; time.sleep(600)"
    assert not run._run([sys.executable, "-c", script], {}, tmp_path, 0.3)
    assert started[0].returncode == -signal.SIGKILL
    assert not Path(f"/proc/{started[0].pid}").exists()


@pytest.mark.parametrize("argument", ["nano", "--modle=x"])
def test_argument_that_is_neither_option_nor_override_is_refused(argument, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", argument])
    with pytest.raises(SystemExit, match=r"must be options or overrides"):
        run.main()


def test_host_profile_books_every_part_of_decode_steps():
    cases = [host.Case("null", overlap=True, direct=True), host.Case("torch", overlap=False)]
    for times in host.decode_steps(cases, running=4, steps=6, overrides=[]):
        assert set(times) == {*host.PARTS, "step"}
        assert times["step"] > sum(times[part] for part in ("plan", "pack", "commit")) / 2 > 0
