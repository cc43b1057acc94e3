"""Several replicas in simulated time: one is a plain simulation to the bit; nothing is lost; what a
router sees is never from the future."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.records import RequestRecord
from core.request import Request, SamplingParams
from plugins.executor.simulated import Simulated
from plugins.mode.fleet import Replica
from plugins.mode.simulate import Simulate
from plugins.mode.simulate_replicas import simulate_replicas
from plugins.predictor.history_quantile import HistoryQuantile
from plugins.router.earliest_start import EarliestStart
from plugins.router.kv_headroom import KvHeadroom
from plugins.router.least_loaded import LeastLoaded
from plugins.router.round_robin import RoundRobin
from plugins.shared.launch_sizes import KINDS
from plugins.shared.measure import Measure, Slo
from plugins.shared.router import RouterSettings
from plugins.shared.routing import RouteDecision, RouteQuery
from plugins.shared.session import Session
from plugins.step_time.fixed import Fixed
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, Given, Recorder, make_session

TIMES = Fixed(step_s=0.004, row_s=1e-4, token_s=2e-5, kv_token_s=1e-7)


class Dialogues:
    """A closed loop: turns of sessions that share their beginnings, after a think time."""

    name = "dialogues"
    closed_loop = True

    def __init__(self, sessions: int = 6, turns: int = 4, think_s: float = 0.05) -> None:
        self.total_requests = sessions * turns
        self._sizes = sessions, turns, think_s

    def requests(self, tokenizer: Any, vocab_size: int, seed: int) -> Sequence[Request]:
        return [self._turn(one, 0, 0.02 * one) for one in range(self._sizes[0])]

    def follow_up(self, record: RequestRecord) -> Sequence[Request]:
        session, turn = map(int, record.request_id.split("-"))
        if turn + 1 == self._sizes[1]:
            return []
        assert record.finished_s is not None
        return [self._turn(session, turn + 1, record.finished_s + self._sizes[2])]

    def _turn(self, session: int, turn: int, arrival_s: float) -> Request:
        prompt = (np.arange(40 * (turn + 1)) * (session + 3) % VOCAB).astype(np.int32)
        params = SamplingParams(max_tokens=40)
        name, output = f"{session}-{turn}", 5 + 7 * ((session + turn) % 4)
        return Request(name, prompt, params, arrival_s, forced_output=output)


def burst() -> Synthetic:
    """More than the pool holds: waits, preempts and evicts; the first comes after the start."""
    return Synthetic(40, output={"kind": "uniform", "low": 10, "high": 60}, rate=150.0)


def session(
    folder: Path,
    workload: Any = None,
    replicas: int = 1,
    router: Any = KvHeadroom,
    pages: int = 24,
    launch_s: Any = None,
    **plugins: Any,
) -> Session:
    """plugins: by name, what makes each; every engine has its own."""
    folder.mkdir(exist_ok=True)

    def make(**more: Any) -> Session:
        times = {"host_s": 3e-4, "launch_s": launch_s}
        executor = Simulated(TIMES, vocab_size=VOCAB, max_model_len=512, **times)
        own = {name: build() for name, build in plugins.items()}
        return make_session(
            folder, workload or burst(), pages=pages, executor=executor, router=router(), **own
        )

    made = make()
    made.engine = replace(made.engine, overlap=True)
    made.replicas, made.hooks_again = replicas, lambda: make().hooks
    return made


def comparable(summary: dict[str, Any]) -> dict[str, Any]:
    """What simulated time decides; host time left out."""
    left = {name: value for name, value in summary.items() if name not in ("replicas", "plugins")}
    left["steps"] = {k: v for k, v in summary["steps"].items() if k != "host_us_mean"}
    return left


def decided(summary: dict[str, Any]) -> set[tuple[str, str, int]]:
    return {
        (line["hook"], line["plugin"], line["answered"])
        for line in summary["plugins"]
        if line["hook"].startswith("decide_") and line["hook"] != "decide_route"
    }


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("workload", "pages", "measure"),
    [
        (burst, 24, Measure()),
        (burst, 160, Measure(0.2, 0.2)),
        (Dialogues, 24, Measure()),
        (partial(Dialogues, think_s=0.0), 160, Measure(0.1, 0.1)),
    ],
    ids=["burst", "roomy", "dialogues", "no think time"],
)
@pytest.mark.filterwarnings("ignore:plugin router was never asked")
def test_one_replica_is_a_plain_simulation_to_the_bit(
    tmp_path: Path, workload: Any, pages: int, measure: Measure, overlap: bool
):
    results = []
    for name, play in (
        ("plain", Simulate().run),
        ("routed", partial(simulate_replicas, regret=True)),
    ):
        kept = Recorder()
        made = session(
            tmp_path / name,
            workload(),
            pages=pages,
            recorder=lambda kept=kept: kept,
            predictor_2=HistoryQuantile,
        )
        made.measure, made.slo = measure, Slo(ttft_s=0.05)
        made.engine = replace(made.engine, overlap=overlap, strict=False)
        summary = play(made)
        times = {one.request_id: one.choices[0].times_s.tolist() for one in kept.requests}
        results.append((comparable(summary), decided(summary), times))
    assert results[0] == results[1]
    assert results[0][0]["requests"]["completed"] >= 20


def test_replicas_serve_every_request_once_and_the_same_way_again(tmp_path: Path):
    def play(name: str) -> tuple[Any, list[Any]]:
        kept = Recorder()
        made = session(tmp_path / name, replicas=3, recorder=lambda: kept)
        summary = Simulate().run(made)
        return summary, [(one.request_id, one.finished_s) for one in kept.requests]

    (summary, ends), again = play("a"), play("b")
    assert (comparable(summary), ends) == (comparable(again[0]), again[1])
    assert sorted(one for one, _ in ends) == sorted(f"synthetic-{i}" for i in range(40))
    assert summary["requests"]["completed"] == 40
    each = summary["replicas"]["each"]
    assert [one["replica"] for one in each] == ["0", "1", "2"]
    assert sum(one["requests"]["completed"] for one in each) == 40
    assert all(one["requests"]["completed"] > 0 for one in each)
    for name in ("prompt", "output", "prefill", "cached"):
        assert sum(one["tokens"][name] for one in each) == summary["tokens"][name], name
    assert summary["tokens"]["computed"] > 0


def test_replicas_draw_launch_times_each_for_itself(tmp_path: Path):
    """Two equal requests at once, to one replica each: only launches tell them apart."""
    prompt, params = np.arange(40, dtype=np.int32), SamplingParams(max_tokens=40)
    both = [Request(name, prompt, params, forced_output=40) for name in "ab"]

    def lasted(launch_s: list[float]) -> list[float]:
        kept = Recorder()
        made = session(
            tmp_path / str(len(launch_s)),
            Given(both),
            replicas=2,
            router=RoundRobin,
            pages=64,
            launch_s=dict.fromkeys(KINDS, launch_s),
            recorder=lambda: kept,
        )
        Simulate().run(made)
        times = {one.request_id: np.array(one.choices[0].times_s) for one in kept.requests}
        assert len(times["a"]) == 40
        return np.abs(times["a"] - times["b"]).tolist()

    assert max(lasted([0.003])) == 0.0
    assert max(lasted([0.003, 0.009])) > 0.005


def test_command_runs_replicas_with_every_sink(command: Any, tmp_path: Path):
    """Each engine gets plugins of its own: a policy that keeps accounts is one of them."""
    router = ["+router=two_choices", "+policy=vtc", "router.snapshot_interval_s=0.05"]
    done = command("mode=simulate", "replicas=3", "workload.num_requests=12", *router)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "outputs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["policy"] == "two_choices+vtc"
    assert summary["hooks"]["decide_route"] == summary["replicas"]["router"] == "two_choices"
    assert summary["requests"]["completed"] == summary["replicas"]["decisions"] == 12
    assert len((folder / "routes.jsonl").read_text().splitlines()) == 12
    assert len((folder / "requests.csv").read_text().splitlines()) == 13


def test_more_replicas_wait_less(tmp_path: Path):
    means = []
    for replicas in (1, 3):
        made = session(tmp_path / str(replicas), replicas=replicas, router=LeastLoaded)
        summary = simulate_replicas(made, regret=False)
        means.append(summary["latency"]["ttft_s"]["mean"])
        assert summary["replicas"]["regret_s"] is None
    assert means == sorted(means, reverse=True)


def test_closed_loop_turns_come_after_the_one_before_wherever_that_ran(tmp_path: Path):
    kept = Recorder()
    made = session(tmp_path, Dialogues(), replicas=3, router=RoundRobin, recorder=lambda: kept)
    summary = Simulate().run(made)
    assert summary["requests"]["completed"] == 24
    ends = {one.request_id: one for one in kept.requests}
    for name, record in ends.items():
        one, turn = map(int, name.split("-"))
        assert record.finished_s >= record.first_token_s > record.arrival_s
        if turn:
            before = ends[f"{one}-{turn - 1}"]
            assert record.arrival_s == pytest.approx(before.finished_s + 0.05)


def test_joined_steps_change_no_time_of_a_closed_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Engines join steps while nobody elsewhere can end: held to those that never do."""
    results, plans = [], []
    for joins in (True, False):
        kept = Recorder()
        if not joins:
            monkeypatch.setattr(Replica, "listen", lambda replica: None)
        folder = tmp_path / str(joins)
        made = session(folder, Dialogues(), replicas=3, recorder=lambda kept=kept: kept)
        summary = simulate_replicas(made, regret=False)
        asked = [line for line in summary["plugins"] if line["hook"] == "decide_batch"]
        plans.append(asked[0]["asked"])
        times = {one.request_id: one.choices[0].times_s.tolist() for one in kept.requests}
        results.append((times, summary["replicas"]["load_cv"], comparable(summary)["tokens"]))
    assert results[0] == results[1]
    assert plans[0] < 0.8 * plans[1]


