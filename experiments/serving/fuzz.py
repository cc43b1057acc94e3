"""Does any request make the server fail?

    python -m experiments.serving.fuzz --cases 10000
    python -m experiments.serving.fuzz --cases 2000 model=smollm2    # with its own weights

Half of the cases are schemathesis's (`pip install '.[fuzz]'`): for each operation of the server's
own OpenAPI page bodies, headers and parameters that follow it and that do not. The other half are
bodies of calls that are served, with a few fields replaced, some of them cut or with a byte
changed. Every other body of schemathesis's is given the served model's name, so that it is not
refused for that alone.

Each must be answered with 200 or a 4xx in the error's shape; then a plain request must be served as
ever, and the engine must hold nothing. The model has SmolLM2's tokenizer and chat template, and two
small layers of random weights. Arguments such as `key=value` go to run.py's config."""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from experiments.serving.server_process import ROOT, ServerProcess, idle, serving
from plugins.model.smollm2_files import model_folder
from plugins.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

SERVED = ROOT / "tests" / "plugins" / "server" / "requests.jsonl"
OPTIONS = (
    *("server.model_name=MODEL", "server.max_tokens=8", "server.max_choices=8"),
    *("device=cpu", "engine.pool_tokens=16384", "mode.warmup=false", "mode.lock=off"),
)
SMALL = {  # in place of SmolLM2's
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
ENDLESS = "/v1/engine/steps"  # a stream for as long as the server runs: left out
TIMEOUT_S = 60.0
END_S = 60.0  # for the engine to be idle afterwards
IN_FLIGHT = 8
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**30),
    *("", "a", "MODEL", "\x00", "\ud83d", "é" * 300, "💥", [], {}, [[]], [[1]], [1, 2], ["a", 1]),
    *([None], [True], {"a": 1}, {"5": 1}, {"type": "text"}, [{"role": "user", "content": "a"}]),
    *([{"role": "user"}], [{"type": "text", "text": "a"}], {"include_usage": True}, [1e9], [-1]),
]


@dataclass
class Outcomes:
    """Statuses by source and path, and what was wrong: at most one line a case."""

    statuses: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def take(self, source: str, path: str, answer: Any, sent: object) -> None:
        """answer: of httpx or requests."""
        self.statuses[source, path, answer.status_code] += 1
        if fault := fault_of(answer):
            self.faults.append(f"{source} {path} {fault}: {str(sent)[:500]}")


