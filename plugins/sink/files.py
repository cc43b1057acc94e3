"""The files of a run's folder: steps.jsonl, requests.csv, tokens.npz, summary.json."""

import csv
import json
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from core.hookspecs import hookimpl
from core.records import RequestRecord, StepRecord
from plugins.shared.run_info import RunInfo, SinkQuery
from plugins.shared.session import Records
from plugins.sink.rows import REQUEST_COLUMNS, StepLines, plain, request_row

# column of tokens.npz -> (array code, dtype)
_TOKEN_COLUMNS = {
    "request": ("i", np.int32),
    "choice": ("i", np.int32),
    "token_id": ("i", np.int32),
    "time_s": ("d", np.float64),
    "step": ("q", np.int64),
}


class Files:
    """records=full: everything; requests: no steps.jsonl; summary: summary.json alone.

    steps.jsonl: one core.records.StepRecord a line, written as it happens. requests.csv: one row a
    request, in order of ending, `index` counting from 0. tokens.npz: int32 request (that index),
    choice, token_id; float64 time_s; int64 step: one entry a token. summary.json comes last, by
    rename: it exists if and only if the run ended well.
    """

    def __init__(self, records: str | Records = "full") -> None:
        self.records = Records(records)

    @hookimpl
    def build_sink(self, query: SinkQuery) -> "FilesSink":
        """Open the files in the run's folder."""
        return FilesSink(Path(query.folder), self.records)


class FilesSink:
    """Writes one run's files. Holds 28 bytes a token until the end, never steps."""

    def __init__(self, folder: Path, records: Records) -> None:
        self._folder = folder
        self._steps = None
        self._requests = None
        self._tokens: dict[str, array[Any]] = {
            name: array(code) for name, (code, _) in _TOKEN_COLUMNS.items()
        }
        self._count = 0
        self._lines = StepLines()
        if records is Records.full:
            self._steps = open(folder / "steps.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        if records is not Records.summary:
            self._requests = open(  # noqa: SIM115 - closed by close and fail
                folder / "requests.csv", "w", encoding="utf-8", newline=""
            )
            self._writer = csv.writer(self._requests)
            self._writer.writerow(["index", *REQUEST_COLUMNS])

    def step(self, record: StepRecord) -> None:
        """Append one line to steps.jsonl."""
        if self._steps is not None:
            self._steps.write(self._lines.line(record) + "\n")

    def request(self, record: RequestRecord) -> None:
        """Append one row to requests.csv and keep its tokens."""
        if self._requests is None:
            return
        self._writer.writerow([self._count, *request_row(record)])
        for number, choice in enumerate(record.choices):
            size = len(choice.token_ids)
            self._tokens["request"].extend([self._count] * size)
            self._tokens["choice"].extend([number] * size)
            self._tokens["token_id"].extend(choice.token_ids)
            self._tokens["time_s"].extend(choice.times_s)
            self._tokens["step"].extend(choice.steps)
        self._count += 1

    def close(self, run: RunInfo, summary: dict[str, Any]) -> None:
        """Write tokens.npz, then summary.json."""
        self._close_streams()
        if self._requests is not None:
            columns = {
                name: np.asarray(self._tokens[name], dtype)
                for name, (_, dtype) in _TOKEN_COLUMNS.items()
            }
            np.savez_compressed(self._folder / "tokens.npz", **columns)  # type: ignore[arg-type]
        text = json.dumps(summary, indent=2, default=plain, allow_nan=False)
        part = self._folder / "summary.json.part"
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self._folder / "summary.json")

    def fail(self, error: BaseException) -> None:
        """The run broke: keep what was written, and no summary.json."""
        self._close_streams()

    def _close_streams(self) -> None:
        for stream in (self._steps, self._requests):
            if stream is not None:
                stream.close()
