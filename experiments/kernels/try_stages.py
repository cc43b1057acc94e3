"""What holds ragged prefill back on Hopper: the pipelined kernel timed with stages left out.

    python -m experiments.kernels.try_stages [--only TEXT ...] [--rounds N] [--compile]

Each variant is kernels/extend_gluon.py with a few lines replaced. Results are wrong by design, but
for those marked right, which are checked: only the times mean something, and only beside the whole
kernel's. A stage that costs nothing when it is left out was hidden behind another; savings do not
add up. Dropped work draws less power as well, so that under sustained load the clock may rise: it
is printed, before and at the end of the load.

Each variant runs in a process of its own with a time limit, since one that is broken may never end:
all compile and run once side by side, then take turns. Two figures a case, microseconds a replay of
a captured graph: with pauses (the L2 cache cleared before each, medians over the rounds), and
sustained (replays back to back for 0.3 s after 0.1 s of the same). The whole kernel comes first and
last, which shows the drift. 2k + 6k includes the copy into the workspace.

--compile: what the variants compile to alone, without a device."""

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from experiments.kernels.cases import PREFILL, capture, make
from experiments.kernels.stages import VARIANTS, WHOLE, load
from experiments.kernels.try_extend import TOLERANCE, extend, rounds_us
from kernels import extend_hopper
from kernels.compiled import MULTIPROCESSOR_BYTES, MULTIPROCESSOR_REGISTERS
from kernels.extend_tma import DenseConfig
from kernels.launch import Launcher

CASES = tuple(case for case in PREFILL if case.name in ("8k + 0", "4 x 8k", "2k + 6k"))
READY_S, MEASURE_S = 60.0, 15.0
WARM_S, LOAD_S = 0.1, 0.3


