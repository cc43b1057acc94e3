"""The replicas of a server in the terminal, live: python -m plugins.mode.replicas.watch [URL]."""

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

COLUMNS = ("id", "state", "requests", "running", "waiting", "KV free", "KV to come", "step")
DEVICE = ("device", "memory", "load")
COLOURS = {"ready": "green", "draining": "cyan", "joining": "yellow", "suspect": "yellow"}
GIB = 1 << 30
PATIENCE_S = 5.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--every-s", type=float, default=1.0)
    given = parser.parse_args(arguments)
    with Live(screen=False, auto_refresh=False) as live:
        while True:
            live.update(picture(given.url), refresh=True)
            time.sleep(given.every_s)


def picture(url: str) -> Group:
    """How the server at `url` stands now."""
    try:
        state, workers = asked(f"{url}/v1/engine"), asked(f"{url}/v1/workers")["data"]
    except (OSError, urllib.error.HTTPError) as error:
        return Group(Text(f"{url}: {error}", "red"))
    return Group(headline(state), table(workers))


def asked(url: str) -> dict[str, Any]:
    """The JSON of a GET, with the key in OPENAI_API_KEY if there is one."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=PATIENCE_S
    ) as answer:
        body: dict[str, Any] = json.load(answer)
    return body


def headline(state: Mapping[str, Any]) -> Text:
    """Model, policy and sums, or why nothing is served."""
    totals = state["totals"]
    sums = f"{state['requests']} requests, {totals.get('sampled_tokens', 0):,} tokens so far"
    moved = f", {totals['failovers']} moved" if totals.get("failovers") else ""
    text = Text(f"{state['model']}  {state['policy']}  {sums}{moved}")
    if not state["ready"]:
        text.append(f"\n{state['reason']}", "red")
    return text


def table(workers: Sequence[Mapping[str, Any]]) -> Table:
    """A row a replica; what a device does not tell is a dash."""
    found = Table(box=None, pad_edge=False)
    for name in (*COLUMNS, *DEVICE, "process", "restarts"):
        found.add_column(name, justify="left" if name in ("id", "state") else "right")
    for worker in sorted(workers, key=lambda one: str(one["id"])):
        found.add_row(*_row(worker))
    return found


def _row(worker: Mapping[str, Any]) -> list[Text | str]:
    report, device = worker.get("report", {}), worker.get("device", {})
    state = Text(worker["state"], COLOURS.get(worker["state"], "red"))
    memory, whole = device.get("memory_used_bytes"), device.get("memory_bytes")
    free = report.get("pages_free", 0) + report.get("pages_evictable", 0)
    pool, step_s = report.get("pool_pages"), report.get("step_s")
    return [
        str(worker["id"]),
        state,
        str(worker["requests"]),
        _shown(report.get("running"), "{:d}"),
        _shown(report.get("waiting"), "{:d}"),
        "–" if not pool else f"{free / pool:.0%} of {pool:,}",
        _shown(report.get("pages_promised"), "{:,d}"),
        "–" if step_s is None else f"{1000 * step_s:.1f} ms",
        _shown(device.get("temperature_c"), "{:.0f} °C"),
        "–" if memory is None or not whole else f"{memory / GIB:.0f} of {whole / GIB:.0f} GiB",
        _shown(device.get("utilisation"), "{:.0%}"),
        _shown(worker.get("process_id"), "{:d}"),
        str(worker["restarts"]),
    ]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


if __name__ == "__main__":
    main()
