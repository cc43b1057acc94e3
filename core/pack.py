"""Rows -> Launch: the packed arrays of a step, in the executor's terms."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from core.launch import Int32, Launch, RowSetup
from core.planner import Rows
from core.records import StepRecord
from core.request import Request, Sequence
from core.state import EngineState

_NONE = np.empty(0, np.int32)


class Packer:
    """Builds launches and moves the columns on: a launched token counts as computed."""

    def __init__(self, state: EngineState, computes: bool) -> None:
        self._state = state
        self._computes = computes
        self.next_id = 0

    def pack(self, rows: Rows, record: StepRecord) -> tuple[Launch, Rows]:
        """The launch of `rows`, and the rows in its order: one-token rows first."""
        table, memory = self._state.table, self._state.memory
        chunks = rows.num_tokens > 1
        num_chunks = int(np.count_nonzero(chunks))
        if num_chunks:
            order = np.argsort(chunks, kind="stable")
            rows = Rows(rows.slots[order], rows.num_tokens[order])
        repeats = rows.repeats
        first = table.computed[rows.slots]
        ends = first + rows.num_tokens
        known, in_flight = table.known[rows.slots], table.in_flight[rows.slots]
        feedback = ends > known
        due = known + in_flight
        samples = (ends == due) & (due < table.length_limit[rows.slots])
        row_ids = table.row[rows.slots]
        fresh = memory.pages_sent[row_ids] == 0
        launch = Launch(
            launch_id=self.next_id,
            row_ids=row_ids,
            first_positions=first,
            num_tokens=rows.num_tokens,
            token_ids=self._token_ids(rows, first, feedback) if self._computes else _NONE,
            feedback=feedback,
            samples=samples,
            num_decode_rows=len(row_ids) - num_chunks,
            table_updates=self._table_updates(row_ids, table.pages_held[rows.slots]),
            setups=tuple([self._setup(table.at(slot)) for slot in rows.slots[fresh].tolist()]),
            repeats=repeats,
            ends_s=rows.ends_s,
        )
        self.next_id += 1
        table.computed[rows.slots] = ends if repeats == 1 else ends + (repeats - 1)
        table.in_flight[rows.slots] = in_flight + samples * np.int32(repeats)
        record.steps = repeats
        table.last_step[rows.slots] = record.step + repeats - 1
        memory.launched(launch.launch_id, row_ids)
        return launch, rows

    def account(self, launch: Launch, rows: Rows, record: StepRecord) -> None:
        """Count the tokens of a launch that is on its way."""
        table, num_tokens = self._state.table, rows.num_tokens
        repeats, decode_rows = rows.repeats, launch.num_decode_rows
        record.decode_tokens = decode_rows * repeats
        if np.count_nonzero(computed_max := table.computed_max[rows.slots]):
            again = np.clip(computed_max - launch.first_positions, 0, num_tokens)
            record.recomputed_tokens = int(again.sum())
            table.recomputed_total[rows.slots] += again
        ends = launch.first_positions + num_tokens
        further = decode_rows * (repeats * (repeats - 1) // 2)  # tokens that repeats read besides
        record.kv_tokens = record.attended = int(ends.sum()) * repeats + further
        if decode_rows < len(num_tokens):
            record.prefill_tokens = int(num_tokens.sum()) - decode_rows
            # A row's new tokens attend to first + 1 .. end tokens.
            twice_mean = (launch.first_positions + ends + 1).astype(np.int64)
            record.attended = int(num_tokens @ twice_mean) // 2
        table.computed_total[rows.slots] += num_tokens if repeats == 1 else repeats

    def _table_updates(self, row_ids: Int32, held: Int32) -> Int32:
        memory = self._state.memory
        if self._computes:
            return memory.table_updates(row_ids, held)
        memory.pages_sent[row_ids] = held
        return _NONE

    def _token_ids(
        self, rows: Rows, first: NDArray[np.int32], feedback: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        table = self._state.table
        single = rows.num_tokens == 1
        latest = single & (feedback | (first + 1 == table.known[rows.slots]))
        head = np.where(feedback, 0, table.last_token[rows.slots])[single]
        parts = [head]
        for index in np.flatnonzero(~latest).tolist():
            tokens = table.tokens(table.at(int(rows.slots[index])))
            begin, count = int(first[index]), int(rows.num_tokens[index])
            if count == 1:
                head[index] = tokens[begin]
            else:
                part = np.zeros(count, np.int32)
                part[: count - int(feedback[index])] = tokens[begin : begin + count]
                parts.append(part)
        return np.concatenate(parts)

    def _setup(self, sequence: Sequence) -> RowSetup:
        state, params = self._state, sequence.request.params
        slot = sequence.slot
        return RowSetup(
            row=int(state.table.row[slot]),
            params=params,
            prompt_len=int(state.table.prompt[slot]),
            tokens=state.table.token_array(sequence),
            seed=request_seed(state.seed, sequence.request),
            choice=sequence.choice,
            end_token_ids=end_token_ids(sequence.request, state.model_end_tokens),
        )


def end_token_ids(request: Request, model_end_tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that stop a request's sequences: its own, and the model's unless these are ignored;
    none of a forced length."""
    params = request.params
    if request.forced_output is not None:
        return ()
    return params.stop_token_ids + (() if params.ignore_eos else model_end_tokens)


def request_seed(run_seed: int, request: Request) -> int:
    """The request's own seed, else one derived from the run's seed and the request's id, so that a
    request draws the same numbers whatever runs beside it."""
    if request.params.seed is not None:
        return request.params.seed
    text = f"{run_seed}:{request.request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
