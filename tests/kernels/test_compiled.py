"""What the kernels compile to on a machine without a GPU: a slower form shows here first.

A launch is recorded as it is made in service, then compiled for the device named. Limits have
little room: registers decide how many programs a multiprocessor holds, one buffer instead of three
means that K and V no longer arrive during the arithmetic (KV slots must be carried one tile ahead),
and copies below 16 bytes waste bandwidth."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from kernels.compiled import ROOT, Launcher, inspect_all
from kernels.pinned import TABLE as FILE
from kernels.rotary_store import FEW
from tests.pairwise import pairwise

FOLDER = "tests.kernels.compiled_launches:"
SHARED = {80: 166912, 89: 101376, 90: 232448}
"""Bytes of shared memory that a program may take, by capability."""

SMALLER = {"num_warps": 4, "num_stages": 3}
"""What the choice by shared memory comes to on a device with 99 KB."""


@dataclass(frozen=True)
class Pinned:
    """A launch and its limits. programs: that a Hopper multiprocessor must hold by registers and
    shared memory, where the configuration counts on it."""

    name: str
    function: str
    arguments: dict = field(default_factory=dict)
    capability: int = 90
    registers: int = 255
    buffers: int = 3
    copies: tuple[int, ...] = (16,)
    programs: int = 1
    launch: int = -1  # which of the function's launches


PREFIX = {"function": "shared", "buffers": 2, "launch": -2}  # the prefix kernel, before decode
PINNED = (
    Pinned("d128", "decode", registers=224, programs=2),
    Pinned("d128, page 1", "decode", {"page_size": 1}, registers=248, programs=2),
    Pinned("d128, one row", "decode", {"rows": 1}, registers=224, programs=2),
    Pinned("d80", "decode", {"head_dim": 80}, registers=240, programs=2),
    Pinned("d256", "decode", {"head_dim": 256}, registers=128, programs=2),
    Pinned("group 16", "decode", {"group": 16}, registers=240, programs=2),
    Pinned("float8", "decode", {"kv_dtype": "float8_e4m3fn"}, copies=(8, 16), programs=2),
    Pinned("float32", "decode", {"kv_dtype": "float32", "head_dim": 64}, registers=144),
    Pinned("d128 on sm_80", "decode", capability=80, registers=240),
    Pinned("d128 on sm_89", "decode", {"config": SMALLER}, 89, registers=184, buffers=2),
    Pinned("prefix", **PREFIX | {"buffers": 3}),
    Pinned("prefix, page 1, group 7", arguments={"page_size": 1, "group": 7}, **PREFIX),
    Pinned("prefix, float8", arguments={"kv_dtype": "float8_e4m3fn"}, **PREFIX),
    Pinned("prefix on sm_89", arguments={"smaller": True}, capability=89, **PREFIX),
    Pinned("prefill", "prefill", registers=208),
    Pinned("prefill on sm_80", "prefill", capability=80, buffers=2),
    Pinned("prefill on sm_89", "prefill", capability=89, buffers=2),
)


ROTARY_AXES = (
    ("bfloat16", "float8_e4m3fn"),
    (False, True),  # norm
    (8, 16),  # heads of 32 + 2 x 8: blocks of queries, keys or values alone, and mixed ones
)
ROTARY = [
    Launcher(f"rotary {kv_dtype} {norm=} {heads}", f"{FOLDER}rotary", arguments)
    for kv_dtype, norm, heads in pairwise(*ROTARY_AXES)
    for config in [{"heads": heads, "num_warps": heads // 4}]
    for arguments in [{"kv_dtype": kv_dtype, "norm": norm, "config": config}]
]
CAPABILITY = {"NVIDIA H200": 90}


def label(entry):
    return "-".join(map(str, (entry["device"], entry["kernel"], *entry["shape"].values())))


def representatives():
    """Of each measured configuration the entry with the widest heads, where it fits least."""

    def width(entry):
        shape = entry["shape"]
        return shape["head_dim"] * getattr(torch, shape["dtype"]).itemsize

    found = {}
    for entry in sorted(json.loads(FILE.read_text()), key=width):
        found[entry["device"], entry["kernel"], *entry["configuration"].values()] = entry
    return list(found.values())


TABLE = representatives()


def measured(entry):
    """The launch that an entry of the table of measured configurations is for."""
    facts = entry["shape"] | {"config": entry["configuration"]}
    facts["kv_dtype"] = facts.pop("dtype")
    function = "decode"
    if entry["kernel"] != "split_kv":
        function, facts["tokens"] = "rotary", 16 if entry["kernel"] == FEW else 2048
        del facts["page_size"]
    return Launcher(label(entry), FOLDER + function, facts, CAPABILITY[entry["device"]])


@pytest.fixture(scope="module")
def compiled():
    launchers = [
        Launcher(one.name, FOLDER + one.function, one.arguments, one.capability) for one in PINNED
    ]
    return inspect_all([*launchers, *ROTARY, *map(measured, TABLE)], timeout_s=360)


@pytest.mark.parametrize("pinned", PINNED, ids=lambda one: one.name)
def test_attention_kernel_stays_within_its_limits(pinned, compiled):
    kernel = compiled[pinned.name][pinned.launch]  # planners come first
    assert kernel.kernel in ("decode_kernel", "_extend_kernel", "prefix_kernel")
    assert kernel.registers <= pinned.registers
    assert kernel.stack_bytes <= 8  # nothing spilled
    assert kernel.async_copy_bytes == pinned.copies
    assert min(kernel.kv_buffers) >= pinned.buffers
    assert kernel.shared_bytes <= SHARED[pinned.capability]
    assert kernel.has_wgmma == (pinned.function != "decode" and pinned.capability == 90)
    assert kernel.programs >= pinned.programs


@pytest.mark.parametrize("entry", TABLE, ids=label)
def test_measured_configuration_fits_its_device(entry, compiled):
    by_kernel = {kernel.kernel: kernel for kernel in compiled[label(entry)]}
    kernel = by_kernel["decode_kernel" if entry["kernel"] == "split_kv" else "rotary_store_kernel"]
    assert kernel.stack_bytes <= 8
    assert kernel.shared_bytes <= SHARED[kernel.capability]
    assert kernel.programs >= entry["configuration"].get("per_sm", 1)


@pytest.mark.parametrize("name", [one.name for one in ROTARY])
def test_rotary_tables_are_loaded_as_the_tile_uses_them(name, compiled):
    [kernel] = compiled[name]
    assert kernel.shared_bytes == 0  # no layout is converted
    assert kernel.registers <= 64
    assert kernel.stack_bytes == 0


@pytest.fixture(scope="module")
def orders():
    """For sm_89 and sm_90 each kernel's waits, triggers and accesses to memory, in PTX's order."""
    source = """