def resources(config: DenseConfig) -> dict[str, int]:
    """Of what kernels.extend_hopper launches now: registers of a thread, bytes of its stack, shared
    bytes of a program, programs that a multiprocessor of capability 9 holds, matrix instructions,
    and how many of them end a group; one that does without need waits for all before it."""
    kernel = extend_hopper.compiled(90, "bf16", 128, config, direct=True)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}
    products = re.findall(r"HGMMA[^;]*;", text)
    registers = -(-usage["REG"] // 8) * 8 * 32 * config.num_warps
    by_shared = MULTIPROCESSOR_BYTES[90] // (kernel.metadata.shared + 1024)  # 1 KB: the system's
    return {
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "shared": kernel.metadata.shared,
        "programs": min(by_shared, MULTIPROCESSOR_REGISTERS // registers),
        "products": len(products),
        "groups": sum("gsb0" in one for one in products),
    }


class Card:
    """Clock and power of device 0 by NVML, in microseconds of the host's time."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._handle))

    def read(self) -> tuple[int, int]:
        """Multiprocessors' clock in MHz and power in W. Raises OSError where NVML has none."""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._handle, 1, ctypes.byref(clock))
        self._ask("nvmlDeviceGetPowerUsage", self._handle, ctypes.byref(power))
        return clock.value, power.value // 1000

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise OSError(f"{name} must return 0, got {code}")


def sustained(graph: torch.cuda.CUDAGraph, us: float, card: Card) -> dict[str, float]:
    """Microseconds of a replay, back to back; clock before, and clock and power at the end while
    the card still works. us: of a replay, roughly."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    warm, count = (max(1, int(seconds * 1e6 / us)) for seconds in (WARM_S, LOAD_S))
    before, _ = card.read()
    for _ in range(warm):
        graph.replay()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    clock, power = card.read()
    while not end.query():
        clock, power = card.read()
        time.sleep(0.002)
    each = begin.elapsed_time(end) * 1e3 / count
    return {"sustained_us": each, "before_mhz": before, "mhz": clock, "watt": power}


def serve(name: str, rounds: int) -> None:
    """Compile a variant and run it once on each case, answer with its resources; then measure all
    cases for every line of standard input. Answers are lines of JSON."""
    variant, card = VARIANTS[name], Card()
    calls = {case.name: extend(variant.config, make(case)) for case in CASES}
    wanted = {case: call() for case, call in calls.items()} if variant.right else {}
    with tempfile.TemporaryDirectory() as folder:
        _install(load(variant, folder))
        for case, call in calls.items():
            out = call()
            if case in wanted:
                error = (out.float() - wanted[case].float()).abs().max().item()
                assert error < TOLERANCE, f"error {error} in {case}"
        del wanted
        torch.cuda.synchronize()
        print(json.dumps(resources(variant.config)), flush=True)
        for _ in sys.stdin:
            figures = {}
            for case, call in calls.items():
                us = rounds_us({case: call}, rounds)[case]
                figures[case] = {"paused_us": us, **sustained(capture(call), us, card)}
            print(json.dumps(figures), flush=True)


def measure(names: Sequence[str], rounds: int) -> None:
    """Time the variants and print the tables."""
    root = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-m", "experiments.kernels.try_stages", "--rounds", str(rounds)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    children = {
        name: subprocess.Popen([*command, "--serve", name], cwd=root, text=True, **pipes)
        for name in names
    }
    with ThreadPoolExecutor(len(children)) as pool:
        try:
            _take_turns(children, pool)
        finally:
            for child in children.values():
                child.kill()  # the threads that read from it then end, too
    for child in children.values():
        child.communicate()


def _take_turns(children: dict[str, subprocess.Popen], pool: ThreadPoolExecutor) -> None:
    limit = time.monotonic() + READY_S
    waiting = {name: pool.submit(_answer, child) for name, child in children.items()}
    ready = {}
    for name, future in waiting.items():
        facts = _result(name, children[name], future, limit - time.monotonic())
        if facts is not None:
            ready[name] = facts
    print_resources(ready)
    turns = [*ready, WHOLE] if WHOLE in ready else [*ready]
    print(_heading(), flush=True)
    whole: dict[str, Any] | None = None
    for name in turns:
        child = children[name]
        if child.poll() is not None:
            continue
        child.stdin.write("\n")
        child.stdin.flush()
        figures = _result(name, child, pool.submit(_answer, child), MEASURE_S)
        if figures is not None:
            whole = figures if name == WHOLE and whole is None else whole
            print(_row(name, figures, whole), flush=True)


def _answer(child: subprocess.Popen) -> dict[str, Any]:
    last = "no output"
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
        last = line.strip() or last
    raise RuntimeError(last)


def _result(name: str, child: subprocess.Popen, future: Future, limit_s: float) -> Any:
    """The answer, or None where there is none, which is printed; the child is then ended."""
    try:
        return future.result(max(1.0, limit_s))
    except TimeoutError:
        print(f"{name:36}no end within the limit", flush=True)
    except RuntimeError as error:
        print(f"{name:36}{str(error)[-150:]}", flush=True)
    child.kill()
    return None


def print_resources(found: dict[str, dict[str, int]]) -> None:
    """One line a variant."""
    heads = ("registers", "stack", "shared", "programs", "products", "groups")
    print(f"{'of capability 9':36}" + "".join(f"{head:>11}" for head in heads))
    for name, facts in found.items():
        print(f"{name:36}" + "".join(f"{facts[head]:11}" for head in heads), flush=True)


def _heading() -> str:
    names = "".join(f"{case.name:^47}" for case in CASES)
    units = f"{'paused':>9}{'saved':>7}{'sust.':>9}{'saved':>7}{'MHz':>11}{'W':>4}"
    return f"{'microseconds':36}{names}\n{'':36}" + units * len(CASES)


def _row(name: str, figures: dict[str, Any], whole: dict[str, Any] | None) -> str:
    """Times, shares saved of the whole kernel's, clock and power under load."""
    cells = []
    for case in CASES:
        one = figures[case.name]
        for key in ("paused_us", "sustained_us"):
            share = "-" if whole is None else f"{1 - one[key] / whole[case.name][key]:.1%}"
            cells.append(f"{one[key]:9.1f}{share:>7}")
        cells.append(f"{one['before_mhz']:6}>{one['mhz']:4}{one['watt']:4}")
    return f"{name:36}" + "".join(cells)


def _install(module: ModuleType) -> None:
    """Let kernels.extend_hopper launch and compile this module's kernel."""
    extend_hopper.KERNELS["pipelined"] = module.pipelined_kernel
    extend_hopper._run["pipelined"] = Launcher(module.pipelined_kernel)


def main() -> None:
    """Measure; --compile alone needs no device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="variants with this in their names")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--serve", help="answer for one variant")
    arguments = parser.parse_args()
    names = [name for name in VARIANTS if any(text in name for text in (WHOLE, *arguments.only))]
    if arguments.serve is not None:
        serve(arguments.serve, arguments.rounds)
    elif arguments.compile:
        found = {}
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                _install(load(VARIANTS[name], folder))
                found[name] = resources(VARIANTS[name].config)
        print_resources(found)
    else:
        measure(names, arguments.rounds)


if __name__ == "__main__":
    main()
