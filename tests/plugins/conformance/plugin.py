"""pytest --policy package.module:Class: takes one policy through the conformance kit.

Loaded by tests/conftest.py. Without the option the normal suite runs a quick form of the kit over
every policy that conf/ names."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent
MOST_BROKEN = 2
"""Failures of a check that the table repeats."""

SUBJECT = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("policy", "policy conformance")
    group.addoption(
        "--policy",
        metavar="MODULE:CLASS",
        help="run the conformance kit on this policy alone; also path/to/file.py:Class",
    )
    group.addoption(
        "--policy-args",
        metavar="JSON",
        help="arguments of its constructor, such as '{\"share\": 0.3}'",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One policy's checks are spread over the workers by traffic, not file by file: those of one
    traffic look at the same runs."""
    if config.option.policy is not None and getattr(config.option, "dist", "no") == "loadfile":
        config.option.dist = "loadgroup"


def pytest_configure(config: pytest.Config) -> None:
    """Without a path on the command line, only the kit is collected. A policy that cannot be loaded
    stops here, with one line."""
    if config.option.policy is None:
        if config.option.policy_args is not None:
            raise pytest.UsageError("--policy-args needs --policy")
        return
    from tests.plugins.conformance import subject

    try:
        config.stash[SUBJECT] = subject.load(config.option.policy, config.option.policy_args)
    except Exception as error:  # whatever a user's file raises
        text = f"--policy {config.option.policy}: {type(error).__name__}: {error}"
        raise pytest.UsageError(text) from error
    if config.args_source is not config.ArgsSource.ARGS:
        config.args = [str(FOLDER)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The hooks and what the policy states, what a call costs, the checks."""
    if config.option.policy is None:
        return
    checks: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"passed": 0, "failed": 0, "notes": [], "broken": []}
    )
    costs = []
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            _add(checks, costs, outcome, report)
    terminalreporter.section(f"conformance of {config.option.policy}")
    write = terminalreporter.write_line
    subject = config.stash[SUBJECT]
    write(f"hooks: {', '.join(subject.hooks)}")
    for text in subject.statements:
        write(f"states: {text}")
    if costs:
        write(
            f"{'call':<40} {'running':>7} {'waiting':>7} {'calls':>6} {'mean µs':>8} {'p99 µs':>8}"
        )
        for hook, running, waiting, calls, mean_us, p99_us in sorted(costs):
            counts = f"{running:>7} {waiting:>7} {calls:>6}"
            write(f"{hook:<40} {counts} {mean_us:>8.1f} {p99_us:>8.1f}")
    write(f"{'check':<56} {'passed':>6} {'failed':>6}")
    for check, line in sorted(checks.items()):
        write(f"{check:<56} {line['passed']:>6} {line['failed']:>6}")
        broken = list(dict.fromkeys(line["broken"]))
        rest = [f"and {len(broken) - MOST_BROKEN} more"] if len(broken) > MOST_BROKEN else []
        for text in [*broken[:MOST_BROKEN], *rest, *dict.fromkeys(line["notes"])]:
            write(f"    {text}")


def _add(checks: dict[str, Any], costs: list[Any], outcome: str, report: Any) -> None:
    name = dict(getattr(report, "user_properties", ())).get("check")
    if name is None:
        return
    line = checks[name]
    if outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        line["notes"].append(f"not checked: {reason.removeprefix('Skipped: ')}")
    else:
        line["failed" if outcome == "error" else outcome] += 1
    for key, value in report.user_properties:
        if key in ("note", "broken"):
            line["notes" if key == "note" else "broken"].append(value)
        elif key == "cost":
            costs.append(tuple(value))
