"""Parameters of the kit: every policy, and for each the traffic, hooks and probes that fit it."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.conformance import rules
from tests.plugins.conformance.rules import BrokenRuleError, NotCheckedError, Runs
from tests.plugins.conformance.starvation import probes
from tests.plugins.conformance.subject import DECISIONS, OBJECTS, ROUTES, Subject, load, shipped
from tests.plugins.conformance.traffic import KINDS, Traffic, mixed

FOLDER = Path(__file__).resolve().parent
SEED = 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    option = metafunc.config.option
    subjects = _shipped() if option.policy is None else [load(option.policy, option.policy_args)]
    axes = [name for name in AXES if name in metafunc.fixturenames]
    if "routed" not in axes:
        subjects = [subject for subject in subjects if subject.in_engine]
    cases = [case for subject in subjects for case in _cases(subject, axes)]
    nobody = [pytest.param(None, *([None] * len(axes)), id="nobody")]
    metafunc.parametrize(["subject", *axes], cases or nobody)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what no policy here has a hook for, and of the quick form what is thorough."""
    left_out = []
    for item in items:
        if not item.path.is_relative_to(FOLDER) or not hasattr(item, "callspec"):
            continue
        subject = item.callspec.params.get("subject")
        if subject is None or (subject.quick and item.get_closest_marker("thorough")):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


@cache
def _shipped() -> list[Subject]:
    return shipped()


def _cases(subject: Subject, axes: list[str]) -> Iterator[Any]:
    values: list[tuple[Any, ...]] = [()]
    for name in axes:
        values = [(*row, value) for row in values for value in AXES[name](subject)]
    for row in values:
        words = [getattr(value, "name", str(value)) for value in row]
        label = [subject.name.rpartition(".")[2], *words] if subject.quick else words
        group = next((value.name for value in row if isinstance(value, Traffic)), "rest")
        marks = pytest.mark.xdist_group(group)
        yield pytest.param(subject, *row, id="-".join(label) or "policy", marks=marks)


def _traffic(subject: Subject) -> list[Traffic]:
    return [mixed(SEED)] if subject.quick else [kind(SEED) for kind in KINDS]


AXES: dict[str, Callable[[Subject], Any]] = {
    "traffic": _traffic,
    "rule": lambda subject: rules.SERVED,
    "decision": lambda subject: [hook for hook in subject.hooks if hook in DECISIONS],
    "built": lambda subject: [hook for hook in subject.hooks if hook in OBJECTS],
    "evictor": lambda subject: [hook for hook in subject.hooks if hook == "build_evictor"],
    "steady": lambda subject: [
        hook for hook in subject.hooks if subject.steady and hook in rules.STEADY
    ][:1],
    "probe": probes,
    "routed": lambda subject: [hook for hook in subject.hooks if hook in ROUTES],
}


@pytest.fixture(scope="session")
def runs() -> Runs:
    """Runs that several rules look at."""
    return Runs()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the summary groups by; set before skips."""
    name = item.originalname.removeprefix("test_")
    rule = item.callspec.params.get("rule") if hasattr(item, "callspec") else None
    item.user_properties.append(("check", rules.SERVED[rule] if rule else name.replace("_", " ")))


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A line for the summary below this check."""

    def write(text: str) -> None:
        if text:
            request.node.user_properties.append(("note", text))

    return write


@pytest.fixture
def holds(request: pytest.FixtureRequest, note: Callable[[str], None]) -> Callable[..., None]:
    """Calls a rule; what breaks it fails the test with the rule's message alone."""

    def check(rule: Callable[..., Any], *arguments: Any) -> None:
        __tracebackhide__ = True
        skipped = broken = said = None
        try:
            said = rule(*arguments)
        except NotCheckedError as error:
            skipped = str(error)
        except BrokenRuleError as error:
            broken = str(error)
        if skipped is not None:
            pytest.skip(skipped)
        if broken is not None:
            request.node.user_properties.append(("broken", broken))
            pytest.fail(broken, pytrace=False)
        note(said if isinstance(said, str) else "")

    return check
