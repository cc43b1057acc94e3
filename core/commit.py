"""After a launch: settling moves memory, from what was launched; committing takes in the tokens.

Settling needs no token value of its launch: pages that a launch filled hold tokens known before it,
and a sequence whose limit is reached ends whatever its last token says. So memory moves at the same
point of a step whether or not launches overlap: with forced lengths every decision is the same."""

import numpy as np
from numpy.typing import NDArray

from core.launch import Launch, LaunchResult
from core.pack import own_end_tokens
from core.records import StepRecord
from core.request import SLOT_MASK, FinishReason, Sequence
from core.state import CORE, EngineState
from core.table import EndTokens, State


class Committer:
    """The part of a step that follows its launch."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._model_ends = np.array(state.model_end_tokens, np.int32)

    def settle(self, launch: Launch, ids: NDArray[np.int64], record: StepRecord) -> None:
        """Publish finished prompt pages, fork choices, release who reached their limit."""
        state, table = self._state, self._state.table
        slots = ids & SLOT_MASK
        prompt, ends = table.prompt[slots], launch.first_positions + launch.num_tokens
        full = table.known[slots] + table.in_flight[slots]
        limit = np.minimum(prompt + table.output_limit[slots], state.max_model_len)
        unsampled = (table.output_limit[slots] == 0) & (ends >= prompt)
        ending = (launch.samples & (full >= limit)) | unsampled
        chunk = (launch.num_tokens > 1) | ((launch.first_positions < prompt) & (ends >= prompt))
        for index in np.flatnonzero(ending | chunk).tolist():
            sequence = table.get(int(ids[index]))
            if sequence is None or table.state[sequence.slot] != State.RUNNING:
                continue  # an end token of the launch before ended it
            if state.may_cache(sequence):
                record.duplicate_prefill_tokens += state.memory.publish(sequence)
            if table.forks[sequence.slot] and ends[index] >= prompt[index]:
                self._fork(sequence)
            if ending[index]:
                record.duplicate_prefill_tokens += state.drain(sequence)

    def commit(
        self, launch: Launch, ids: NDArray[np.int64], result: LaunchResult, record: StepRecord
    ) -> tuple[list[Sequence], NDArray[np.int32]]:
        """End who failed, append the sampled tokens, end who is done; returns whose tokens came and
        the tokens. Late ones of an ended sequence are dropped; a preempted one keeps its own."""
        state, table = self._state, self._state.table
        sampled = ids[launch.samples]
        for row, error in result.errors.items():
            position = int(launch.first_positions[row] + launch.num_tokens[row])
            # What it published may be as wrong as its logits: settling does not wait for these.
            for choice in self.fail(int(ids[row]), f"at position {position}: {error}", record):
                state.memory.forget(choice)
        self._prompt_logprobs(launch, ids, result)
        if len(sampled) < len(ids):
            self._end_unsampled(ids[~launch.samples], record)
        alive = table.id[sampled & SLOT_MASK] == sampled
        slots, steps = (sampled & SLOT_MASK)[alive], record.step + np.arange(launch.repeats)
        streams = result.tokens.reshape(len(sampled), launch.repeats)[alive]
        tokens = streams[:, -1]
        sequences = list(map(table.at, slots.tolist()))
        table.known[slots] += launch.repeats
        table.in_flight[slots] -= launch.repeats
        table.last_token[slots] = tokens
        ends_s = np.array([state.now_s]) if result.ends_s is None else result.ends_s
        table.recent.append(slots, sequences, streams, ends_s, steps)
        if launch.repeats > 1 and not state.config.overlap:  # pages hold tokens of this launch
            self.settle(launch, ids, record)
        for place, entry in result.logprobs.items():
            if alive[place]:
                table.at(int(sampled[place]) & SLOT_MASK).record.logprobs.append(entry)
        stops = self._stops(sequences, slots, tokens)
        done = stops | (table.state[slots] == State.DRAINING)
        for index in np.flatnonzero(done).tolist():
            sequence = sequences[index]
            reason = FinishReason.stop if stops[index] else sequence.ending
            if reason is not FinishReason.capacity:
                state.note(record, sequence, "finished", CORE, reason.value)
            state.finish(sequence, reason, sequence.error if not stops[index] else "")
        for index in np.flatnonzero(table.state[slots] == State.WAITING).tolist():
            state.waiting.touch(sequences[index].id)
        record.sampled_tokens = len(sequences) * launch.repeats
        return sequences, streams.ravel()

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

    def _end_unsampled(self, ids: NDArray[np.int64], record: StepRecord) -> None:
        """Requests that want no token end when the log-probabilities of their prompt are in."""
        state, table = self._state, self._state.table
        slots = ids & SLOT_MASK
        drained = (table.id[slots] == ids) & (table.state[slots] == State.DRAINING)
        for slot in slots[drained & (table.in_flight[slots] == 0)].tolist():
            state.note(record, table.at(slot), "finished", CORE, FinishReason.length.value)
            state.finish(table.at(slot), FinishReason.length)

    def _stops(
        self, sequences: list[Sequence], slots: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        kinds = self._state.table.end_tokens[slots]
        if not kinds.any():
            return np.zeros(len(kinds), np.bool_)
        ends_model = (tokens[:, None] == self._model_ends).any(axis=1)
        stops: NDArray[np.bool_] = (kinds == EndTokens.MODEL) & ends_model
        for index in np.flatnonzero(kinds == EndTokens.OWN).tolist():
            ends = own_end_tokens(sequences[index], self._state.model_end_tokens)
            stops[index] = int(tokens[index]) in ends
        return stops

    def _prompt_logprobs(
        self, launch: Launch, ids: NDArray[np.int64], result: LaunchResult
    ) -> None:
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
