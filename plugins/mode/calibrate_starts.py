"""How long the host takes to start launches of each kind, in the way that an engine comes to them:
several chunks at once, after a few steps of one-token rows, which leave its caches to other code.
A grid repeats one launch many times, and the host is quicker there."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from time import perf_counter

import numpy as np

from core.launch import Launch
from core.protocols import Executor
from plugins.mode.calibrate_grid import Point, Room, launches
from plugins.shared.launch_sizes import LaunchSizes

ROUNDS, DECODES = 8, 4
"""How often each launch is started, and the steps of one-token rows before it."""
SHAPES = (
    Point(32, 1024, 64, 256, num_chunks=2),  # few tokens
    Point(32, 1024, 96, 1024, num_chunks=12),  # many, and much to attend to
)


def time_starts(
    executor: Executor, room: Room, sizes: LaunchSizes, rng: np.random.Generator
) -> dict[str, float]:
    """By kind of launch (plugins/shared/launch_sizes.py), the mean seconds until it is started.
    Kinds of no launch that the engine has room for are left out."""
    found: dict[str, list[float]] = {}
    for point in _points(room, sizes):
        [whole] = launches(point, room, rng, 1)
        decodes, chunks, both = _parts(whole)
        for one in (whole, decodes, chunks):
            _start(executor, one)
        for _ in range(ROUNDS):
            for one in (chunks, both):
                before = [_start(executor, decodes) for _ in range(DECODES)]
                found.setdefault("decode", []).append(before[-1])
                found.setdefault(sizes.of(one)[2], []).append(_start(executor, one))
    return {kind: fmean(seconds) for kind, seconds in found.items()}


def _points(room: Room, sizes: LaunchSizes) -> Iterator[Point]:
    shapes = list(SHAPES)
    graphed = {*sizes.chunks, *sizes.mixed}
    alone = next((size for size in sizes.tokens if size > 1024 and size not in graphed), 0)
    if graphed and alone:  # launched kernel by kernel
        shapes.append(Point(32, 1024, alone - 32))
    return (shape for shape in shapes if room.holds(shape))


def _parts(whole: Launch) -> tuple[Launch, Launch, Launch]:
    """Of a step that sets its rows up: its one-token rows, its longer rows, and all, once more."""
    again = replace(whole, setups=(), table_updates=whole.table_updates[:0])
    ones = whole.num_decode_rows
    return _rows(again, slice(0, ones), ones), _rows(again, slice(ones, None), 0), again


def _rows(launch: Launch, which: slice, num_decode_rows: int) -> Launch:
    num_tokens = launch.num_tokens[which]
    return replace(
        launch,
        row_ids=launch.row_ids[which],
        first_positions=launch.first_positions[which],
        num_tokens=num_tokens,
        token_ids=np.ones(num_tokens.sum(), np.int32),
        feedback=launch.feedback[which],
        samples=launch.samples[which],
        num_decode_rows=num_decode_rows,
    )


def _start(executor: Executor, launch: Launch) -> float:
    since = perf_counter()
    executor.launch(launch)
    seconds = perf_counter() - since
    executor.collect()
    return seconds
