"""When a replica would truly begin to answer a request: what regret is measured against.

For one request and one replica, by what the simulation knows and no router could: the state of the
engine itself, what its cache holds now, true output lengths, and the model of a step's time:

start = max(busy, memory, slot) + prefill                      seconds from now

busy     until the step that runs has ended, and with overlap the one launched behind it, which is
         taken to last as long as the last one
memory   until so many running requests have ended that the waiting and this one find pages
slot     likewise for one of engine.max_num_seqs
prefill  n steps, each with the present decodes and an equal part of the prompt tokens that are
         computed in them: this request's, without what the cache holds, and of every other prompt
         as much as fits into n slices. n: slices of this prompt, or more if the budget of a step
         (engine.max_num_batched_tokens) does not hold all that. A slice is what the batching policy
         calls slice_tokens, else the budget

It is an estimate: prompts may be served in another order, others end and come meanwhile. And it is
greedy: who comes later pays for this one too. The regret of a choice is the seconds by which its
start is later than the least of all.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from core.engine import Engine
from core.keys import page_keys
from core.request import Request
from core.table import State

Floats = NDArray[np.float64]


@dataclass(slots=True)
class PromptKeys:
    """Page keys of the request that was asked about last: all replicas are asked about it."""

    request_id: str = ""
    page_size: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def of(self, request: Request, size: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Keys and tokens of its whole pages, the last token left out."""
        if (self.request_id, self.page_size) != (request.request_id, size):
            usable = (len(request.prompt) - 1) // size * size
            self.tokens = np.ascontiguousarray(request.prompt[:usable], np.int32)
            self.keys = page_keys(self.tokens, size)
            self.request_id, self.page_size = request.request_id, size
        return self.keys, self.tokens


