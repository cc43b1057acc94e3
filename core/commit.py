"""After a launch: settling moves memory, from what was launched; committing takes in the tokens.

Settling needs no token value of its launch: pages that a launch filled hold tokens known before it,
and a sequence whose limit is reached ends whatever its last token says. So memory moves at the same
point of a step whether or not launches overlap: with forced lengths every decision is the same."""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, LaunchResult
from core.pack import end_token_ids
from core.records import StepRecord
from core.request import SLOT_MASK, FinishReason, Sequence
from core.state import CORE, EngineState
from core.table import EndTokens, State, some

Ids = NDArray[np.int64]
Tokens = NDArray[np.int32]
Got = tuple[Collection[Sequence], Tokens, int]  # whose tokens came, the last, StepEvent.num_late


@dataclass(slots=True, eq=False)
class InFlight:
    """A launch that is not collected yet: whose rows it has, and the record of its step."""

    launch: Launch
    ids: Ids
    ends: Tokens  # tokens that each row has computed after it
    record: StepRecord
    unsampled: list[Sequence] = field(default_factory=list)  # who end with it, without a token


class Committer:
    """The part of a step that follows its launch."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._model_ends = np.array(state.model_end_tokens, np.int32)

    def settle(self, entry: InFlight) -> None:
        """Publish finished prompt pages, fork choices, release who reached their limit."""
        launch, ids, record, ends = entry.launch, entry.ids, entry.record, entry.ends
        state, table, slots = self._state, self._state.table, ids & SLOT_MASK
        prompt, limit = table.prompt[slots], table.length_limit[slots]
        # Who wants no token at all ends with its prompt.
        ending = table.known[slots] + table.in_flight[slots] >= limit
        ending &= launch.samples | (ends >= limit)
        filled = ends == prompt
        if launch.num_decode_rows < len(ids):
            filled |= launch.num_tokens > 1
            if (repeats := launch.repeats) is not None:
                filled &= (whole := repeats.turn == len(repeats.each))
                before = repeats.turn - int(whole and some(ending))  # the last beside who ends
                self._publish_slices(launch, repeats.each[:before], ids)
        for index in (ending | filled).nonzero()[0].tolist():
            sequence = table.get(int(ids[index]))
            if sequence is None or table.state[sequence.slot] != State.RUNNING:
                continue  # an end token of the launch before ended it
            if state.may_cache(sequence):
                record.duplicate_prefill_tokens += state.memory.publish(sequence)
            if table.forks[sequence.slot] and ends[index] >= prompt[index]:
                self._fork(sequence)
            if ending[index]:
                record.duplicate_prefill_tokens += state.drain(sequence)
                if not launch.samples[index]:
                    entry.unsampled.append(sequence)

    def _publish_slices(self, launch: Launch, each: Tokens, ids: Ids) -> None:
        """What slices filled, in order, as if each had been settled by itself."""
        state, chunks = self._state, range(launch.num_decode_rows, len(ids))
        slices = [(state.table.of(int(ids[row])), row) for row in chunks]
        rows = [(sequence, row) for sequence, row in slices if state.may_cache(sequence)]
        ends = (launch.first_positions + each).tolist()
        groups = [ends] if len(rows) == 1 else [[end] for end in ends]
        for group, (sequence, row) in product(groups, rows):
            state.memory.publish(sequence, [end[row] for end in group])

    def take_first(self, entry: InFlight, result: LaunchResult) -> None:
        """The tokens of steps that went in one, all but the last: nobody ends before it."""
        repeats, num, tokens = entry.launch.repeats, entry.launch.num_decode_rows, result.tokens
        assert repeats is not None, "the first of two results is of a launch that repeats"
        for sliced in entry.ids[num:].tolist():
            self._state.may_cache(self._state.table.of(sliced))  # while its prompt alone is known
        for ids, before in ((entry.ids[:num], 0), (entry.ids[num:], repeats.turn - 1)):
            ends_s = repeats.ends_s[before:-1]
            size = len(ids) * len(ends_s)
            own, tokens = tokens[:size], tokens[size:]
            if len(own):
                self._take_in(ids, own.reshape(len(ids), -1), ends_s, entry.record.step + before)

    def _take_in(
        self, sampled: Ids, streams: Tokens, ends_s: NDArray[np.float64], step: int
    ) -> tuple[NDArray[np.bool_], list[Sequence]]:
        """Append the tokens [n, k] that the sequences of these ids got from `step` on; returns
        which of them still live, and these. Late tokens of an ended one are dropped."""
        table, num, slots = self._state.table, len(ends_s), sampled & SLOT_MASK
        alive = table.id[slots] == sampled
        if b"\0" in alive.tobytes():
            slots, streams = slots[alive], streams[alive]
        sequences: list[Any] = list(map(table.sequences.__getitem__, slots.tolist()))
        table.known[slots] += num
        table.in_flight[slots] -= num
        table.last_token[slots] = streams[:, -1]
        table.recent.append(slots, sequences, streams, ends_s, step)
        return alive, sequences

    def commit(self, entry: InFlight, result: LaunchResult) -> Got:
        """End who failed, append the sampled tokens, end who is done; returns what came of all its
        steps. A preempted one keeps its own."""
        state, table = self._state, self._state.table
        launch, ids, record = entry.launch, entry.ids, entry.record
        sampled = ids[launch.samples]
        for row, error in result.errors.items():
            position = int(entry.ends[row])
            # What it published may be as wrong as its logits: settling does not wait for these.
            for choice in self.fail(int(ids[row]), f"at position {position}: {error}", record):
                state.memory.forget(choice)
        self._prompt_logprobs(launch, ids, result)
        step, now_s = record.step + record.steps - 1, np.array([state.now_s])
        alive, sequences = self._take_in(sampled, result.tokens[:, None], now_s, step)
        for place, scores in result.logprobs.items():
            if alive[place]:
                table.at(int(sampled[place]) & SLOT_MASK).record.logprobs.append(scores)
        tokens = result.tokens[alive]
        self._finish(sequences, (sampled & SLOT_MASK)[alive], tokens, record)
        for sequence in entry.unsampled:  # the log-probabilities of its prompt are in
            if table.get(sequence.id) is sequence:
                record.note(sequence.key, "finished", CORE, FinishReason.length.value)
                state.finish(sequence, FinishReason.length)
        # Of several steps, one-token rows have samples of each.
        num_late = sum(alive[launch.num_decode_rows :].tolist()) if record.steps > 1 else 0
        record.sampled_tokens = len(tokens) * record.steps - num_late * (record.slices - 1)
        return sequences, tokens, num_late

    def _finish(
        self, sequences: list[Sequence], slots: Ids, tokens: Tokens, record: StepRecord
    ) -> None:
        """End who is done with its latest token; who waits has a new one."""
        state, table = self._state, self._state.table
        states, stops = table.state[slots], self._stops(sequences, slots, tokens)
        if not some((states != State.RUNNING) | stops):
            return
        for index in (stops | (states == State.DRAINING)).nonzero()[0].tolist():
            sequence = sequences[index]
            reason = FinishReason.stop if stops[index] else sequence.ending
            if reason is not FinishReason.capacity:
                record.note(sequence.key, "finished", CORE, reason.value)
            state.finish(sequence, reason, sequence.error if not stops[index] else "")
        for index in (table.state[slots] == State.WAITING).nonzero()[0].tolist():
            state.waiting.touch(sequences[index].id)

    def fail(self, id: int, error: str, record: StepRecord) -> list[Sequence]:
        """End the request of a sequence, if it still lives, with all its choices; returns these."""
        state, sequence = self._state, self._state.table.get(id)
        if sequence is None:
            return []
        live = state.live[sequence.request.request_id]
        message = f"request {sequence.request.request_id!r} {error}"
        record.note(sequence.key, "finished", CORE, message)
        choices = list(live.sequences)
        state.end(live, FinishReason.error, message)
        return choices

    def _stops(self, sequences: list[Sequence], slots: Ids, tokens: Tokens) -> NDArray[np.bool_]:
        kinds = self._state.table.end_tokens[slots]
        if not np.count_nonzero(kinds):
            return np.zeros(len(kinds), np.bool_)
        ends_model = (tokens[:, None] == self._model_ends).any(axis=1)
        stops: NDArray[np.bool_] = (kinds == EndTokens.MODEL) & ends_model
        for index in np.flatnonzero(kinds == EndTokens.OWN).tolist():
            ends = end_token_ids(sequences[index].request, self._state.model_end_tokens)
            stops[index] = int(tokens[index]) in ends
        return stops

    def _prompt_logprobs(self, launch: Launch, ids: Ids, result: LaunchResult) -> None:
        for row, entries in result.prompt_logprobs.items():
            sequence = self._state.table.get(int(ids[row]))
            if sequence is not None and sequence.choice == 0:
                record = self._state.live[sequence.request.request_id].record
                have = len(record.prompt_logprobs) - int(launch.first_positions[row])
                record.prompt_logprobs.extend(entries[max(have, 0) :])

    def _fork(self, parent: Sequence) -> None:
        """Start the other choices of a request on its prompt's whole pages, all but the last
        token's: each computes that page's tail itself, so that it has logits of its own to sample
        from. Without a slot, or pages that can be shared, they wait and are admitted in turn."""
        state = self._state
        shares = state.memory.allocator.shares_pages
        num_pages = (int(state.table.prompt[parent.slot]) - 1) // state.memory.page_size
        live = state.live[parent.request.request_id]
        forks = int(state.table.forks[parent.slot])
        state.table.forks[parent.slot] = 0
        for choice in range(parent.request.params.n - forks, parent.request.params.n):
            predicted = float(state.table.predicted_output[parent.slot])
            child = state.table.add(parent.request, choice, live.record.choices[choice], predicted)
            live.sequences.append(child)
            if shares and len(state.running) < state.config.max_num_seqs:
                state.memory.fork(parent, child, num_pages)
                state.run(child)
            else:
                state.waiting.push(child.id)