def fault_of(answer: Any) -> str:
    """What is wrong with an answer to a broken call, "" = nothing."""
    status = answer.status_code
    if status == 200:
        return ""
    if not 400 <= status < 500:
        return f"status {status}"
    try:
        keys = set(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"{status} without the error's shape"
    return "" if keys == {"message", "type", "param", "code"} else f"{status} with {keys}"


def main() -> int:
    """1 if a case failed the server."""
    arguments, overrides = _parser().parse_known_args()
    outcomes = Outcomes()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "run", *OPTIONS, *small_model(folder), *overrides) as server,
    ):
        mutations(server.url, arguments.cases // 2, arguments.seed, outcomes)
        described(server.url, arguments.cases - arguments.cases // 2, arguments.seed, outcomes)
        good = serves_on(server)
        traceback = "Traceback" in server.messages
    sys.stdout.write(_report(outcomes, good, traceback))
    return int(bool(outcomes.faults) or not good or traceback)


def small_model(folder: str) -> tuple[str, ...]:
    """Overrides for a model in a new folder: random weights, SmolLM2's tokenizer and vocabulary."""
    source, target = model_folder(False), Path(folder) / "model"
    target.mkdir()
    for file in source.glob("*.json*"):
        if "index" not in file.name:
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= SMALL
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return "model=hf", f"model.path={target}", "model.load=dummy", "model.dtype=float32"


def mutations(url: str, cases: int, seed: int, outcomes: Outcomes) -> None:
    """Send that many bodies that were served once and are broken now."""
    rng, served = random.Random(seed), served_calls()

    def send(http: httpx.Client, case: tuple[str, bytes]) -> None:
        path, raw = case
        headers = {"content-type": "application/json"}
        outcomes.take("mutated", path, http.post(url + path, content=raw, headers=headers), raw)

    drawn = [mutated(rng, served) for _ in range(cases)]
    with httpx.Client(timeout=TIMEOUT_S) as http, ThreadPoolExecutor(IN_FLIGHT) as pool:
        for _ in pool.map(partial(send, http), drawn):
            pass


def served_calls() -> list[dict[str, Any]]:
    """Calls with a body that are answered with 200: those of requests.jsonl whose client stays, and
    the simplest of either kind that generates nothing."""
    lines = [json.loads(line) for line in SERVED.read_text(encoding="utf-8").splitlines()]
    good = [line for line in lines if line["expect"]["status"] == 200 and "body" in line]
    plain = [("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [19556, 28]})]
    served = [{"path": path, "body": body} for path, body in plain]
    return served + [line for line in good if "client" not in line]


def mutated(rng: random.Random, served: list[dict[str, Any]]) -> tuple[str, bytes]:
    """A path and a body."""
    path = rng.choice(list(BODIES))
    body = dict(rng.choice([one["body"] for one in served if one["path"] == path]))
    fields = [*BODIES[path].model_fields, "unknown"]
    for _ in range(rng.randint(0, 2)):
        body[rng.choice(fields)] = rng.choice(VALUES)
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:
        cut = rng.randrange(len(raw))
        raw = raw[:cut] + rng.choice([b"", b"\xff", b"\x00", b"}", b'"', b"NaN"]) + raw[cut + 1 :]
    return path, raw


def described(url: str, cases: int, seed: int, outcomes: Outcomes) -> None:
    """Send that many of schemathesis's, most of them to the endpoints that take a body."""
    import requests

    page = httpx.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
    operations = [one for one in _operations(page) if one.path != ENDLESS]
    bodies = [one for one in operations if one.method == "post"]
    # There is one way to ask for what takes nothing, and a few dozen for what takes a name.
    shares = [cases // len(bodies) if one in bodies else min(cases, 20) for one in operations]
    with requests.Session() as session:
        for operation, share in zip(operations, shares, strict=True):
            _run(operation, share, seed, partial(_call, url, session, outcomes))


def serves_on(server: ServerProcess) -> bool:
    """Whether a plain request is served as ever and the engine holds nothing afterwards."""
    body = {"model": "MODEL", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    server.wait_for(idle, END_S)
    ready = httpx.get(f"{server.url}/ready", timeout=TIMEOUT_S)
    served = answer.status_code == ready.status_code == 200
    return served and answer.json()["usage"]["completion_tokens"] == 4


def _operations(page: dict[str, Any]) -> Iterator[Any]:
    import schemathesis

    for result in schemathesis.openapi.from_dict(page).get_all_operations():
        yield result.ok()


def _run(operation: Any, cases: int, seed: int, call: Callable[[Any, bool], None]) -> None:
    """`call` with cases that do not follow the page, every other time with ones that do."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from schemathesis import GenerationMode

    modes = [GenerationMode.POSITIVE]
    if operation.method == "post":
        modes.append(GenerationMode.NEGATIVE)
    for number, mode in enumerate(modes):
        left = (cases + number) // len(modes)

        def send(case: Any) -> None:
            nonlocal left
            if left:  # hypothesis may draw more
                left -= 1
                call(case, left % 2 == 0)

        run = settings(
            max_examples=max(left, 1),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seeded(seed)(run(given(case=operation.as_strategy(generation_mode=mode))(send)))()


def _call(url: str, session: Any, outcomes: Outcomes, case: Any, named: bool) -> None:
    if named and isinstance(case.body, dict):
        case.body["model"] = "MODEL"
    answer = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
    outcomes.take("described", case.operation.path, answer, case.body)


def _report(outcomes: Outcomes, good: bool, traceback: bool) -> str:
    statuses = sorted({status for _, _, status in outcomes.statuses})
    keys = sorted({(source, path) for source, path, _ in outcomes.statuses})
    lines = [f"| source | path | {' | '.join(map(str, statuses))} |"]
    lines.append("|---|---|" + "---|" * len(statuses))
    for source, path in keys:
        counts = [f"{outcomes.statuses[source, path, status]:,}" for status in statuses]
        lines.append(f"| {source} | {path} | {' | '.join(counts)} |")
    total = outcomes.statuses.total()
    failed = sum(n for (_, _, status), n in outcomes.statuses.items() if status >= 500)
    lines.append(f"{total:,} cases, 5xx: {failed}, faults: {len(outcomes.faults)}")
    lines += outcomes.faults[:20]
    lines.append(f"the good request after them: {'served' if good else 'NOT served'}")
    lines.append(f"tracebacks in the server's log: {'yes' if traceback else 'none'}")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
