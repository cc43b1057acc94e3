"""A step's time as it was measured: the form of a calibration file, and what it says of a step.

    seconds = step + chunks * [a row has more than one token] + row * rows + token * tokens
              + more_token * max(tokens - knee, 0) + kv_token * context tokens read
              + pair * pairs of a new token and one that it attends to

The knee is where matrix products leave the memory's limit for that of arithmetic, as in a roofline.
Rows and tokens are padded before, as the executor does it. That is the device's part. A launch also
takes the host some time, by its kind (plugins/shared/launch_sizes.py), and small steps of small
models last as long as that. `mode=calibrate` writes such files, executor/step_time=calibrated reads
them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import ConfigError
from plugins.shared.launch_sizes import KINDS, LaunchSizes

Float = NDArray[np.float64]
VERSION = 2
UNITS = {
    "step": "s",
    "chunks": "s",
    "row": "s/row",
    "token": "s/token",
    "more_token": "s/token beyond the knee",
    "kv_token": "s/context token read",
    "pair": "s/pair",
}
TERMS = tuple(UNITS)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors |predicted / measured - 1| of some steps: how many, mean, 90th percentile,
    largest; None without steps."""

    points: int
    mape: float | None
    p90: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The content of a calibration file.

    model, device, dtype: what was measured; num_devices of it. coefficients: TERMS in their UNITS.
    knee_tokens: see above. sizes: of launches, padded. host_s, host_row_s: seconds in which the
    host plans, starts and commits a step of one-token rows; launch_s: what launches of other kinds
    take beyond that, by kind, values of equal weight. pool_tokens: KV slots that the engine found
    room for with memory_share. fit: errors of the steps that were fitted; test: of those held out;
    traffic: of the steps of a real run, 16 together. measured: commit, command, date, versions.
    points: the grid, for each step its facts, measured and predicted seconds; skipped: of the grid,
    for want of room."""

    model: str
    device: str
    dtype: str
    num_devices: int
    coefficients: Mapping[str, float]
    knee_tokens: int
    sizes: LaunchSizes
    host_s: float
    host_row_s: float
    launch_s: Mapping[str, list[float]]
    pool_tokens: int
    memory_share: float
    fit: Residuals
    test: Residuals
    traffic: Residuals
    measured: Mapping[str, Any]
    points: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: int = 0

    def seconds(self, num_rows: Any, num_tokens: Any, kv_tokens: Any, attended: Any) -> Any:
        """Seconds of the device for steps, padding included in the facts; numbers or arrays that
        broadcast."""
        facts = num_rows, num_tokens, kv_tokens, attended
        return seconds_of(self.coefficients, self.knee_tokens, *facts)

    def save(self, path: Path) -> None:
        """Write the file; folders are made."""
        content = {"version": VERSION, "units": UNITS | {"host_row_s": "s/row"}} | asdict(self)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def seconds_of(
    coefficients: Mapping[str, float],
    knee_tokens: int,
    num_rows: Any,
    num_tokens: Any,
    kv_tokens: Any,
    attended: Any,
) -> Any:
    """Seconds of steps by the formula of this module; numbers or arrays that broadcast."""
    c = coefficients
    chunks: Any = num_tokens > num_rows
    beyond: Any = num_tokens - knee_tokens
    beyond = np.maximum(beyond, 0) if isinstance(beyond, np.ndarray) else max(beyond, 0)
    linear = c["row"] * num_rows + c["token"] * num_tokens + c["more_token"] * beyond
    reads = c["kv_token"] * kv_tokens + c["pair"] * attended
    return c["step"] + c["chunks"] * chunks + linear + reads


def load(path: Path) -> Calibration:
    """Read a file. Raises ConfigError for one that does not have this form."""
    rule = f"a calibration file of version {VERSION}, as mode=calibrate writes it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        require(content.get("version") == VERSION, "step_time.file", rule, str(path))
        known = {one.name: content[one.name] for one in fields(Calibration)}
        for name in ("fit", "test", "traffic"):
            known[name] = Residuals(**known[name])
        known["sizes"] = LaunchSizes(**known["sizes"])
        found = Calibration(**known)
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"step_time.file must be {rule}, got {path}: {error!r}") from None
    costs = found.coefficients
    right = set(costs) == set(TERMS) and all(costs[name] >= 0 for name in TERMS)
    right = right and set(found.launch_s) <= set(KINDS)
    require(right, "step_time.file", f"{rule}: {', '.join(TERMS)}, all >= 0", str(path))
    return found


def residuals(predicted: Float, measured: Float) -> Residuals:
    """Relative errors of predictions, float64 [n] each."""
    if not len(measured):
        return Residuals(0, None, None, None)
    errors = np.abs(predicted / measured - 1)
    mean, p90, most = errors.mean(), np.percentile(errors, 90), errors.max()
    return Residuals(len(errors), float(mean), float(p90), float(most))
