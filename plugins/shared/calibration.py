"""A step's time as it was measured: the form of a calibration file, and what it says of a step.

    seconds = base(tokens) + row * rows + near * min(context, NEAR)
              + kv_token * (context tokens read - of them read again) + repeat * read again
              + pair * (pairs - context tokens read)
              + depth * (pairs - context tokens read) / (tokens - rows)

A pair is a new token and one that it attends to, so one-token rows have no more of them than
context tokens that they read. base: measured at a few numbers of tokens and straight between them;
beyond the last it goes on as it came there. context: the mean over the rows. near: a kernel's start
shows in short contexts. Read again: what a one-token row holds of a prefix that others of the step
hold in the same pages, which the device finds in its cache, or reads once for all. The last term is
how far a token of a chunk looks back in the mean, which
is how long a kernel works that does not divide keys.

Launches that are started in other ways (plugins/shared/launch_sizes.py) run other kernels, so each
of FORMS has coefficients of its own. Rows and tokens are padded before, as the executor does it.
That is the device's part. A launch also takes the host some time, by its kind, and small steps of
small models last as long as that. `mode=calibrate` writes such files,
executor/step_time=calibrated reads them."""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import ConfigError
from plugins.shared.launch_sizes import KINDS, LaunchSizes

Float = NDArray[np.float64]
VERSION = 4
NEAR = 256
UNITS = {
    "row": "s/row",
    "near": "s/token of mean context",
    "kv_token": "s/context token read",
    "repeat": "s/context token read again",
    "pair": "s/pair",
    "depth": "s/token looked back",
}
TERMS = tuple(UNITS)
FORMS = ("decode", "graphed", "other")


def form_of(kind: str) -> str:
    """Which of FORMS launches of a kind have."""
    return kind if kind in FORMS else "other"


@dataclass(frozen=True, slots=True)
class Form:
    """tokens: ascending numbers of them; base_s: of a step with so many. terms: TERMS in their
    UNITS."""

    tokens: Sequence[int]
    base_s: Sequence[float]
    terms: Mapping[str, float]

    def seconds(
        self,
        num_rows: Any,
        num_tokens: Any,
        kv_tokens: Any,
        attended: Any,
        repeated: Any = 0,
    ) -> Any:
        """Seconds of steps by the formula of this module, `repeated` of their kv_tokens read again;
        numbers or arrays that broadcast. A number gives the same bits as in an array."""
        c, beyond = self.terms, attended - kv_tokens
        arrays = isinstance(num_tokens + kv_tokens, np.ndarray)
        less, more = (np.minimum, np.maximum) if arrays else (min, max)
        back = beyond / more(num_tokens - num_rows, 1)
        near = less(kv_tokens / more(num_rows, 1), NEAR)
        linear = c["row"] * num_rows + c["near"] * near + c["kv_token"] * kv_tokens
        linear = linear + (c["repeat"] - c["kv_token"]) * repeated
        return self._base(num_tokens) + linear + c["pair"] * beyond + c["depth"] * back

    def _base(self, num_tokens: Any) -> Any:
        nodes, base_s = self.tokens, self.base_s
        if isinstance(num_tokens, np.ndarray):
            found = np.interp(num_tokens, nodes, base_s)
            if len(nodes) > 1:
                found = found + self._slope(len(nodes) - 2) * np.maximum(num_tokens - nodes[-1], 0)
            return found
        at = bisect_right(nodes, num_tokens) - 1
        if at < 0 or len(nodes) == 1:
            return base_s[0]
        if at == len(nodes) - 1:
            return base_s[-1] + self._slope(at - 1) * (num_tokens - nodes[-1])
        return self._slope(at) * (num_tokens - nodes[at]) + base_s[at]

    def _slope(self, at: int) -> float:
        """From a node to the next."""
        nodes, base_s = self.tokens, self.base_s
        return (base_s[at + 1] - base_s[at]) / (nodes[at + 1] - nodes[at])

    @property
    def known(self) -> bool:
        """Whether it is of the right form."""
        costs = [*self.base_s, *self.terms.values()]
        ascends = list(self.tokens) == sorted(set(self.tokens))
        right = set(self.terms) == set(TERMS) and len(self.tokens) == len(self.base_s) > 0
        return right and ascends and all(cost >= 0 for cost in costs)


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

    model, device, dtype: what was measured; num_devices of it. forms: by those of FORMS that were
    measured, "other" for all that were not. sizes: of launches, padded. host_s, host_row_s: seconds
    in which the host plans, starts and commits a step of one-token rows; host_new_s: of a sequence
    that is admitted; launch_s: what launches of other kinds take beyond that, by kind, values of
    equal weight. pool_tokens: KV slots that the
    engine found room for with memory_share. fit: errors of the steps of the grid that were fitted;
    test: of those held out; traffic: of a real run's steps that were held out, 16 together.
    measured: commit, command, date, versions. repeats: launches of which each point's seconds are
    the median. points: the grid, for each step its facts, measured and predicted seconds; skipped:
    of the grid, for want of room. starts_s: by kind of launch, in which the host started those that
    came after others, beside the grid."""

    model: str
    device: str
    dtype: str
    num_devices: int
    forms: Mapping[str, Form]
    sizes: LaunchSizes
    host_s: float
    host_row_s: float
    host_new_s: float
    launch_s: Mapping[str, list[float]]
    pool_tokens: int
    memory_share: float
    fit: Residuals
    test: Residuals
    traffic: Residuals
    measured: Mapping[str, Any]
    repeats: int
    points: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: int = 0
    starts_s: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, *facts: Any) -> Any:
        """Seconds of the device for steps started in one way. facts: as of Form.seconds, padding
        included."""
        return self.forms.get(form_of(kind), self.forms["other"]).seconds(*facts)

    @property
    def counts_repeats(self) -> bool:
        """Whether context read again takes another time than context read once."""
        return any(form.terms["repeat"] != form.terms["kv_token"] for form in self.forms.values())

    def save(self, path: Path) -> None:
        """Write the file; folders are made."""
        units = UNITS | {"base_s": "s", "host_row_s": "s/row", "host_new_s": "s/sequence"}
        content = {"version": VERSION, "units": units} | asdict(self)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load(path: Path) -> Calibration:
    """Read a file. Raises ConfigError for one that does not have this form."""
    rule = f"a calibration file of version {VERSION}, as mode=calibrate writes it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        require(content.get("version") == VERSION, "step_time.file", rule, str(path))
        known = {one.name: content[one.name] for one in fields(Calibration) if one.name in content}
        for name in ("fit", "test", "traffic"):
            known[name] = Residuals(**known[name])
        known["sizes"] = LaunchSizes(**known["sizes"])
        known["forms"] = {name: Form(**one) for name, one in known["forms"].items()}
        found = Calibration(**known)
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"step_time.file must be {rule}, got {path}: {error!r}") from None
    right = {"other"} <= set(found.forms) <= set(FORMS) and set(found.launch_s) <= set(KINDS)
    right = right and all(one.known for one in found.forms.values())
    require(right, "step_time.file", f"{rule}: {', '.join(TERMS)}, all >= 0", str(path))
    return found


def residuals(predicted: Float, measured: Float) -> Residuals:
    """Relative errors of predictions, float64 [n] each."""
    if not len(measured):
        return Residuals(0, None, None, None)
    errors = np.abs(predicted / measured - 1)
    mean, p90, most = errors.mean(), np.percentile(errors, 90), errors.max()
    return Residuals(len(errors), float(mean), float(p90), float(most))
