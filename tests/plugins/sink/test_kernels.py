"""The sink `kernels`: its windows and its report, from made-up kernels; on a GPU from real ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.launch import Launch
from core.records import StepRecord
from plugins.executor.torch_executor import TorchExecutor
from plugins.shared.run_info import RunInfo, SinkQuery
from plugins.sink.kernel_profile import (
    COPIES,
    LAYERS,
    SAMPLING,
    KernelEvent,
    clipped,
)
from plugins.sink.kernel_report import Roofline
from plugins.sink.kernels import Kernels, KernelsSink, Schedule
from plugins.sink.step_work import (
    CHUNKS,
    DECODE,
    GEMM,
    ONE_TOKEN,
    Ceilings,
    ModelShape,
    StepWork,
)
from plugins.sink.torch_profiler import TorchProfiler
from tests.plugins.sink import counted
from tests.plugins.sink.kernel_run import DECODES, EXECUTOR, MIXED, SHAPE, admitted, launch, record
from tests.plugins.sink.sink_run import RUN

CEILINGS = Ceilings(bytes_s=1e9, flops=1e9)


def run_info(**manifest: Any) -> RunInfo:
    return RunInfo(
        RUN.name, 0, "default", {}, {}, {"device": "cuda", "executor": EXECUTOR} | manifest
    )


class FakeProfiler:
    """Hands out what a device did in each window."""

    def __init__(self, *windows: list[list[KernelEvent]]) -> None:
        self.windows = list(windows)
        self.calls: list[str] = []

    def wait(self) -> None:
        """Nothing runs."""

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> list[KernelEvent]:
        self.calls.append("stop")
        return [event for one in self.windows.pop(0) for event in one]


def decodes(count: int) -> list[list[KernelEvent]]:
    return [launch(12.0 * index, *DECODES) for index in range(count)]


def sink(folder: Path, profiler: Any, schedule: Schedule, **known: Any) -> KernelsSink:
    facts = {"shape": SHAPE, "ceilings": CEILINGS} | known
    return KernelsSink(folder, schedule, profiler, Roofline(**facts))


def serve(one: KernelsSink, steps: int, close: bool = True) -> list[int]:
    """Overlapping steps of one row that decodes, with a chunk of 9 at first; steps without a launch
    between. Returns the number of calls of the profiler after each."""
    calls = []
    for step in range(steps):
        rows, choices = [("a", 0, 1 if step else 9)], [] if step else [admitted("a", 0)]
        one.step(record(step, *rows, sampled_tokens=1, choices=choices, graph_tokens=1))
        one.step(StepRecord(step, step + 0.1, end_s=step + 0.1))
        calls.append(len(one._profiler.calls))  # type: ignore[attr-defined]
    if close:
        one.close(run_info(), {"duration_s": float(steps)})
    return calls


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "kernels.json").read_text())
    return found


def test_kernel_launched_early_counts_from_the_end_of_the_one_ahead() -> None:
    ahead, early = KernelEvent("decode_kernel", 0.0, 10.0, 7), KernelEvent("merge", 2.0, 11.0, 7)
    beside, within = KernelEvent("_extend_kernel", 1.0, 8.0, 9), KernelEvent("gone", 4.0, 5.0, 7)
    found = {one.name: (one.start_us, one.duration_us) for one in clipped([early, beside, ahead])}
    assert found == {"decode_kernel": (0, 10), "merge": (10, 3), "_extend_kernel": (1, 8)}
    assert clipped([ahead, within])[1].duration_us == 0


def test_window_opens_after_the_first_steps_and_holds_those_that_begin_in_it(
    tmp_path: Path,
) -> None:
    profiler = FakeProfiler(decodes(3), decodes(3))
    one = sink(tmp_path, profiler, Schedule(after=2, steps=3, windows=2, every=6))
    assert serve(one, 14) == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    kind = results(tmp_path)["kinds"][ONE_TOKEN]
    assert (kind["steps"], kind["sampled"], kind["in_graphs"]) == (13, 4, 4)  # a first has no begin
    # Of a window after step 1, those that begin past 2.0 s: steps 3, 4 and 5, contexts 12 to 14.
    contexts = [13, 14, 19, 20]
    groups = {one["group"]: one for one in kind["groups"]}
    assert groups[DECODE]["bytes"] == 32 * sum(contexts) / 4
    assert kind["step_outside_us"] == pytest.approx(1e6)


def test_report_gives_rates_shares_and_the_gaps_of_the_run(tmp_path: Path, capsys: Any) -> None:
    profiler = FakeProfiler(decodes(4))
    serve(sink(tmp_path, profiler, Schedule(1, 4, 1, 99)), 6)
    report = results(tmp_path)
    kind = report["kinds"][ONE_TOKEN]
    assert (kind["step_us"], kind["busy_us"], kind["launches"]) == (12, 8, 4)
    assert (kind["between_us"], kind["within_us"]) == (3, 1)
    assert kind["idle_share"] == pytest.approx(1 / 3)
    groups = {one["group"]: one for one in kind["groups"]}
    assert [groups[GEMM][key] for key in ("calls", "us", "bytes", "flops")] == [1, 2, 2600, 2600]
    assert groups[GEMM]["share"] == pytest.approx(2 / 12)
    assert groups[GEMM]["tb_s"] == pytest.approx(2600 / 2e-6 / 1e12)
    assert groups[GEMM]["roofline"] == pytest.approx(2600e-9 / 2e-6)
    assert groups[COPIES]["us"] == 2
    assert "bytes" not in groups[COPIES]
    names = [one["name"] for one in kind["kernels"]]
    assert names[:2] == ["decode_kernel", "nvjet_tst_64x8"]
    text = (tmp_path / "kernels.md").read_text()
    assert "| `nvjet_tst_64x8` | GEMM | 1.0 | 2.0 | 16.7% |" in text
    assert "idle 33.3% (25.0% between launches, 8.3% within)" in text
    printed = capsys.readouterr().out
    assert "attention decode" in printed
    assert "nvjet" not in printed
    assert report["run"]["busy_s"] is None  # the one step with chunks was not sampled
    assert "Not sampled: 1 steps with chunks." in text


def test_busy_time_of_the_run_grows_with_contexts(tmp_path: Path) -> None:
    """Steps 0 and 3 have chunks. Sampled: 3, and of the five others 4 and 5."""
    launches = [launch(0, *DECODES), launch(12, *MIXED), launch(30, *DECODES), launch(42, *DECODES)]
    one = sink(tmp_path, FakeProfiler(launches), Schedule(1, 4, 1, 99))
    rows = [[("a", 0, 9)], [("a", 0, 1)], [("a", 0, 1)], [("a", 0, 1), ("b", 0, 5)]]
    rows += [[("a", 0, 1), ("b", 0, 1)]] * 3
    for step, own in enumerate(rows):
        names = {0: "a", 3: "b"}
        choices = [admitted(names[step], 0)] if step in names else []
        one.step(record(step, *own, sampled_tokens=len(own), choices=choices))
    one.close(run_info(), {"duration_s": 2.0})
    report = results(tmp_path)
    run, kinds = report["run"], report["kinds"]
    assert {name: kind["sampled"] for name, kind in kinds.items()} == {CHUNKS: 1, ONE_TOKEN: 2}
    assert run["not_sampled"] == {}

    def least(rows: int, contexts: int, tokens: int = 0, pairs: int = 0) -> float:
        step = StepWork(rows, tokens or rows, rows, contexts, pairs, False)
        return sum(map(CEILINGS.least_s, SHAPE.work(step).values()))

    chunks = [least(1, 0, 9, 45), least(2, 12, 6, 15)]
    singles = [least(1, 10), least(1, 11), *(least(2, 13 + 6 + 2 * n) for n in range(3))]
    busy = sum(chunks) * 11e-6 / chunks[1] + sum(singles) * 8e-6 * 2 / sum(singles[2:4])
    assert run["least_s"] == pytest.approx(sum(chunks) + sum(singles))
    assert run["busy_s"] == pytest.approx(busy)
    assert run["kernel_gap_s"] == pytest.approx(busy - run["least_s"])
    assert run["idle_s"] == pytest.approx(2.0 - run["profiling_s"] - busy)


class SlowProfiler(FakeProfiler):
    """On a clock of its own: 50 ms of device work to wait for, 7 ms to start, 11 ms to stop."""

    now_s = 0.0

    def wait(self) -> None:
        self.now_s += 0.05

    def start(self) -> None:
        super().start()
        self.now_s += 0.007

    def stop(self) -> list[KernelEvent]:
        self.now_s += 0.011
        return super().stop()


@pytest.mark.parametrize(
    ("steps", "profiling_s"), [(9, 2 * (0.007 + 0.011)), (8, 2 * 0.007 + 0.011)]
)
def test_device_work_that_the_profiler_waits_for_is_the_runs(
    tmp_path: Path, monkeypatch: Any, steps: int, profiling_s: float
) -> None:
    """Two windows; of 8 steps the second is still open at the end, and closing it holds up no
    run."""
    profiler = SlowProfiler(decodes(3), decodes(steps - 6))
    monkeypatch.setattr("plugins.sink.kernels.time.perf_counter", lambda: profiler.now_s)
    serve(sink(tmp_path, profiler, Schedule(1, 3, 2, 5)), steps)
    run = results(tmp_path)["run"]
    assert profiler.calls == ["start", "stop"] * 2
    assert run["profiling_s"] == pytest.approx(profiling_s)
    assert run["measured_s"] == pytest.approx(steps - profiling_s)


def test_unknown_model_and_device_leave_times_alone(tmp_path: Path) -> None:
    one = sink(tmp_path, FakeProfiler(decodes(3)), Schedule(1, 3, 1, 9), shape=None, ceilings=None)
    serve(one, 5)
    kind = results(tmp_path)["kinds"][ONE_TOKEN]
    assert kind["least_us"] is None
    assert all("bytes" not in group and "roofline" not in group for group in kind["groups"])
    assert "bytes and operations are not known" in (tmp_path / "kernels.md").read_text()


def test_window_open_at_the_end_is_read(tmp_path: Path) -> None:
    profiler = FakeProfiler(decodes(3))
    serve(sink(tmp_path, profiler, Schedule(1, 20, 1, 99)), 5)
    assert profiler.calls == ["start", "stop"]
    assert results(tmp_path)["kinds"][ONE_TOKEN]["sampled"] == 2


def test_run_too_short_for_a_window_says_so(tmp_path: Path) -> None:
    one = sink(tmp_path, FakeProfiler(), Schedule(100, 20, 1, 99))
    with pytest.raises(ConfigError, match=r"kernels\.after must be below 5 steps, got 100"):
        serve(one, 5)


def test_window_that_does_not_fit_its_steps_is_left_out(tmp_path: Path) -> None:
    profiler = FakeProfiler(decodes(2), decodes(3))
    serve(sink(tmp_path, profiler, Schedule(1, 3, 2, 5)), 10)
    report = results(tmp_path)
    assert report["left_out"] == ["window 0: 8 kernels and copies in 2 launches, not 3"]
    assert report["kinds"][ONE_TOKEN]["sampled"] == 2


def test_profile_without_kernels_is_an_error(tmp_path: Path) -> None:
    one = sink(tmp_path, FakeProfiler([]), Schedule(1, 3, 1, 9))
    with pytest.raises(RuntimeError, match=r"nothing was sampled: window 0: 0 kernels"):
        serve(one, 6)
    assert not (tmp_path / "kernels.json").exists()


def test_broken_run_lets_the_profiler_go(tmp_path: Path) -> None:
    profiler = FakeProfiler(decodes(1))
    one = sink(tmp_path, profiler, Schedule(1, 3, 1, 9))
    serve(one, 2, close=False)
    one.fail(RuntimeError("boom"))
    one.fail(RuntimeError("boom"))
    assert profiler.calls == ["start", "stop"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": 0}, r"kernels\.after must be >= 1, got 0"),
        ({"steps": 1}, r"kernels\.steps must be >= 2, got 1"),
        ({"windows": 0}, r"kernels\.windows must be >= 1, got 0"),
        ({"windows": 2, "every": 21}, r"kernels\.every must be >= steps \+ 2 = 22, got 21"),
        ({"bandwidth_tb_s": 0.0}, r"kernels\.bandwidth_tb_s must be > 0 or null"),
        ({"records": "summary"}, r"records must be full for sink kernels, got 'summary'"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Kernels(**options)


def test_device_must_be_cuda(tmp_path: Path) -> None:
    query = SinkQuery(run_info(device="cpu"), str(tmp_path))
    with pytest.raises(ConfigError, match=r"a CUDA device for sink kernels, got 'cpu'"):
        Kernels().build_sink(query=query)


def test_profiler_that_sees_nothing_is_refused(monkeypatch: Any, tmp_path: Path) -> None:
    import torch

    monkeypatch.setattr(TorchProfiler, "wait", lambda self: None)
    monkeypatch.setattr(TorchProfiler, "start", lambda self: None)
    monkeypatch.setattr(TorchProfiler, "stop", lambda self: [])
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    with pytest.raises(ConfigError, match=r"able to see kernels \(CUPTI\), got 'none"):
        Kernels().build_sink(query=SinkQuery(run_info(), str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "NVIDIA H200", Ceilings(4.28e12, 790e12)),
        ({}, "NVIDIA A100", None),
        ({"matmul_tflop_s": None}, "NVIDIA H200", None),
        ({"ceilings_of": "A100"}, "NVIDIA A100", Ceilings(4.28e12, 790e12)),
    ],
)
def test_ceilings_hold_for_the_named_device(
    options: dict[str, Any], device: str, expected: Ceilings | None
) -> None:
    found = Kernels(**options)._ceilings({"device_name": device})
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert [found.bytes_s, found.flops] == pytest.approx([expected.bytes_s, expected.flops])


def test_import_brings_no_torch() -> None:
    script = "import sys, plugins.sink.kernels; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def arguments(folder: Path, *more: str) -> list[str]:
    """Of a short run of a tiny model."""
    return [
        "model=tiny_llama",
        "model.dtype=bfloat16",
        "workload=synthetic",
        "workload.num_requests=8",
        "workload.prompt={kind: fixed, value: 40}",
        "workload.output={kind: fixed, value: 60}",
        "engine.max_num_seqs=8",
        "mode.lock=off",
        "~sinks.figures",
        f"hydra.run.dir={folder}",
        *more,
    ]


def test_run_on_a_cpu_says_what_the_sink_needs(command: Any, tmp_path: Path) -> None:
    outcome = command(*arguments(tmp_path, "device=cpu", "+sink=kernels"))
    assert outcome.code == 1
    assert "device must be a CUDA device for sink kernels, got 'cpu'" in outcome.err


def test_manifest_has_the_models_shape(command: Any, tmp_path: Path) -> None:
    assert command(*arguments(tmp_path, "device=cpu", "workload.num_requests=1")).code == 0
    executor = json.loads((tmp_path / "manifest.json").read_text())["executor"]
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert ModelShape.of(executor) == ModelShape(2 * layer, 128 * 64, 2, 2 * 64, 2 * 2 * 32 * 2)


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_windows_hold_the_launches_of_their_steps(
    command: Any, tmp_path: Path, monkeypatch: Any, overlap: str
) -> None:
    """A real engine: with overlap a launch is in flight wherever a window begins or ends."""
    launch_of = TorchExecutor.launch

    def counted_launch(executor: TorchExecutor, one: Launch) -> None:
        counted.LAUNCHED.append(len(one.row_ids))
        launch_of(executor, one)

    monkeypatch.setattr(TorchExecutor, "launch", counted_launch)
    options = ["device=cpu", f"engine.overlap={overlap}", "+sink=kernels"]
    options += ["sinks.kernels._target_=tests.plugins.sink.counted.Counted"]
    options += ["workload.output=null", "engine.max_num_seqs=3"]
    options += [f"sinks.kernels.{one}" for one in ("after=1", "steps=4", "windows=5", "every=6")]
    outcome = command(*arguments(tmp_path, *options))
    assert outcome.code == 0, outcome.err
    report = results(tmp_path)
    assert report["left_out"] == []
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    profiled = [step for at in range(5) for step in window_steps(steps, 1 + 6 * at, 4)[1:]]
    for name, kind in report["kinds"].items():
        own = [
            one for one in profiled if (name == CHUNKS) == any(row[2] > 1 for row in one["rows"])
        ]
        assert kind["sampled"] == len(own)
        us = {one["group"]: one["us"] for one in kind["groups"]}[DECODE]
        assert us == pytest.approx(sum(one["num_rows"] for one in own) / len(own))
    assert sum(kind["sampled"] for kind in report["kinds"].values()) == 15


def window_steps(steps: list[Any], after: int, count: int) -> list[Any]:
    """Those that begin after the end of step after - 1, the first `count` of them."""
    launched = [step for step in steps if step["num_rows"]]
    return [one for one in launched if one["start_s"] >= launched[after - 1]["end_s"]][:count]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_steps_of_a_real_run_are_profiled(
    command: Any, tmp_path: Path, overlap: str, graphs: str
) -> None:
    """SplitKV's decode, in CUDA graphs or launched one by one."""
    options = ["device=cuda", f"engine.overlap={overlap}", f"executor.graphs={graphs}"]
    options += ["model.config.hidden_size=256", "+kernel=split_kv", "+sink=kernels"]
    options += [f"sinks.kernels.{one}" for one in ("after=2", "steps=8", "windows=3", "every=12")]
    outcome = command(*arguments(tmp_path, *options))
    assert outcome.code == 0, outcome.err
    report = results(tmp_path)
    assert report["left_out"] == []
    kind = report["kinds"][ONE_TOKEN]
    assert kind["sampled"] >= 14
    assert kind["in_graphs"] == (kind["sampled"] if graphs == "on" else 0)
    groups = {one["group"]: one for one in kind["groups"]}
    assert {DECODE, GEMM, LAYERS, SAMPLING} <= set(groups)
    assert groups[DECODE]["tb_s"] > 0
    assert 0 < kind["busy_us"] <= kind["step_us"]
    assert 0 <= kind["idle_share"] < 1
