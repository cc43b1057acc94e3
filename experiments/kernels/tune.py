"""Measures launch parameters on this card and writes them to kernels/pinned.json.

    python -m experiments.kernels.tune [--kernels split_kv,rotary_store,rotary_store_few]
                                       [--shape 128,bfloat16,16,4 ...] [--seconds 230]

For every shape (head_dim, dtype, page size, group) each candidate is checked against torch on every
workload, then timed in rounds that interleave the candidates; the least geometric mean of its
median times over the best ones wins. Candidates compile beforehand in several processes; those that
count on more programs to a multiprocessor than it holds are left out. The table
is written after each shape, those that matter most first; what --seconds leaves no time for is left
out. Entries of other devices and shapes are kept. experiments/kernels/tuned.py holds shapes,
candidates and workloads."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from experiments.kernels.tuned import TUNED, score, too_many
from kernels.pinned import TABLE, Shape

ROUNDS = 3
COMPILING = 0.65
"""Share of the time that compilation may take."""

Job = tuple[str, Shape]


def main() -> None:
    """Tune what the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default=",".join(TUNED))
    parser.add_argument("--shape", type=_shape, action="append", help="instead of the kernels' own")
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: candidates are timed on it")
    begin = time.monotonic()
    jobs = _jobs(arguments.kernels.split(","), arguments.shape)
    ready = _compile(jobs, arguments.processes, begin + COMPILING * arguments.seconds)
    print(f"{len(ready)} of {len(jobs)} compiled in {time.monotonic() - begin:.0f} s", flush=True)
    for job, candidates in ready.items():
        if time.monotonic() - begin > arguments.seconds:
            print(f"no time for {job[0]} {job[1]} and what follows")
            break
        entry = _entry(*job, candidates)
        if entry is not None:
            _write(entry, arguments.table)
    print(f"{time.monotonic() - begin:.0f} s in all")


def _shape(text: str) -> Shape:
    parts = text.split(",")
    known = len(parts) == 4 and parts[1] in ("float32", "float16", "bfloat16", "float8_e4m3fn")
    if not (known and all(part.isdecimal() and int(part) for part in (parts[0], *parts[2:]))):
        rule = "head_dim,dtype,page_size,group such as 128,bfloat16,16,4 (torch's names of dtypes)"
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return Shape(int(parts[0]), parts[1], int(parts[2]), int(parts[3]))


def _jobs(kernels: list[str], shapes: list[Shape] | None) -> list[Job]:
    """The kernels' shapes by turns, the first ones of each first."""
    unknown = [name for name in kernels if name not in TUNED]
    if unknown:
        raise ValueError(f"--kernels must be of {', '.join(TUNED)}, got {unknown}")
    columns = [[(name, shape) for shape in shapes or TUNED[name].shapes] for name in kernels]
    return [job for row in zip_longest(*columns) for job in row if job is not None]


def _compile(jobs: list[Job], processes: int, deadline: float) -> dict[Job, list[Any]]:
    """Fill Triton's cache; returns the jobs that were done in time, and which candidates ran."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"))
    tasks: dict[Job, list[Future[str | None]]] = {
        job: [pool.submit(_run_once, *job, i) for i in range(len(_candidates(job)))] for job in jobs
    }
    ready: dict[Job, list[Any]] = {}
    for job, futures in tasks.items():
        try:
            said = [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
        except TimeoutError:
            break
        pairs = list(zip(_candidates(job), said, strict=True))
        ready[job] = [config for config, reason in pairs if reason is None]
        for config, reason in pairs:
            if reason is not None:
                print(f"{job[0]} {job[1]}: {config} left out: {reason}", flush=True)
    if len(ready) < len(jobs):
        for process in list(pool._processes.values()):
            process.kill()
    pool.shutdown(cancel_futures=True)
    return ready


def _candidates(job: Job) -> list[Any]:
    name, shape = job
    return list(TUNED[name].candidates(shape))


def _run_once(name: str, shape: Shape, index: int) -> str | None:
    """Compile one candidate; returns what prevents it, most often shared memory or registers."""
    config = _candidates((name, shape))[index]
    major, minor = torch.cuda.get_device_capability()
    try:
        workloads = TUNED[name].workloads(shape, True)
        crowded = too_many(config, workloads[0], 10 * major + minor)
        if crowded is None:
            for workload in workloads:
                workload.run(config)
            torch.cuda.synchronize()
    except Exception as error:
        return str(error)[:100]
    return crowded


def _entry(name: str, shape: Shape, candidates: Sequence[Any]) -> dict[str, object] | None:
    """The best candidate of a shape, or None if none serves it."""
    begin = time.monotonic()
    times = _times(name, shape, candidates)
    if not times:
        print(f"{name} {shape}: no candidate serves it", flush=True)
        return None
    best = [min(column) for column in zip(*times.values(), strict=True)]
    ranked = sorted(times, key=lambda config: score(times[config], best))
    winner = ranked[0]
    us = [round(one, 2) for one in times[winner]]
    scores = [round(score(times[config], best), 3) for config in ranked]
    took = time.monotonic() - begin
    print(f"{name} {shape}: {winner} {us} us; scores {scores}; {took:.1f} s", flush=True)
    return {
        "kernel": name,
        "device": torch.cuda.get_device_name(),
        "shape": asdict(shape),
        "configuration": asdict(winner),
        "measured_us": us,
    }


def _times(name: str, shape: Shape, candidates: Sequence[Any]) -> dict[Any, list[float]]:
    """Candidates that are right, with their median microseconds for each workload."""
    workloads = TUNED[name].workloads(shape, False)
    good = []
    for config in candidates:
        try:
            for workload in workloads:
                workload.check(config)
            good.append(config)
        except Exception as error:
            print(f"{name} {shape}: {config} left out: {str(error)[:100]}", flush=True)
    rounds = [
        {config: [workload.us(config) for workload in workloads] for config in good}
        for _ in range(ROUNDS)
    ]
    return {
        config: [statistics.median(us) for us in zip(*(r[config] for r in rounds), strict=True)]
        for config in good
    }


def _write(entry: dict[str, object], table: Path) -> None:
    """Replace the entry of this kernel, device and shape; one line each."""
    old = json.loads(table.read_text()) if table.exists() else []
    fields = ("kernel", "device", "shape")
    kept = [one for one in old if any(one[name] != entry[name] for name in fields)]
    lines = ",\n".join(json.dumps(one) for one in [*kept, entry])
    table.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
