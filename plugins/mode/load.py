"""Mode load: replay a workload against a server of OpenAI's API, open loop, and measure it from
the client's side."""

import gc
import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from core.config import require
from core.errors import ConfigError
from core.request import Request
from plugins.mode.load_body import PROMPTS, Bodies
from plugins.mode.load_client import LoadClient
from plugins.mode.load_replay import Replay
from plugins.mode.outlet import Outlet
from plugins.mode.progress import ProgressBar
from plugins.mode.run_facts import head, summary_of_hooks
from plugins.mode.samples import distribution
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summarise
from plugins.shared.clocks import RealClock
from plugins.shared.event_loop import allow_many_files, run_loop
from plugins.shared.measure import Window, window_of
from plugins.shared.run_info import SinkQuery
from plugins.shared.session import Session, closed_loop
from plugins.shared.tokenizer_file import read_tokenizer

LATE_S = 0.1  # from here on the driver's own delay is worth a warning
logger = logging.getLogger(__name__)


class Load:
    """Each request is sent at its arrival time, whatever the server does; latencies count from that
    time. The arguments are explained in conf/mode/load.yaml."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        prompts: str = "ids",
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        extensions: bool = True,
        api_key_env: str | None = None,
        max_connections: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        holds = urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
        require(holds, "mode.url", "an address that begins with http:// or https://", url)
        require(prompts in PROMPTS, "mode.prompts", f"one of {', '.join(PROMPTS)}", prompts)
        needs = prompts == "ids" or tokenizer is not None
        require(needs, "mode.tokenizer", f"given for mode.prompts={prompts}", tokenizer)
        require(vocab_size is None or vocab_size >= 1, "mode.vocab_size", ">= 1", vocab_size)
        some = max_connections is None or max_connections >= 1
        require(some, "mode.max_connections", ">= 1 or null", max_connections)
        require(timeout_s > 0, "mode.timeout_s", "> 0", timeout_s)
        known = api_key_env is None or api_key_env in os.environ
        require(known, "mode.api_key_env", "the name of an environment variable", api_key_env)
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"
        self.model = model
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.extensions = extensions
        self.api_key_env = api_key_env
        self.max_connections = max_connections
        self.timeout_s = timeout_s

    def run(self, session: Session) -> dict[str, Any]:
        """Replay the session's workload; returns the summary.

        That of mode bench as far as a client can know it, and `load`: how late the driver was, what
        went wrong, how tokens came in chunks. Memory and steps are not known, nor is the time
        in the queue: a client does not see when a request is admitted.

        Raises ConfigError under a simulated clock, for a server that does not answer, and if no
        request at all completed."""
        if not isinstance(session.clock, RealClock):
            raise ConfigError("mode load needs clock=real: a server lives in real time")
        if closed_loop(session.workload) is not None:
            raise ConfigError(
                f"workload {session.workload.name} is a closed loop: its requests wait for answers,"
                " and mode=load replays recorded arrivals; use an open loop, or mode=bench"
            )
        tokenizer = (
            None if self.tokenizer is None else read_tokenizer("mode.tokenizer", self.tokenizer)
        )
        allow_many_files()
        return run_loop(self._run(session, session.clock, tokenizer))

    async def _run(
        self, session: Session, clock: RealClock, tokenizer: Any | None
    ) -> dict[str, Any]:
        key = os.environ[self.api_key_env] if self.api_key_env else None
        async with LoadClient(self.url, key, self.max_connections, self.timeout_s) as client:
            model = self.model or await _first_model(client)
            vocab_size = self.vocab_size or await _vocab_size(client, tokenizer)
            session.run.manifest["server"] = {"url": self.url, "model": model}
            requests = session.workload.requests(tokenizer, vocab_size, session.run.seed)
            bodies = Bodies(model, self.prompts, tokenizer, self.extensions)
            calls = [(request, bodies.body(request)) for request in requests]
            if bodies.dropped:
                logger.warning("fields that are not sent, of how many requests: %s", bodies.dropped)
            gc.collect()
            gc.freeze()
            try:
                return await self._measured(session, clock, client, bodies, calls)
            finally:
                gc.unfreeze()

    async def _measured(
        self,
        session: Session,
        clock: RealClock,
        client: LoadClient,
        bodies: Bodies,
        calls: Sequence[tuple[Request, bytes]],
    ) -> dict[str, Any]:
        outlet = Outlet(threaded=False)
        outlet.open(
            session.hooks.build_all("build_sink", SinkQuery(session.run, str(session.folder)))
        )
        try:
            session.hooks.notify("on_run_start", session.run)
            replay = Replay(client, bodies.path, clock, outlet)
            window = window_of([request.arrival_s for request, _ in calls], session.measure)
            clock.restart()
            with ProgressBar(session.progress, len(calls), label="load") as bar:
                await replay.run(calls, bar)
            summary = self._summary(session, replay, bodies, window)
            if not summary["requests"]["completed"]:
                error = summary["requests"]["first_error"]
                raise ConfigError(f"none of {len(calls)} requests completed; the first: {error}")
            session.hooks.notify("on_run_end", summary)
        except BaseException as error:
            outlet.fail(error)
            raise
        outlet.close(session.run, summary)
        return summary

    def _summary(
        self, session: Session, replay: Replay, bodies: Bodies, window: Window
    ) -> dict[str, Any]:
        run = session.run
        late = distribution(replay.late_s)
        if (late["p99"] or 0) > LATE_S:
            text = "the driver sent late, p99 %.0f ms: it is what is measured, not the server alone"
            logger.warning(text, 1e3 * (late["p99"] or 0))
        return {
            **head(session, "load", session.workload.name),
            "server": run.manifest["server"],
            **summarise(replay.records, StepTotals(0, 0), window, session.slo),
            "hit_rate": replay.hit_rate(),
            "load": {
                "late_s": late,
                "errors": dict(replay.errors),
                "counted_by": dict(replay.counted_by),
                "chunks": replay.chunks(),
                "dropped_fields": bodies.dropped,
            },
            "hooks": {"build_sink": run.hooks.get("build_sink")},
            "plugins": [entry for entry in summary_of_hooks(session.hooks) if entry["asked"]],
        }


async def _first_model(client: LoadClient) -> str:
    listed = await client.get("models")
    try:
        return str(listed["data"][0]["id"])
    except (IndexError, KeyError, TypeError):
        raise ConfigError(
            "mode.model must be given for a server that lists none under /models"
        ) from None


async def _vocab_size(client: LoadClient, tokenizer: Any | None) -> int:
    if tokenizer is not None:
        return len(tokenizer)
    engine = await client.get("engine")
    if not isinstance(engine, dict) or not isinstance(engine.get("vocab_size"), int):
        raise ConfigError("mode.vocab_size must be given for a server that does not tell it")
    return int(engine["vocab_size"])
