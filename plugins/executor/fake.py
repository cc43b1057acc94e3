"""Scripted tokens under a virtual clock: the scheduler alone, fast and exactly repeatable.

Launches take step_s + token_s per token of simulated time, one after another. While it is at it,
the executor checks every launch against the contract of core.launch with a shadow of the pool
(shadow.py)."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.clock import Clock
from core.config import require
from core.errors import ConfigError, InvariantError
from core.hookspecs import hookimpl
from core.launch import Launch, LaunchResult, PoolLayout, RowSetup, TokenLogprobs
from core.pack import request_seed
from core.queries import ExecutorQuery
from core.request import Request, SamplingParams
from plugins.executor.script import Script
from plugins.executor.shadow import ShadowPool

Int64 = NDArray[np.int64]
MAX_IN_FLIGHT = 2


class Fake:
    """The plugin.

    vocab_size, max_model_len, end_token_ids: what it claims of its model. step_s, token_s:
    simulated seconds of a launch, fixed and for each token. end_at: request seed -> output position
    of its first end token. fail_at: request seed -> output position at which its logits hold no
    token. check: verify every launch (linear in the context read; off for timing
    the planner)."""

    def __init__(
        self,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        end_token_ids: tuple[int, ...] = (),
        step_s: float = 0.01,
        token_s: float = 0.0001,
        end_at: Mapping[int, int] | None = None,
        fail_at: Mapping[int, int] | None = None,
        check: bool = True,
    ) -> None:
        require(vocab_size >= 2, "executor.vocab_size", ">= 2", vocab_size)
        require(max_model_len >= 2, "executor.max_model_len", ">= 2", max_model_len)
        known = all(0 <= token < vocab_size for token in end_token_ids)
        require(known, "executor.end_token_ids", f"in [0, {vocab_size})", end_token_ids)
        require(step_s >= 0, "executor.step_s", ">= 0", step_s)
        require(token_s >= 0, "executor.token_s", ">= 0", token_s)
        require(
            not end_at or bool(end_token_ids), "executor.end_token_ids", "given with end_at", ()
        )
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.end_token_ids = tuple(end_token_ids)
        self.step_s = step_s
        self.token_s = token_s
        self.fail_at = dict(fail_at or {})
        self.check = check
        self.script = Script(vocab_size, self.end_token_ids, end_at or {})

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "FakeExecutor":
        """An executor of its own for each engine, on the engine's clock."""
        return FakeExecutor(self, query.clock)

    def stream(self, run_seed: int, request: Request, choice: int, num_tokens: int) -> list[int]:
        """The first `num_tokens` tokens that a request's choice gets in a run, whatever the
        schedule."""
        seeds = np.full(num_tokens, request_seed(run_seed, request))
        positions = np.arange(num_tokens)
        drawn = self.script.tokens(seeds, np.full(num_tokens, choice), positions)
        tokens: list[int] = drawn.tolist()
        ignores_end = request.params.ignore_eos or request.forced_output is not None
        ends = () if ignores_end else self.end_token_ids
        banned = _banned(request.params, ends)
        for position in range(min(request.params.min_tokens, num_tokens)):
            tokens[position] = self.script.without(tokens[position], banned)
        return tokens


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A launch not yet collected; rows and sampled_rows: int64 table rows."""

    rows: Int64
    sampled_rows: Int64
    result: LaunchResult


class FakeExecutor:
    """core.protocols.Executor without a device. num_launches and num_tokens count what was
    launched."""

    tokenizer = None
    computes = True

    def __init__(self, plugin: Fake, clock: Clock) -> None:
        self.vocab_size = plugin.vocab_size
        self.max_model_len = plugin.max_model_len
        self.end_token_ids = plugin.end_token_ids
        self.num_launches = 0
        self.num_tokens = 0
        self._plugin = plugin
        self._clock = clock
        self._free_at_s = 0.0
        self._pending: deque[Pending] = deque()
        self._shadow: ShadowPool | None = None
        self._rows: list[RowSetup | None] = []
        self._seeds = self._choices = self._prompt_lens = np.empty(0, np.int64)
        self._special = np.empty(0, np.bool_)  # rows with minimum tokens or log-probabilities

    def measure_pool(self, layout: PoolLayout) -> int:
        """Raises ConfigError: there is no device to measure."""
        rule = "a number for the fake executor, which has no memory to measure"
        raise ConfigError(f"engine.pool_tokens must be {rule}, got 'auto'")

    def prepare(self, layout: PoolLayout) -> None:
        """Make room for the rows' state."""
        if self._plugin.check:
            self._shadow = ShadowPool(layout, self.vocab_size)
        self._rows = [None] * layout.num_rows
        self._seeds = np.zeros(layout.num_rows, np.int64)
        self._choices = np.zeros(layout.num_rows, np.int64)
        self._prompt_lens = np.zeros(layout.num_rows, np.int64)
        self._special = np.zeros(layout.num_rows, np.bool_)

    def launch(self, launch: Launch) -> None:
        """Check and compute a launch. Raises InvariantError for one that breaks the contract."""
        if len(self._pending) >= MAX_IN_FLIGHT:
            raise InvariantError(f"at most {MAX_IN_FLIGHT} launches in flight, got one more")
        for setup in launch.setups:
            self._set_up(setup)
        if self._shadow is not None:
            self._shadow.apply(launch)
        rows = launch.row_ids.astype(np.int64)
        sampled_rows = rows[launch.samples]
        ends = (launch.first_positions + launch.num_tokens)[launch.samples].astype(np.int64)
        positions = ends - self._prompt_lens[sampled_rows]
        tokens = self._tokens(sampled_rows, positions)
        if self._shadow is not None:
            self._shadow.sampled(sampled_rows, tokens)
        num_tokens = int(launch.num_tokens.sum())
        start_s = max(self._clock.now(), self._free_at_s)
        self._free_at_s = start_s + self._plugin.step_s + self._plugin.token_s * num_tokens
        self.num_launches += 1
        self.num_tokens += num_tokens
        result = self._result(launch, rows, sampled_rows, tokens)
        result.errors.update(self._errors(launch, rows, positions))
        self._pending.append(Pending(rows, sampled_rows, result))

    def collect(self) -> LaunchResult:
        """The oldest launch, at the simulated time it ends. Raises InvariantError if there is
        none."""
        if not self._pending:
            raise InvariantError("collect needs a launch in flight, got none")
        pending = self._pending.popleft()
        if self._shadow is not None:
            self._shadow.collected(pending.rows, pending.sampled_rows)
        self._clock.wait_until(pending.result.finished_s)
        return pending.result

    def describe(self) -> dict[str, Any]:
        """The simulated durations, for the manifest."""
        plugin = self._plugin
        return {
            "executor": "fake",
            "device": "none",
            "step_s": plugin.step_s,
            "token_s": plugin.token_s,
            "check": plugin.check,
        }

    def close(self) -> None:
        """Forget what is in flight."""
        self._pending.clear()

    def _set_up(self, setup: RowSetup) -> None:
        row, params = setup.row, setup.params
        outputs = setup.tokens[setup.prompt_len :]
        self._rows[row] = setup
        self._seeds[row] = setup.seed
        self._choices[row] = setup.choice
        self._prompt_lens[row] = setup.prompt_len
        asks = params.logprobs is not None or params.prompt_logprobs is not None
        self._special[row] = asks or params.min_tokens > 0
        rows = np.full(len(outputs), row)
        if self._plugin.check and (outputs != self._tokens(rows, np.arange(len(outputs)))).any():
            rule = f"row {row} resumes with the tokens it was given"
            raise InvariantError(f"setups: {rule}; got {outputs.tolist()}")

    def _tokens(self, rows: Int64, positions: Int64) -> NDArray[np.int32]:
        tokens = self._plugin.script.tokens(self._seeds[rows], self._choices[rows], positions)
        for index in np.flatnonzero(self._special[rows]).tolist():
            setup = self._rows[rows[index]]
            assert setup is not None, f"row {rows[index]} was not set up"
            if positions[index] < setup.params.min_tokens:
                banned = _banned(setup.params, setup.end_token_ids)
                tokens[index] = self._plugin.script.without(int(tokens[index]), banned)
        return tokens

    def _result(
        self, launch: Launch, rows: Int64, sampled_rows: Int64, tokens: NDArray[np.int32]
    ) -> LaunchResult:
        result = LaunchResult(launch.launch_id, tokens, self._free_at_s)
        if not self._special[rows].any():
            return result
        for index, row in enumerate(sampled_rows.tolist()):
            num_top = self._params(row).logprobs
            if num_top is not None:
                result.logprobs[index] = self._uniform(int(tokens[index]), num_top)
        for index, row in enumerate(rows.tolist()):
            num_top = self._params(row).prompt_logprobs
            scored = self._scored(launch, index, row)
            if num_top is not None and len(scored):
                entries = [self._uniform(token, num_top) for token in scored.tolist()]
                result.prompt_logprobs[index] = entries
        return result

    def _errors(self, launch: Launch, rows: Int64, positions: Int64) -> dict[int, str]:
        if not self._plugin.fail_at:
            return {}
        sampled = np.flatnonzero(launch.samples)
        wanted = [self._plugin.fail_at.get(seed) for seed in self._seeds[rows[sampled]].tolist()]
        fails = zip(sampled.tolist(), positions.tolist(), wanted, strict=True)
        return {index: "logits are not finite" for index, at, fail in fails if at == fail}

    def _params(self, row: int) -> SamplingParams:
        setup = self._rows[row]
        assert setup is not None, f"row {row} was not set up"
        return setup.params

    def _scored(self, launch: Launch, index: int, row: int) -> NDArray[np.int32]:
        setup, first = self._rows[row], int(launch.first_positions[index])
        assert setup is not None, f"row {row} was not set up"
        end = min(first + int(launch.num_tokens[index]), setup.prompt_len - 1)
        return setup.tokens[first + 1 : end + 1]

    def _uniform(self, token: int, num_top: int) -> TokenLogprobs:
        """Every token is equally likely; the best are the token itself and those that follow it."""
        logprob = -float(np.log(self.vocab_size))
        ids = (token + np.arange(min(num_top, self.vocab_size))) % self.vocab_size
        return TokenLogprobs(logprob, ids.astype(np.int32), np.full(len(ids), logprob, np.float32))


def _banned(params: SamplingParams, end_token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset((*params.stop_token_ids, *end_token_ids))
