"""How often Triton compiles each kernel for one model, and that start-up has met all the forms.

A form that turns up while requests run makes them wait for the compiler, in the worst case for ten
seconds. tests/kernels/variant_launches.py serves batches of many sizes; keys are Triton's own."""

import json
import os
import subprocess
import sys

import pytest

from kernels.compiled import ROOT

ONCE = dict.fromkeys(
    (
        *("update_kernel", "step_kernel", "rotary_store_kernel", "merge_kernel", "_merge_kernel"),
        *("_slots_kernel", "_gather_kernel", "_logprobs_kernel"),
        *("_penalise_kernel", "_edit_kernel", "_count_kernel"),
    ),
    1,
)
FORMS = ONCE | {
    "rms_norm_kernel": 4,  # few or many rows, with or without a residual
    "swiglu_kernel": 2,  # few or many rows
    "_tiles_kernel": 2,  # tiles of packed heads, and of one head for the dense kernel
    "_extend_kernel": 2,  # a tile to one program, or divided among several
    "pipelined_kernel": 2,  # over new keys and values, or over gathered ones
    "_scan_kernel": 3,  # for draws from either type of logits, or for log-probabilities
    "_finish_kernel": 2,  # logits of the model's type, or of float32 once penalised
    "decode_kernel": 2,  # merges itself, or leaves that to a kernel of its own
    "_plan_kernel": 4,  # up to 32, 128, 256, 512 rows
}
PREFIXES = {
    "_match_kernel": 3,  # up to 32, 128, more rows
    "_choose_kernel": 1,
    "_group_kernel": 3,
    "_cut_kernel": 3,
    "prefix_kernel": 1,
    "_plan_kernel": 5,  # and a lone row, which shares nothing
}
EXPECTED = {
    "split_kv": FORMS,
    "shared_prefix": FORMS | PREFIXES,
    "cascade": FORMS | PREFIXES | {"_plan_kernel": 8},  # either kernel's
}


@pytest.fixture(scope="module")
def recorded():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.variant_launches"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("decode", EXPECTED)
def test_kernel_has_few_forms_whatever_is_served(recorded, decode):
    assert recorded[decode]["forms"] == EXPECTED[decode]


@pytest.mark.parametrize("decode", EXPECTED)
def test_start_up_meets_every_form(recorded, decode):
    assert recorded[decode]["not_met"] == []
