"""Allocators, length predictors and step-time models, held against their protocols."""

from array import array
from typing import Any

import numpy as np

from core.errors import InvariantError
from core.queries import AllocatorQuery, LengthPredictorQuery, StepTimeQuery
from core.records import ChoiceRecord, RequestRecord
from core.request import Request, SamplingParams
from tests.plugins.conformance.play import Player
from tests.plugins.conformance.rules import BrokenRuleError, NotCheckedError
from tests.plugins.conformance.sequences import hold_for_all
from tests.plugins.conformance.subject import Subject
from tests.plugins.conformance.traffic import mixed

POOL_TOKENS, MODEL_LEN = 1024, 256
KINDS = ("take", "take", "give", "half")


def allocator_keeps_its_promises(subject: Subject) -> None:
    """Any sequence of allocations: free and distinct ids, books that add up, none given twice."""

    hold_for_all(
        lambda steps: _Allocations(subject).run(steps), _draw, 60 if subject.quick else 400
    )


def _draw(rng: np.random.Generator) -> tuple[str, int]:
    return str(rng.choice(KINDS)), int(rng.integers(1, 25))


class _Allocations:
    """An allocator beside the set of pages it handed out."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        query = AllocatorQuery(POOL_TOKENS, MODEL_LEN)
        self.allocator = subject.make().build_allocator(query=query)
        self.taken: list[list[int]] = []
        self._check()

    def run(self, steps: list[tuple[str, int]]) -> None:
        for kind, number in steps:
            if kind == "take":
                self._take(number)
            elif self.taken:
                self._give(number % len(self.taken), kind == "half")
            self._check()
        if self.taken:
            self._give_twice(self.taken[0])
        for pages in self.taken:
            self.allocator.free(np.array(pages, np.int32))
        self.taken = []
        self._check()

    def _take(self, number: int) -> None:
        before, can = self.allocator.num_free, self.allocator.can_allocate(number)
        pages = self.allocator.allocate(number)
        if (pages is not None) != can:
            got = "None" if pages is None else "pages"
            raise self._broken(f"can_allocate({number}) said {can}, allocate gave {got}")
        if pages is None:
            if self.allocator.num_free != before:
                raise self._broken("allocate gave None and changed num_free")
            return
        given = np.asarray(pages).tolist()
        held = {page for pages in self.taken for page in pages}
        inside = all(1 <= page <= self.allocator.num_pages for page in given)
        if len(set(given)) != number or not inside or set(given) & held:
            rule = f"{number} distinct free pages of 1 .. {self.allocator.num_pages}"
            raise self._broken(f"allocate must give {rule}, got {given}")
        self.taken.append(given)

    def _give(self, index: int, half: bool) -> None:
        pages = self.taken.pop(index)
        keep = len(pages) // 2 if half and self.allocator.shares_pages else 0
        self.allocator.free(np.array(pages[keep:], np.int32))
        if keep:
            self.taken.append(pages[:keep])

    def _give_twice(self, pages: list[int]) -> None:
        self.taken.remove(pages)
        self.allocator.free(np.array(pages, np.int32))
        before = self.allocator.num_free
        try:
            self.allocator.free(np.array(pages, np.int32))
        except InvariantError:
            if self.allocator.num_free != before:
                raise self._broken("free refused pages and took them all the same") from None
            return
        raise self._broken("free took pages that were free already; InvariantError was due")

    def _check(self) -> None:
        self.allocator.check()
        held = sum(map(len, self.taken))
        if self.allocator.num_free + held != self.allocator.num_pages:
            books = f"num_free {self.allocator.num_free} and {held} handed out"
            raise self._broken(f"{books} must be num_pages = {self.allocator.num_pages}")
        if not 0 <= self.allocator.unusable_pages(3) <= self.allocator.num_free:
            unusable = self.allocator.unusable_pages(3)
            raise self._broken(f"unusable_pages must be within num_free, got {unusable}")

    def _broken(self, text: str) -> Exception:
        return BrokenRuleError("protocol", self.subject, "build_allocator", text)


def predictor_keeps_its_promises(subject: Subject) -> None:
    """Finite lengths for odd requests, before and after it saw some end in every way; the same for
    the same seed and history."""
    first, second = (_predictions(subject) for _ in range(2))
    if first != second:
        text = f"two predictors of one seed and history differ: {first[:4]} and {second[:4]}"
        raise BrokenRuleError("determinism", subject, "build_length_predictor", text)


def _predictions(subject: Subject) -> list[float]:
    plugin = subject.make()
    predictor = plugin.build_length_predictor(query=LengthPredictorQuery(3))
    oracle = bool(getattr(plugin, "oracle", False))
    said = []
    for index, request in enumerate(_requests(oracle)):
        prompt = request.prompt.tobytes()
        value = predictor.predict(request)
        if not (isinstance(value, (int, float, np.number)) and np.isfinite(value) and value >= 0):
            text = f"predict must be a finite number >= 0, got {value!r} for {request}"
            raise BrokenRuleError("protocol", subject, "build_length_predictor", text)
        if request.prompt.tobytes() != prompt:
            text = "predict changed the request's prompt"
            raise BrokenRuleError("queries", subject, "build_length_predictor", text)
        said.append(float(value))
        predictor.observe(_record(request, index))
    return said


def _requests(oracle: bool) -> list[Request]:
    rng = np.random.default_rng(5)
    asked = []
    for index in range(60):
        params = SamplingParams(
            max_tokens=(1, 7, 100, 2**40)[index % 4],
            n=1 + index % 2,
            ignore_eos=index % 3 == 0,
        )
        prompt = rng.integers(1, 1000, int(rng.integers(1, 300))).astype(np.int32)
        labels = {"client": f"c{index % 3}", "session": f"s{index % 5}", "arrival_s": index / 10}
        forced = int(rng.integers(1, 50)) if oracle else None
        asked.append(Request(f"r{index}", prompt, params, forced_output=forced, **labels))
    return asked


def _record(request: Request, index: int) -> RequestRecord:
    record = RequestRecord(
        request.request_id, request.client, request.arrival_s, len(request.prompt)
    )
    record.finish_reason = ("stop", "length", "abort", "error", "capacity")[index % 5]
    record.finished_s = request.arrival_s + 1.0
    num = 0 if record.finish_reason in ("error", "capacity") else 1 + index % 40
    for _ in range(request.params.n):
        choice = ChoiceRecord(array("i", range(num)), array("d", [0.5] * num))
        choice.steps, choice.finish_reason = array("q", range(num)), record.finish_reason
        record.choices.append(choice)
    return record


def step_time_keeps_its_promises(subject: Subject) -> str:
    """Finite times >= 0 for numbers and arrays, the same element by element, before the first step
    and after a run. Returns a note where more work is said to take less time."""

    def no_model() -> Any:
        raise NotCheckedError("asks for a model, which this kit has none of")

    fresh = subject.make().build_step_time_model(query=StepTimeQuery(no_model))
    _check_times(subject, fresh, "before the first step")
    player = Player(subject, mixed(seed=1))
    player.run()
    return _check_times(subject, player.engine.state.step_time, "after a run")


def _check_times(subject: Subject, model: Any, when: str) -> str:
    facts = np.array(
        [
            [1, 1, 1, 1],
            [8, 8, 4000, 4000],
            [64, 64, 90_000, 90_000],
            [9, 520, 6000, 700_000],
            [256, 8192, 2_000_000, 40_000_000],
        ]
    )
    times = np.asarray(model.seconds(*facts.T))
    if times.shape != (len(facts),) or not np.isfinite(times).all() or (times < 0).any():
        text = f"{when} seconds must be {len(facts)} finite numbers >= 0, got {times}"
        raise BrokenRuleError("protocol", subject, "build_step_time_model", text)
    single = [float(model.seconds(*row)) for row in facts.tolist()]
    if not np.allclose(single, times, rtol=1e-9):
        text = f"{when} seconds differ for numbers and arrays: {single} and {times.tolist()}"
        raise BrokenRuleError("protocol", subject, "build_step_time_model", text)
    if np.asarray(model.seconds(facts[:, :1], *facts[0, 1:])).shape != (len(facts), 1):
        text = f"{when} seconds do not broadcast [n, 1] with numbers"
        raise BrokenRuleError("protocol", subject, "build_step_time_model", text)
    less = (times[1:3] < times[:2]).any()
    return f"{when} more decode rows are said to take less time: {times[:3]}" if less else ""
