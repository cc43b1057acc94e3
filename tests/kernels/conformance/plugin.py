"""pytest --kernel package.module:function: takes one attention kernel through the conformance kit.

Loaded by tests/conftest.py. Without the option the normal suite runs a quick form of the kit over
the kernels named in ours.py."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent
MAX_WORKERS = 8
"""Processes that share a GPU: enough to compile in parallel."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel", "attention kernel conformance")
    group.addoption(
        "--kernel",
        metavar="MODULE:FUNCTION",
        help="run the conformance kit on this attention kernel alone; also path/to/file.py:function"
        " and module:Class(key=value)",
    )
    group.addoption(
        "--kernel-kind",
        choices=("decode", "extend"),
        help="what the kernel is; default: extend if it has a parameter query_starts",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One kernel's checks are spread over the workers one by one, not file by file."""
    if config.option.kernel is None:
        return
    if getattr(config.option, "dist", "no") == "loadfile":
        config.option.dist = "load"
    if getattr(config.option, "numprocesses", None) in ("auto", "logical"):
        config.option.numprocesses = min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    """Without a path on the command line, only the kit is collected. A kernel that cannot be loaded
    stops here, with one line."""
    text = "thorough: a check that the quick form of the kernel conformance kit leaves out"
    config.addinivalue_line("markers", text)
    source = config.args_source
    if config.option.kernel is None:
        return
    from tests.kernels.conformance import kit  # brings Triton, which the environment must precede

    try:
        kit.load(config.option.kernel, config.option.kernel_kind)
    except (ImportError, AttributeError, ValueError, SyntaxError, OSError, TypeError) as error:
        raise pytest.UsageError(f"--kernel {config.option.kernel}: {error}") from error
    if source is not config.ArgsSource.ARGS:
        config.args = [str(FOLDER)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table, by kernel and check."""
    if config.option.kernel is None:
        return
    table: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"passed": 0, "failed": 0, "skipped": 0, "worst": (0.0, 0.0, 0.0), "notes": []}
    )
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            _add(table, outcome, report)
    terminalreporter.section(f"conformance of {config.option.kernel}")
    write = terminalreporter.write_line
    write(f"{'check':<66} {'passed':>6} {'failed':>6} {'error / limit':>19}")
    for check, line in sorted(table.items()):
        _, error, limit = line["worst"]
        measured = f"{error:.1e} / {limit:.1e}" if limit else ""
        write(f"{check:<66} {line['passed']:>6} {line['failed']:>6} {measured:>19}")
        for note in dict.fromkeys(line["notes"]):
            write(f"    {note}")


def _add(table: dict[str, dict[str, Any]], outcome: str, report: Any) -> None:
    properties = dict(getattr(report, "user_properties", ()))
    name = properties.get("check")
    if name is None:
        return
    line = table[name]
    line["failed" if outcome == "error" else outcome] += 1
    if outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        line["notes"].append(reason.removeprefix("Skipped: ") + ": not checked")
    for key, value in report.user_properties:
        if key == "note":
            line["notes"].append(value)
        elif key == "deviation":
            error, limit = value
            line["worst"] = max(line["worst"], (error / (limit or 1.0), error, limit))