class Watcher(RoundRobin):
    """Takes turns, and keeps what it saw of the replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, list[float], list[int]]] = []

    @hookimpl
    def decide_route(self, query: RouteQuery) -> RouteDecision:
        rows = query.replicas
        self.seen.append((query.now_s, rows.age_s.tolist(), rows.requests.tolist()))
        return super().decide_route(query)


@pytest.mark.parametrize(("interval_s", "delay_s"), [(0.02, 0.0), (0.02, 0.03), (0.1, 0.005)])
def test_reports_are_late_and_never_from_the_future(
    tmp_path: Path, interval_s: float, delay_s: float
):
    watcher, kept = Watcher(), Recorder()
    made = session(tmp_path, replicas=2, router=lambda: watcher, recorder=lambda: kept, pages=160)
    made.router = RouterSettings(interval_s, delay_s)
    simulate_replicas(made, regret=False)
    ends = sorted(one.finished_s for one in kept.requests)
    arrivals = sorted(one.arrival_s for one in kept.requests)
    assert [now_s for now_s, _, _ in watcher.seen] == arrivals
    longest_step_s = 0.03  # of 128 tokens and 8 rows, with what is launched behind it
    oldest_s = interval_s + longest_step_s + delay_s  # what came last, just before the next
    for number, (now_s, ages, requests) in enumerate(watcher.seen):
        assert all(0 <= age <= oldest_s for age in ages), (now_s, ages)
        assert sum(requests) == number - np.searchsorted(ends, now_s, "right")


def test_regret_is_zero_for_the_oracle_and_the_run_is_labelled(tmp_path: Path):
    made = session(tmp_path / "oracle", replicas=3, router=EarliestStart)
    oracle = simulate_replicas(made, regret=True)
    assert oracle["policy"] == made.run.policy == "default (oracle)"
    assert oracle["replicas"]["regret_s"]["max"] == 0.0
    assert oracle["replicas"]["best_share"] == 1.0
    blind = simulate_replicas(session(tmp_path / "blind", replicas=3, router=RoundRobin), True)
    assert blind["policy"] == "default"
    assert blind["replicas"]["regret_s"]["mean"] > 0.0


def test_an_idle_replica_starts_when_the_oracle_says(tmp_path: Path):
    """100 tokens in slices of 64: two steps of 4 ms + a row + 50 tokens + their KV, launched after
    the host's 0.3 ms."""
    params = SamplingParams(max_tokens=4)
    request = Request("r", np.arange(100, dtype=np.int32), params, 1.0, forced_output=4)
    kept = Recorder()
    made = session(tmp_path, Given([request]), replicas=2, recorder=lambda: kept)
    simulate_replicas(made, regret=True)
    (line,) = map(json.loads, (tmp_path / "routes.jsonl").read_text().splitlines())
    assert line["start_s"] == pytest.approx(2 * (0.004 + 1e-4 + 50 * 2e-5 + 50 * 1e-7))
    assert (line["replica"], line["found_tokens"], line["regret_s"]) == ("0", 0, 0.0)
    (record,) = kept.requests
    assert record.first_token_s - 1.0 == pytest.approx(line["start_s"], rel=0.15)


