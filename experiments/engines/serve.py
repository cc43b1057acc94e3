"""A mode that serves several request files one after another on one engine, each from a cold cache.

`python -m experiments.engines.run` starts it through run.py: mode._target_ names this class."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from core.engine import Engine
from core.request import Request, SamplingParams
from experiments.engines.direct_hooks import DirectHooks
from experiments.engines.workloads import warm_up_load
from plugins.mode.bench import Bench
from plugins.mode.outlet import Outlet
from plugins.mode.run_facts import check_all_asked
from plugins.mode.step_totals import StepTotals
from plugins.shared.session import Session
from plugins.workload.file import File

RESULTS = "results.jsonl"
DIRECT = "hooks called directly"
READY = "ready"


class Serve(Bench):
    """paths: request files, named by their stems; rounds: how often to go through all of them.
    warmup: first two batches of `warmup_requests` prompts, drawn and greedy. lock: as in Bench.
    direct: serve every file a second time in turn, hooks called directly (direct_hooks.py).

    Writes a line of results.jsonl as each run ends, and one with the time of the first token before
    all others; the sinks of each run write to a folder of its own."""

    def __init__(
        self,
        paths: tuple[str, ...],
        rounds: int = 1,
        warmup: bool = True,
        lock: str = "fail",
        warmup_requests: int = 64,
        direct: bool = False,
    ) -> None:
        super().__init__(warmup, lock)
        self.paths = paths
        self.rounds = rounds
        self.warmup_requests = warmup_requests
        self.direct = direct
        self._wall_s = 0.0  # of the file served last

    def _serve(
        self, session: Session, engine: Engine, outlet: Outlet, warms: bool
    ) -> dict[str, Any]:
        results = []
        facts = engine.executor.describe()
        session.run.manifest["executor"] = facts
        with open(session.folder / RESULTS, "w", encoding="utf-8") as log:
            if warms:
                log.write(json.dumps(self._warm_up(session, engine) | {"executor": facts}) + "\n")
                log.flush()
            ways: dict[str, Any] = {"": engine.state.hooks}
            if self.direct:
                ways[DIRECT] = DirectHooks(session.hooks)
            turns = itertools.product(range(self.rounds), map(Path, self.paths), ways.items())
            for number, path, (name, hooks) in turns:
                engine.state.hooks = hooks
                folder = f"{path.stem}-{number}{'-direct' if name else ''}"
                result = self._serve_file(session, engine, outlet, path, folder)
                result |= {"round": number} | ({"engine": name} if name else {})
                results.append(result)
                log.write(json.dumps(result) + "\n")
                log.flush()
            engine.state.hooks = ways[""]
        check_all_asked(session.hooks, session.engine.strict)
        return {"results": results}

    def _warm_up(self, session: Session, engine: Engine) -> dict[str, Any]:
        """What was compiled and loaded by need is there afterwards. unix_s: the first token's."""
        first_s = 0.0
        for temperature in (0.6, 0.0):
            load = warm_up_load(temperature, self.warmup_requests)
            limit = engine.state.max_model_len - 16
            for number, prompt in enumerate(load.prompts):
                tokens = np.array(prompt[:limit], np.int32) % engine.executor.vocab_size
                params = SamplingParams(max_tokens=16, temperature=temperature, ignore_eos=True)
                engine.submit(Request(f"warm-{number}", tokens, params, session.clock.now()))
            while engine.has_work:
                event = engine.step()
                if event is not None and len(event.token_ids) and not first_s:
                    first_s = time.time()
            clear_cache(engine)
        return {"kind": READY, "unix_s": first_s}

    def _serve_file(
        self, session: Session, engine: Engine, outlet: Outlet, path: Path, folder: str
    ) -> dict[str, Any]:
        session = replace(session, workload=File(str(path)), folder=session.folder / folder)
        session.folder.mkdir(exist_ok=True)
        tokenizer, vocab = engine.executor.tokenizer, engine.executor.vocab_size
        requests = session.workload.requests(tokenizer, vocab, session.run.seed)
        summary = self._measured(session, engine, outlet, requests)
        clear_cache(engine)
        figures = _figures(requests, summary, self._wall_s)
        return {"workload": path.stem, **figures, **_timeline(session.folder)}

    def _replay(self, session: Session, engine: Engine, requests: Sequence[Request]) -> StepTotals:
        begin = time.perf_counter()
        totals = super()._replay(session, engine, requests)
        self._wall_s = time.perf_counter() - begin
        return totals


def clear_cache(engine: Engine) -> None:
    """Drop every cached page that nobody uses."""
    memory = engine.state.memory
    memory.allocator.free(memory.ledger.from_tree(memory.cache.clear()))


def _timeline(folder: Path) -> dict[str, Any]:
    """What sink=kernels found of the run's time, if it is there."""
    file = folder / "kernels.json"
    if not file.exists():
        return {}
    return {"timeline": json.loads(file.read_text(encoding="utf-8"))["run"]}


def _figures(requests: Sequence[Request], summary: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """Named as shared by all engines; then what only this engine tells. Raises RuntimeError for
    another number of tokens than was asked for."""
    tokens, steps, latency = summary["tokens"], summary["steps"], summary["latency"]
    asked = sum(request.params.max_tokens for request in requests)
    if tokens["output"] != asked:
        reason = summary["requests"]["first_error"]
        raise RuntimeError(f"output tokens must be {asked}, got {tokens['output']}: {reason}")
    milliseconds = {
        f"{kind}_{rank}_ms": round(1000 * latency[f"{kind}_s"][rank], 2)
        for kind in ("ttft", "itl")
        for rank in ("p50", "p99")
        if latency[f"{kind}_s"][rank] is not None
    }
    return {
        "requests": len(requests),
        "prompt_tokens": tokens["prompt"],
        "output_tokens": tokens["output"],
        "wall_s": round(wall_s, 4),
        "output_tok_s": round(tokens["output"] / wall_s, 1),
        "total_tok_s": round((tokens["prompt"] + tokens["output"]) / wall_s, 1),
        "temperature": fmean(request.params.temperature for request in requests),
        "cached_tokens": tokens["cached"],
        **milliseconds,
        "computed_tokens": tokens["computed"],
        "duplicate_prefill_tokens": tokens["duplicate_prefill"],
        "preemptions": summary["preemptions"],
        "steps": steps["count"],
        "host_us_mean": {part: round(us or 0.0, 1) for part, us in steps["host_us_mean"].items()},
    }
