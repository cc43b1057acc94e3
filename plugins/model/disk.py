"""Tensors of safetensors files, read at the disk's speed into tensors that are already there.

Mapped files, which safetensors reads by default, come in page fault by page fault on one thread and
reach a GPU from pageable memory. Here several threads read blocks with plain reads: straight into
CPU tensors of the stored type, or into page-locked buffers from which a GPU copies and casts.
"""

import ctypes
import json
import math
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import ConfigError

THREADS = 8  # enough to keep a disk's queue filled while others copy
BLOCK_BYTES = 32 << 20  # long enough for the kernel's read-ahead to open up
NUM_BUFFERS = THREADS + 2  # the threads read on while the oldest block is copied

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: `shape` values of `dtype` from byte `offset` on. pitch: bytes from the
    beginning of one row (of the first dimension) to the next, None = they follow each other."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    pitch: int | None = None

    def part(self, dim: int, begin: int, end: int) -> "Stored":
        """Indices [begin, end) of dimension 0, or of dimension 1 of a matrix."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if dim == 0:
            offset, shape = self.offset + begin * row_bytes, (end - begin, *self.shape[1:])
            return replace(self, offset=offset, shape=shape)
        assert dim == 1 == len(self.shape) - 1, "columns are those of a matrix"
        offset, shape = self.offset + begin * self.dtype.itemsize, (self.shape[0], end - begin)
        return replace(self, offset=offset, shape=shape, pitch=row_bytes)


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a stored tensor and the flat part of the target that it fills. row, pitch: values
    of a row and bytes between beginnings of rows; one row unless they lie apart."""

    path: Path
    offset: int
    dtype: torch.dtype
    target: Tensor
    row: int
    pitch: int = 0


def stored_tensors(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds, by name, in the order of its bytes; only the header is read.

    Raises ConfigError for a file that is cut short or broken, or a type that torch cannot cast.
    """
    try:
        with safe_open(path, framework="pt"):  # checks the header and the length of the file
            pass
    except Exception as error:  # safetensors raises its own error type for a broken file
        raise ConfigError(f"{path} must be a whole safetensors file: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise ConfigError(
                f"{name} in {path} must have a type of {', '.join(DTYPES)}, got {entry['dtype']}"
            )
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = Stored(path, offset, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return tensors


def read_tensors(
    pairs: Sequence[tuple[Stored, Tensor]], on_read: Callable[[int], None] = lambda _: None
) -> None:
    """Fill each target from its file, casting where the types differ.

    Targets are contiguous, have as many values as are stored and are written on the current
    CUDA stream, complete on return. on_read gets the bytes of target as they arrive. Memory beside
    the targets: none for a CPU target of the stored type, otherwise NUM_BUFFERS * BLOCK_BYTES
    (320 MiB), page-locked for a GPU, where torch's allocator keeps it for others to use, and one
    block on the GPU for a cast.

    Raises ConfigError for a file that ends early or cannot be read; the targets are then undefined.
    """
    free: list[Tensor] = []
    pending: deque[tuple[_Block, Tensor | None, Future[None]]] = deque()

    def land() -> None:
        block, buffer, read = pending.popleft()
        read.result()
        if buffer is not None:
            _copy(block, buffer)
            free.append(buffer)
        on_read(block.target.nbytes)

    pool = ThreadPoolExecutor(THREADS, "weights")
    try:
        for block in _blocks(pairs):
            if len(pending) == NUM_BUFFERS:
                land()
            device, buffer = block.target.device, None
            if device.type != "cpu" or block.target.dtype != block.dtype:
                buffer = free.pop() if free else _empty_buffer(device)
            read = pool.submit(_read, block, block.target if buffer is None else buffer)
            pending.append((block, buffer, read))
        while pending:
            land()
    finally:
        pool.shutdown(cancel_futures=True)


def _blocks(pairs: Sequence[tuple[Stored, Tensor]]) -> Iterator[_Block]:
    for stored, target in pairs:
        assert target.numel() == math.prod(stored.shape), "as many values as are stored"
        size, pitch = stored.dtype.itemsize, stored.pitch
        if target.device.type == "cpu" and sys.platform == "linux":
            _advise_huge_pages(target)
        length, step = BLOCK_BYTES // size, BLOCK_BYTES
        if pitch is not None:
            rows = length // stored.shape[1]
            length, step = rows * stored.shape[1], rows * pitch
        for index, part in enumerate(torch.split(target.view(-1), length)):
            if len(part):
                where = stored.path, stored.offset + index * step, stored.dtype
                one_row = len(part) if pitch is None else stored.shape[1]
                yield _Block(*where, part, one_row, pitch or 0)


def _advise_huge_pages(target: Tensor) -> None:
    """New memory by pages of 4 KiB takes longer to touch than its contents to read. Advice only:
    a kernel may have no huge pages."""
    begin = -(-target.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = target.data_ptr() + target.nbytes - begin
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _read(block: _Block, memory: Tensor) -> None:
    """Fill the beginning of `memory` with the block's bytes."""
    size = block.dtype.itemsize
    wanted = memory.view(torch.uint8).numpy().data[: len(block.target) * size]
    row = block.row * size
    try:
        # A file of its own, so that the kernel's read-ahead sees one run of bytes.
        with open(block.path, "rb", buffering=0) as file:
            for index in range(len(wanted) // row):
                file.seek(block.offset + index * block.pitch)
                _read_row(file, wanted[index * row : (index + 1) * row], block.path)
    except OSError as error:
        raise ConfigError(f"{block.path} must be readable: {error}") from error


def _read_row(file: RawIOBase, missing: memoryview, path: Path) -> None:
    while missing:
        count = file.readinto(missing)
        if not count:
            raise ConfigError(
                f"{path} must be a whole safetensors file: it became shorter while it was read"
            )
        missing = missing[count:]


def _copy(block: _Block, buffer: Tensor) -> None:
    values = buffer[: len(block.target) * block.dtype.itemsize].view(block.dtype)
    on_gpu = block.target.is_cuda
    block.target.copy_(values, non_blocking=on_gpu)  # a blocking copy would cast on the CPU
    if on_gpu:
        torch.cuda.current_stream(block.target.device).synchronize()  # the buffer is used again


def _empty_buffer(device: torch.device) -> Tensor:
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
