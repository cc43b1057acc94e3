"""After a launch: settling moves memory, from what was launched; committing takes in the tokens.

Settling needs no token value of its launch: pages that a launch filled hold tokens known before it,
and a sequence whose limit is reached ends whatever its last token says. So memory moves at the same
point of a step whether or not launches overlap: with forced lengths every decision is the same."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, LaunchResult
from core.pack import end_token_ids
from core.records import StepRecord
from core.request import SLOT_MASK, FinishReason, Sequence
from core.state import CORE, EngineState
from core.table import EndTokens, State

Ids = NDArray[np.int64]
Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class InFlight:
    """A launch that is not collected yet: whose rows it has, and the record of its step."""

    launch: Launch
    ids: Ids
    record: StepRecord
    first: LaunchResult | None = None  # of steps that went in one, committed before the last


class Committer:
    """The part of a step that follows its launch."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._model_ends = np.array(state.model_end_tokens, np.int32)

    def settle(self, entry: InFlight) -> None:
        """Publish finished prompt pages, fork choices, release who reached their limit."""
        launch, ids, record = entry.launch, entry.ids, entry.record
        state, table = self._state, self._state.table
        slots = ids & SLOT_MASK
        prompt, limit = table.prompt[slots], table.length_limit[slots]
        ends = launch.first_positions + launch.num_tokens
        launched = table.known[slots] + table.in_flight[slots]
        # Who wants no token at all ends with its prompt.
        ending = (launched >= limit) & (launch.samples | (ends >= limit))
        filled = (launch.num_tokens > 1) | (ends == prompt)
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

    def take_in(
        self, sampled: Ids, result: LaunchResult, step: int
    ) -> tuple[NDArray[np.bool_], list[Sequence], Tokens]:
        """Append the tokens that the sequences of these ids got from `step` on; returns which of
        them still live, these, and their tokens [n, k]. Late ones of an ended one are dropped."""
        table = self._state.table
        ends_s = np.array([self._state.now_s]) if result.ends_s is None else result.ends_s
        num, slots = len(ends_s), sampled & SLOT_MASK
        alive, streams = table.id[slots] == sampled, result.tokens.reshape(len(sampled), num)
        if np.count_nonzero(alive) < len(alive):
            slots, streams = slots[alive], streams[alive]
        sequences = list(map(table.at, slots.tolist()))
        table.known[slots] += num
        table.in_flight[slots] -= num
        table.last_token[slots] = streams[:, -1]
        table.recent.append(slots, sequences, streams, ends_s, np.arange(step, step + num))
        return alive, sequences, streams

    def commit(self, entry: InFlight, result: LaunchResult) -> tuple[list[Sequence], Tokens]:
        """End who failed, append the sampled tokens, end who is done; returns whose tokens came and
        the tokens, with those that came first. A preempted one keeps its own."""
        state, table = self._state, self._state.table
        launch, ids, record, first = entry.launch, entry.ids, entry.record, entry.first
        sampled = ids[launch.samples]
        for row, error in result.errors.items():
            position = int(launch.first_positions[row] + launch.num_tokens[row])
            # What it published may be as wrong as its logits: settling does not wait for these.
            for choice in self.fail(int(ids[row]), f"at position {position}: {error}", record):
                state.memory.forget(choice)
        self._prompt_logprobs(launch, ids, result)
        if len(sampled) < len(ids):
            self._end_unsampled(ids[~launch.samples], record)
        step = record.step + record.steps - (1 if first is not None else launch.repeats)
        alive, sequences, streams = self.take_in(sampled, result, step)
        if launch.repeats > 1 and first is None:  # pages hold tokens of this launch
            self.settle(entry)
        for place, scores in result.logprobs.items():
            if alive[place]:
                table.at(int(sampled[place]) & SLOT_MASK).record.logprobs.append(scores)
        self._finish(sequences, (sampled & SLOT_MASK)[alive], streams[:, -1], record)
        if first is not None:
            before = first.tokens.reshape(len(sampled), -1)[alive]
            streams = np.concatenate((before, streams), axis=1)
        record.sampled_tokens = streams.size
        return sequences, streams.ravel()

    def _finish(
        self, sequences: list[Sequence], slots: Ids, tokens: Tokens, record: StepRecord
    ) -> None:
        """End who is done with its latest token; who waits has a new one."""
        state, table = self._state, self._state.table
        stops = self._stops(sequences, slots, tokens)
        for index in (stops | (table.state[slots] == State.DRAINING)).nonzero()[0].tolist():
            sequence = sequences[index]
            reason = FinishReason.stop if stops[index] else sequence.ending
            if reason is not FinishReason.capacity:
                state.note(record, sequence, "finished", CORE, reason.value)
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
        state.note(record, sequence, "finished", CORE, message)
        choices = list(live.sequences)
        state.end(live, FinishReason.error, message)
        return choices

    def _end_unsampled(self, ids: Ids, record: StepRecord) -> None:
        """Requests that want no token end when the log-probabilities of their prompt are in."""
        state, table = self._state, self._state.table
        slots = ids & SLOT_MASK
        drained = (table.id[slots] == ids) & (table.state[slots] == State.DRAINING)
        for slot in slots[drained & (table.in_flight[slots] == 0)].tolist():
            state.note(record, table.at(slot), "finished", CORE, FinishReason.length.value)
            state.finish(table.at(slot), FinishReason.length)

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
                first = int(launch.first_positions[row])
                have = len(record.prompt_logprobs)  # entries of positions 1 .. have
                record.prompt_logprobs.extend(entries[max(have - first, 0) :])

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
