"""A step's time from a calibration file: measured and fitted by mode=calibrate.

The terms, and what the errors in the file mean, are in plugins/shared/calibration.py."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from core.config import require
from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.queries import StepTimeQuery
from plugins.shared.calibration import Calibration, load

FOLDER = Path(__file__).resolve().parent / "data" / "calibration"
SUFFIX = ".json"


class Calibrated:
    """file: the name of a file in plugins/step_time/data/calibration/, or the path of a .json file
    of one's own. It also knows the host's times, sizes of launches and pool of what was measured;
    the simulated executor takes those where its own are null. A launch of chunks alone that the run
    did not hold takes the host what one beside one-token rows did, and the other way round."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.calibration: Calibration = load(_path_of(file))
        self.host_s = self.calibration.host_s
        self.host_row_s = self.calibration.host_row_s
        self.host_new_s = self.calibration.host_new_s
        self.launch_s = dict(self.calibration.launch_s)
        for kind, like in (("chunk", "mixed"), ("mixed", "chunk")):
            if like in self.calibration.launch_s:  # graphs between attentions, both
                self.launch_s.setdefault(kind, self.launch_s[like])
        self.sizes = self.calibration.sizes
        self.counts_repeats = self.calibration.counts_repeats

    @hookimpl
    def build_step_time_model(self, query: StepTimeQuery) -> "Calibrated":
        """Itself: it learns nothing."""
        return self

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of steps; numbers or arrays that broadcast. Without their kind, steps with longer
        rows count as the least graph that takes them, if there is one."""
        facts = np.broadcast_arrays(num_rows, num_tokens, kv_tokens, attended)
        rows, tokens = facts[0], facts[1]
        graphed = tokens <= max(self.sizes.mixed, default=0)
        kinds = np.where(tokens == rows, "decode", np.where(graphed, "graphed", "chunk"))
        if not kinds.ndim:
            return self.seconds_of(str(kinds), num_rows, num_tokens, kv_tokens, attended)
        found = np.empty(kinds.shape)
        for kind in np.unique(kinds).tolist():
            own = kinds == kind
            found[own] = self.seconds_of(kind, *(fact[own] for fact in facts))
        return found

    def seconds_of(self, kind: str, *facts: Any) -> Any:
        """Seconds of steps that are started in that way, see plugins/shared/launch_sizes.py. facts:
        as of plugins.shared.calibration.Form.seconds."""
        return self.calibration.seconds(kind, *facts)

    def pool_tokens(self, memory_share: float) -> int:
        """KV slots that the measured engine had. Raises ConfigError for another share of the
        memory than it was measured with."""
        found = self.calibration
        rule = f"{found.memory_share}, with which {self.file} was measured, or pool_tokens a number"
        require(memory_share == found.memory_share, "engine.memory_share", rule, memory_share)
        return found.pool_tokens

    def describe(self) -> dict[str, Any]:
        """What was measured, and the error of steps that the fit did not see."""
        found = self.calibration
        return {
            "source": "calibrated",
            "file": self.file,
            "device": found.device,
            "model": found.model,
            "dtype": found.dtype,
            "num_devices": found.num_devices,
            "error": asdict(found.test),
            "error_of_fit": asdict(found.fit),
            "error_of_traffic": asdict(found.traffic),
            "measured": dict(found.measured),
        }


def _path_of(file: str) -> Path:
    own = Path(file).expanduser()
    if file.endswith(SUFFIX):
        require(own.is_file(), "step_time.file", "a file that exists", file)
        return own
    path = FOLDER / f"{file}{SUFFIX}"
    if not path.is_file():
        names = ", ".join(sorted(one.stem for one in FOLDER.glob(f"*{SUFFIX}")))
        raise ConfigError(
            f"step_time.file must be one of {names or '(none yet)'} in {FOLDER.name}/, or a path"
            f" that ends with {SUFFIX}, got {file!r}; python run.py mode=calibrate measures one"
        )
    return path
