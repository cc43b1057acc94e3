"""A small made-up run that the tests of sinks feed to them."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from core.records import Choice, ChoiceRecord, RequestRecord, StepRecord
from plugins.mode.step_totals import StepTotals
from plugins.mode.summary import summarise
from plugins.shared.run_info import RunInfo, SinkQuery

RUN = RunInfo(
    name="tiny",
    seed=3,
    policy="evict_shortest",
    hooks={"decide_order": "fcfs", "decide_preemption": "evict_shortest"},
    config={
        "seed": 3,
        "allocator": {"_target_": "plugins.allocator.paged.Paged", "page_size": 4},
        "+odd/key": 1,
    },
    manifest={"commit": "abc", "versions": {"torch": "2"}},
)
PAGE, POOL = 4, 8


def stream(times: list[float]) -> ChoiceRecord:
    count = len(times)
    return ChoiceRecord(
        array("i", range(100, 100 + count)),
        array("d", times),
        array("q", range(count)),
        [],
        "length",
    )


def steps() -> list[StepRecord]:
    """Six steps of 1 s: `a` is preempted in step 2 and resumed in step 4; `b` waits till step 1."""
    choices = {
        0: [
            Choice("a", 0, "admitted", "prompt_fits", "fits", {"cached_tokens": np.int64(4)}),
            Choice("b", 0, "refused", "prompt_fits", "3 pages needed, 1 free"),
        ],
        1: [Choice("b", 0, "admitted", "prompt_fits", "fits", {"cached_tokens": 0})],
        2: [
            Choice(
                "a",
                0,
                "preempted",
                "evict_shortest",
                "fewest generated",
                {"cause": "pages", "pages_freed": 2, "lost_tokens": 9},
            )
        ],
        3: [Choice("a", 0, "refused", "prompt_fits", "2 pages needed, 0 free")],
        4: [Choice("a", 0, "resumed", "prompt_fits", "fits", {"cached_tokens": 4})],
        5: [Choice("a", 0, "finished", "core", "length")],
    }
    return [
        StepRecord(
            step=index,
            start_s=float(index),
            launched_s=index + 0.1,
            end_s=index + 1.0,
            waiting=1,
            running=1,
            num_rows=1,
            decode_tokens=1,
            sampled_tokens=1,
            pages_free=POOL - 5,
            pages_tree=2,
            pages_evictable=1,
            pages_request=3,
            used_tokens=10,
            batch_plugin="chunked",
            batch_reason="decode first",
            rows=[("b" if index in (2, 3) else "a", 0, 1)],
            choices=choices[index],
            host_us={"plan": 100.0},
        )
        for index in range(6)
    ]


def requests() -> list[RequestRecord]:
    """`b` ends in step 3, `a` in step 5, `huge` never fits."""
    common: dict[str, Any] = {"client": "", "finish_reason": "length"}
    return [
        RequestRecord(
            "huge", "", 0.0, 99, finished_s=0.0, finish_reason="capacity", error="needs 25 pages"
        ),
        RequestRecord(
            "b", "", 0.5, 6, 1.0, 4.0, choices=[stream([2.0, 3.0, 4.0])], finish_reason="length"
        ),
        RequestRecord(
            "a",
            arrival_s=0.0,
            prompt_tokens=8,
            admitted_s=0.0,
            finished_s=6.0,
            cached_tokens=4,
            preemptions=1,
            recomputed_tokens=5,
            choices=[stream([1.0, 2.0, 5.0, 6.0])],
            **common,
        ),
    ]


def summary() -> dict[str, Any]:
    totals = StepTotals(PAGE, POOL)
    for record in steps():
        totals.add(record)
    plugins = [
        {"hook": "decide_order", "plugin": "fcfs", "asked": 2, "answered": 2},
        {"hook": "decide_preemption", "plugin": "last_admitted", "asked": 0, "answered": 0},
        {"hook": "decide_preemption", "plugin": "evict_shortest", "asked": 1, "answered": 1},
    ]
    return {**summarise(requests(), totals), "hooks": RUN.hooks, "plugins": plugins}


def feed(plugin: Any, folder: Path, run: RunInfo = RUN) -> Any:
    """Drive a sink through the whole run; returns it, closed."""
    sink = plugin.build_sink(query=SinkQuery(run, str(folder)))
    ended = {0: ["huge"], 3: ["b"], 5: ["a"]}
    records = {record.request_id: record for record in requests()}
    for record in steps():
        sink.step(record)
        for name in ended.get(record.step, []):
            sink.request(records[name])
    sink.close(run, summary())
    return sink
