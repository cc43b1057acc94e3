"""An engine on the scripted executor, and scenarios in the notation of public bug reports.

`t3 A(p=40, o=8)` becomes `Arrival(3, "A", 40, 8)`: request A comes before step 3 with 40 prompt
tokens and asks for 8, end tokens ignored. `shares=("A", 32)`: its first 32 tokens are those of A.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.build import build_engine
from core.config import EngineConfig
from core.engine import Engine
from core.hooks import Hooks
from core.queries import StepEvent
from core.records import RequestRecord
from core.request import FinishReason, Request, SamplingParams, Sequence
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.shared.clocks import VirtualClock
from plugins.step_time.fixed import Fixed

VOCAB = 1000
LONGEST = 4096  # tokens drawn for every prompt, of which it uses the first


def make_engine(
    *,
    pages: int = 16,
    page_size: int = 16,
    seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 1024,
    engine_len: int | None = None,
    end_token_ids: tuple[int, ...] = (),
    overlap: bool = False,
    strict: bool = True,
    seed: int = 0,
    plugins: dict[str, object] | None = None,
    contains_faults: bool = False,
    **defaults: object,
) -> Engine:
    """An engine in strict mode under virtual time. `defaults` replace the plugins behind the hooks
    by role; None leaves one out. max_model_len: the model's; engine_len: the engine's own limit."""
    roles: dict[str, object] = {
        "order": Fcfs(),
        "admission": PromptFits(),
        "batching": Chunked(slice_tokens=budget),
        "preemption": LastAdmitted(),
        "allocator": Paged(page_size),
        "cache": Radix(),
        "evictor": Lru(),
        "cache_admission": AdmitAll(),
        "predictor": MaxTokensShare(),
        "step_time": Fixed(),
        "executor": Fake(
            vocab_size=VOCAB, max_model_len=max_model_len, end_token_ids=end_token_ids
        ),
    }
    assert not defaults.keys() - roles.keys(), f"no such role: {defaults.keys() - roles.keys()}"
    roles.update(defaults)
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=engine_len,
        pool_tokens=pages * page_size,
        overlap=overlap,
        strict=strict,
    )
    behind = {role: plugin for role, plugin in roles.items() if plugin is not None}
    hooks = Hooks(behind, plugins or {})
    return build_engine(hooks, config, seed, VirtualClock(), contains_faults=contains_faults)


def prompt(name: str, length: int) -> np.ndarray:
    """Prompt ids that depend on `name` alone, so that two names share nothing; int32 [length]."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.integers(1, VOCAB, LONGEST)[:length].astype(np.int32)


@dataclass(frozen=True)
class Arrival:
    """One request of a scenario. params, fields: more arguments of SamplingParams and Request."""

    step: int
    name: str
    prompt_tokens: int
    output_tokens: int
    shares: tuple[str, int] | None = None
    params: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def request(self, now_s: float = 0.0) -> Request:
        ids = prompt(self.name, self.prompt_tokens)
        if self.shares:
            other, count = self.shares
            ids[:count] = prompt(other, count)[: len(ids)]
        params = {"max_tokens": self.output_tokens, "ignore_eos": True} | self.params
        fields = {"arrival_s": now_s} | self.fields
        return Request(self.name, ids, SamplingParams(**params), **fields)


@dataclass
class Outcome:
    """What a scenario left: the engine, its records, the events in order."""

    engine: Engine
    requests: dict[str, Request]
    events: list[StepEvent]

    @property
    def records(self) -> dict[str, RequestRecord]:
        return self.engine.records

    def choices(self, kind: str, name: str | None = None) -> list[Any]:
        """All decisions of a kind, in order; of one request if named."""
        every = (c for event in self.events for c in event.record.choices if c.kind == kind)
        return [c for c in every if name in (None, c.request_id)]

    def total(self, fact: str) -> int:
        """A field of the step records, summed over the run."""
        return sum(getattr(event.record, fact) for event in self.events)

    def preemptions(self) -> int:
        return sum(record.preemptions for record in self.records.values())

    def first_token_step(self, name: str) -> int:
        return self.token_steps(name)[0]

    def last_token_step(self, name: str) -> int:
        return self.token_steps(name)[-1]

    def token_steps(self, name: str) -> list[int]:
        return list(self.records[name].choices[0].steps)

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        return list(self.records[name].choices[choice].token_ids)

    def reason(self, name: str) -> str:
        return self.records[name].finish_reason


