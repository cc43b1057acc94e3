"""Launches that take the time a model of a device says, under a virtual clock; nothing is computed.

What decides is the same as on a device: scheduler, allocator, prefix tree and policies run as they
are. Token values are scripted as the fake executor's (script.py), so that both give the same step
records; nothing of a launch is kept or checked."""

from bisect import bisect_left
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from core.clock import Clock
from core.config import EngineConfig, require
from core.errors import ConfigError, InvariantError
from core.hookspecs import hookimpl
from core.launch import Launch, LaunchResult, PoolLayout, RowSetup
from core.protocols import StepTimeModel
from core.queries import ExecutorQuery, StepTimeQuery
from plugins.executor.script import POSITION, Script, mix, stream_start
from plugins.shared.clocks import VirtualClock

Int32 = NDArray[np.int32]
MAX_IN_FLIGHT = 2


class DeviceModel(StepTimeModel, Protocol):
    """What stands for a device of known memory: those of plugins/step_time that know theirs."""

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots beside the weights in that share of the device's memory."""

    def describe(self) -> dict[str, Any]:
        """Source, device, model and error of the figures, for manifest and summary."""


class Simulated:
    """The plugin.

    step_time: the device's time of a step: a StepTimeModel, or a DeviceModel. vocab_size,
    max_model_len: what it claims of its model. host_s, host_row_s: seconds in which the host plans
    and launches a step, fixed and for each row; they pass before the launch, so with engine.overlap
    they are hidden while the launch before runs. graph_sizes: numbers of rows to which a step of
    one-token rows is padded, ascending, as graphs captured at a few sizes do ([]: none). null: what
    was measured with the step_time (attributes of these names), else 0 and none."""

    def __init__(
        self,
        step_time: StepTimeModel | DeviceModel,
        vocab_size: int = 128256,
        max_model_len: int = 131072,
        host_s: float | None = None,
        host_row_s: float | None = None,
        graph_sizes: list[int] | None = None,
    ) -> None:
        require(vocab_size >= 2, "executor.vocab_size", ">= 2", vocab_size)
        require(max_model_len >= 2, "executor.max_model_len", ">= 2", max_model_len)
        fixed_s = getattr(step_time, "host_s", 0.0) if host_s is None else host_s
        row_s = getattr(step_time, "host_row_s", 0.0) if host_row_s is None else host_row_s
        require(fixed_s >= 0, "executor.host_s", ">= 0", fixed_s)
        require(row_s >= 0, "executor.host_row_s", ">= 0", row_s)
        sizes = getattr(step_time, "graph_sizes", []) if graph_sizes is None else graph_sizes
        sizes = list(sizes)
        ascend = sizes == sorted(set(sizes)) and all(size >= 1 for size in sizes)
        require(ascend, "executor.graph_sizes", "null or >= 1, ascending", graph_sizes)
        known = callable(getattr(step_time, "seconds", None))
        require(known, "executor.step_time", "a model with a method seconds", step_time)
        self.step_time = step_time
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.host_s = fixed_s
        self.host_row_s = row_s
        self.graph_sizes = sizes

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> StepTimeModel:
        """What stands for the device: a simulation knows its own times."""
        return self.step_time

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "SimulatedExecutor":
        """An executor of its own for each engine. Raises ConfigError under a real clock."""
        if not isinstance(query.clock, VirtualClock):
            raise ConfigError("clock must be virtual for the simulated executor, got real")
        return SimulatedExecutor(self, query.clock, query.engine)