@dataclass(slots=True)
class Starts:
    """Of one engine. prompts: shared by all. slice_tokens: most prompt tokens of a request in a
    step. found: request id -> prompt tokens that its cache held when the request was sent there;
    entries of requests that are gone are dropped as they pile up. coming: sent, and not yet in the
    engine's queue. step_s: what its last step took."""

    engine: Engine
    prompts: PromptKeys
    slice_tokens: int
    found: dict[str, int] = field(default_factory=dict)
    coming: list[Request] = field(default_factory=list)
    step_s: float = 0.0
    _known: tuple[str, int, int] = ("", 0, 0)  # request, the engine's step, what it found

    def sent(self, request: Request) -> None:
        """The request goes to this engine."""
        live = self.engine.state.live
        if len(self.found) > 64 + 2 * (len(live) + len(self.coming)):
            known = {*live, *(one.request_id for one in self.coming)}
            self.found = {name: hit for name, hit in self.found.items() if name in known}
        self.found[request.request_id] = self.cached(request)
        self.coming.append(request)

    def stepped(self, step_s: float) -> None:
        """The engine made a step that took so long, and let in who was coming."""
        self.step_s = step_s
        self.coming.clear()

    def cached(self, request: Request) -> int:
        """Prompt tokens in its cache now."""
        memory, step = self.engine.state.memory, self.engine.steps
        if not (memory.cache.stores and request.cache):
            return 0
        if self._known[:2] != (request.request_id, step):
            keys, tokens = self.prompts.of(request, memory.page_size)
            match = memory.cache.match(keys, tokens, request.namespace)
            self._known = request.request_id, step, len(match.pages) * memory.page_size
        return self._known[2]

    def start_s(self, request: Request, now_s: float) -> float:
        """Seconds until it would have its first token here."""
        state = self.engine.state
        table, running = state.table, state.running
        remaining = table.known[running] + table.in_flight[running] - table.computed[running]
        contexts = table.computed[running[remaining == 1]]
        prefilling = running[remaining > 1]
        length, cached = len(request.prompt), self.cached(request)
        waiting, pages = self._waiting()
        firsts = np.concatenate([table.computed[prefilling], waiting[0]])
        lefts = np.concatenate([remaining[remaining > 1], waiting[1]])
        pages += state.memory.pages_for(length) - cached // state.memory.page_size
        ends = self._ends_s(contexts)
        behind_s = self.step_s if state.config.overlap and len(running) else 0.0
        busy_s = max(self.engine.clock.now() + behind_s - now_s, 0.0)
        wait_s = max(busy_s, self._memory_s(pages, ends), self._slot_s(ends))
        return wait_s + self._prefill_s(length, cached, firsts, lefts, contexts)

    def _prefill_s(
        self, length: int, cached: int, firsts: Floats, lefts: Floats, contexts: NDArray[np.int32]
    ) -> float:
        own, decodes, kv_tokens = length - cached, len(contexts), int(contexts.sum())
        room = max(self.engine.state.config.max_num_batched_tokens - decodes, 1)
        steps = -(-own // min(self.slice_tokens, room))
        others = np.minimum(lefts, steps * self.slice_tokens)
        steps = max(steps, -(-(own + int(others.sum())) // room))
        tokens = (own + float(others.sum())) / steps
        pairs = _pairs(cached, length) + float((others * (firsts + others / 2.0)).sum())
        rows = decodes + 1 + np.count_nonzero(lefts)
        model = self.engine.state.step_time
        reads = kv_tokens + tokens
        return steps * float(
            model.seconds(rows, decodes + tokens, reads, kv_tokens + pairs / steps)
        )

    def _decode_s(self, contexts: NDArray[np.int32]) -> float:
        """Of a step of the present decodes."""
        num, kv_tokens = len(contexts), int(contexts.sum())
        model = self.engine.state.step_time
        return float(model.seconds(num, num, kv_tokens, kv_tokens)) if num else 0.0

    def _waiting(self) -> tuple[Floats, int]:
        """Of those who wait, cached and other known tokens, [2, waiting], and pages they need."""
        state, rows, pages = self.engine.state, [], 0
        slots = np.flatnonzero(state.table.state == State.WAITING).tolist()
        waiting = [state.table.at(slot) for slot in slots]
        lengths = [(one.request, int(state.table.known[one.slot])) for one in waiting]
        lengths += [(request, len(request.prompt)) for request in self.coming]
        for request, known in lengths:
            hit = min(self.found.get(request.request_id, 0), known - 1)
            rows.append((hit, known - hit))
            pages += state.memory.pages_for(known) - hit // state.memory.page_size
        return np.array(rows, np.float64).reshape(-1, 2).T, pages

    def _ends_s(self, contexts: NDArray[np.int32]) -> tuple[Floats, NDArray[np.int64]]:
        """When each running request ends if nobody comes, ascending, and pages it holds."""
        step_s = self._decode_s(contexts)
        table, running = self.engine.state.table, self.engine.state.running
        left = table.length_limit[running] - table.known[running] - table.in_flight[running]
        order = np.argsort(left, kind="stable")
        return left[order] * step_s, table.pages_held[running][order].astype(np.int64)

    def _memory_s(self, pages: int, ends: tuple[Floats, NDArray[np.int64]]) -> float:
        short = pages - self.engine.state.memory.supply
        times, held = ends
        if short <= 0 or not len(times):
            return 0.0
        at = int(np.searchsorted(np.cumsum(held), short))
        return float(times[min(at, len(times) - 1)])

    def _slot_s(self, ends: tuple[Floats, NDArray[np.int64]]) -> float:
        state, (times, _) = self.engine.state, ends
        over = (
            len(state.running)
            + len(state.waiting)
            + len(self.coming)
            + 1
            - state.config.max_num_seqs
        )
        return float(times[min(over, len(times)) - 1]) if over > 0 and len(times) else 0.0


def _pairs(first: int, last: int) -> float:
    """Pairs of a token first + 1 .. last and one that it attends to."""
    return (last * (last + 1) - first * (first + 1)) / 2.0
