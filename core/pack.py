"""Rows -> Launch: the packed arrays of a step, in the executor's terms."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, RowSetup
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

    def pack(self, rows: Rows, record: StepRecord) -> Launch:
        """The launch of `rows`, of which those of one token come first."""
        table, memory = self._state.table, self._state.memory
        num_chunks = int(np.count_nonzero(rows.num_tokens > 1))
        first = table.computed[rows.slots]
        ends = first + rows.total
        known, in_flight = table.known[rows.slots], table.in_flight[rows.slots]
        feedback = ends > known
        times = 1 if rows.repeats is None else len(rows.repeats.each)
        due = known + in_flight
        further = np.maximum(ends - due, 0) if times > 1 else np.int32(0)  # earlier samples
        due += further
        samples = (ends == due) & (due < table.length_limit[rows.slots])
        row_ids = table.row[rows.slots]
        fresh = [s for s in rows.slots.tolist() if s in memory.opened] if memory.opened else []
        memory.opened.difference_update(fresh)
        setups, token_ids, updates = tuple([self._setup(table.at(s)) for s in fresh]), _NONE, _NONE
        if self._computes:
            token_ids = self._token_ids(rows, first, feedback)
            updates = memory.rows.updates(row_ids, table.pages_held[rows.slots])
        arrays = row_ids, first, rows.num_tokens, token_ids, feedback, samples
        facts = len(row_ids) - num_chunks, updates, setups, rows.repeats, rows.num_new
        launch = Launch(self.next_id, *arrays, *facts)
        self.next_id += 1
        table.computed[rows.slots] = ends
        table.in_flight[rows.slots] = in_flight + samples * (further + np.int32(1))
        record.steps = times
        table.last_step[rows.slots] = record.step + times - 1
        memory.rows.launched(launch.launch_id, row_ids)
        return launch

    def account(self, launch: Launch, rows: Rows, record: StepRecord) -> None:
        """Count the tokens of a launch that is on its way."""
        table, first, repeats = self._state.table, launch.first_positions, launch.repeats
        num_rows, decode_rows, steps = len(rows.slots), launch.num_decode_rows, record.steps
        record.decode_tokens = decode_rows * steps
        if np.count_nonzero(computed_max := table.computed_max[rows.slots]):
            again = np.clip(computed_max - first, 0, rows.total)
            record.recomputed_tokens = int(again.sum())
            table.recomputed_total[rows.slots] += again
        begin = int(np.add.reduce(first)) if repeats is None else sum(first.tolist())
        if decode_rows == num_rows:
            record.kv_tokens = begin * steps + num_rows * steps * (steps + 1) // 2
            record.attended = record.kv_tokens
        else:
            num_new, turn = sum(rows.num_tokens.tolist()), 1
            done = [0, num_new]
            if repeats is not None:
                record.slices = turn = repeats.turn
                done = [0, *repeats.done.tolist()]
            after = steps - turn
            record.kv_tokens = begin * steps + num_new * turn * (turn - 1) // 2
            record.kv_tokens += done[turn] * (1 + after) + num_rows * after * (after + 1) // 2
            before = first.astype(np.int64)
            ends = before + rows.total  # a token attends to as many as its place
            record.attended = int(ends @ ends - before @ before + done[-1]) // 2
            record.decode_tokens += (num_rows - decode_rows) * after
            record.prefill_tokens = done[-1] - record.decode_tokens
            record.last_prefill_tokens = 0 if after else done[-1] - done[-2] - decode_rows
        if repeats is not None:
            record.later_tokens = int(repeats.done[-1]) - repeats.mean(repeats.done)
        table.computed_total[rows.slots] += rows.total

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
        state, params, slot = self._state, sequence.request.params, sequence.slot
        draws = request_seed(state.seed, sequence.request), sequence.choice
        ends = end_token_ids(sequence.request, state.model_end_tokens)
        row, prompt_len = int(state.table.row[slot]), int(state.table.prompt[slot])
        return RowSetup(row, params, prompt_len, state.table.token_array(sequence), *draws, ends)


def end_token_ids(request: Request, model_end_tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that stop a request's sequences: its own and the model's; none of a forced length."""
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
