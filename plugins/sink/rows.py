"""Records as rows: what files, the wandb table and figures have in common."""

import json
from typing import Any

import numpy as np

from core.records import RequestRecord, StepRecord
from plugins.shared.metrics import e2e_s, queue_s, tpot_s, ttft_s

REQUEST_COLUMNS = (
    "request_id",
    "client",
    "finish_reason",
    "prompt_tokens",
    "output_tokens",
    "predicted_output",
    "cached_tokens",
    "resumed_cached_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "preemptions",
    "arrival_s",
    "admitted_s",
    "first_token_s",
    "finished_s",
    "queue_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "error",
)
_STEP_COLUMNS = tuple(name for name in StepRecord.__slots__ if name not in ("choices", "rows"))
_MAX_ROW_TEXTS = 100_000
_DERIVED = {"queue_s": queue_s, "ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": e2e_s}


def request_row(record: RequestRecord) -> list[Any]:
    """The values of REQUEST_COLUMNS, times in seconds of the run's clock, None = never happened."""
    return [
        _DERIVED[name](record) if name in _DERIVED else getattr(record, name)
        for name in REQUEST_COLUMNS
    ]


class StepLines:
    """Step records as lines of JSON (see `plain` for what their details may hold). Rows, which
    recur from step to step, are encoded once: that is most of a step's cost."""

    def __init__(self) -> None:
        self._rows = _RowTexts()

    def line(self, record: StepRecord) -> str:
        """One record, no line break."""
        if len(self._rows) > _MAX_ROW_TEXTS:
            self._rows.clear()
        rows = ",".join(map(self._rows.__getitem__, record.rows))
        return f'{to_json(_step_fields(record))[:-1]},"rows":[{rows}]}}'


class _RowTexts(dict[tuple[str, int, int], str]):
    def __missing__(self, row: tuple[str, int, int]) -> str:
        text = self[row] = to_json(row)
        return text


def _step_fields(record: StepRecord) -> dict[str, Any]:
    fields = {name: getattr(record, name) for name in _STEP_COLUMNS}
    fields["choices"] = [
        {
            "request_id": choice.request_id,
            "choice": choice.choice,
            "kind": choice.kind,
            "plugin": choice.plugin,
            "reason": choice.reason,
            "detail": choice.detail,
        }
        for choice in record.choices
    ]
    return fields


def to_json(value: Any) -> str:
    """Compact JSON on one line; anything that `plain` can turn into values is allowed."""
    return _ENCODER.encode(value)


def plain(value: Any) -> Any:
    """`default=` for json.dumps: numpy scalars and arrays as Python values, the rest as text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)


_ENCODER = json.JSONEncoder(
    default=plain, separators=(",", ":")
)  # built once: a step writes several
