"""From timed steps to the coefficients of a step's time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.records import StepRecord
from plugins.shared.calibration import TERMS, seconds_of
from plugins.shared.least_squares import non_negative

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Facts of steps as a calibration counts them, graph padding included, float64 [n] each; and
    how long they took."""

    num_rows: Float
    num_tokens: Float
    kv_tokens: Float
    attended: Float
    seconds: Float

    def __len__(self) -> int:
        return len(self.seconds)

    def part(self, chosen: NDArray[np.bool_]) -> "Steps":
        """Those chosen; bool [n]."""
        return Steps(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def steps_of(rows: Sequence[tuple[int, int, int, int, int, float]]) -> Steps:
    """Steps from (rows, tokens, kv_tokens, attended, graph_rows, seconds) of each."""
    table = np.array(rows, np.float64).reshape(-1, 6)
    num_rows, num_tokens, kv_tokens, attended, graph_rows, seconds = table.T
    padded = graph_rows > 0
    num_rows = np.where(padded, graph_rows, num_rows)
    num_tokens = np.where(padded, graph_rows, num_tokens)
    return Steps(num_rows, num_tokens, kv_tokens, attended, seconds)


def fit(steps: Steps) -> tuple[dict[str, float], int]:
    """Coefficients by term and the knee in tokens: of least squared relative error, none below 0.
    Every number of tokens that a step has is tried as the knee; where no step needs one, the
    smallest stands and its term is 0."""
    best: tuple[float, Float, int] | None = None
    for knee in np.unique(steps.num_tokens).astype(int).tolist():
        columns = _columns(steps, knee) / steps.seconds[:, None]
        found = non_negative(columns, np.ones(len(steps)))
        cost = float(np.square(columns @ found - 1).sum())
        if best is None or cost < best[0] * (1 - 1e-9):
            best = cost, found, knee
    assert best is not None, "a fit needs steps"
    return dict(zip(TERMS, best[1].tolist(), strict=True)), best[2]


def predicted(coefficients: Mapping[str, float], knee: int, steps: Steps) -> Float:
    """Seconds of steps by a fit."""
    facts = steps.num_rows, steps.num_tokens, steps.kv_tokens, steps.attended
    seconds: Float = seconds_of(coefficients, knee, *facts)
    return seconds


def fit_host(num_rows: Float, seconds: Float) -> tuple[float, float]:
    """Seconds of a step and of a row in it that the host takes."""
    if not len(seconds):
        return 0.0, 0.0
    columns = np.stack([np.ones_like(num_rows), num_rows], axis=1) / seconds[:, None]
    step, row = non_negative(columns, np.ones(len(seconds))).tolist()
    return step, row


def of_records(records: Sequence[StepRecord]) -> Steps:
    """The steps of a run that computed something: each lasts from its start, or the end of the one
    before if that is later, until its tokens are there."""
    rows, last_end_s = [], -np.inf
    for record in records:
        seconds = record.end_s - max(record.start_s, last_end_s)
        last_end_s = record.end_s
        if record.num_rows and seconds > 0:
            tokens = record.prefill_tokens + record.decode_tokens
            facts = record.num_rows, tokens, record.kv_tokens, record.attended
            rows.append((*facts, record.graph_rows, seconds))
    return steps_of(rows)


def host_seconds(records: Sequence[StepRecord], parts: Sequence[str]) -> tuple[Float, Float]:
    """Rows of each step that computed something, and what its host parts took."""
    ran = [record for record in records if record.num_rows]
    micros = [sum(record.host_us.get(part, 0.0) for part in parts) for record in ran]
    rows = np.array([record.num_rows for record in ran], np.float64)
    return rows, np.array(micros, np.float64) / 1e6


def _columns(steps: Steps, knee: int) -> Float:
    columns: Mapping[str, Float] = {
        "step": np.ones(len(steps)),
        "chunks": (steps.num_tokens > steps.num_rows).astype(np.float64),
        "row": steps.num_rows,
        "token": steps.num_tokens,
        "more_token": np.maximum(steps.num_tokens - knee, 0.0),
        "kv_token": steps.kv_tokens,
        "pair": steps.attended,
    }
    return np.stack([columns[name] for name in TERMS], axis=1)
