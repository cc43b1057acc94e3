"""Policies with one mistake each, for the tests of the conformance kit."""

import itertools
import random
import time
from time import perf_counter

import numpy as np

from core.hookspecs import hookimpl
from core.queries import (
    AdmissionDecision,
    BatchDecision,
    CacheAdmissionDecision,
    Cause,
    OrderDecision,
    PreemptionDecision,
    Verdict,
)
from plugins.allocator.paged import PagedAllocator
from plugins.cache.lru import LruEvictor
from plugins.shared.routing import RouteDecision

SEEN = []
NUMBERS = itertools.count()


class LastComeFirst:
    """Starves whoever came first."""

    @hookimpl
    def decide_order(self, query):
        return OrderDecision(-query.waiting.arrival_s)


class LastComeFirstByDesign(LastComeFirst):
    """Says so."""

    starves = "the latest goes first"


class PatientLastComeFirst:
    """The latest first, but whoever waited `patience_s` before all others: keeps its bound."""

    def __init__(self, patience_s: float = 5.0, kept: bool = True) -> None:
        self.starvation_bound_s = patience_s
        self.kept = kept

    @hookimpl
    def decide_order(self, query):
        arrival_s = query.waiting.arrival_s
        old = query.now_s - arrival_s >= self.starvation_bound_s if self.kept else arrival_s < 0
        keys = np.stack([~old, np.where(old, arrival_s, -arrival_s)], axis=1).astype(float)
        return OrderDecision(keys, hold=query.now_s + 1e-9)


class ReadsTheClock:
    @hookimpl
    def decide_order(self, query):
        return OrderDecision(query.waiting.arrival_s - time.time())


class ReadsTheClockByName:
    @hookimpl
    def decide_order(self, query):
        return OrderDecision(query.waiting.arrival_s - perf_counter())


class HidesTheClock:
    """Its own `except` must not hide the call."""

    @hookimpl
    def decide_order(self, query):
        try:
            return OrderDecision(query.waiting.arrival_s - time.monotonic())
        except Exception:
            return OrderDecision(query.waiting.arrival_s)


class DrawsFromTheModule:
    @hookimpl
    def decide_preemption(self, query):
        ids = query.candidates.id.tolist()
        random.shuffle(ids)
        return PreemptionDecision(np.array(ids))


class DrawsUnseeded:
    @hookimpl
    def decide_preemption(self, query):
        return PreemptionDecision(np.random.default_rng().permutation(query.candidates.id))


