"""Variants of the pipelined prefill kernel still fit its source."""

import ast
import subprocess
import sys

import pytest

from experiments.kernels import try_stages
from experiments.kernels.stages import VARIANTS, WHOLE, Variant, load
from kernels import extend_gluon
from tests.patience import SOON_S


@pytest.mark.parametrize("name", VARIANTS)
def test_replacements_match_the_source(name):
    variant = VARIANTS[name]
    ast.parse(variant.source())
    whole = VARIANTS[WHOLE]
    assert (variant.source() == whole.source()) == (not variant.edits)
    assert name == WHOLE or variant != whole


def test_variants_differ():
    assert len({(one.source(), one.config) for one in VARIANTS.values()}) == len(VARIANTS)


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("import", 3)])
def test_text_that_does_not_occur_once_is_refused(old, count):
    with pytest.raises(ValueError, match=rf"must occur once, got {count}: '{old}'"):
        Variant(((old, ""),)).source()


def test_module_is_the_variants_and_not_the_kernels(tmp_path):
    module = load(VARIANTS["no rescale"], str(tmp_path))
    assert module.pipelined_kernel is not extend_gluon.pipelined_kernel
    assert module.__file__ == str(tmp_path / "variant.py")


def test_children_take_turns_and_broken_ones_are_left_out(monkeypatch, capsys):
    facts = dict.fromkeys(("registers", "stack", "shared", "programs", "products", "groups"), 7)
    one = {"paused_us": 10.0, "sustained_us": 20.0, "before_mhz": 1980, "mhz": 1500, "watt": 600}
    figures = {case.name: one for case in try_stages.CASES}
    good = f"import json\nprint(json.dumps({facts}), flush=True)\n"
    good += f"while True:\n    input()\n    print(json.dumps({figures}), flush=True)"
    stuck = f"import json\nprint(json.dumps({facts}), flush=True)\nimport time\ntime.sleep(60)"
    programs = {WHOLE: good, "no rescale": "raise ValueError('broken')", "2 stages": stuck}
    real = subprocess.Popen
    wait = try_stages._result

    def patient(name, child, future, limit_s):
        hangs = name == "2 stages" and limit_s == try_stages.MEASURE_S
        return wait(name, child, future, 0.2 if hangs else SOON_S)

    monkeypatch.setattr(try_stages, "_result", patient)
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", programs[command[-1]]], **options),
    )
    try_stages.measure(list(programs), rounds=1)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith(WHOLE)]
    assert len(rows) == 3  # resources, first and last turn
    assert rows[1][2:8] == ["10.0", "0.0%", "20.0", "0.0%", "1980>1500", "600"]
    assert any(line.startswith("no rescale") and "ValueError: broken" in line for line in lines)
    assert any(line.startswith("2 stages") and "no end" in line for line in lines)
