"""When the host and the device of a simulation are busy, in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.clock import Clock
from core.launch import Launch
from plugins.executor.joined_steps import reads
from plugins.executor.shared_context import SharedContext
from plugins.shared.launch_sizes import LaunchSizes
from plugins.shared.step_time import StepTimeModel

_SAFE = 2.0  # a host that many times faster than the device is never late by rounding


@dataclass(frozen=True, slots=True)
class Times:
    """What launches cost: see plugins/executor/simulated.py. launch_s has every kind."""

    step_time: StepTimeModel
    host_s: float
    host_row_s: float
    host_new_s: float
    launch_s: Mapping[str, Sequence[float]]
    sizes: LaunchSizes

    @property
    def counts_repeats(self) -> bool:
        """Whether the model asks how much context several rows share."""
        return bool(getattr(self.step_time, "counts_repeats", False))

    def planned_s(self, num_rows: int, num_new: int) -> float:
        """Seconds of the host before a launch, whose plan admitted so many sequences."""
        return self.host_s + self.host_row_s * num_rows + self.host_new_s * num_new

    def seconds(self, kind: str, *facts: Any) -> Any:
        """Of the device, for steps that are started in that way; facts as of StepTimeModel, and
        repeated context if the model counts it."""
        of_kind = getattr(self.step_time, "seconds_of", None)
        return self.step_time.seconds(*facts) if of_kind is None else of_kind(kind, *facts)

    def line(
        self, kinds: Mapping[int, str], figures: Any, num: int, repeated: Sequence[int] = ()
    ) -> NDArray[np.float64]:
        """What `num` steps take the device; kinds and figures: see joined_steps.of_slices.
        repeated: that context, of each step the same; none if the model does not count it."""
        starts = [at for at in sorted(kinds) if at < num]
        if len(starts) == 1:
            found: NDArray[np.float64] = self.seconds(kinds[0], *figures, *repeated)
            return found if np.ndim(found) else np.full(num, found)
        parts = [
            self.seconds(kinds[at], *(figure[at:end] for figure in figures), *repeated)
            for at, end in zip(starts, [*starts[1:], num], strict=True)
        ]
        return np.concatenate(parts)


@dataclass(slots=True, eq=False)
class BusyTimes:
    """Until when both are busy with what was launched. rng: which of several launch_s a launch
    takes. shared: None = the model does not count what rows share."""

    times: Times
    clock: Clock
    overlap: bool
    rng: np.random.Generator
    device_free_s: float = 0.0
    host_free_s: float = 0.0
    shared: SharedContext | None = None

    def start(self, launch: Launch) -> None:
        """Take in a launch of one step."""
        times = self.times
        each = np.stack((np.zeros_like(launch.num_tokens), launch.num_tokens))
        kv, attended, _ = reads(launch.first_positions, each)
        computed, tokens, kind = times.sizes.of(launch)
        facts = computed, tokens, int(kv[0]), int(attended[0])
        more: tuple[int, ...] = ()
        if self.shared is not None:
            self.shared.note(launch)
            more = (self.shared.repeated(launch.row_ids[: launch.num_decode_rows]),)
        seconds = float(times.seconds(kind, *facts, *more))
        starts_s = times.launch_s[kind]
        start_s = (
            starts_s[int(self.rng.integers(len(starts_s)))] if len(starts_s) > 1 else starts_s[0]
        )
        ready_s, self.host_free_s = self._host_ends_s(len(launch.row_ids), launch.num_new, start_s)
        device_s = max(ready_s, self.device_free_s) + seconds
        self.device_free_s = max(device_s, self.host_free_s)

    def join(self, launch: Launch, ends_s: NDArray[np.float64]) -> None:
        """Take in a launch of several steps that end then."""
        if self.shared is not None:
            self.shared.note(launch)
        self.device_free_s = float(ends_s[-1])
        start_s = self.times.launch_s[self.times.sizes.of(launch)[2]][0]
        self.host_free_s = self._host_ends_s(len(launch.row_ids), launch.num_new, start_s)[1]

    def line(
        self,
        num_rows: int,
        num_new: int,
        kinds: Mapping[int, str],
        seconds: NDArray[np.float64],
        pending: bool,
        until_s: float,
    ) -> NDArray[np.float64]:
        """When steps that take so long on the device end, of those planned before until_s, the
        first of which is planned now. num_new: that its plan admits. kinds: how they are started,
        from which step on. pending: some are in flight. One step alone if the host takes longer
        than the device, or not always as long."""
        times, now_s = self.times, self.clock.now()
        first_s, host_s = times.planned_s(num_rows, num_new), times.planned_s(num_rows, 0)
        starts_s = {at: times.launch_s[kind] for at, kind in kinds.items() if at < len(seconds)}
        varied = [at for at, several in starts_s.items() if len(several) > 1]
        if varied:
            seconds = seconds[: max(min(varied), 1)]
        start_s, longest_s = starts_s[0][0], max([several[0] for several in starts_s.values()])
        least_s = min(seconds.tolist())
        # One addition after another, as single launches do it: the same bits.
        if not self.overlap:
            if longest_s > least_s:
                seconds = seconds[:1]
            parts = np.full(2 * len(seconds) + 1, host_s)
            parts[0], parts[1], parts[2::2] = now_s, first_s, seconds
            ends_s: NDArray[np.float64] = np.add.accumulate(parts)[2::2]
            return ends_s[: 1 + int(ends_s[:-1].searchsorted(until_s))]
        # A step is planned while the one before runs, when that before it ended.
        ready_s, done_s = self._host_ends_s(num_rows, num_new, start_s)
        line = np.empty(len(seconds) + 1)
        line[0], line[1:] = max(ready_s, self.device_free_s), seconds
        line = np.add.accumulate(line)
        line[0] = max(done_s, self.device_free_s) if pending else now_s
        late = max(line[0], done_s) + host_s + longest_s > line[1]  # for the second step
        num = 1 if late else len(seconds)
        if not late and (host_s + longest_s) * _SAFE >= least_s:
            later = (line[1:-1] + host_s + longest_s > line[2:]).nonzero()[0]
            num = int(later[0]) + 1 if len(later) else num
        return line[1 : num + 1][: 1 + int(line[: num - 1].searchsorted(until_s))]

    def _host_ends_s(self, num_rows: int, num_new: int, start_s: float) -> tuple[float, float]:
        """When the host has planned the next launch, and when it has started it."""
        planned_s = self.times.planned_s(num_rows, num_new)
        ready_s = max(self.clock.now(), self.host_free_s) + planned_s
        return ready_s, ready_s + start_s
