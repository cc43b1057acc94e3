"""What Triton makes of a launch, without a GPU: registers, spills, shared memory, copies.

`record` lets a launcher run on CPU tensors and keeps its launches instead of running them, so that
what is compiled is specialised exactly as in service: argument types, integers that are 1 or
divisible by 16, constants and launch parameters. `inspect_all` does this for several launchers in
one process of its own, which Triton's interpreter forces (TRITON_INTERPRET=1 is read when kernels
are defined) and start-up costs recommend:

    python -m kernels.compiled < launches.json > compiled.json"""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import jit

from kernels import launch

ROOT = Path(__file__).resolve().parent.parent
MULTIPROCESSOR_REGISTERS = 65536
MULTIPROCESSOR_BYTES = {80: 167936, 86: 102400, 89: 102400, 90: 233472, 100: 233472, 120: 102400}
"""Shared memory, by capability."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled kernel.

    registers: of a thread. stack_bytes: of a thread, 0 = nothing spilled. shared_bytes: of a
    program. async_copy_bytes: widths of the asynchronous copies, ascending; 16 is the widest.
    kv_buffers: buffers of each pipelined tile, ascending; none = no load overlaps the arithmetic.
    has_wgmma: Hopper's matrix instructions. has_tma: tensor-map copies."""

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    async_copy_bytes: tuple[int, ...]
    kv_buffers: tuple[int, ...]
    has_wgmma: bool
    has_tma: bool
    ptx: str = field(default="", repr=False)
    ttgir: str = field(default="", repr=False)

    @property
    def programs(self) -> int:
        """How many a multiprocessor holds at once, by registers and shared memory."""
        # 1 KB of shared memory a program is the system's; registers come in steps of 8 a thread.
        by_shared = MULTIPROCESSOR_BYTES[self.capability] // (self.shared_bytes + 1024)
        registers = -(-self.registers // 8) * 8 * 32 * self.num_warps
        return min(by_shared, MULTIPROCESSOR_REGISTERS // registers)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Something that launches kernels: `module:function`, called with `arguments`; JSON values.

    name: of its entry in the result. capability: 80, 89, 90, ..."""

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    capability: int = 90


def inspect(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Sequence[str] = (),
) -> Compiled:
    """Compile a `triton.jit` function, which must not be an interpreter's.

    signature: type of each argument, such as "*fp16", "i32", "constexpr"; divisible: arguments that
    are multiples of 16 (pointers: aligned to 16 bytes)."""
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(fn, dict(signature), dict(constexprs), attrs)
    return _compile(source, capability, {"num_warps": num_warps, "num_stages": num_stages})


@contextmanager
def record(capability: int = 90) -> Iterator[list[Compiled]]:
    """While it is open, launches of Triton kernels are compiled and listed, and not run; their
    tensors may lie on a CPU. What a launcher returns then is not computed."""
    compiled: list[Compiled] = []

    def take(kernel: Any, backend: Any, options: dict[str, Any], bound: Any) -> None:
        parsed, *parts = kernel._pack_args(backend, options, *bound)
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *parts)
        compiled.append(_compile(source, capability, parsed.__dict__))

    with _launches(capability, take):
        yield compiled


@contextmanager
def record_keys(capability: int = 90) -> Iterator[list[tuple[str, str]]]:
    """As `record`, but nothing is compiled: a launch's kernel, and the key under which Triton keeps
    what it compiled for it. As many keys as a kernel has, so many times is it compiled."""
    keys: list[tuple[str, str]] = []

    def take(kernel: Any, backend: Any, options: dict[str, Any], bound: Any) -> None:
        del backend, options
        _, specialization, given = bound
        keys.append((kernel.__name__, jit.compute_cache_key({}, specialization, given)))

    with _launches(capability, take):
        yield keys


@contextmanager
def _launches(capability: int, take: Callable[..., None]) -> Iterator[None]:
    """Hand launches to `take`: kernel, backend, options, and what the kernel's binder returned."""
    backend = make_backend(GPUTarget("cuda", capability, 32))

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup  # nothing runs
        options = {"debug": False, **options}
        binder = jit.create_function_from_signature(self.signature, self.params, backend)
        take(self, backend, options, binder(*arguments, **options))

    originals = jit.JITFunction.run, launch.starts_early
    jit.JITFunction.run = run
    launch.starts_early = lambda _device: capability >= 90
    torch.Tensor.is_cuda = True  # so that checks let CPU tensors pass
    try:
        yield
    finally:
        jit.JITFunction.run, launch.starts_early = originals
        del torch.Tensor.is_cuda  # back to what it hid


def inspect_all(
    launchers: Sequence[Launcher], timeout_s: float = 120.0
) -> dict[str, list[Compiled]]:
    """The kernels of every launcher in the order of their launches, by the launchers' names;
    without ptx and ttgir. One child process; raises RuntimeError with what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    text = json.dumps([asdict(launcher) for launcher in launchers])
    command = [sys.executable, "-m", "kernels.compiled"]
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found = json.loads(done.stdout)
    return {name: [_from_json(entry) for entry in entries] for name, entries in found.items()}


def main() -> None:
    """Launchers as a JSON list on standard input; on standard output what they compile to, by
    name."""
    found = {}
    for entry in json.load(sys.stdin):
        launcher = Launcher(**entry)
        with record(launcher.capability) as compiled:
            _function(launcher.function)(**launcher.arguments)
        kept = [asdict(kernel) for kernel in compiled]
        found[launcher.name] = [kernel | {"ptx": "", "ttgir": ""} for kernel in kept]
    json.dump(found, sys.stdout)


def _compile(source: Any, capability: int, options: dict[str, Any]) -> Compiled:
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, ttgir = kernel.asm["ptx"], kernel.asm["ttgir"]
    usage = _usage(kernel.asm["cubin"])
    widths = {int(width, 0) for width in re.findall(r"cp\.async\.c[ag]\.[^;]*?, (0x\w+|\d+)", ptx)}
    return Compiled(
        kernel=source.name,
        capability=capability,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        async_copy_bytes=tuple(sorted(widths)),
        kv_buffers=_buffers(ttgir),
        has_wgmma="wgmma.mma_async" in ptx,
        has_tma="cp.async.bulk.tensor" in ptx,
        ptx=ptx,
        ttgir=ttgir,
    )


def _buffers(ttgir: str) -> tuple[int, ...]:
    """Leading dimensions of the shared-memory arrays that copies fill while others are read: a tile
    is a slice of them."""
    arrays = re.findall(r"ttg\.local_alloc\s*:\s*\(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return tuple(sorted(map(int, arrays)))


def _usage(cubin: bytes) -> dict[str, int]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _from_json(entry: dict[str, Any]) -> Compiled:
    tuples = {name: tuple(entry[name]) for name in ("async_copy_bytes", "kv_buffers")}
    return Compiled(**(entry | tuples))


if __name__ == "__main__":
    main()
