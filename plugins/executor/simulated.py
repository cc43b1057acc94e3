"""Launches that take the time a model of a device says, under a virtual clock; nothing is computed.

What decides is the same as on a device: scheduler, allocator, prefix tree and policies run as they
are. Token values are scripted as the fake executor's (script.py), so that both give the same step
records; nothing of a launch is kept or checked."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from core.clock import Clock
from core.config import EngineConfig, require
from core.errors import ConfigError, InvariantError
from core.hookspecs import hookimpl
from core.launch import Int32, Launch, LaunchResult, PoolLayout, Repeats, RowSetup
from core.queries import ExecutorQuery, StepTimeQuery
from core.recent import MOST
from core.table import some
from plugins.executor.joined_steps import of_slices, steps_alike
from plugins.executor.scripted_rows import ScriptedRows
from plugins.executor.shared_context import SharedContext
from plugins.executor.simulated_time import BusyTimes, Times
from plugins.shared.clocks import VirtualClock
from plugins.shared.launch_sizes import KINDS, LaunchSizes, least
from plugins.shared.step_time import StepTimeModel
from plugins.shared.tokenizer_file import read_tokenizer

MAX_IN_FLIGHT = 2
_TIMES = np.arange(MOST + 1, dtype=np.int32)


class DeviceModel(StepTimeModel, Protocol):
    """What stands for a device of known memory: those of plugins/step_time that know theirs."""

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots beside the weights in that share of the device's memory."""

    def describe(self) -> dict[str, Any]:
        """Source, device, model and error of the figures, for manifest and summary."""


class Simulated:
    """The plugin.

    step_time: the device's time of a step: a StepTimeModel, or a DeviceModel. vocab_size,
    max_model_len, tokenizer: what it claims of its model, the last a folder or name, for workloads
    of text. host_s, host_row_s, host_new_s: seconds that a step takes the host, fixed, for each
    row, and for each sequence that it admits; they pass before the launch, so with engine.overlap
    they are hidden while the launch before runs. launch_s: in which it then starts the rest of a
    launch, by kind (plugins/shared/launch_sizes.py), or several values, of which each launch draws
    one by the run's seed; the device works meanwhile, and ends no sooner. The host does one thing
    after the other.
    graph_sizes: numbers of rows to which a step of one-token rows is padded, ascending, as graphs
    captured at a few sizes do ([]: none). null: what was measured with the step_time (its
    attributes of these names, and `sizes`), else 0 and none."""

    def __init__(
        self,
        step_time: StepTimeModel | DeviceModel,
        vocab_size: int = 128256,
        max_model_len: int = 131072,
        host_s: float | None = None,
        host_row_s: float | None = None,
        host_new_s: float | None = None,
        graph_sizes: list[int] | None = None,
        launch_s: dict[str, Any] | None = None,
        tokenizer: str | None = None,
    ) -> None:
        require(vocab_size >= 2, "executor.vocab_size", ">= 2", vocab_size)
        require(max_model_len >= 2, "executor.max_model_len", ">= 2", max_model_len)
        own = {"host_s": host_s, "host_row_s": host_row_s, "host_new_s": host_new_s}
        hosts_s = {
            name: getattr(step_time, name, 0.0) if one is None else one for name, one in own.items()
        }
        for name, seconds in hosts_s.items():
            require(seconds >= 0, f"executor.{name}", ">= 0", seconds)
        given = getattr(step_time, "launch_s", {}) if launch_s is None else launch_s
        starts_s = _by_kind(given)
        sizes: LaunchSizes = getattr(step_time, "sizes", LaunchSizes())
        if graph_sizes is not None:
            ascend = graph_sizes == sorted({size for size in graph_sizes if size >= 1})
            require(ascend, "executor.graph_sizes", "null or >= 1, ascending", graph_sizes)
            sizes = replace(sizes, graphs=graph_sizes)
        known = callable(getattr(step_time, "seconds", None))
        require(known, "executor.step_time", "a model with a method seconds", step_time)
        self.step_time = step_time
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        starts_s = dict.fromkeys(KINDS, (0.0,)) | starts_s
        self.times = Times(step_time, **hosts_s, launch_s=starts_s, sizes=sizes)
        self.tokenizer = (
            None if tokenizer is None else read_tokenizer("executor.tokenizer", tokenizer)
        )

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> StepTimeModel:
        """What stands for the device: a simulation knows its own times."""
        return self.step_time

    @hookimpl
    def build_executor(self, query: ExecutorQuery) -> "SimulatedExecutor":
        """An executor of its own for each engine. Raises ConfigError under a real clock."""
        if not isinstance(query.clock, VirtualClock):
            raise ConfigError("clock must be virtual for the simulated executor, got real")
        return SimulatedExecutor(self, query.clock, query.engine, query.seed)


