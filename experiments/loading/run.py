"""Do weights load at the disk's speed?

    python -m experiments.loading.run --model llama_8b --out loading.jsonl          # on a GPU
    python -m experiments.loading.run --model llama_8b --layers 2 --device cpu

Writes a sharded checkpoint of the model's shape (random bf16 weights), checks that this loader and
safetensors read the same bits from a shard, then times readers by turns: each from the disk (the
files' pages are dropped before) and again from the page cache.

    plain        the files from begin to end on one thread, as `cat` does
    threads      the same bytes with as many threads and blocks as `ours`: what the disk can give
    safetensors  load_file to the device, which on a CPU maps files, hence a copy of each tensor
    ours         load_weights: parameters allocated and filled on the device
    refill       the same into parameters that are there already
"""

import argparse
import ctypes
import json
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from conf.device import resolve_device
from conf.overrides import ROOT
from plugins.model import disk
from plugins.model.checkpoint import INDEX, SafetensorsFolder, load_weights, weight_files
from plugins.model.spec import DecoderSpec, decoder_spec
from plugins.model.weights import Weights, allocate, slots

STATES = ("cold", "warm")
WRITTEN_AT_ONCE_BYTES = 16 << 20
SCRATCH_BYTES = 1 << 20

Line = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """What is read, and where to."""

    spec: DecoderSpec
    folder: Path
    dtype: torch.dtype
    device: torch.device
    held: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters that `refill` fills

    @property
    def files(self) -> list[Path]:
        return weight_files(self.folder)

    def load(self) -> Weights:
        source = SafetensorsFolder(self.folder)
        return load_weights(source, self.spec, self.dtype, self.device, progress=False)

    def refill(self) -> None:
        SafetensorsFolder(self.folder).read(self.held, lambda _: None)


def main() -> None:
    """Write, check and time; exit status 1 for other bits than safetensors reads."""
    arguments = _parser().parse_args()
    node = OmegaConf.load(ROOT / "model" / f"{arguments.model}.yaml").config
    config = OmegaConf.to_container(node)
    if arguments.layers:
        config["num_hidden_layers"] = arguments.layers
    device = torch.device(resolve_device(arguments.device))
    folder = Path(tempfile.mkdtemp(prefix="loading-", dir=arguments.folder))
    checkpoint = Checkpoint(decoder_spec(config), folder, getattr(torch, arguments.dtype), device)
    try:
        write(checkpoint, config, arguments.shard_gb)
        print("write: done", flush=True)
        if not same_bits(checkpoint):
            raise SystemExit("check: other bits than safetensors reads")
        print("check: the bits that safetensors reads", flush=True)
        lines = []
        for line in measure(checkpoint, arguments):
            print(json.dumps(line), flush=True)
            lines.append(line)
    finally:
        shutil.rmtree(folder)
    if arguments.out:
        with arguments.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    print(report(lines), end="")


def write(checkpoint: Checkpoint, config: Line, shard_gb: float) -> None:
    """The config, the index and the shards, each by a thread of its own, on the disk on return."""
    meta = allocate(checkpoint.spec, torch.float32, torch.device("meta"))
    shapes = {name: slot.shape for name, slot in slots(meta, checkpoint.spec).items()}
    if shutil.disk_usage(checkpoint.folder).free < 2.2 * sum(map(math.prod, shapes.values())):
        raise SystemExit(f"--folder must have room for the checkpoint, got {checkpoint.folder}")
    shards: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > room:
            shards.append({})
            room = max(int(shard_gb * 1e9), size)
        shards[-1][name] = shape
        room -= size
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(len(shards))]
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    (checkpoint.folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    paths = [checkpoint.folder / name for name in names]
    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(_write_shard, paths, shards, range(len(shards))))


def same_bits(checkpoint: Checkpoint) -> bool:
    """Whether a shard's tensors are those that safetensors reads; holds the loaded ones."""
    table = slots(checkpoint.load(), checkpoint.spec)
    checkpoint.held.update(
        {name: slot.view for name, slot in table.items() if slot.view.shape == slot.shape}
    )
    expected = load_file(checkpoint.files[-1], device=str(checkpoint.device))
    return all(
        torch.equal(table[name].view, tensor.to(checkpoint.dtype).expand_as(table[name].view))
        for name, tensor in expected.items()
    )


