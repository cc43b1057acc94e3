"""Results of a launch between the device and the host."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.clock import Clock
from core.launch import Launch, LaunchResult, TokenLogprobs
from plugins.executor.logprobs import Entries
from plugins.executor.packing import PromptScores
from plugins.executor.sampler import NO_TOKEN, SamplePlan
from plugins.executor.upload import download


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A launch whose results the host has not read. Host tensors are filled once `event` has
    passed.

    tokens int64: of the rows `sampled`, int64 [k], or of all rows. graph_tokens: see LaunchResult.
    samples: not None where logprobs is not. fault: what is said of a row whose logits
    hold no token. finished_s: when it was done, known at once where there is no device to wait for.
    read_plan: what attention planned, see LaunchResult."""

    launch_id: int
    tokens: Tensor
    sampled: NDArray[np.int64]
    fault: str
    event: torch.Event | None
    finished_s: float | None
    graph_tokens: int = 0
    of_all_rows: bool = False
    samples: SamplePlan | None = None
    logprobs: Entries | None = None
    scores: PromptScores | None = None
    score_entries: Entries | None = None
    read_plan: Callable[[], dict[str, Any]] | None = None

    def wait(self, clock: Clock) -> LaunchResult:
        """The results, waiting for the device if there is one."""
        if self.event is not None:
            self.event.synchronize()
        tokens = self.tokens.numpy().astype(np.int32)
        if self.of_all_rows:
            tokens = tokens[self.sampled]
        errors = dict.fromkeys(self.sampled[tokens == NO_TOKEN].tolist(), self.fault)
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None and self.samples is not None:
            entries = self.logprobs.to_host(self.samples.num_logprobs.tolist())
            logprobs = dict(zip(self.samples.asked.tolist(), entries, strict=True))
        return LaunchResult(
            launch_id=self.launch_id,
            tokens=tokens,
            finished_s=clock.now() if self.finished_s is None else self.finished_s,
            errors=errors,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(errors),
            graph_tokens=self.graph_tokens,
            attention={} if self.read_plan is None else self.read_plan(),
        )

    def _prompt_logprobs(self, errors: dict[int, str]) -> dict[int, list[TokenLogprobs]]:
        """The scores of each row that asked; a row with one that is NaN joins the errors."""
        scores = self.scores
        if scores is None or self.score_entries is None:
            return {}
        entries = iter(
            self.score_entries.to_host(np.repeat(scores.num_top, scores.num_tokens).tolist())
        )
        scored = {
            row: [next(entries) for _ in range(count)]
            for row, count in zip(scores.rows, scores.num_tokens, strict=True)
        }
        failed = (row for row, own in scored.items() if any(isnan(one.logprob) for one in own))
        errors |= dict.fromkeys(failed, self.fault)
        return scored


def send(launch: Launch, tokens: Tensor, clock: Clock, **rest: Any) -> InFlight:
    """Results of a launch on their way to the host. tokens: on the device; rest: further fields."""
    event = None
    on_host = download(tokens)
    if tokens.device.type == "cuda":
        event = torch.Event(tokens.device)
        event.record()
    return InFlight(
        launch_id=launch.launch_id,
        tokens=on_host,
        sampled=np.flatnonzero(launch.samples),
        event=event,
        finished_s=clock.now() if event is None else None,
        **rest,
    )


def no_token(model_dtype: str, kv_dtype: str) -> str:
    """What is said of a row whose logits hold no token."""
    return (
        "logits must be finite but for masked tokens, with one left; got NaN, +inf or -inf"
        f" alone (model {model_dtype}, KV {kv_dtype}; is either narrower than the"
        " weights were trained in?)"
    )