class DrawsFromAnObject:
    """An unseeded generator made with the policy: no call is forbidden, but no run repeats."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    @hookimpl
    def decide_preemption(self, query):
        return PreemptionDecision(self.random.permutation(query.candidates.id))

    @hookimpl
    def decide_order(self, query):
        return OrderDecision(self.random.random(len(query.waiting)))


class RemembersInTheModule:
    """Shuffles by what all engines of the process did together; a run alone repeats."""

    def __init__(self) -> None:
        SEEN.clear()

    @hookimpl
    def decide_order(self, query):
        SEEN.append(len(query.waiting))
        return OrderDecision(np.sin(query.waiting.arrival_order * 7.0 + len(SEEN)))


class CountsInTheClass:
    """Never starts anew: the second run of a process differs."""

    @hookimpl
    def decide_order(self, query):
        return OrderDecision(np.sin(query.waiting.arrival_order * 7.0 + next(NUMBERS)))


class WalksASet:
    """Clients in the order in which a set of their names happens to lie."""

    @hookimpl
    def decide_order(self, query):
        clients = [query.request(one).client for one in query.waiting.id.tolist()]
        ranks = {client: rank for rank, client in enumerate(set(clients))}
        return OrderDecision(np.array([ranks[client] for client in clients], float))


class CountsCommittedTokens:
    """`generated` lags behind where a launch is in flight."""

    @hookimpl
    def decide_preemption(self, query):
        if query.cause is not Cause.PAGES:
            return None
        rows = query.candidates
        order = np.lexsort((rows.admitted_order, rows.generated * 7 % 5))
        return PreemptionDecision(rows.id[order])


class ChangesTheTable:
    @hookimpl
    def decide_order(self, query):
        keys = query.waiting.arrival_s
        keys.flags.writeable = True
        keys += 1.0
        return OrderDecision(keys)


class ChangesTheQuery:
    @hookimpl
    def decide_order(self, query):
        object.__setattr__(query, "now_s", 0.5)
        return OrderDecision(query.waiting.arrival_s)


class ChangesAPrompt:
    @hookimpl
    def decide_cache_admission(self, query):
        query.request.prompt[0] = 3
        return CacheAdmissionDecision(admit=False)


class NeverAdmits:
    @hookimpl
    def decide_admission(self, query):
        return AdmissionDecision(Verdict.WAIT, "not today")


class NamesTooFewVictims:
    """Nobody, though pages are short."""

    @hookimpl
    def decide_preemption(self, query):
        return PreemptionDecision(query.candidates.id[:0])


class NamesStrangers:
    @hookimpl
    def decide_preemption(self, query):
        return PreemptionDecision(query.candidates.id + 1)


class DisplacesEquals:
    """Two requests push each other out for ever."""

    displaces = True

    @hookimpl
    def decide_preemption(self, query):
        return PreemptionDecision(query.candidates.id)


class AsksForNoTokens:
    """A row that computes nothing."""

    @hookimpl
    def decide_batch(self, query):
        rows = query.running
        return BatchDecision(rows.id[-1:], np.zeros(1, np.int32))


class IsNotSteady:
    """All that run, but the first alone in every third step."""

    steady = True

    @hookimpl
    def decide_batch(self, query):
        rows = query.running
        ids = rows.id if query.step % 3 else rows.id[:1]
        return BatchDecision(ids, np.ones(len(ids), np.int32))


class Swallows:
    @hookimpl
    def decide_admission(self, query):
        try:
            fits = query.pages_needed <= query.pages_free - query.running.pages_held.sum() * 0
        except Exception:
            return None
        return AdmissionDecision(Verdict.ADMIT if fits else Verdict.WAIT)


class Raises:
    @hookimpl
    def decide_batch(self, query):
        if query.step > 3:
            raise ZeroDivisionError("a mistake")


class RepeatsVictims:
    """An evictor that offers a node that was taken off offer."""

    @hookimpl
    def build_evictor(self, query):
        return RepeatingEvictor()


class RepeatingEvictor(LruEvictor):
    def on_lock(self, node):
        pass

    def on_unlock(self, node):
        if node not in self._evictable:
            super().on_unlock(node)


class GivesUpEarly:
    """An evictor that forgets a node once it was hit."""

    @hookimpl
    def build_evictor(self, query):
        return ForgetfulEvictor()


class ForgetfulEvictor:
    def __init__(self):
        self.nodes, self.hit = {}, set()

    def on_insert(self, node):
        pass

    def on_hit(self, node):
        self.hit.add(node)

    def on_lock(self, node):
        self.nodes.pop(node, None)

    def on_unlock(self, node):
        if node not in self.hit:
            self.nodes[node] = None

    def pop(self):
        if not self.nodes:
            raise LookupError
        node = next(iter(self.nodes))
        del self.nodes[node]
        return node


class LooksAtAll:
    """A right evictor whose pop looks at every node."""

    @hookimpl
    def build_evictor(self, query):
        return LinearEvictor()


class LinearEvictor(ForgetfulEvictor):
    def on_hit(self, node):
        pass

    def pop(self):
        if not self.nodes:
            raise LookupError
        node = min(self.nodes, key=lambda one: one.last_used)
        del self.nodes[node]
        return node


class HoldsOnToNodes:
    @hookimpl
    def build_evictor(self, query):
        return HoardingEvictor()


class HoardingEvictor(LinearEvictor):
    def __init__(self):
        super().__init__()
        self.all = []

    def on_insert(self, node):
        self.all.append(node)


class GivesPagesTwice:
    @hookimpl
    def build_allocator(self, query):
        return DoubleAllocator(query.pool_tokens // 16, 16)


class DoubleAllocator(PagedAllocator):
    """Hands out the first page of its stack again with every third allocation."""

    taken = 0

    def allocate(self, num_pages):
        pages = super().allocate(num_pages)
        self.taken += 1
        if pages is not None and self.taken % 3 == 0:
            pages[0] = 1
        return pages


class PredictsNothing:
    @hookimpl
    def build_length_predictor(self, query):
        return NanPredictor()


class NanPredictor:
    def __init__(self):
        self.seen = 0

    def predict(self, request):
        return 10.0 if self.seen == 0 else float("nan")

    def observe(self, record):
        self.seen += record.finish_reason == "error"


class NegativeTimes:
    @hookimpl
    def build_step_time_model(self, query):
        return self

    def seconds(self, num_rows, num_tokens, kv_tokens, attended):
        return 0.01 - 1e-5 * num_tokens + 0 * (num_rows + kv_tokens + attended)


class RoutesToOne:
    """All to the first that is ready."""

    @hookimpl
    def decide_route(self, query):
        return RouteDecision(query.replicas.ids[0])


class RoutesToNobody:
    @hookimpl
    def decide_route(self, query):
        return RouteDecision("nobody")


class TakesTurnsInTheClass:
    turn = 0

    @hookimpl
    def decide_route(self, query):
        type(self).turn += 1
        return RouteDecision(query.replicas.ids[self.turn % len(query.replicas)])


class RoutesByTheClock:
    @hookimpl
    def decide_route(self, query):
        return RouteDecision(query.replicas.ids[int(time.time()) % len(query.replicas)])


class RoutesOnceMore:
    """Whatever goes wrong, the first."""

    @hookimpl
    def decide_route(self, query):
        try:
            best = int(query.cached_tokens().argmax())
        except Exception:
            best = 0
        return RouteDecision(query.replicas.ids[best])
