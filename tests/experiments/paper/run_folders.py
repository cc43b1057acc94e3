"""Small run folders written by hand, with the files and names that run.py uses."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from experiments.paper.folders import Run, read_run
from plugins.sink.rows import REQUEST_COLUMNS

MANIFEST = {"commit": "abc", "dirty": False, "device": "cpu", "platform": "box", "hook_version": 1}
Row = dict[str, Any]


def request(name: str, arrival_s: float = 0.0, ttft_s: float = 1.0, **more: Any) -> Row:
    """A completed request of 10 prompt tokens; two output tokens, the second a second later."""
    first_s = arrival_s + ttft_s
    return {
        "request_id": name,
        "finish_reason": "length",
        "prompt_tokens": 10,
        "output_tokens": 2,
        "cached_tokens": 0,
        "computed_tokens": 11,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "arrival_s": arrival_s,
        "admitted_s": arrival_s,
        "first_token_s": first_s,
        "finished_s": first_s + 1,
        "ttft_s": ttft_s,
        "tpot_s": 1.0,
        "e2e_s": ttft_s + 1,
        **more,
    }


def step(number: int, choices: Sequence[Sequence[str]] = (), **more: Any) -> dict[str, Any]:
    """A line of steps.jsonl. choices: (kind, request, plugin, reason)."""
    return {
        "step": number,
        "start_s": float(number),
        "end_s": number + 1.0,
        "steps": 1,
        "num_rows": 0,
        "prefill_tokens": 0,
        "batch_plugin": "chunked",
        "batch_reason": "decode",
        "choices": [
            {"kind": kind, "request_id": name, "choice": 0, "plugin": plugin, "reason": reason}
            for kind, name, plugin, reason in choices
        ],
        "rows": [],
        **more,
    }


def write_run(
    folder: Path,
    policy: str = "default",
    seed: int = 0,
    requests: Sequence[Row] = (),
    summary: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    steps: Sequence[Mapping[str, Any]] | None = None,
    gaps_s: Mapping[str, Sequence[float]] | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> Run:
    """A finished run. gaps_s: request -> gaps between its tokens; default: one of a second."""
    path = folder / f"{policy}-s{seed}-{len(list(folder.glob('*'))):x}"
    path.mkdir(parents=True)
    plugins = {} if policy == "default" else {policy: {"_target_": f"outside.{policy}"}}
    whole = {"seed": seed, "records": "full", "plugins": plugins, **(config or {})}
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(whole)))
    (path / "manifest.json").write_text(json.dumps({**MANIFEST, **(manifest or {})}))
    _write_requests(path / "requests.csv", requests)
    _write_tokens(path / "tokens.npz", requests, gaps_s or {})
    if steps is not None:
        (path / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    head = {"policy": policy, "seed": seed, "latency": {}, "workload": "toy"}
    (path / "summary.json").write_text(json.dumps({**head, **(summary or {})}))
    return read_run(path)


def _write_requests(path: Path, requests: Sequence[Row]) -> None:
    names = ["index", *dict.fromkeys([*REQUEST_COLUMNS, *(key for row in requests for key in row)])]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for index, row in enumerate(requests):
            writer.writerow({"index": index, **row})


def _write_tokens(
    path: Path, requests: Sequence[Row], gaps_s: Mapping[str, Sequence[float]]
) -> None:
    owners: list[int] = []
    times: list[float] = []
    for index, row in enumerate(requests):
        gaps = gaps_s.get(row["request_id"], [1.0])
        stream = row["first_token_s"] + np.cumsum([0.0, *gaps])
        owners += [index] * len(stream)
        times += stream.tolist()
    zeros = np.zeros(len(owners), np.int32)
    np.savez(
        path,
        request=np.array(owners, np.int32),
        choice=zeros,
        token_id=zeros,
        time_s=np.array(times),
        step=zeros.astype(np.int64),
    )
