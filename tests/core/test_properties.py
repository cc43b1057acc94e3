"""Random sequences of submit, abort, step, forced preemption and eviction, in strict mode.

The scripted executor checks on every launch that each row reads exactly its own KV; strict
mode recounts the books after every step. What is left to assert: streams, ends, an idle engine.
"""

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.hookspecs import hookimpl
from core.queries import PreemptionDecision, PreemptionQuery
from core.request import FinishReason, Request, SamplingParams
from plugins.allocator.contiguous import Contiguous
from plugins.allocator.paged import Paged
from plugins.cache.none import NoCache
from plugins.cache.radix import Radix
from plugins.executor.fake import Fake
from tests.core.policy_tables import ADMISSIONS, BATCHINGS, VICTIMS
from tests.engine_harness import VOCAB, check_ended_once, check_idle, make_engine

END_TOKENS = tuple(range(20))
STREAMS = Fake(vocab_size=VOCAB, end_token_ids=END_TOKENS)
FAIL_AT = {1000 + position: position for position in range(12)}  # request seed -> output position


class ForcePreemption:
    """Displaces for the first waiting request whenever armed: preemption without need."""

    displaces = True

    def __init__(self) -> None:
        self.armed = False

    @hookimpl
    def decide_preemption(self, query: PreemptionQuery) -> PreemptionDecision | None:
        if query.beneficiary is None:
            return None
        armed, self.armed = self.armed, False
        return PreemptionDecision(query.candidates.id[::-1], "forced") if armed else None


class EngineMachine(RuleBasedStateMachine):
    """One engine of a random make under random traffic."""

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        pool_tokens=st.sampled_from([32, 64, 128, 256]),
        seqs=st.integers(1, 6),
        budget=st.sampled_from([1, 7, 32, 256]),
        cache=st.sampled_from([Radix, Radix, NoCache]),
        contiguous=st.booleans(),
        admission=st.sampled_from(sorted(ADMISSIONS)),
        batching=st.sampled_from(sorted(BATCHINGS)),
        victims=st.sampled_from(sorted(VICTIMS)),
        overlap=st.booleans(),
        seed=st.integers(0, 99),
    )
    def build(
        self,
        page_size,
        pool_tokens,
        seqs,
        budget,
        cache,
        contiguous,
        admission,
        batching,
        victims,
        overlap,
        seed,
    ):
        self.force = ForcePreemption()
        contiguous = contiguous and cache is NoCache
        self.engine = make_engine(
            pages=pool_tokens // page_size,
            page_size=page_size,
            seqs=seqs,
            budget=budget,
            overlap=overlap,
            seed=seed,
            allocator=Contiguous(page_size) if contiguous else Paged(page_size),
            cache=cache(),
            batching=BATCHINGS[batching](),
            preemption=VICTIMS[victims]()["mine"],
            executor=Fake(
                vocab_size=VOCAB, max_model_len=200, end_token_ids=END_TOKENS, fail_at=FAIL_AT
            ),
            plugins={"force": self.force} | ADMISSIONS[admission](),
        )
        self.requests: dict[str, Request] = {}
        self.events = []
        self.aborted: set[str] = set()

    @rule(
        length=st.integers(1, 90),
        shared=st.integers(0, 90),
        output=st.integers(0, 40),
        choices=st.sampled_from([1, 1, 1, 2, 4]),
        ignore_eos=st.booleans(),
        namespace=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(0, 2),
        forced=st.sampled_from([None, None, 3]),
        cache=st.sampled_from([True, True, False]),
        seed=st.sampled_from([None, None, None, *FAIL_AT]),
    )
    def submit(
        self, length, shared, output, choices, ignore_eos, namespace, priority, forced, cache, seed
    ):
        name = f"r{len(self.requests)}"
        prompt = np.random.default_rng(len(self.requests)).integers(1, VOCAB, length)
        prompt[:shared] = 5
        params = SamplingParams(max_tokens=output, n=choices, ignore_eos=ignore_eos, seed=seed)
        request = Request(
            name,
            prompt.astype(np.int32),
            params,
            arrival_s=self.engine.clock.now(),
            namespace=namespace,
            priority=priority,
            forced_output=forced,
            cache=cache,
        )
        self.requests[name] = request
        self.engine.submit(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.engine.abort(name)

    @rule()
    def abort_unknown(self):
        self.engine.abort("nobody")

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self._step()

    @rule()
    def force_preemption(self):
        self.force.armed = True
        self._step()

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        memory = self.engine.state.memory
        memory._evict([memory.ledger.num_free + min(count, memory.cache.num_evictable)])

    @invariant()
    def streams_are_right(self):
        for event in getattr(self, "events", [])[-1:]:
            for record in event.finished:
                self._check_streams(record)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "the engine did not come to rest"
        check_ended_once(self.events, self.engine)
        check_idle(self.engine)

    def _step(self):
        event = self.engine.step()
        if event is not None:
            self.events.append(event)
            for record in event.finished:
                self._check_streams(record)

    def _check_streams(self, record):
        """Tokens are the script's, in order, each once; the end is as the request asked."""
        request = self.requests[record.request_id]
        for choice, entry in enumerate(record.choices):
            tokens = list(entry.token_ids)
            expected = STREAMS.stream(self.engine.state.seed, request, choice, len(tokens))
            assert tokens == expected
            assert len(tokens) <= request.output_limit
            assert len(entry.times_s) == len(entry.steps) == len(tokens)
            if entry.finish_reason == FinishReason.stop.value:
                assert tokens[-1] in END_TOKENS
            if request.params.seed in FAIL_AT:
                assert len(tokens) <= FAIL_AT[request.params.seed]
        if record.finish_reason == FinishReason.abort.value:
            assert record.request_id in self.aborted
        if record.finish_reason == FinishReason.error.value:
            assert request.params.seed in FAIL_AT
            assert record.error
            assert max(len(c.token_ids) for c in record.choices) == FAIL_AT[request.params.seed]


EngineMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(
        Phase.explicit,
        Phase.generate,
    ),  # a counterexample replays as it is: shrinking costs minutes
    suppress_health_check=list(HealthCheck),
)
TestEngineProperties = EngineMachine.TestCase