def run(
    engine: Engine,
    arrivals: list[Arrival],
    aborts: dict[str, int] | None = None,
    max_steps: int = 3000,
    before_step: Callable[[int], None] | None = None,
) -> Outcome:
    """Play a scenario to its end and check what holds for all: one end each, progress, the script's
    tokens in every stream, an idle engine. before_step: called with the step's number."""
    events: list[StepEvent] = []
    requests: dict[str, Request] = {}
    todo = sorted(arrivals, key=lambda arrival: arrival.step)
    to_abort = dict(aborts or {})
    step = idle = 0
    while todo or engine.has_work:
        while todo and todo[0].step <= step:
            request = todo.pop(0).request(engine.clock.now())
            requests[request.request_id] = request
            engine.submit(request)
        for name in [name for name, at in to_abort.items() if at <= step]:
            engine.abort(name)
            del to_abort[name]
        if before_step is not None:
            before_step(step)
        moved, event = advance(engine)
        if event is not None:
            events.append(event)
        idle = 0 if moved or not engine.has_work else idle + 1
        assert idle < 4, "[prog]: nothing moved in four steps with work pending"
        step += 1
        assert step < max_steps, f"not done after {max_steps} steps"
    outcome = Outcome(engine, requests, events)
    check_ended_once(events, engine)
    check_streams(outcome)
    check_idle(engine)
    return outcome


def advance(engine: Engine) -> tuple[bool, StepEvent | None]:
    """One step, and whether it moved: a token computed or committed, an admission, an end."""
    before = progress_marks(engine)
    event = engine.step()
    return progress_marks(engine) != before, event


def progress_marks(engine: Engine) -> tuple[object, ...]:
    state = engine.state
    computed = sum(int(state.table.computed[s.slot]) for s in filter(None, state.table.sequences))
    return computed, state.admissions, sum(state.finish_counts.values()), len(engine._in_flight)


def finish(engine: Engine, max_steps: int = 2000) -> list[StepEvent]:
    """Step until nothing is left; the events."""
    events = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        event = engine.step()
        if event is not None:
            events.append(event)
    raise AssertionError(f"not done after {max_steps} steps")


def sequence_of(engine: Engine, name: str, choice: int = 0) -> Sequence:
    """The live sequence of a request."""
    return next(s for s in engine.state.live[name].sequences if s.choice == choice)


def script(engine: Engine, request: Request, num_tokens: int, choice: int = 0) -> list[int]:
    """The first tokens that the scripted executor has for a stream, whatever runs beside it."""
    fake = engine.hooks.registered["executor"].plugin
    assert isinstance(fake, Fake)
    return list(fake.stream(engine.state.seed, request, choice, num_tokens))


def check_streams(outcome: Outcome) -> None:
    """[same]: each stream is the script's, in order, each token once; full length if it ended by
    length."""
    engine = outcome.engine
    for name, request in outcome.requests.items():
        room = engine.state.max_model_len - len(request.prompt)
        for choice, entry in enumerate(engine.records[name].choices):
            tokens = list(entry.token_ids)
            assert tokens == script(engine, request, len(tokens), choice), f"{name} {choice}"
            assert len(entry.times_s) == len(entry.steps) == len(tokens)
            if entry.finish_reason == FinishReason.length.value:
                assert len(tokens) == min(request.output_limit, room), name
    streamed: dict[tuple[str, int], list[int]] = {}
    for event in outcome.events:
        for key, token in zip(event.rows, event.token_ids.tolist(), strict=True):
            streamed.setdefault(key, []).append(token)
    for (name, choice), tokens in streamed.items():
        assert tokens == outcome.tokens(name, choice), f"events and record of {name} differ"


def check_ended_once(events: list[StepEvent], engine: Engine) -> None:
    """[done]: every request seen has exactly one terminal event."""
    ended = [record.request_id for event in events for record in event.finished]
    assert sorted(ended) == sorted(engine.records), "each request ends exactly once"
    assert all(record.finish_reason for record in engine.records.values())


def check_idle(engine: Engine) -> None:
    """[idle]: nothing is held once nothing is queued."""
    memory = engine.state.memory
    assert memory.ledger.num_free + memory.ledger.num_tree == memory.ledger.num_pages
    assert memory.cache.num_evictable == memory.cache.num_pages
    assert memory.cache.num_handles == 0
    assert memory.rows.in_use == 0
    assert len(engine.state.table) == len(engine.state.waiting) == len(engine.state.running) == 0


def check_alive(engine: Engine, name: str = "alive") -> None:
    """[alive]: a plain small request succeeds; then [idle]."""
    engine.submit(Arrival(0, name, 5, 3).request(engine.clock.now()))
    finish(engine)
    assert engine.records[name].finish_reason == "length"
    assert len(engine.records[name].choices[0].token_ids) == 3
    check_idle(engine)
