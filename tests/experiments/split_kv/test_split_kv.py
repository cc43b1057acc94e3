"""The single pass as a peer of the attention benchmark, and the table of both, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from experiments.kernels.cases import Case, decode, make
from experiments.kernels.implementations import implementations
from experiments.split_kv import one_pass, table

PEERS = Path(one_pass.__file__)


def test_single_pass_is_right_as_a_peer_of_the_benchmark():
    if torch.cuda.is_available():
        pytest.skip("a rehearsal for machines without a GPU")
    inputs = make(decode("2 rows", [33, 5]), device="cpu")
    builds = implementations(PEERS, only=["tritium", "one_pass"])
    errors = {name: inputs.error(build(inputs, 0)(), [0, 1]) for name, build in builds.items()}
    assert sorted(errors) == ["one_pass", "tritium"]
    assert max(errors.values()) < 1e-2


def test_chunks_are_refused():
    inputs = make(Case("chunk", (4,), (8,)), device="cpu")
    with pytest.raises(ValueError, match="it decodes alone"):
        implementations(PEERS, only=["one_pass"])["one_pass"](inputs, 0)


def test_gain_of_splitting_stands_in_its_row(tmp_path):
    device = {"kind": "device", "device": "some card"}
    times = {"one_pass": ("1x32k", 400.0, 0.25), "tritium": ("1x32k", 50.0, 2.0)}
    lines = [
        {"kind": "decode", "case": case, "name": name, "us": us, "tb_s": rate}
        for name, (case, us, rate) in times.items()
    ]
    failed = {"kind": "graph", "case": "1x1k", "name": "tritium", "failure": "none"}
    alone = {"kind": "graph", "case": "1x1k", "name": "one_pass", "us": 9.0, "tb_s": 0.5}
    log = tmp_path / "split.jsonl"
    log.write_text("\n".join(map(json.dumps, [device, *lines, failed, alone])))
    text = table.main(log)
    assert "| 1x32k | 400.0 | 50.0 | 8.00 | 0.25, 2.00 |" in text
    assert "| 1x1k | 9.0 | - | - | 0.50, - |" in text
