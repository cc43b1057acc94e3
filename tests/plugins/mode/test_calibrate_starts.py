"""plugins/mode/calibrate_starts.py: launches of each kind, after steps of one-token rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.launch import Launch, LaunchResult
from plugins.mode import calibrate_starts
from plugins.mode.calibrate_grid import Point, Room, grid, launches
from plugins.mode.calibrate_starts import DECODES, ROUNDS, time_starts
from plugins.shared.launch_sizes import LaunchSizes

ROOM = Room(max_rows=256, max_tokens=8192, max_len=16384, num_pages=9000, page_size=16)
SIZES = LaunchSizes([32], [128, 2048, 2176, 2560], [128, 2048, 2560], [192], mixed_pairs=10**6)


class Host:
    """Takes a second for each row launched, and 100 more for a launch after another of chunks."""

    def __init__(self) -> None:
        self.now_s, self.launched, self.flying = 0.0, [], 0

    def launch(self, launch: Launch) -> None:
        assert len(launch.token_ids) == launch.num_tokens.sum()
        assert (launch.num_tokens[: launch.num_decode_rows] == 1).all()
        assert (launch.num_tokens[launch.num_decode_rows :] > 1).all()
        chunks = launch.num_decode_rows < len(launch.row_ids)
        after_chunks = bool(self.launched) and self.launched[-1]
        self.now_s += len(launch.row_ids) + 100 * (chunks and after_chunks)
        self.launched.append(chunks)
        self.flying += 1

    def collect(self) -> LaunchResult:
        self.flying -= 1
        return LaunchResult(0, np.empty(0, np.int32), self.now_s)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(calibrate_starts, "perf_counter", lambda: found.now_s)
    return found


def test_kinds_are_started_after_steps_of_one_token_rows(host: Host):
    """Two chunks of 64 beside 32 rows are a graph, twelve of 96 alone or beside rows are pieces;
    2,176 tokens have no graph."""
    executor: Any = host
    found = time_starts(executor, ROOM, SIZES, np.random.default_rng(0))
    # Alone (2 rows) and beside 32 in a graph; one chunk alone and beside 32 rows without one.
    assert found == {
        "decode": 32.0,
        "graphed": (2 + 34) / 2,
        "chunk": 12.0,
        "mixed": 44.0,
        "eager": (1 + 33) / 2,
    }
    assert host.flying == 0
    assert len(host.launched) == 3 * (3 + 2 * ROUNDS * (DECODES + 1))


def test_kinds_for_which_there_is_no_room_are_left_out(host: Host):
    executor: Any = host
    small = replace(ROOM, max_tokens=200)
    found = time_starts(executor, small, SIZES, np.random.default_rng(0))
    assert set(found) == {"decode", "graphed"}
    assert time_starts(executor, replace(ROOM, max_rows=8), SIZES, np.random.default_rng(0)) == {}


def test_a_step_of_several_chunks_counts_each():
    """Two rows of 9, three chunks of 4 behind 5."""
    point = Point(2, 9, 4, 5, num_chunks=3)
    assert (point.num_rows, point.num_tokens, point.kv_tokens) == (5, 14, 18 + 27)
    assert point.attended == 18 + 3 * (6 + 7 + 8 + 9)
    assert point.lengths() == [9, 9, 9, 9, 9]
    [launch] = launches(point, ROOM, np.random.default_rng(0), 1)
    assert launch.num_tokens.tolist() == [1, 1, 4, 4, 4]
    assert launch.first_positions.tolist() == [8, 8, 5, 5, 5]
    assert Point(2, 9, num_chunks=3).num_rows == 2, "of no tokens: none"


def test_grid_holds_every_chunk_as_several_short_ones():
    points = [
        point for point in grid([1, 8], [16, 64], [32, 512, 1024, 2048]) if point.num_chunks > 1
    ]
    assert points == [
        Point(0, 0, 64, 0, num_chunks=8),
        Point(8, 64, 128, 16, num_chunks=8),
        Point(0, 0, 256, 64, num_chunks=8),
    ]
