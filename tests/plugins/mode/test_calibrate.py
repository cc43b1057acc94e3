"""mode=calibrate: what it measures, and that the fit finds what is known."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from core.errors import ConfigError
from core.launch import LaunchResult
from core.records import StepRecord
from kernels import torch_reference
from plugins.attention.paged import PagedAttention
from plugins.executor.simulated import Simulated
from plugins.executor.torch_runner import TorchRunner
from plugins.mode import calibrate_refit
from plugins.mode.calibrate import Calibrate, mixed_pairs
from plugins.mode.calibrate_fit import fit, of_ran, steps_of, typical
from plugins.mode.calibrate_grid import FIRST_ID, Point, Room, Timed, grid, launches, time_point
from plugins.mode.calibrate_host import between_steps_s, fit_host, host_times
from plugins.mode.calibrate_traffic import STRETCH, load_ran, ran_of
from plugins.mode.simulate import Simulate
from plugins.model.loader import HuggingFaceModel
from plugins.shared.calibration import load
from plugins.shared.clocks import RealClock
from plugins.shared.launch_sizes import GRAPHED_CHUNKS as CHUNKS
from plugins.shared.launch_sizes import GRAPHED_CONTEXT as CONTEXT
from plugins.shared.launch_sizes import KINDS, LaunchSizes
from plugins.step_time.calibrated import Calibrated
from plugins.step_time.fixed import Fixed
from plugins.step_time.roofline import Roofline
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, make_session

ROOT = Path(__file__).resolve().parents[3]
GRID: dict[str, Any] = {
    "rows": [1, 2, 4, 8],
    "contexts": [16, 64, 256],
    "chunks": [16, 64, 120],
    "prefixes": [],
    "repeats": 3,
}


def calibrated(folder: Path, step_time: Any, **arguments: Any) -> Path:
    """The file that a calibration of the simulated executor writes."""
    folder.mkdir(exist_ok=True)
    executor = Simulated(step_time, vocab_size=VOCAB, max_model_len=512)
    session = make_session(folder, Synthetic(12), pages=400, executor=executor)
    Calibrate(**GRID | arguments).run(session)
    return folder / "calibration.json"


def test_facts_of_a_step_by_hand():
    """Two rows that read 10 each; a chunk of 3 behind 4, which attend to 5, 6 and 7."""
    point = Point(2, 10, 3, 4)
    assert (point.num_rows, point.num_tokens, point.kv_tokens) == (3, 5, 27)
    assert point.attended == 20 + 5 + 6 + 7


def test_grid_holds_rows_by_contexts_chunks_alone_and_both():
    points = grid([1, 8], [16, 64], [32])
    assert [p for p in points if not p.chunk] == [
        Point(1, 16),
        Point(1, 64),
        Point(8, 16),
        Point(8, 64),
    ]
    assert [p for p in points if not p.rows] == [
        Point(0, 0, 32, 0),
        Point(0, 0, 32, 16),
        Point(0, 0, 32, 64),
    ]
    assert {(p.rows, p.chunk) for p in points if p.rows and p.chunk} == {(1, 32), (8, 32)}


def test_launches_have_pages_of_their_own_and_repeat_the_same_step():
    room = Room(max_rows=4, max_tokens=64, max_len=100, num_pages=12, page_size=16)
    first, second = launches(Point(2, 33, 20, 10), room, np.random.default_rng(0), 2)
    assert first.first_positions.tolist() == [32, 32, 10]
    assert first.num_tokens.tolist() == [1, 1, 20]
    assert [setup.tokens.size for setup in first.setups] == [33, 33, 30]
    pages = first.table_updates[:, 2].tolist()
    assert len(set(pages)) == len(pages) == 3 + 3 + 2
    assert min(pages) >= 1
    assert max(pages) <= 12
    assert not second.setups
    assert not len(second.table_updates)
    assert second.first_positions.tolist() == first.first_positions.tolist()


def test_grid_holds_prefixes_by_rows_and_every_other_beside_a_chunk():
    points = [p for p in grid([1, 4, 16], [16], [32, 64, 128], [64, 256]) if p.shared]
    assert [p for p in points if not p.chunk] == [
        Point(4, 80, shared=64, sharers=4),
        Point(4, 320, shared=256, sharers=2),
        Point(16, 80, shared=64, sharers=2),
        Point(16, 320, shared=256, sharers=8),
    ]
    assert [p for p in points if p.chunk] == [
        Point(16, 80, 32, 64, 64, 2),
        Point(16, 320, 64, 256, 256, 8),
    ]


def test_rows_that_share_a_prefix_hold_its_pages_in_turn():
    """Five rows, two at a time: three prefixes, of which two are held twice."""
    room = Room(max_rows=8, max_tokens=64, max_len=100, num_pages=14, page_size=16)
    point = Point(5, 40, 20, 0, shared=32, sharers=2)
    assert (point.prefixes, point.repeated) == (3, 64)
    assert room.holds(point)
    assert not replace(room, num_pages=12).holds(point), "ten pages for five rows, and two"
    assert not room.holds(replace(point, shared=24)), "half a page"
    [launch] = launches(point, room, np.random.default_rng(0), 1)
    table = np.zeros((6, 3), np.int32)
    row, index, page = launch.table_updates.T
    table[row, index] = page
    assert table[0, :2].tolist() == table[3, :2].tolist()
    assert table[1, :2].tolist() == table[4, :2].tolist()
    assert len(set(table[table > 0].tolist())) == 3 * 2 + 5 + 2
    assert table.max() == 3 * 2 + 5 + 2, "the first pages of the pool"


def test_a_step_takes_the_device_and_its_start_the_host(monkeypatch: pytest.MonkeyPatch):
    """Ends 1, 2, 4, 7, 11 .. s; the host takes 0, 1, 2, 3 .. s to start a launch."""

    class Steps:
        def __init__(self) -> None:
            self.ends_s = [1.0, 2.0, 4.0, 7.0, 11.0]

        def launch(self, launch: Any) -> None:
            clock.append(clock[-1] + launch.launch_id - FIRST_ID)

        def collect(self) -> Any:
            return LaunchResult(0, np.empty(0, np.int32), self.ends_s.pop(0))

    clock = [0.0]
    monkeypatch.setattr("plugins.mode.calibrate_grid.perf_counter", lambda: clock[-1])
    room = Room(max_rows=4, max_tokens=64, max_len=100, num_pages=12, page_size=16)
    rng = np.random.default_rng(0)
    executor: Any = Steps()
    took = time_point(executor, Point(1, 16), room, rng, 1, 3)
    assert took == Timed(seconds=3.0, launch_s=3.0), "of 2, 3 and 4 both"


@pytest.mark.parametrize(
    "point",
    [Point(4, 16, 16), Point(1, 101), Point(3, 80), Point(1, 16, 64)],
    ids=["rows", "length", "pages", "tokens"],
)
def test_steps_that_do_not_fit_are_known(point: Point):
    room = Room(max_rows=4, max_tokens=64, max_len=100, num_pages=12, page_size=16)
    assert room.holds(Point(2, 33, 20, 10))
    assert not room.holds(point)


def test_coefficients_of_a_linear_device_come_back(tmp_path: Path):
    costs = {"step_s": 0.01, "row_s": 2e-4, "token_s": 5e-5, "kv_token_s": 1e-6, "pair_s": 2e-7}
    found = load(calibrated(tmp_path, Fixed(**costs)))
    decode, other = found.forms["decode"], found.forms["other"]
    assert set(found.forms) == {"decode", "other"}
    each = costs["row_s"] + costs["token_s"]
    rows = np.array(decode.tokens)
    assert (rows[0], rows[-1]) == (1, 8)
    assert decode.base_s == pytest.approx((costs["step_s"] + each * rows).tolist(), rel=1e-3)
    # A pair of a one-token row is a context token read.
    kv_s = costs["kv_token_s"] + costs["pair_s"]
    assert decode.terms["kv_token"] == pytest.approx(kv_s, rel=1e-3)
    assert other.terms["kv_token"] == pytest.approx(kv_s, rel=1e-3)
    assert other.terms["pair"] == pytest.approx(costs["pair_s"], rel=1e-3)
    assert other.terms["row"] == pytest.approx(costs["row_s"], rel=1e-3)
    tokens = np.array(other.tokens)
    assert other.base_s == pytest.approx((costs["step_s"] + costs["token_s"] * tokens).tolist())
    assert found.test.points == round(0.25 * len(found.points))
    assert found.test.max is not None
    assert found.test.max < 1e-6
    # A run's steps, which include the host's time that passed under a clock that does not move.
    assert found.traffic.points >= 50 / STRETCH


def test_context_read_again_is_told_from_context_read_once(tmp_path: Path):
    """1 us a token of context, a tenth of that for one that a row before holds."""
    rng, facts = np.random.default_rng(0), []
    for rows, tokens in rng.integers((2, 100), (64, 9000), (40, 2)).tolist():
        again = int(rng.integers(0, tokens))
        seconds = 1e-3 + 1e-5 * rows + 1e-6 * (tokens - again) + 1e-7 * again
        facts.append((rows, rows, rows, tokens, tokens, seconds, 0, 0, again))
    terms = fit(steps_of(facts), host_waits=False).forms["decode"].terms
    assert terms["kv_token"] == pytest.approx(1e-6, rel=0.02)
    assert terms["repeat"] == pytest.approx(1e-7, rel=0.1)
    alone = fit(steps_of([fact[:6] for fact in facts]), host_waits=False).forms["decode"].terms
    assert alone["repeat"] == alone["kv_token"] > 0


class CheapRepeats(Fixed):
    """Context that a row before holds takes a fifth of the time."""

    counts_repeats = True
    sizes = LaunchSizes()

    def seconds_of(self, kind: str, *facts: Any) -> Any:
        """As Fixed, but for that."""
        *others, repeated = facts
        return self.seconds(*others) - 0.8 * self.kv_token_s * repeated


def test_what_a_device_saves_on_shared_prefixes_comes_back(tmp_path: Path):
    executor = CheapRepeats(1e-3, 0.0, 1e-5, 1e-6, 0.0)
    found = load(calibrated(tmp_path, executor, rows=[1, 2, 4, 6], prefixes=[128, 256]))
    assert found.counts_repeats
    assert sum(one["shared"] > 0 for one in found.points) == 2 * 2 + 2
    for form in found.forms.values():
        assert form.terms["kv_token"] == pytest.approx(1e-6, rel=1e-3)
        assert form.terms["repeat"] == pytest.approx(0.2e-6, rel=1e-3)


def test_knee_of_the_matrix_products_is_met_within_a_node():
    """max(4 ms, 0.1 ms a token): from 40 tokens on arithmetic takes longer."""
    tokens = np.array([1, 5, 10, 20, 40, 60, 90])
    seconds = np.maximum(4e-3, 1e-4 * tokens)
    facts = [(0, 1, t, t, t, s) for t, s in zip(tokens.tolist(), seconds.tolist(), strict=True)]
    found = fit(steps_of(facts, LaunchSizes(chunks=[1000], tokens=tokens.tolist())))
    assert found.launch_s == {}
    assert found.forms["other"].seconds(1, tokens, tokens, tokens) == pytest.approx(seconds)


def test_decodes_may_be_faster_with_more_rows_but_chunks_not_with_more_tokens():
    facts = [(n, n, n, n, n, s) for n, s in ((1, 3e-3), (2, 2e-3), (4, 4e-3))]
    facts += [(0, 1, n, n, n, s) for n, s in ((10, 3e-3), (20, 2e-3), (40, 4e-3))]
    found = fit(steps_of(facts), host_waits=False).forms
    rows = np.array([1, 2, 4])
    assert found["decode"].seconds(rows, rows, rows, rows) == pytest.approx([3e-3, 2e-3, 4e-3])
    assert np.diff(found["other"].base_s).min() >= 0


def test_launches_with_a_graph_have_a_form_of_their_own():
    """1 ms and 2 us a token in a graph, half of that in none, which long contexts have."""
    sizes = LaunchSizes(tokens=[16, 32, 64, 128], mixed=[16, 32, 64, 128], mixed_pairs=10_000)
    facts = []
    for size in (16, 32, 64, 128):
        for past in (0, 1000):
            pairs = size * (past + size)
            seconds = (1e-3 + 2e-6 * size) * (1.0 if pairs <= 10_000 else 0.5)
            facts.append((0, 1, size, past + size, pairs, seconds, past + size, pairs))
    steps = steps_of(facts, sizes)
    kinds = [KINDS[kind] for kind in steps.kind]
    assert kinds == ["graphed", "chunk"] * 3 + ["chunk", "chunk"]
    found = fit(steps, host_waits=False)
    assert set(found.forms) == {"graphed", "other"}
    assert found.forms["graphed"].base_s == pytest.approx([1.032e-3, 1.064e-3, 1.128e-3])


def test_steps_of_a_run_count_as_the_median_of_those_alike():
    """Nine of 8 rows, one of them seen late; of 16 rows too few; of 40 the host took as long."""
    facts = [(8, 8, 8, 800, 800, 0.1)] * 8 + [(8, 8, 8, 800, 800, 0.9)]
    facts += [(16, 16, 16, 800, 800, 0.1)] * 4 + [(40, 40, 40, 800, 800, 0.1)] * 9
    steps = steps_of(facts)
    found = typical(steps, np.where(steps.num_rows == 40, 0.095, 0.01))
    assert (found.num_rows.tolist(), found.seconds.tolist()) == ([8.0], [0.1])
    assert found.launches.tolist() == [9.0]
    joined = steps + found
    assert len(joined) == len(steps) + 1
    assert joined.kind.dtype == np.int64


def test_every_launch_counts_once_whether_of_a_grid_or_of_a_run():
    """Three launches of 1 s and one of 2: least squared relative error is at 14 / 13."""
    one, many = (8, 8, 8, 8, 8, 2.0), (8, 8, 8, 8, 8, 1.0)
    found = fit(steps_of([one]) + steps_of([many], launches=3))
    assert found.forms["decode"].seconds(8, 8, 8, 8) == pytest.approx(3.5 / 3.25)


def test_rows_and_tokens_count_as_they_are_padded():
    sizes = LaunchSizes([1, 2, 4], [8, 16, 24, 32], [8, 32])
    rows = [
        (3, 3, 3, 30, 30, 0.1),
        (0, 1, 5, 30, 30, 0.1),
        (2, 3, 7, 30, 30, 0.1),
        (2, 3, 20, 30, 30, 0.1),
        (5, 5, 5, 30, 30, 0.1),
    ]
    steps = steps_of(rows, sizes)
    assert steps.num_rows.tolist() == [4, 1, 3, 3, 5]
    assert steps.num_tokens.tolist() == [4, 8, 8, 24, 5]
    kinds = [KINDS[kind] for kind in steps.kind]
    assert kinds == ["decode", "chunk", "mixed", "eager", "eager"]


def test_graphs_of_whole_launches_take_any_rows_but_many_chunks():
    sizes = LaunchSizes([1, 2, 4], [8, 64, 128], [8, 64], mixed=[8, 64])
    assert sizes.padded(2, 3, 7) == (3, 8, "graphed")
    assert sizes.padded(0, 1, 7) == (1, 8, "graphed")
    assert sizes.padded(0, CHUNKS, 64) == (CHUNKS, 64, "graphed")
    assert sizes.padded(0, CHUNKS + 1, 64) == (CHUNKS + 1, 64, "chunk")
    assert sizes.padded(3, 4, 100) == (4, 128, "eager")


def test_graphs_of_whole_launches_take_no_long_contexts():
    sizes = LaunchSizes([1], [8, 64], [8, 64], mixed=[8, 64], mixed_pairs=5000)
    assert mixed_pairs({"num_q_heads": 16, "head_dim": 128}) == 1_220_703
    assert mixed_pairs(None) == 0
    assert sizes.padded(2, 3, 7, CONTEXT, 5000) == (3, 8, "graphed")
    assert sizes.padded(2, 3, 7, CONTEXT + 1, 5000) == (3, 8, "mixed")
    assert sizes.padded(0, 1, 7, CONTEXT, 5001) == (1, 8, "chunk")
    assert replace(sizes, mixed_pairs=0).padded(0, 1, 7, 9, 10**9) == (1, 8, "graphed")


def test_records_become_columns_and_come_back_from_a_file(tmp_path: Path):
    records = [
        StepRecord(0, 1.0, 1.1, 1.5, num_rows=2, decode_tokens=1, prefill_tokens=5, kv_tokens=9),
        StepRecord(1, 2.0),  # nothing was launched
        StepRecord(2, 3.0, 3.1, 3.2, num_rows=1, decode_tokens=1),
    ]
    records[0].host_us = {"plan": 100.0, "launch": 2000.0}
    ran = ran_of(records)
    ran.save(tmp_path / "steps.npz")
    ran = load_ran(tmp_path / "steps.npz")
    assert ran.num_tokens.tolist() == [6.0, 1.0]
    assert ran.plan.tolist() == [pytest.approx(1e-4), 0.0]
    assert ran.next_s[0] == 2.0
    assert np.isnan(ran.next_s[1])
    with np.load(tmp_path / "steps.npz") as arrays:
        columns = dict(arrays)
    columns["graph_rows"] = columns.pop("graph_tokens")
    np.savez(tmp_path / "before.npz", **columns)
    assert load_ran(tmp_path / "before.npz").graph_tokens.tolist() == ran.graph_tokens.tolist()


def steps_at(times_s: list[tuple[float, float]], **parts_us: float) -> list[StepRecord]:
    found = [
        StepRecord(at, start_s, start_s, end_s, num_rows=1, decode_tokens=1, kv_tokens=9)
        for at, (start_s, end_s) in enumerate(times_s)
    ]
    for record in found:
        record.host_us = dict(parts_us)
    return found


def test_time_between_steps_is_what_no_part_of_them_has():
    """Every 10 ms a step of 2 ms of parts and 7 ms of waiting; an idle second does not count."""
    starts_s = [0.0, 0.01, 0.02, 0.03, 1.03, 1.04]
    records = steps_at([(start_s, start_s) for start_s in starts_s], plan=2000.0, collect=7000.0)
    for overlap in (True, False):
        assert between_steps_s(ran_of(records), overlap) == pytest.approx(1e-3)
    assert between_steps_s(ran_of(records[:2]), True) == 0.0


def test_a_step_of_a_run_lasts_from_the_end_of_the_one_before():
    steps = of_ran(ran_of(steps_at([(0.0, 0.3), (0.1, 0.5), (0.9, 1.0)])), LaunchSizes())
    assert steps.seconds.tolist() == pytest.approx([0.3, 0.2, 0.1])


def test_run_of_the_workload_keeps_to_its_arrivals(tmp_path: Path):
    executor = Simulated(Fixed(), vocab_size=VOCAB, max_model_len=512)
    session = make_session(tmp_path, Synthetic(12, rate=20.0), pages=400, executor=executor)
    Calibrate(**GRID).run(session)
    ran = load_ran(tmp_path / "steps.npz")
    arrivals_s = [one.arrival_s for one in session.workload.requests(None, VOCAB, 0)]
    assert ran.start_s[-1] - ran.start_s[0] > arrivals_s[-1] - arrivals_s[0] > 0


def test_steps_that_wait_for_the_host_are_told_from_those_that_do_not():
    """5 us a token on the device; a mixed launch takes the host 2 ms, a chunk alone nothing."""
    rows, rng = [], np.random.default_rng(0)
    for tokens in rng.integers(2, 2000, 60).tolist():
        device_s = 1e-4 + 5e-6 * tokens
        rows.append((0, 1, tokens, tokens, tokens, device_s))
        rows.append((1, 2, tokens + 1, tokens + 9, tokens + 9, max(2e-3, device_s + 5e-6)))
    steps = steps_of(rows)
    found = fit(steps)
    assert dict(found.launch_s) == {"mixed": pytest.approx(2e-3)}
    assert found.seconds(steps) == pytest.approx(steps.seconds, rel=1e-6)
    assert fit(steps, host_waits=False).launch_s == {}


def test_host_time_is_a_part_for_a_step_and_one_for_a_row():
    rows = np.array([1.0, 10.0, 100.0])
    assert fit_host(rows, 1e-4 + 1e-6 * rows) == pytest.approx((1e-4, 1e-6))


def test_host_time_of_an_admitted_sequence_is_what_launches_of_a_kind_differ_by(tmp_path: Path):
    """0.2 ms each beyond 1 ms of a step, 2 of a mixed launch and 5 of an eager one."""
    own_ms, counts = {"decode": 0.0, "mixed": 2.0, "eager": 5.0}, [0, 1, 3, 2, 0, 1]
    kinds = ["decode"] * 3 + ["mixed"] * 6 + ["eager"] * 6
    numbers = [0] * 3 + counts + [one + 4 for one in counts]
    records = steps_at([(float(at), float(at)) for at in range(len(kinds))])
    for record, kind, num in zip(records, kinds, numbers, strict=True):
        record.host_us = {"plan": 1e3 * (1 + own_ms[kind] + 0.2 * num)}
        for one in range(num):
            record.note((str(one), 0), "admitted" if one % 2 else "resumed", "mine", "")
    ran_of(records).save(tmp_path / "steps.npz")
    ran = load_ran(tmp_path / "steps.npz")
    assert ran.num_new.tolist() == numbers
    which = np.array([KINDS.index(kind) for kind in kinds])
    (host_s, row_s, new_s), own_s = host_times(ran, which, ("plan",), 0.0, {})
    assert host_s + row_s == pytest.approx(1e-3)
    assert new_s == pytest.approx(0.2e-3)
    assert own_s["mixed"] == pytest.approx([2e-3] * len(own_s["mixed"]))
    assert own_s["eager"] == pytest.approx([5e-3] * len(own_s["eager"]))


def test_start_of_a_kind_that_a_run_hardly_had_is_told_by_the_grid():
    """In the run a mixed launch takes the host 3 ms, of which 2 are its start, 1 in the grid: there
    4 of a chunk alone, so 8 + 1. One eager launch of 50 ms in the run is not believed."""
    kinds = ["decode"] * 6 + ["mixed"] * 6 + ["eager"]
    records = steps_at([(float(at), float(at)) for at in range(len(kinds))])
    parts = {
        "decode": {"plan": 1e3, "launch": 5e2},
        "mixed": {"plan": 2e3 + 5e2, "launch": 2e3},
        "eager": {"plan": 5e4},
    }
    for record, kind in zip(records, kinds, strict=True):
        record.host_us = parts[kind]
    ran = ran_of(records)
    which = np.array([KINDS.index(kind) for kind in kinds])
    grid_s = {"decode": 1e-4, "mixed": 1e-3, "chunk": 4e-3, "eager": 5e-3}
    (host_s, row_s, new_s), own_s = host_times(ran, which, ("plan", "launch"), 0.0, grid_s)
    assert host_s + row_s == pytest.approx(1.5e-3)
    assert new_s == 0
    assert np.mean(own_s["mixed"]) == pytest.approx(3e-3)
    assert own_s["chunk"] == [pytest.approx(9e-3)]
    assert own_s["eager"] == [pytest.approx(11e-3)]
    assert "graphed" not in own_s
    _, own_s = host_times(ran, which, ("plan", "launch"), 0.0, {})
    assert set(own_s) == {"mixed", "eager"}
    assert np.mean(own_s["eager"]) == pytest.approx(50e-3 - 1.5e-3)


def test_error_of_steps_held_out_is_not_that_of_those_fitted(tmp_path: Path):
    """A roofline is not quite linear, so both have errors."""
    path = calibrated(tmp_path, Roofline())
    found = load(path)
    held = [one for one in found.points if one["held_out"]]
    errors = [abs(one["predicted_s"] / one["seconds"] - 1) for one in held]
    assert found.test.mape == pytest.approx(np.mean(errors))
    assert found.test.max == pytest.approx(max(errors))
    assert found.fit.points + found.test.points == len(found.points)
    assert found.fit.mape is not None
    assert found.fit.mape < 0.1


def test_simulation_with_the_file_carries_its_error(tmp_path: Path):
    path = calibrated(tmp_path / "a", Roofline())
    folder = tmp_path / "b"
    folder.mkdir()
    executor = Simulated(Calibrated(str(path)), vocab_size=VOCAB, max_model_len=512)
    summary = Simulate().run(make_session(folder, Synthetic(6), executor=executor))
    held_out = json.loads(path.read_text())["test"]
    assert summary["simulated"]["error"] == held_out
    assert held_out["mape"] is not None


def test_file_goes_to_a_path_too_and_steps_left_out_are_counted(tmp_path: Path):
    own = tmp_path / "deep" / "own.json"
    path = calibrated(tmp_path, Fixed(), rows=[1, 2, 4, 8, 16], path=str(own))
    assert own.read_text() == path.read_text()
    # 16 rows exceed max_num_seqs (3 steps of decodes, 3 mixed); 8 beside a chunk, too (3), and
    # 120 tokens beside 8.
    assert load(path).skipped == 9


def test_too_few_steps_and_bad_values_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="at least 14 steps that the engine has room for"):
        calibrated(tmp_path, Fixed(), rows=[1], contexts=[16], chunks=[16])
    with pytest.raises(ConfigError, match=r"mode.chunks must be numbers >= 2, got \[1\]"):
        Calibrate(**GRID | {"chunks": [1]})
    with pytest.raises(ConfigError, match=r"mode.test_share must be in \(0, 1\), got 1"):
        Calibrate(**GRID | {"test_share": 1.0})


@pytest.mark.parametrize("num_devices", [1, 2])
def test_torch_executor_is_measured_in_real_time(tmp_path: Path, num_devices: int):
    """A tiny model on the CPU: every step takes time, nothing of it is called hidden."""
    config = yaml.safe_load((ROOT / "conf" / "model" / "tiny_llama.yaml").read_text())["config"]
    session = make_session(
        tmp_path,
        Synthetic(2, prompt={"kind": "fixed", "value": 8}, output={"kind": "fixed", "value": 4}),
        RealClock(),
        pages=400,
        executor=TorchRunner(tensor_parallel=num_devices),
        model=HuggingFaceModel(
            None, load="dummy", dtype="float32", config=config, tensor_parallel=num_devices
        ),
        attention=PagedAttention(torch_reference.paged_decode, torch_reference.paged_extend),
    )
    Calibrate(**GRID | {"repeats": 1, "warmup": 0}, lock="off").run(session)
    found = load(tmp_path / "calibration.json")
    assert found.num_devices == num_devices
    assert all(one["seconds"] > 0 for one in found.points)
    assert all(sum(form.base_s) + sum(form.terms.values()) > 0 for form in found.forms.values())
    assert found.host_s + found.host_row_s > 0
    assert found.traffic.points == 1, "four steps make one stretch"
    assert (found.dtype, found.measured["clock"]) == ("float32", "real")
    assert found.measured["shape"]["num_layers"] == 2


def test_refit_of_a_file_gives_the_file_again(tmp_path: Path):
    path = calibrated(tmp_path, Roofline())
    before, own = load(path), tmp_path / "again.json"
    calibrate_refit.main([str(path), str(tmp_path / "steps.npz"), str(own)])
    again = load(own)
    assert again.test == before.test
    assert again.forms == before.forms
    assert again.points == before.points
    assert calibrate_refit._repeats(["mode.repeats=5"]) == 5
    assert calibrate_refit._repeats([]) == 15
