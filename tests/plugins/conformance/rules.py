"""The rules that hold for every policy in an engine. Each function takes a policy and traffic and
raises BrokenRuleError, whose message names the rule, the hook and what happened."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from tests.core import test_joined_steps as joined_steps
from tests.plugins.conformance.play import FATAL, Played, played, played_between
from tests.plugins.conformance.subject import DECISIONS, NAME, Subject
from tests.plugins.conformance.traffic import END_TOKENS, Traffic, mixed
from tests.plugins.conformance.watch import Answer, PoisonError, Watch

COMPARED = ("decide_admission", "decide_batch", "decide_preemption", "decide_cache_admission")
"""Hooks whose every answer must be the same with and without overlap. Orders are compared by what
came of them: a preempted request whose token comes late is keyed once more."""

STEADY = "decide_batch", "on_step"
"""Hooks whose plugins say whether steps that only decode may go in one (core/hookspecs.py)."""

SERVED = {
    "decisions": "every decision is accepted by the core",
    "progress": "every request ends",
    "conservation": "strict mode's books balance, and nothing is held at the end",
    "exceptions": "no hook raises",
    "queries": "queries are left as they are",
    "clock and chance": "time and chance come from the query",
}
"""What one run shows."""


class BrokenRuleError(AssertionError):
    """A rule that a policy breaks."""

    def __init__(self, rule: str, subject: Subject, hook: str, text: str) -> None:
        super().__init__(f"{rule}: {hook} of {subject.name}: {text}")


class NotCheckedError(Exception):
    """A rule that cannot be checked here, and why."""


class Runs:
    """Runs of subjects, each played once and shared by the rules that look at it."""

    def __init__(self) -> None:
        self._kept: dict[Any, Played] = {}

    def plain(self, subject: Subject, traffic: Traffic) -> Played:
        """One launch at a time, queries compared."""
        return self._of(
            subject, traffic, "plain", lambda: played(subject, traffic, watch=Watch(True))
        )

    def between(self, subject: Subject, traffic: Traffic) -> Played:
        """In turns with a second engine."""
        other = mixed(seed=99)
        make = lambda: played_between(subject, traffic, other)  # noqa: E731
        return self._of(subject, traffic, "between", make)

    def again(self, subject: Subject, traffic: Traffic) -> Played:
        """A second time, alone."""
        return self._of(subject, traffic, "again", lambda: played(subject, traffic, checks=False))

    def overlapped(self, subject: Subject, traffic: Traffic) -> Played:
        """Two launches in flight."""
        make = lambda: played(subject, traffic, overlap=True)  # noqa: E731
        return self._of(subject, traffic, "overlap", make)

    def ended_by_tokens(self, subject: Subject, traffic: Traffic, overlap: bool) -> Played:
        """The same requests until their end tokens."""
        ends = traffic.until_end_tokens()
        make = lambda: played(subject, ends, overlap=overlap, end_tokens=END_TOKENS)  # noqa: E731
        return self._of(subject, traffic, f"ends {overlap}", make)

    def _of(
        self, subject: Subject, traffic: Traffic, kind: str, make: Callable[[], Played]
    ) -> Played:
        key = (id(subject), traffic.name, kind)
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def served(runs: Runs, subject: Subject, traffic: Traffic, rule: str) -> None:
    """One of SERVED."""
    run = runs.plain(subject, traffic)
    for breach in run.breaches:
        if breach.rule == rule:
            raise BrokenRuleError(rule, subject, breach.hook, breach.text)
    if not run.ended_well and rule in FATAL:
        raise NotCheckedError(f"the run broke off: {run.breaches[-1].rule}")


def deterministic(runs: Runs, subject: Subject, traffic: Traffic) -> None:
    """The same seed gives the same run, whatever else was played in the process."""
    first = _whole(runs.plain(subject, traffic))
    if runs.between(subject, traffic).facts == first.facts:
        return  # then it repeats alone, too
    again = runs.again(subject, traffic)
    if again.facts != first.facts:
        hook, text = _difference(subject, first, again)
        text += ": first and second run of one seed differ"
        raise BrokenRuleError("determinism", subject, hook, text)


def isolated(runs: Runs, subject: Subject, traffic: Traffic) -> None:
    """A second engine in the process changes nothing."""
    alone, between = _whole(runs.plain(subject, traffic)), runs.between(subject, traffic)
    if between.facts == alone.facts:
        return
    if runs.again(subject, traffic).facts != alone.facts:
        raise NotCheckedError("runs differ even without a second engine")
    hook, text = _difference(subject, alone, between)
    text += ": alone and beside a second engine differ; keep no state in modules or classes"
    raise BrokenRuleError("isolation", subject, hook, text)


def overlap_safe(runs: Runs, subject: Subject, traffic: Traffic) -> str:
    """With forced lengths the same decisions, launched ahead or not. Returns a note: a policy that
    learns from results sees them a step later and may differ."""
    plain, ahead = _whole(runs.plain(subject, traffic)), runs.overlapped(subject, traffic)
    for breach in ahead.breaches:
        raise BrokenRuleError("overlap", subject, breach.hook, f"with overlap: {breach.text}")
    answers = [[one for one in run.answers if one.hook in COMPARED] for run in (plain, ahead)]
    same = plain.decisions == ahead.decisions
    if same and (subject.observes or answers[0] == answers[1]):
        return ""
    hook, text = _difference(subject, plain, ahead, COMPARED)
    if subject.observes:
        return f"'{traffic.name}': decisions differ with overlap, results come a step later"
    text += ": with one launch at a time and with overlap differ; count with `emitted` and"
    text += " `remaining`, not with `generated` and `known`"
    raise BrokenRuleError("overlap", subject, hook, text)


def same_tokens(runs: Runs, subject: Subject, traffic: Traffic) -> None:
    """With end tokens each request gets the same tokens, launched ahead or not."""
    if "oracle" in subject.statements:
        raise NotCheckedError("an oracle knows no length that end tokens decide")
    plain, ahead = (runs.ended_by_tokens(subject, traffic, overlap) for overlap in (False, True))
    for run in (plain, ahead):
        for breach in run.breaches:
            text = f"requests that end by token: {breach.text}"
            raise BrokenRuleError("overlap", subject, breach.hook, text)
    for name, got in plain.tokens.items():
        if (other := ahead.tokens.get(name)) != got:
            text = f"tokens of {name!r} differ with overlap: {got} and {other}"
            raise BrokenRuleError("overlap", subject, subject.hooks[0], text)


def lets_exceptions_pass(subject: Subject, traffic: Traffic, hook: str) -> None:
    """What a query raises when it is read comes out of the hook."""
    for poison_at in (1, 4):
        run = played(subject, traffic, watch=Watch(poisons=hook, poison_at=poison_at))
        if run.swallowed:
            text = f"swallowed an exception that its query raised ({PoisonError.__name__})"
            raise BrokenRuleError("exceptions", subject, hook, text)


def joins_steps(subject: Subject) -> None:
    """A policy that calls itself steady: steps that only decode, gone in one, tell the same."""
    alone, joined = (_told(subject, joins) for joins in (False, True))
    names = "tokens", "ends", "decisions", "sums", "steps"
    for name, one, other in zip(names, alone, joined, strict=True):
        if one != other:
            hook = next(hook for hook in subject.hooks if hook in STEADY)
            text = f"is called steady, but {name} differ where steps that only decode go in one"
            raise BrokenRuleError("steady", subject, hook, text)


def _told(subject: Subject, joins: bool) -> Any:
    engine = joined_steps.make(plugins={NAME: subject.make()})
    events = joined_steps.play(engine, joined_steps.workload(num=8), joins)
    return joined_steps.told(engine, events)


def was_asked(runs: list[Played], subject: Subject) -> str:
    """Each deciding hook was asked, and answered, somewhere. Returns how often."""
    counts = []
    for hook in subject.hooks:
        if hook not in DECISIONS:
            continue
        asked = sum(run.asked[hook] for run in runs)
        answered = sum(run.answered[hook] for run in runs)
        counts.append(f"{hook} asked {asked} times, answered {answered}")
        if not asked:
            text = "was never asked, whatever the traffic; does it need `displaces = True`?"
            raise BrokenRuleError("coverage", subject, hook, text)
        if not answered:
            raise BrokenRuleError("coverage", subject, hook, "never gave an answer but None")
    return "; ".join(counts)


def _whole(run: Played) -> Played:
    if not run.ended_well:
        raise NotCheckedError(f"the run broke off: {run.breaches[-1].rule}")
    return run


def _difference(
    subject: Subject, one: Played, other: Played, hooks: tuple[str, ...] = DECISIONS
) -> tuple[str, str]:
    """The hook and the step at which two runs part, in words."""
    pairs = zip_longest(one.answers, other.answers, fillvalue=Answer(-1, "", "nothing"))
    own = ((a, b) for a, b in pairs if a != b and (a.hook or b.hook) in hooks)
    found = next(own, None)
    if found is None:
        steps = sorted({*one.decisions, *other.decisions})
        differs = (s for s in steps if one.decisions.get(s) != other.decisions.get(s))
        return subject.hooks[0], f"step {next(differs, 'of the end')}"
    a, b = found
    hook = a.hook or b.hook
    return hook, f"step {max(a.step, b.step)}, {_short(a.said)} and {_short(b.said)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