class SimulatedExecutor:
    """core.protocols.Executor without a device. It has no end tokens of its own: a sequence ends by
    length, or by its request's stop_token_ids."""

    computes = False
    end_token_ids: tuple[int, ...] = ()

    def __init__(self, plugin: Simulated, clock: Clock, engine: EngineConfig, seed: int) -> None:
        self.vocab_size = plugin.vocab_size
        self.tokenizer = plugin.tokenizer
        self.max_model_len = plugin.max_model_len
        self.step_time = plugin.step_time
        self._plugin = plugin
        self._clock = clock
        self._memory_share = engine.memory_share
        self._busy = BusyTimes(plugin.times, clock, engine.overlap, np.random.default_rng(seed))
        self._pending: deque[LaunchResult] = deque()
        self._rows = ScriptedRows(0, plugin.vocab_size)
        self._asks: dict[int, str] = {}  # rows whose request wants what nothing here can compute

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
        self._rows = ScriptedRows(layout.num_rows, self.vocab_size)
        if self._plugin.times.counts_repeats:
            self._busy.shared = SharedContext(layout.num_rows)

    def launch(self, launch: Launch) -> None:
        """Set the time at which the launch ends."""
        if len(self._pending) >= MAX_IN_FLIGHT:
            raise InvariantError(f"at most {MAX_IN_FLIGHT} launches in flight, got one more")
        for setup in launch.setups:
            self._set_up(setup)
        graph_tokens, repeats = self._graph_tokens(launch), launch.repeats
        if repeats is None:
            self._busy.start(launch)
            tokens = self._rows.tokens(launch)
        else:
            self._busy.join(launch, repeats.ends_s)
            first, tokens = self._rows.both(launch, repeats)
            facts = launch.launch_id, first, float(repeats.ends_s[-2])
            self._pending.append(LaunchResult(*facts))
        errors = self._errors(launch) if self._asks else {}
        facts = launch.launch_id, tokens, self._busy.device_free_s
        self._pending.append(LaunchResult(*facts, errors, graph_tokens=graph_tokens))

    def forecast(
        self,
        rows: Int32,
        first: Int32,
        num_tokens: Int32,
        left: Int32,
        room: Int32,
        until_s: float,
        num_new: int = 0,
    ) -> Repeats:
        """How often these rows go on if nothing else happens: in steps that are planned before
        `until_s`, up to the first in which a row has no room for more tokens, or one prompt ends
        and another does not. first: where they start. A row that decodes has one token a step; one
        with more has num_tokens a step until none of its `left` is left, and then decodes. num_new:
        as in Launch, of the first. One step alone of rows that end with an error, if the host takes
        longer than the device, or not always as long."""
        num_rows, sizes = len(rows), self._plugin.times.sizes
        num, turn = steps_alike(num_tokens, left, room)
        if self._asks and self._asks.keys() & set(rows.tolist()):
            num = turn = 1
        repeated: tuple[int, ...] = ()
        if (shared := self._busy.shared) is not None:
            num = shared.foreseen(rows, first, num_tokens, num, turn)
            repeated = (shared.repeated(rows[num_tokens == 1]),)
        each = num_tokens * _TIMES[: num + 1, None]
        if some(num_tokens > 1):
            further = np.maximum(_TIMES[: num + 1, None] - np.int32(turn), 0)
            each = np.where(num_tokens == 1, each, np.minimum(each, left) + further)
            figures, kinds = of_slices(sizes, num_tokens, first, each, turn)
            begin, kv_tokens = sum(first.tolist()), figures[2]
        else:
            padded, _, kind = sizes.padded(num_rows, num_rows, num_rows)
            begin = sum(first.tolist())
            kv_tokens = begin + num_rows * _TIMES[1 : num + 1].astype(np.int64)
            figures, kinds = (padded, padded, kv_tokens, kv_tokens), {0: kind}
        seconds = self._plugin.times.line(kinds, figures, num, repeated)
        facts = num_rows, num_new, kinds, seconds, bool(self._pending)
        ends_s = self._busy.line(*facts, until_s)
        num, begun_s = len(ends_s), max(self._busy.device_free_s, self._clock.now())
        lasts_s = ends_s.copy()
        lasts_s[1:] -= ends_s[:-1]
        lasts_s[0] -= begun_s
        done = kv_tokens[:num] - begin
        return Repeats(each[1 : num + 1], done, ends_s, lasts_s, min(turn, num))

    def collect(self) -> LaunchResult:
        """The oldest launch, at the simulated time it ends, or at which the host has started the
        one after it. Raises InvariantError if there is none."""
        if not self._pending:
            raise InvariantError("collect needs a launch in flight, got none")
        result = self._pending.popleft()
        self._clock.wait_until(max(result.finished_s, self._busy.host_free_s))
        return result

    def describe(self) -> dict[str, Any]:
        """The model of the step's time with its error, for the manifest."""
        times = self._plugin.times
        step_time = times.step_time
        known = step_time.describe() if hasattr(step_time, "describe") else {"error": None}
        return {
            "executor": "simulated",
            "device": "none",
            "step_time": {"source": type(step_time).__name__.lower()} | known,
            "host_s": times.host_s,
            "host_row_s": times.host_row_s,
            "host_new_s": times.host_new_s,
            "launch_s": {kind: fmean(values) for kind, values in times.launch_s.items()},
            "graph_sizes": list(times.sizes.graphs),
        }

    def close(self) -> None:
        """Forget what is in flight."""
        self._pending.clear()

    def _set_up(self, setup: RowSetup) -> None:
        row, params = setup.row, setup.params
        self._rows.set_up(setup)
        self._asks.pop(row, None)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._asks[row] = "a simulation computes no log-probabilities"

    def _graph_tokens(self, launch: Launch) -> int:
        num_rows, repeats = len(launch.row_ids), launch.repeats
        decodes = repeats is not None and repeats.turn < len(repeats.each)
        if decodes or launch.num_decode_rows == num_rows:
            return least(self._plugin.times.sizes.graphs, num_rows)
        if repeats is not None:
            return 0  # slices alone: a record tells of what comes after them
        _, tokens, kind = self._plugin.times.sizes.of(launch)
        return tokens if kind == "graphed" else 0

    def _errors(self, launch: Launch) -> dict[int, str]:
        rows = launch.row_ids.tolist()
        return {at: self._asks[row] for at, row in enumerate(rows) if row in self._asks}


def _by_kind(launch_s: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    values = {
        kind: tuple(one) if isinstance(one, list | tuple) else (one,)
        for kind, one in launch_s.items()
    }
    holds = set(values) <= set(KINDS) and all(
        one and all(isinstance(x, int | float) and 0 <= x < np.inf for x in one)
        for one in values.values()
    )
    rule = f"null or seconds >= 0, one or more, by kind: {', '.join(KINDS)}"
    require(holds, "executor.launch_s", rule, launch_s)
    return values