class SimulatedExecutor:
    """core.protocols.Executor without a device. It has no end tokens of its own: a sequence ends by
    length, or by its request's stop_token_ids."""

    tokenizer = None
    computes = False
    end_token_ids: tuple[int, ...] = ()

    def __init__(self, plugin: Simulated, clock: Clock, engine: EngineConfig) -> None:
        self.vocab_size = plugin.vocab_size
        self.max_model_len = plugin.max_model_len
        self.step_time = plugin.step_time
        self._plugin = plugin
        self._clock = clock
        self._memory_share = engine.memory_share
        self._overlap = engine.overlap
        self._free_at_s = 0.0
        self._pending: deque[LaunchResult] = deque()
        self._starts = np.empty(0, np.uint64)  # of the rows' token streams: script.py
        self._asks: dict[int, str] = {}  # rows whose request wants what nothing here can compute
        self._script = Script(plugin.vocab_size, (), {})
        self._masked: dict[int, tuple[int, frozenset[int]]] = {}  # rows: up to a position, which

    def measure_pool(self, layout: PoolLayout) -> int:
        """The tokens that the device's memory holds. Raises ConfigError where the model of the
        step's time knows none, or one request does not fit."""
        step_time = self._plugin.step_time
        if not hasattr(step_time, "pool_tokens"):
            rule = f"a number, since {type(step_time).__name__} knows no device's memory"
            raise ConfigError(f"engine.pool_tokens must be {rule}; got 'auto'")
        tokens: int = step_time.pool_tokens(self._memory_share)
        pages = min(tokens // layout.page_size, layout.num_pages - 1)
        if pages < layout.max_pages:
            raise ConfigError(
                f"engine.pool_tokens=auto: memory holds {pages} pages of {layout.page_size} tokens,"
                f" one request of engine.max_model_len needs {layout.max_pages}; lower that"
            )
        return pages * layout.page_size

    def prepare(self, layout: PoolLayout) -> None:
        """Make room for the rows' state."""
        self._starts = np.zeros(layout.num_rows, np.uint64)

    def launch(self, launch: Launch) -> None:
        """Set the time at which the launch ends."""
        if len(self._pending) >= MAX_IN_FLIGHT:
            raise InvariantError(f"at most {MAX_IN_FLIGHT} launches in flight, got one more")
        for setup in launch.setups:
            self._set_up(setup)
        graph_rows = self._graph_rows(launch)
        ends = launch.first_positions + launch.num_tokens
        ends_s = launch.ends_s if launch.repeats > 1 else None
        if ends_s is not None:
            self._free_at_s = float(ends_s[-1])
        else:
            host_s = self._plugin.host_s + self._plugin.host_row_s * len(launch.row_ids)
            start_s = max(self._clock.now() + host_s, self._free_at_s)
            self._free_at_s = start_s + self._seconds(launch, ends, graph_rows)
        tokens = self._tokens(launch, ends)
        facts: Any = {"errors": self._errors(launch) if self._asks else {}}
        facts["graph_rows"] = graph_rows
        if ends_s is not None and self._overlap:
            streams = tokens.reshape(-1, launch.repeats)
            first, tokens = streams[:, :-1].ravel(), streams[:, -1]
            known_s, ends_s = ends_s[:-1], ends_s[-1:]
            self._pending.append(
                LaunchResult(launch.launch_id, first, float(known_s[-1]), ends_s=known_s)
            )
        self._pending.append(
            LaunchResult(launch.launch_id, tokens, self._free_at_s, ends_s=ends_s, **facts)
        )

    def forecast(
        self, rows: NDArray[np.int32], kv_tokens: int, num: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When each of the next `num` steps is planned, and when its launch ends, if all are of
        these one-token rows, the first reads `kv_tokens`, and nothing else happens. One step alone
        of rows that end with an error, or if with overlap the host takes longer than the device."""
        plugin, num_rows = self._plugin, len(rows)
        padded = self._padded(num_rows) or num_rows
        reads = kv_tokens + num_rows * np.arange(num)
        seconds = plugin.step_time.seconds(padded, padded, reads, reads) + np.zeros(num)
        host_s, now_s = plugin.host_s + plugin.host_row_s * num_rows, self._clock.now()
        fails = self._asks and self._asks.keys() & set(rows.tolist())
        if fails or (self._overlap and host_s > seconds.min()):
            seconds = seconds[:1]
        parts = np.zeros(2 * len(seconds) + 1)
        parts[2::2] = seconds
        if self._overlap:  # a step is planned while the one before runs, when that before it ended
            ahead_s = [now_s, max(now_s, self._free_at_s)]
            parts[0] = max(now_s + host_s, self._free_at_s)
        else:
            ahead_s = [now_s]
            parts[0], parts[1::2] = now_s, host_s
        # One addition after another, as single launches do it: the same bits.
        ends_s = np.add.accumulate(parts)[2::2]
        return np.concatenate((ahead_s, ends_s))[: len(ends_s)], ends_s

    def collect(self) -> LaunchResult:
        """The oldest launch, at the simulated time it ends. Raises InvariantError if there is
        none."""
        if not self._pending:
            raise InvariantError("collect needs a launch in flight, got none")
        result = self._pending.popleft()
        self._clock.wait_until(result.finished_s)
        return result

    def describe(self) -> dict[str, Any]:
        """The model of the step's time with its error, for the manifest."""
        plugin, step_time = self._plugin, self._plugin.step_time
        known = step_time.describe() if hasattr(step_time, "describe") else {"error": None}
        return {
            "executor": "simulated",
            "device": "none",
            "step_time": {"source": type(step_time).__name__.lower()} | known,
            "host_s": plugin.host_s,
            "host_row_s": plugin.host_row_s,
            "graph_sizes": plugin.graph_sizes,
        }

    def close(self) -> None:
        """Forget what is in flight."""
        self._pending.clear()

    def _set_up(self, setup: RowSetup) -> None:
        row, params = setup.row, setup.params
        self._starts[row] = stream_start(setup.seed, setup.choice, setup.prompt_len)
        self._asks.pop(row, None)
        self._masked.pop(row, None)
        if params.min_tokens and params.stop_token_ids:
            ends = frozenset((*params.stop_token_ids, *setup.end_token_ids))
            self._masked[row] = setup.prompt_len + params.min_tokens, ends
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._asks[row] = "a simulation computes no log-probabilities"

    def _seconds(self, launch: Launch, ends: Int32, graph_rows: int) -> float:
        counts = launch.num_tokens
        num_rows = num_tokens = len(counts)
        kv_tokens = attended = int(ends.sum())
        if launch.num_decode_rows < num_rows:  # new tokens attend to first + 1 .. end tokens
            num_tokens = int(counts.sum())
            twice_mean = (launch.first_positions + ends + 1).astype(np.int64)
            attended = int(counts @ twice_mean) // 2
        if graph_rows:
            num_tokens = num_rows = graph_rows
        step_time = self._plugin.step_time
        return float(step_time.seconds(num_rows, num_tokens, kv_tokens, attended))

    def _graph_rows(self, launch: Launch) -> int:
        num_rows = len(launch.row_ids)
        return 0 if launch.num_decode_rows < num_rows else self._padded(num_rows)

    def _padded(self, num_rows: int) -> int:
        sizes = self._plugin.graph_sizes
        return sizes[bisect_left(sizes, num_rows)] if sizes and num_rows <= sizes[-1] else 0

    def _tokens(self, launch: Launch, ends: Int32) -> Int32:
        rows, samples = launch.row_ids, launch.samples
        if np.count_nonzero(samples) < len(samples):
            rows, ends = rows[samples], ends[samples]
        mixed = self._starts[rows] + ends.astype(np.uint64) * POSITION
        if launch.repeats > 1:
            further = np.arange(launch.repeats).astype(np.uint64) * POSITION
            mixed = (mixed[:, None] + further).ravel()
        tokens = (mix(mixed) % np.uint64(self.vocab_size)).astype(np.int32)
        if self._masked:
            self._mask(tokens.reshape(len(rows), launch.repeats), rows, ends)
        return tokens

    def _mask(self, tokens: Int32, rows: Int32, ends: Int32) -> None:
        """Replace, in tokens [num_rows, repeats], what may not end a request yet (min_tokens)."""
        for at, row in enumerate(rows.tolist()):
            until, banned = self._masked.get(row, (0, frozenset[int]()))
            for index in range(min(until - int(ends[at]), tokens.shape[1])):
                tokens[at, index] = self._script.without(int(tokens[at, index]), banned)

    def _errors(self, launch: Launch) -> dict[int, str]:
        rows = launch.row_ids.tolist()
        return {at: self._asks[row] for at, row in enumerate(rows) if row in self._asks}
