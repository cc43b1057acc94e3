"""One run of a policy over some traffic, and what is left of it to compare."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from core.build import build_engine
from core.config import EngineConfig
from core.engine import Engine
from core.errors import InvariantError, PolicyError
from core.hooks import Hooks
from core.queries import AllocatorQuery, StepEvent
from core.request import Request
from plugins.admission.prompt_fits import PromptFits
from plugins.allocator.paged import Paged
from plugins.batching.chunked import Chunked
from plugins.cache.admit_all import AdmitAll
from plugins.cache.lru import Lru
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from plugins.order.fcfs import Fcfs
from plugins.predictor.max_tokens_share import MaxTokensShare
from plugins.preemption.last_admitted import LastAdmitted
from plugins.step_time.fixed import Fixed
from tests.engine_harness import (
    VOCAB,
    Outcome,
    advance,
    check_ended_once,
    check_idle,
    check_streams,
)
from tests.plugins.conformance.forbidden import ForbiddenCallError
from tests.plugins.conformance.subject import NAME, Subject
from tests.plugins.conformance.traffic import SteppedClock, Traffic
from tests.plugins.conformance.watch import Answer, Breach, PoisonError, Watch

STUCK_STEPS = 12
"""Steps without a token, an admission or an end after which nothing will come any more; the core
itself gives up on an idle engine after 8."""


@dataclass
class Played:
    """What a run left. facts: of each step all but host times, for runs that must be equal.
    decisions: by step number, what must not depend on overlap. breaches: rules broken on the way,
    the last one by what ended the run."""

    facts: list[Any] = field(default_factory=list)
    decisions: dict[int, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    tokens: dict[str, Any] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    swallowed: bool = False

    @property
    def ended_well(self) -> bool:
        """Nothing broke that makes the rest of the run meaningless."""
        return not any(breach.rule in FATAL for breach in self.breaches)


FATAL = ("decisions", "progress", "conservation", "exceptions")


def engine_for(
    plugin: Any, traffic: Traffic, *, overlap: bool, seed: int, checks: bool = True,
    end_tokens: tuple[int, ...] = (), clock: SteppedClock | None = None,
    slice_tokens: int | None = None,
) -> Engine:  # fmt: skip
    """An engine with the policy in front of the defaults. checks: strict mode, and the executor
    verifies every launch."""
    clock = clock or SteppedClock()
    alone = "build_allocator" in dir(plugin) and not _shares_pages(plugin)
    budget = traffic.budget
    behind = {
        "order": Fcfs(),
        "admission": PromptFits(growth_share=traffic.growth),
        "batching": Chunked(slice_tokens=slice_tokens or budget),
        "preemption": LastAdmitted(),
        "allocator": Paged(traffic.page_size),
        "cache": NoCache() if alone else Radix(),
        "evictor": Lru(),
        "cache_admission": AdmitAll(),
        "predictor": MaxTokensShare(),
        "step_time": Fixed(clock.step_s / 2, token_s=clock.step_s / 4 / budget),
        "executor": Fake(
            vocab_size=VOCAB,
            max_model_len=1024,
            end_token_ids=end_tokens,
            step_s=clock.step_s / 2,
            token_s=clock.step_s / 4 / budget,
            check=checks,
        ),
    }
    config = EngineConfig(
        max_num_seqs=traffic.seqs,
        max_num_batched_tokens=budget,
        pool_tokens=traffic.pool,
        overlap=overlap,
        strict=checks,
    )
    return build_engine(Hooks(behind, {NAME: plugin}), config, seed, clock)


def _shares_pages(plugin: Any) -> bool:
    built = plugin.build_allocator(query=AllocatorQuery(1 << 12, 1024))
    return built is None or built.shares_pages


class Player:
    """Plays traffic step by step, so that several can take turns."""

    def __init__(
        self, subject: Subject, traffic: Traffic, *, overlap: bool = False, seed: int = 7,
        watch: Watch | None = None, end_tokens: tuple[int, ...] = (), checks: bool = True,
    ) -> None:  # fmt: skip
        self.subject, self.traffic = subject, traffic
        self.watch = watch or Watch()
        self.played = Played()
        self._options = {"overlap": overlap, "seed": seed}
        self._options |= {"end_tokens": end_tokens, "checks": checks}
        self._requests: dict[str, Request] = {}
        self._prompts: dict[str, bytes] = {}
        self._events: list[StepEvent] = []
        self.engine: Any = None

    def run(self) -> Played:
        """The whole run."""
        with self.watch.forbidden.watching(self.subject.package):
            for _ in self.turns():
                pass
        return self.played

    def turns(self) -> Iterator[None]:
        """One step a turn. What a step raises ends the run and is kept as a breach."""
        try:
            yield from self._steps()
            self._check_end()
        except Exception as error:
            self._keep(error)
        self._conclude()

    def _steps(self) -> Iterator[None]:
        plugin = self.watch.around(self.subject.make())
        engine = self.engine = engine_for(plugin, self.traffic, **self._options)
        self.watch.engine = engine
        clock = engine.clock
        todo = sorted(self.traffic.arrivals, key=lambda one: one.step)
        aborts = sorted((step, name) for name, step in self.traffic.aborts.items())
        step = stuck = 0
        while todo or engine.has_work:
            clock.start_step(step)
            while todo and todo[0].step <= step:
                self._submit(todo.pop(0).request(clock.now()))
            while aborts and aborts[0][0] <= step:
                engine.abort(aborts.pop(0)[1])
            moved, event = advance(engine)
            if event is not None:
                self._events.append(event)
            stuck = 0 if moved or not engine.has_work else stuck + 1
            if stuck > STUCK_STEPS or step > self.traffic.most_steps:
                raise StuckError(self._who_is_stuck(step, stuck))
            step += 1
            yield

    def _submit(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._prompts[request.request_id] = request.prompt.tobytes()
        self.engine.submit(request)

    def _who_is_stuck(self, step: int, stuck: int) -> str:
        live = ", ".join(sorted(self.engine.state.live)[:4])
        what = (
            f"nothing moved in {stuck} steps" if stuck > STUCK_STEPS else f"not done by step {step}"
        )
        return f"{what} of '{self.traffic.name}'; unfinished: {live}"

    def _check_end(self) -> None:
        outcome = Outcome(self.engine, self._requests, self._events)
        check_ended_once(self._events, self.engine)
        check_idle(self.engine)
        check_streams(outcome)
        for name, request in self._requests.items():
            if request.prompt.tobytes() != self._prompts[name]:
                hook = self.subject.hooks[0]
                text = f"changed the prompt of request {name!r}"
                self.played.breaches.append(Breach("queries", hook, text))

    def _keep(self, error: Exception) -> None:
        rules = (
            (ForbiddenCallError, ""),
            (PoisonError, ""),
            (PolicyError, "decisions"),
            (StuckError, "progress"),
            (InvariantError, "conservation"),
        )
        rule = next((rule for kind, rule in rules if isinstance(error, kind)), None)
        raised, hook = self.watch.raised or (None, "")
        if rule is None:
            ours = isinstance(error, AssertionError) and raised is not error
            rule = "conservation" if ours else "exceptions"
        if rule:
            text = str(error) if rule != "exceptions" else f"{type(error).__name__}: {error}"
            where = f" (step {self.engine.steps} of '{self.traffic.name}')" if self.engine else ""
            blamed = hook if raised is error else self._blamed(error)
            self.watch.breaches.append(Breach(rule, blamed, text + where))

    def _blamed(self, error: Exception) -> str:
        """The hook that the message names, else the policy's first."""
        named = [hook for hook in self.subject.hooks if hook in str(error)]
        return named[0] if named else self.subject.hooks[0]

    def _conclude(self) -> None:
        played, watch = self.played, self.watch
        played.breaches = [*watch.breaches, *played.breaches]
        played.answers, played.swallowed = watch.answers, watch.swallowed
        played.asked, played.answered = watch.asked, watch.answered
        for event in self._events:
            record = event.record
            facts = [getattr(record, one.name) for one in fields(record) if one.name != "host_us"]
            rest = event.rows, event.token_ids.tolist()
            played.facts.append((*facts, *rest))
            played.choices.update(choice.kind for choice in record.choices)
            chosen = [
                (c.request_id, c.choice, c.kind, c.plugin, c.detail)
                for c in record.choices
                if c.kind != "finished"
            ]
            if record.rows or chosen:
                pages = record.pages_free, record.pages_tree
                played.decisions[record.step] = (record.rows, chosen, *pages)
        if self.engine is not None:
            for name, record in self.engine.records.items():
                played.tokens[name] = [
                    (choice.finish_reason, list(choice.token_ids)) for choice in record.choices
                ]


class StuckError(Exception):
    """Requests are left and nothing moves, or all moves in circles."""


def played(subject: Subject, traffic: Traffic, **options: Any) -> Played:
    """A run to its end."""
    return Player(subject, traffic, **options).run()


def played_between(subject: Subject, traffic: Traffic, other: Traffic) -> Played:
    """The same run while a second engine with a policy of its own plays `other`, step by step in
    turns."""
    first = Player(subject, traffic, checks=False)
    second = Player(subject, other, seed=8, checks=False)
    with first.watch.forbidden.watching(subject.package):
        ours, theirs = first.turns(), second.turns()
        busy = True
        while busy:
            next(theirs, None)
            busy = next(ours, STOP) is not STOP
    return first.played


STOP = object()
