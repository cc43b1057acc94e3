"""The tuner, rehearsed on a CPU: candidates are checked, the quickest wins, the table is kept."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from experiments.kernels import bench, tune, tuned
from experiments.kernels.tuned import TUNED, Tuned, Workload
from kernels.jit import INTERPRETED
from kernels.pinned import Shape
from kernels.rotary_store import RotaryStoreConfig
from kernels.split_launch import DecodeConfig

SHAPE = Shape(16, "float32", 16, 2)
needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="kernels do not run here"
)


def wrong(config):
    if config.heads == 8:
        raise ValueError("relative error 1")


@pytest.fixture
def fake(monkeypatch):
    """A kernel whose candidates take as long as their warps say; 8 heads are wrong."""
    workloads = [
        Workload(lambda config: None, wrong, lambda config, i=i: 1.0 * config.num_warps + i)
        for i in range(2)
    ]
    configs = [RotaryStoreConfig(8, 1), RotaryStoreConfig(16, 4), RotaryStoreConfig(4, 2)]
    one = Tuned((SHAPE,), lambda shape: configs, lambda shape, small: workloads)
    monkeypatch.setitem(TUNED, "fake", one)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")


def test_quickest_candidate_that_is_right_wins(fake, capsys):
    entry = tune._entry("fake", SHAPE, tune._candidates(("fake", SHAPE)))
    assert entry["configuration"] == {"heads": 4, "num_warps": 2}
    assert entry["measured_us"] == [2.0, 3.0]
    assert "RotaryStoreConfig(heads=8, num_warps=1) left out: relative error 1" in (
        capsys.readouterr().out
    )


def test_entry_replaces_its_own_and_keeps_others(fake, tmp_path):
    table = tmp_path / "pinned.json"
    entry = tune._entry("fake", SHAPE, tune._candidates(("fake", SHAPE)))
    tune._write(entry | {"device": "Other"}, table)
    tune._write(entry | {"measured_us": [9.0]}, table)
    tune._write(entry, table)
    assert json.loads(table.read_text()) == [entry | {"device": "Other"}, entry]


def test_kernels_take_turns_and_unknown_ones_are_refused():
    jobs = tune._jobs(["split_kv", "rotary_store"], None)
    assert [name for name, _ in jobs[:4]] == ["split_kv", "rotary_store"] * 2
    assert (
        len(set(jobs))
        == len(jobs)
        == sum(len(TUNED[n].shapes) for n in ("split_kv", "rotary_store"))
    )
    with pytest.raises(ValueError, match=r"--kernels must be of split_kv, .*, got \['x'\]"):
        tune._jobs(["x"], None)


@pytest.mark.parametrize("kernel", TUNED)
def test_shapes_have_candidates(kernel):
    for shape in TUNED[kernel].shapes:
        candidates = TUNED[kernel].candidates(shape)
        assert 4 <= len(set(candidates)) == len(candidates) <= 16


@pytest.mark.parametrize("text", ["128,bf16,16,4", "128,bfloat16,16", "0,bfloat16,16,4", "a,b,c,d"])
def test_shape_that_is_none_is_a_usage_error(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune", "--shape", text])
    with pytest.raises(SystemExit):
        tune.main()
    rule = "must be head_dim,dtype,page_size,group such as 128,bfloat16,16,4"
    assert f"--shape: {rule} (torch's names of dtypes), got '{text}'" in capsys.readouterr().err
    assert tune._shape("128,bfloat16,16,4") == Shape(128, "bfloat16", 16, 4)


@pytest.mark.parametrize("program", [tune, bench])
def test_without_a_gpu_is_a_usage_error(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        program.main()
    assert "error: needs a CUDA device" in capsys.readouterr().err


def test_candidate_with_more_programs_than_a_multiprocessor_holds_is_left_out(monkeypatch):
    made = SimpleNamespace(kernel="decode_kernel", programs=3)
    monkeypatch.setattr(tuned, "record", lambda capability: nullcontext([made]))
    workload = Workload(lambda config: None, wrong, lambda config: 1.0)
    assert tuned.too_many(DecodeConfig(per_sm=3), workload, 90) is None
    said = tuned.too_many(DecodeConfig(per_sm=4), workload, 90)
    assert said == "a multiprocessor holds 3 of its programs"
    assert tuned.too_many(RotaryStoreConfig(8, 1), workload, 90) is None


@needs_kernels
def test_decode_workload_checks_what_it_runs(monkeypatch):
    workload = tuned._decode(SHAPE, rows=2, context=32)
    config = DecodeConfig(16, 4, 2, 1)
    workload.check(config)
    monkeypatch.setattr(tuned.SplitKV, "__call__", lambda self, q, *_: q)
    with pytest.raises(ValueError, match="relative error"):
        workload.check(config)


@needs_kernels
def test_rotary_workload_checks_what_it_runs(monkeypatch):
    workload = tuned._rotary(SHAPE, tokens=3, in_graph=True)
    for config in tuned.rotary_candidates(SHAPE)[:2]:
        workload.check(config)
    monkeypatch.setattr(tuned, "rotary_store", lambda *_, **__: None)
    with pytest.raises(ValueError, match="relative error"):
        workload.check(config)
