"""Serves the comparison workloads with this engine and, with --peers, with others on the same card.

    python -m experiments.engines.run --model qwen3_0_6b --workloads nano,decode --out engines.jsonl
    python -m experiments.engines.run --model llama_8b --peers PATH/engines.py --rates 4,16,32

Arguments such as `key=value`, `+policy=NAME` and `~key` go to run.py. Each engine has a process
of its own, one after another; wall_s is from the first submission to the last token, start_s from
the command to the first token of warm-up (of a peer: what it says itself)."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.engines.floor import Shape, floor
from experiments.engines.report import comparison
from experiments.engines.serve import READY, RESULTS
from experiments.engines.workloads import OFFLINE, ONLINE, ONLINE_REQUESTS, Load, load, write

ROOT = Path(__file__).resolve().parents[2]
OURS = "tritium"
# Wall times are not comparable then: hosts list rows, and the device is waited for now and then.
TIMELINE = (
    "+sink=kernels",
    "sinks.kernels.after=2",
    "sinks.kernels.steps=8",
    "sinks.kernels.windows=40",
    "sinks.kernels.every=32",
    "records=full",
    "sinks.files.records=summary",
    "~sinks.timeline",
)
"""A window early, for the prompts; then a quarter of all steps."""

PEER_MODELS = {"qwen3_0_6b": "qwen3-0.6b", "llama_8b": "llama-8b"}

Line = dict[str, Any]


@dataclass(slots=True)
class Experiment:
    """Arguments, and what the engines share: the workloads by name, the model's shape."""

    arguments: argparse.Namespace
    overrides: list[str]
    folder: Path
    loads: dict[str, Load]
    shape: Shape

    def annotated(self, line: Line) -> Line:
        """A result with its model and, if all requests come at once, its floor."""
        line = {"kind": "engine", **line, "model": self.arguments.model}
        name = line["workload"]
        if not name.startswith(ONLINE):
            least = floor(self.loads[name], self.shape)
            line |= {
                "floor_s": least.total_s,
                "floor_once_s": least.once_s,
                "of_floor": least.once_s / line["wall_s"],
            }
        return line


def main() -> int:
    """Run what the arguments name; 1 if an engine failed."""
    arguments, rest = _parser().parse_known_args()
    wrong = [text for text in rest if text[:1] != "~" and (text[:1] == "-" or "=" not in text)]
    if wrong:
        raise SystemExit(f"arguments must be options or overrides of run.py, got {wrong}")
    names = [*arguments.workloads, *(f"{ONLINE}{rate:g}" for rate in arguments.rates)]
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="engines-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    loads = {name: load(name, arguments.scale, arguments.online_requests) for name in names}
    experiment = Experiment(arguments, rest, folder, loads, _shape(arguments.model))
    ended, lines = [], []
    engines: dict[str, Callable[[Experiment], tuple[bool, list[Line]]]] = {OURS: serve}
    if arguments.peers is not None:
        engines["peers"] = serve_peer
    for name in [name for name in engines if name not in arguments.without]:
        ok, found = engines[name](experiment)
        ended.append(ok)
        new = [experiment.annotated(line) for line in found]
        lines += new
        if arguments.out is not None:  # what comes next may fail
            with open(arguments.out, "a", encoding="utf-8") as log:
                log.writelines(json.dumps(line) + "\n" for line in new)
    sys.stdout.write(comparison(lines) + f"\nfolder: {folder}\n")
    return 0 if all(ended) else 1


def serve(experiment: Experiment) -> tuple[bool, list[Line]]:
    """This engine, through run.py: one process for all workloads."""
    arguments, folder = experiment.arguments, experiment.folder
    files = [write(one, folder / f"{name}.jsonl") for name, one in experiment.loads.items()]
    quoted = ",".join(json.dumps(str(path)) for path in files)
    command = [sys.executable, "run.py", "+experiment=engines", f"model={arguments.model}"]
    command += [
        f"workload.path={json.dumps(str(files[0]))}",
        "mode._target_=experiments.engines.serve.Serve",
        f"+mode.paths=[{quoted}]",
        f"+mode.rounds={arguments.rounds}",
        f"+mode.direct={arguments.direct_hooks}",
        f"hydra.run.dir={folder / OURS}",
        "~sinks.figures",
        *(TIMELINE if arguments.timeline else ()),
        *experiment.overrides,
    ]
    results = folder / OURS / RESULTS
    results.unlink(missing_ok=True)
    began_s = time.time()
    ok = _run(command, dict(os.environ), ROOT, arguments.timeout)
    lines = _read(results)
    ready = next((line for line in lines if line.get("kind") == READY), None)
    facts = {"engine": OURS}
    if ready is not None:
        facts["start_s"] = round(ready["unix_s"] - began_s, 1)
        facts["device"] = ready["executor"].get("device_name")
        facts["torch"] = ready["executor"].get("torch")
    return ok, [facts | line for line in lines if line.get("kind") != READY]


