"""One slice of prompts, then decode steps of everyone, by turns; never both in a step.

Between `prefill_first`, which makes streams wait for all prompts, and mixed steps: the pacing that
SGLang's prefill_decode_interval and vLLM's prefill_schedule_interval offer.
"""

import numpy as np

from core.config import require
from core.hookspecs import hookimpl
from core.queries import BatchDecision, BatchQuery
from plugins.batching.budget import in_turn, longest_unserved


class Interleaved:
    """slice_tokens: most prompt tokens of a slice, for prompts in order of admission. decode_steps:
    decode steps between two slices. While only one kind is there it runs in every step; with both a
    stream waits for one slice, and a prompt for decode_steps steps."""

    steady = True

    def __init__(self, slice_tokens: int = 512, decode_steps: int = 1) -> None:
        require(slice_tokens >= 1, "batching.slice_tokens", ">= 1", slice_tokens)
        require(decode_steps >= 1, "batching.decode_steps", ">= 1", decode_steps)
        self.slice_tokens = slice_tokens
        self.decode_steps = decode_steps
        self._step = -1  # the step that was last asked about
        self._decodes = 0  # in a row before that step
        self._chosen_decode = False  # in that step

    @hookimpl
    def decide_batch(self, query: BatchQuery) -> BatchDecision:
        """A slice if prompts wait and decodes had their turn; else a token for each decode."""
        self._begin(query.step)
        running = query.running
        remaining = running.remaining
        is_prompt = (remaining > 1) | (running.computed < running.prompt)
        prompts, decodes = np.flatnonzero(is_prompt), np.flatnonzero(~is_prompt)
        turn = self._decodes >= self.decode_steps
        self._chosen_decode = len(decodes) > 0 and not (len(prompts) > 0 and turn)
        if self._chosen_decode:
            rows = longest_unserved(running, decodes, query.token_limit)
            reason = f"decode {len(rows)}, {len(prompts)} prompts wait a turn"
            return BatchDecision(running.id[rows], np.ones(len(rows), np.int32), reason)
        tokens = in_turn(remaining[prompts], min(self.slice_tokens, query.token_limit))
        served = tokens > 0
        reason = f"slice of {int(tokens.sum())}, {len(decodes)} decodes wait a turn"
        return BatchDecision(running.id[prompts[served]], tokens[served], reason)

    def _begin(self, step: int) -> None:
        """Count what the step before chose; a step that is planned again keeps its turn."""
        if step == self._step:
            return
        # Steps in between were like the last one: nobody was asked.
        self._decodes = self._decodes + step - self._step if self._chosen_decode else 0
        self._step = step