import json, re
from kernels.compiled import record
from tests.kernels import compiled_launches as launches
words = r"griddepcontrol\\.(wait|launch_dependents)|\\b(ld|st)\\.global|\\b(cp)\\.async"
found = {}
for capability in (89, 90):
    with record(capability) as made:
        launches.decode(rows=2, splits=2)  # with a merge
        launches.rotary()
        launches.norm_and_gate()
    found[capability] = {
        one.kernel: ["".join(part) for part in re.findall(words, one.ptx)] for one in made
    }
print(json.dumps(found))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EARLY = ("decode_kernel", "merge_kernel", "rotary_store_kernel", "rms_norm_kernel", "swiglu_kernel")


@pytest.mark.parametrize("kernel", EARLY)
def test_kernel_launched_early_waits_before_it_touches_memory(kernel, orders):
    assert not {"wait", "launch_dependents"} & set(orders["89"][kernel])
    order = orders["90"][kernel]
    # The merge reads what was planned two launches ago: the kernel ahead let it in after a wait.
    ahead = ["ld", "ld"] if kernel == "merge_kernel" else []
    assert order[: len(ahead) + 2] == [*ahead, "wait", "launch_dependents"]
    assert len(order) > len(ahead) + 2
    assert order.count("wait") == order.count("launch_dependents") == 1


def test_planner_spills_nothing(compiled):
    planner = compiled["d128"][0]
    assert planner.kernel == "_plan_kernel"
    assert planner.stack_bytes == 0


@pytest.mark.parametrize("form", ["pipelined", "paired"])
def test_dense_prefill_issues_its_products_together(form):
    # ptxas waits after each product where it finds too few registers, and says so in a remark only.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import json; from tests.kernels.compiled_launches import dense;"
    code += f"print(json.dumps(dense({form!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    products, groups, registers, stack_bytes = json.loads(done.stdout)
    assert 4 * groups <= products
    assert registers * 128 * 2 <= 65536, "two programs to a multiprocessor"
    assert stack_bytes == 0
