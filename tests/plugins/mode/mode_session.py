"""A Session on the scripted executor, for the tests of modes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.clock import Clock
from core.config import EngineConfig
from core.hooks import Hooks
from core.hookspecs import hookimpl
from core.request import Request
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.evict_shortest import EvictShortest
from plugins.shared.clocks import VirtualClock
from plugins.shared.run_info import RunInfo
from plugins.shared.session import Records, Session
from plugins.sink.files import Files
from plugins.step_time.fixed import Fixed

VOCAB = 300


class Given:
    """A workload of requests made by hand."""

    name = "given"

    def __init__(self, requests: Sequence[Request]) -> None:
        self.given = requests

    def requests(self, tokenizer: Any, vocab_size: int, seed: int) -> Sequence[Request]:
        return self.given


class Recorder:
    """A sink plugin that keeps what it was handed."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.requests: list[Any] = []
        self.closed: dict[str, Any] | None = None
        self.failed: BaseException | None = None

    @hookimpl
    def build_sink(self, query: Any) -> Any:
        recorder = self

        class Sink:
            def step(self, record: Any) -> None:
                recorder.steps.append(record)

            def request(self, record: Any) -> None:
                recorder.requests.append(record)

            def close(self, run: Any, summary: dict[str, Any]) -> None:
                recorder.closed = summary

            def fail(self, error: BaseException) -> None:
                recorder.failed = error

        return Sink()


def make_session(
    folder: Path,
    workload: Any = None,
    clock: Clock | None = None,
    pages: int = 24,
    executor: Any = None,
    **plugins: object,
) -> Session:
    """Defaults, and `plugins` by name; files in `folder`."""
    defaults = {
        "order": Fcfs(),
        "admission": PromptFits(),
        "batching": Chunked(slice_tokens=64),
        "preemption": EvictShortest(),
        "allocator": Paged(16),
        "cache": Radix(),
        "evictor": Lru(),
        "cache_admission": AdmitAll(),
        "predictor": MaxTokensShare(),
        "step_time": Fixed(),
        "executor": executor or Fake(vocab_size=VOCAB, max_model_len=512),
        "files": Files(),
    }
    hooks = Hooks(defaults, plugins)
    return Session(
        hooks=hooks,
        engine=EngineConfig(
            max_num_seqs=8, max_num_batched_tokens=128, pool_tokens=pages * 16, strict=True
        ),
        clock=clock or VirtualClock(),
        run=RunInfo("test", 0, "default", hooks.in_charge(), {"seed": 0}, {}),
        folder=folder,
        device="cpu",
        records=Records.full,
        progress=False,
        workload=workload or Given([]),
    )
