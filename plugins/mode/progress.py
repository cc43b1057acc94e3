"""The progress bar of a bench, and of mode load."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from core.queries import StepEvent

EVERY_S = 0.1


class ProgressBar:
    """Requests done, tokens/s, KV use and preemptions, on standard error if that is a terminal.

    Use as a context manager; a step that falls within EVERY_S of the last update costs one clock
    read. label: what stands before the bar.
    """

    def __init__(
        self, enabled: bool, total: int, pool_pages: int = 0, label: str = "bench"
    ) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("requests · {task.fields[facts]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (enabled and sys.stderr.isatty()),
            expand=True,
        )
        self._task = self._bar.add_task(label, total=total, facts="")
        self._pool_pages = pool_pages
        self._begun_s = self._shown_s = time.monotonic()
        self._tokens = self._done = self._preempted = 0

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def update(self, event: StepEvent) -> None:
        """Count one step."""
        if self._bar.disable:
            return
        record = event.record
        self._tokens += record.sampled_tokens
        self._done += len(event.finished)
        self._preempted += sum(choice.kind == "preempted" for choice in record.choices)
        now_s = time.monotonic()
        if now_s - self._shown_s < EVERY_S:
            return
        self._shown_s = now_s
        rate = self._tokens / (now_s - self._begun_s)
        used = record.pages_request + record.pages_tree - record.pages_evictable
        facts = f"{rate:,.0f} tokens/s · KV {100 * used / max(self._pool_pages, 1):.0f} %"
        if self._preempted:
            facts += f" · {self._preempted:,} preemptions"
        self.show(self._done, facts)

    def show(self, done: int, facts: str) -> None:
        """Requests done, and what to say beside them."""
        self._bar.update(self._task, completed=done, facts=facts)