def serve_peer(experiment: Experiment) -> tuple[bool, list[Line]]:
    """The peer's script, in one process for what comes at once and one for what arrives."""
    arguments = experiment.arguments
    if arguments.model not in PEER_MODELS:
        known = ", ".join(PEER_MODELS)
        raise SystemExit(f"--model must be one of {known} for --peers, got {arguments.model!r}")
    out = experiment.folder / "peers.jsonl"
    out.unlink(missing_ok=True)
    common = ["--model", PEER_MODELS[arguments.model], "--out", str(out)]
    common += arguments.peer_options.split()
    runs = []
    if arguments.workloads:
        names, rounds = ",".join(arguments.workloads), str(arguments.rounds)
        more = ["--workloads", names, "--scale", str(arguments.scale), "--repeat", rounds]
        runs.append(["--engine", arguments.peer_engine, *more])
    if arguments.rates:
        rates = ",".join(f"{rate:g}" for rate in arguments.rates)
        more = ["--rates", rates, "--online-requests", str(arguments.online_requests)]
        runs.append(["--engine", f"{arguments.peer_engine}-online", *more])
    environment = dict(os.environ) | {"PYTHONPATH": str(arguments.peer_site)}
    script = [sys.executable, str(arguments.peers.resolve())]
    # Not in the clone: a peer may take our folder `kernels` for a package it knows.
    oks = [
        _run([*script, *run, *common], environment, experiment.folder, arguments.timeout)
        for run in runs
    ]
    lines = [line for line in _read(out) if "error" not in line]
    for line in lines:
        if line["workload"] == "poisson":
            line["workload"] = f"{ONLINE}{line['rate']:g}"
            line["engine"] = line["engine"].removesuffix("-online")
    return all(oks), lines


def _run(command: list[str], environment: Mapping[str, str], cwd: Path, timeout_s: float) -> bool:
    """Run to the end or the limit, output on standard error; then nothing of it is left."""
    process = subprocess.Popen(command, env=environment, cwd=cwd, stdout=2, start_new_session=True)
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"stopped after {timeout_s:g} s: {' '.join(command)[:200]}\n")
        return False
    finally:
        with suppress(ProcessLookupError):  # its own children may outlive it and hold the card
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> list[Line]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _shape(model: str) -> Shape:
    node = yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
    if not node.get("config"):
        raise SystemExit(f"--model must name a model with its config inline, got {model!r}")
    return Shape.of(node["config"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_0_6b", help="a file of conf/model")
    parser.add_argument("--workloads", type=_names, default=list(OFFLINE), help="or '' for none")
    parser.add_argument("--rates", type=_rates, default=[], help="of online requests a second")
    parser.add_argument("--online-requests", type=int, default=ONLINE_REQUESTS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the offline requests")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--direct-hooks", action="store_true", help="ours again without pluggy")
    parser.add_argument("--timeline", action="store_true", help="profile ours: where time goes")
    parser.add_argument("--peers", type=Path, help="the peers' script")
    parser.add_argument("--peer-engine", default="vllm")
    parser.add_argument("--peer-site", type=Path, default=Path("/tmp/peer_site"))
    parser.add_argument("--peer-options", default="", help="more options of the peers' script")
    parser.add_argument("--without", nargs="*", default=[], choices=(OURS, "peers"))
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for each process")
    parser.add_argument("--folder", type=Path, help="request files and results; default temporary")
    parser.add_argument("--out", type=Path, help="append the results to this JSONL file")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _rates(text: str) -> list[float]:
    return [float(rate) for rate in _names(text)]


if __name__ == "__main__":
    sys.exit(main())
