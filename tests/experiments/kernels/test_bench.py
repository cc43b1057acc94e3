"""The attention benchmark, rehearsed on a CPU: work counts, checks before timing, its log."""

import io
import json
import sys

import pytest
import torch

from experiments.kernels import bench, cases, implementations, report
from experiments.kernels.cases import Case, K, decode
from experiments.kernels.roofline import Ceilings, ratios

CEILINGS = Ceilings(copy_tb_s=4.0, matmul_tflops=800.0)
TINY = decode("3 rows", [33, 5, 16])
CHUNKS = Case("chunk and decode", (9, 1), (20, 7))


@pytest.fixture
def on_cpu(monkeypatch):
    """No GPU: tiny inputs on the CPU, every call timed as 5 microseconds."""
    if torch.cuda.is_available():
        pytest.skip("a rehearsal for machines without a GPU")
    monkeypatch.setattr(
        bench, "make", lambda case, layers=1: cases.make(case, layers, device="cpu")
    )
    monkeypatch.setattr(bench, "do_bench", lambda call, **_: call() is None or 0.005)
    monkeypatch.setattr(bench, "capture", lambda run: run() or run)
    monkeypatch.setattr(bench, "replay_us", lambda run, repeats: run() or 64.0)
    monkeypatch.setattr(bench, "LAYERS", 2)


def test_work_of_a_decode_case_is_that_of_the_formula():
    case = decode("64x8k", [8 * K] * 64)
    kv, q_and_out, table = 2 * 64 * 8 * K * 8 * 128 * 2, 2 * 64 * 32 * 128 * 2, 64 * 512 * 4
    assert case.bytes == kv + q_and_out + table
    assert case.flops == 4 * 32 * 128 * 64 * 8 * K
    assert CEILINGS.floor_us(case) == pytest.approx(case.bytes / 4e12 * 1e6)


def test_work_of_a_causal_chunk_counts_the_keys_each_query_sees():
    case = Case("2k + 6k", (2 * K,), (8 * K,))
    seen = sum(range(6 * K + 1, 8 * K + 1))
    assert case.flops == 4 * 32 * 128 * seen
    facts = CEILINGS.facts(case, us=500.0)
    assert facts["floor_us"] == pytest.approx(case.flops / 800e12 * 1e6, abs=0.01)
    assert facts["roofline"] == pytest.approx(facts["floor_us"] / 500.0, abs=1e-4)


def test_ratio_is_taken_in_each_round_to_its_best_rival():
    assert ratios([2.0, 3.0], [4.0, 3.0], [1.0, 6.0]) == [2.0, 1.0]


def test_unknown_implementation_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"implementation must be one of tritium, .*, got fa4"):
        implementations.implementations(None, only=["fa4"])
    peers = tmp_path / "peers.py"
    peers.write_text("IMPL = {'fa3': None}")
    names = list(implementations.implementations(peers, without=["FlexAttention"]))
    assert names == ["tritium", "torch SDPA (cuDNN)", "fa3"]


@pytest.mark.parametrize("case", [TINY, CHUNKS], ids=lambda case: case.name)
def test_wrong_and_failing_implementations_are_not_timed(case, on_cpu):
    builds = implementations.implementations(None, only=["tritium", "torch SDPA (cuDNN)"])
    builds["zeros"] = lambda inputs, layer: lambda: torch.zeros_like(inputs.q)
    ours, cudnn, zeros = bench._eager(case, builds, rounds=2)
    assert ours.failure is None
    assert ours.error < bench.TOLERANCE
    assert ours.rounds_us == [5.0, 5.0]
    assert cudnn.failure == "ValueError: rows differ in length"
    assert zeros.failure == "ValueError: relative error 1"
    assert cudnn.rounds_us == zeros.rounds_us == []


@pytest.mark.parametrize("case", [TINY, CHUNKS], ids=lambda case: case.name)
def test_layers_of_a_step_have_caches_of_their_own(case, on_cpu):
    inputs = cases.make(case, layers=2, device="cpu")
    first, second = (implementations.ours(inputs, layer)() for layer in range(2))
    assert inputs.error(first, range(len(case.new))) < bench.TOLERANCE
    assert not inputs.error(second, [0]) < bench.TOLERANCE
    (result,) = bench._in_graph(case, {"tritium": implementations.ours}, rounds=1)
    assert (result.failure, result.rounds_us) == (None, [32.0])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_reference(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for case in (decode("2x40", [40, 40]), Case("8 + 12", (8,), (20,))):
        inputs = cases.make(case, device="cpu")
        error = inputs.error(implementations.flex(inputs, 0)(), range(len(case.new)))
        assert error < bench.TOLERANCE


def exact(inputs, layer):
    return lambda: torch.cat([inputs.reference(row) for row in range(len(inputs.case.new))])


def test_log_becomes_tables_and_a_figure(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "our_layers", lambda inputs: lambda: None)
    builds = {"tritium": exact, "fa3": exact}
    log = io.StringIO()
    bench._write(log, {"kind": "device", "device": "H", "torch": "2", "triton": "3"} | FACTS)
    for kind, case in (("decode", TINY), ("prefill", CHUNKS)):
        bench._report(log, kind, bench._eager(case, builds, 3), CEILINGS)
    bench._report(log, "graph", bench._in_graph(TINY, builds, 3), CEILINGS)
    bench._write(log, {"kind": "planner", "case": "64 rows", "name": "default", "us": 2.25})
    readme = tmp_path / "README.md"
    names = ("device", "decode", "prefill", "graph", "planner")
    readme.write_text("a\n" + "".join(f"<!-- bench:{n} -->\nold\n<!-- /bench -->\n" for n in names))
    (tmp_path / "log").write_text(log.getvalue())
    figure = tmp_path / "figure.png"
    command = ["report", str(tmp_path / "log"), "--readme", str(readme), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", command)
    for _ in range(2):  # a second run replaces the first one's tables
        report.main()
        text = readme.read_text()
        assert "old" not in text
        assert text.count("| 3 rows | 5.0 | 5.0 | 0.0") == 1
        assert text.count("| 3 rows | 32.0 | 32.0 |") == 1
        assert text.count("1.000 [1.000, 1.000]") == 3
        assert "| 64 rows | 2.2 |" in text
    assert 1000 < figure.stat().st_size < 100_000


FACTS = {"copy_tb_s": 4.0, "matmul_tflops": 800.0}


def test_table_without_a_place_in_the_readme_is_an_error():
    log = report.Log([{"kind": "device", "device": "H", "torch": "2", "triton": "3"} | FACTS])
    with pytest.raises(ValueError, match=r"must hold <!-- bench:NAME --> for \['device'\]"):
        report.filled("no marks", report.tables(log))


def test_log_of_a_failure_names_it():
    result = bench.Result(TINY, "fa3", failure="RuntimeError: no")
    assert json.dumps(result.line("decode", CEILINGS)).endswith('"failure": "RuntimeError: no"}')