def measure(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Iterator[Line]:
    """A line for each round, reader and state."""
    total = sum(path.stat().st_size for path in checkpoint.files)
    common = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name() if checkpoint.device.type == "cuda" else "cpu",
        "dtype": arguments.dtype,
        "bytes": total,
        "threads": disk.THREADS,
    }
    turns = product(range(arguments.rounds), arguments.readers, arguments.states)
    for number, reader, state in turns:
        if state == "cold":
            drop_pages(checkpoint.files)
        cached = resident(checkpoint.files)
        begin = perf_counter()
        result = READERS[reader](checkpoint)
        seconds = perf_counter() - begin
        del result
        line = {"reader": reader, "state": state, "round": number, "cached_before": cached}
        line |= {"seconds": round(seconds, 3), "gb_per_s": round(total / seconds / 1e9, 3)}
        yield line | common


def drop_pages(files: list[Path]) -> None:
    """Ask the kernel to forget the files; `resident` says whether it did."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(files: list[Path]) -> float:
    """Share of the files' pages that are in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = []
    for path in files:
        mapped = np.memmap(path, np.uint8, "r")
        flags = np.empty(-(-mapped.size // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size)
        if libc.mincore(address, length, ctypes.c_void_p(flags.ctypes.data)):
            raise OSError(ctypes.get_errno(), f"mincore refused {path}")
        pages.append(flags & 1)
    return round(float(np.concatenate(pages).mean()), 4)


def report(lines: list[Line]) -> str:
    """Medians in GB/s and as a share of the faster plain reading of that state."""
    runs: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        runs.setdefault((line["reader"], line["state"]), []).append(line["gb_per_s"])
    rows = ["| reader | state | GB/s | of the best plain read |", "|---|---|---|---|"]
    for (reader, state), speeds in runs.items():
        best = max(median(runs.get((name, state), [0.0])) for name in ("plain", "threads"))
        share = f"{100 * median(speeds) / best:.0f} %" if best else "not measured"
        rows.append(f"| {reader} | {state} | {median(speeds):.2f} | {share} |")
    kept = max((line["cached_before"] for line in lines if line["state"] == "cold"), default=0.0)
    if kept > 0.01:
        rows.append(f"Not cold: up to {100 * kept:.0f} % of the pages could not be dropped.")
    return "".join(row + "\n" for row in rows)


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for begin in range(0, end, WRITTEN_AT_ONCE_BYTES):
            count = min(WRITTEN_AT_ONCE_BYTES, end - begin)
            words = rng.integers(0, 1 << 64, -(-count // 8), np.uint64)
            bits = words.view(np.uint16)[: count // 2] & 0xBFFF  # below 2, so never NaN or infinite
            file.write(bits.data)
        file.flush()
        os.fsync(file.fileno())


def _read_files(checkpoint: Checkpoint, threads: int, run_bytes: int) -> None:
    sizes = {path: path.stat().st_size for path in checkpoint.files}
    runs = [(path, begin) for path in sizes for begin in range(0, sizes[path], run_bytes)]

    def read(run: tuple[Path, int]) -> None:
        memory, left = bytearray(SCRATCH_BYTES), run_bytes
        with open(run[0], "rb", buffering=0) as file:
            file.seek(run[1])
            while left > 0 and (count := file.readinto(memory)):
                left -= count

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, runs))


def _safetensors(checkpoint: Checkpoint) -> list[dict[str, torch.Tensor]]:
    shards = [load_file(path, device=str(checkpoint.device)) for path in checkpoint.files]
    if checkpoint.device.type == "cpu":
        return [{name: t.clone() for name, t in shard.items()} for shard in shards]
    torch.cuda.synchronize(checkpoint.device)
    return shards


READERS: dict[str, Callable[[Checkpoint], object]] = {
    "plain": lambda checkpoint: _read_files(checkpoint, 1, 1 << 62),
    "threads": lambda checkpoint: _read_files(checkpoint, disk.THREADS, disk.BLOCK_BYTES),
    "safetensors": _safetensors,
    "ours": Checkpoint.load,
    "refill": Checkpoint.refill,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama_8b", help="a file of conf/model with a config")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters; the files are bf16")
    parser.add_argument("--shard-gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, then removed")
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=READERS)
    parser.add_argument("--states", nargs="+", default=list(STATES), choices=STATES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the lines to this JSONL file")
    return parser


if __name__ == "__main__":
    main()