def test_every_decision_is_in_the_file_with_its_scores(tmp_path: Path):
    summary = simulate_replicas(session(tmp_path, replicas=2, router=LeastLoaded), regret=True)
    lines = [json.loads(line) for line in (tmp_path / "routes.jsonl").read_text().splitlines()]
    assert len(lines) == summary["replicas"]["decisions"] == 40
    assert {line["plugin"] for line in lines} == {"router"}
    for line in lines:
        assert line["scores"].keys() == {"0", "1"}
        assert line["scores"][line["replica"]] == min(line["scores"].values())
        assert line["regret_s"] >= 0.0
    assert json.loads((tmp_path / "summary.json").read_text())["replicas"]["count"] == 2


def test_sinks_hear_of_a_run_that_breaks(tmp_path: Path):
    class Broken:
        @hookimpl
        def decide_route(self, query: RouteQuery) -> RouteDecision:
            raise RuntimeError("no")

    kept = Recorder()
    made = session(tmp_path, replicas=2, router=Broken, recorder=lambda: kept)
    with pytest.raises(RuntimeError, match="no") as raised:
        Simulate().run(made)
    assert kept.failed is raised.value
    assert kept.closed is None
    assert raised.value.__notes__ == ["raised by plugin router at decide_route"]


def test_bounds_are_those_of_one_engine(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"mode\.bounds must be false with several replicas"):
        Simulate(bounds=True).run(session(tmp_path, replicas=2))
