"""plugins/sink/wandb_sink.py with the real client, offline."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.errors import CommError

from core.errors import ConfigError
from plugins.shared.run_info import SinkQuery
from plugins.sink.wandb_sink import Wandb, flatten
from tests.plugins.sink.sink_run import RUN, feed


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no settings, no terminal: as on a fresh machine."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SWEEP_ID", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def test_keys_are_flat_and_legal() -> None:
    nested = {"+exp/a": 1, "cache": {"_target_": "x.Y", "sizes": [1, 2]}, "a b": {}, "p.q": None}
    assert flatten(nested) == {
        "exp_a": 1,
        "cache.target": "x.Y",
        "cache.sizes": [1, 2],
        "p.q": None,
    }


def test_offline_run_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    real = wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda self, data, **more: (logged.append(data), real(self, data, **more))
    )
    sink = feed(Wandb(mode="offline"), tmp_path)
    run = sink._run
    assert len(runs(tmp_path)) == 1
    assert run.config["allocator.page_size"] == 4
    assert run.config["hooks.decide_preemption"] == "evict_shortest"
    assert run.config["policy"] == "evict_shortest"
    assert run.config["manifest.commit"] == "abc"
    assert (run.group, run.name, run.offline) == ("", "tiny", True)
    series = [point for point in logged if "steps/time_s" in point]
    assert [point["steps/time_s"] for point in series] == [1, 2, 3, 4, 5, 6]
    assert sum(point["steps/preemptions"] for point in series) == 1
    table = next(point["requests"] for point in logged if "requests" in point)
    assert [row[0] for row in table.data] == ["huge", "b", "a"]
    figures = next(point for point in logged if "figures/memory" in point)
    assert set(figures) == {"figures/memory", "figures/latency"}


def test_job_of_a_sweep_is_grouped_and_named_by_its_folders(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, manifest={"sweep": {"folder": "2026-sweep", "position": 1}})
    folder = tmp_path / "evict_shortest-s3-abc"
    folder.mkdir()
    sink = Wandb(mode="offline").build_sink(query=SinkQuery(run, str(folder)))
    assert (sink._run.group, sink._run.name) == ("2026-sweep", "evict_shortest-s3-abc")
    sink.fail(RuntimeError())


def test_failed_run_is_marked_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[Any] = []
    real = wandb.Run.finish
    sink = Wandb(mode="offline").build_sink(query=SinkQuery(RUN, str(tmp_path)))

    def finish(self: wandb.Run, exit_code: int | None = None) -> None:
        codes.append((exit_code, self.summary["error"]))
        real(self, exit_code)

    monkeypatch.setattr(wandb.Run, "finish", finish)
    sink.fail(RuntimeError("boom"))
    assert codes == [(1, "RuntimeError: boom")]


def test_agent_groups_by_sweep_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc123")
    sink = Wandb(mode="offline").build_sink(query=SinkQuery(RUN, str(tmp_path)))
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert sink._run.group == "abc123"
    sink.fail(RuntimeError())


def test_without_a_key_it_goes_on_offline_with_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="wandb goes on offline: no API key") as caught:
        sink = Wandb().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.fail(RuntimeError())
    assert len(caught) == 1
    assert len(runs(tmp_path)) == 1


def test_with_a_key_and_no_network_it_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(monkeypatch)
    with pytest.warns(UserWarning, match="wandb goes on offline: no route") as caught:
        sink = Wandb().build_sink(query=SinkQuery(RUN, str(tmp_path)))
    sink.fail(RuntimeError())
    assert len(caught) == 1
    assert len(runs(tmp_path)) == 1


def test_online_on_purpose_fails_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable(monkeypatch)
    with pytest.raises(ConfigError, match=r"wandb.mode=online needs a reachable server"):
        Wandb(mode="online").build_sink(query=SinkQuery(RUN, str(tmp_path)))


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wandb.mode must be online, .* got 'on'"):
        Wandb(mode="on")


def test_three_runs_in_one_process_stay_three(tmp_path: Path) -> None:
    folders = [tmp_path / f"job{index}" for index in range(3)]
    for folder in folders:
        folder.mkdir()
    plugin = Wandb(mode="offline")
    first = plugin.build_sink(query=SinkQuery(RUN, str(folders[0])))
    second = plugin.build_sink(query=SinkQuery(RUN, str(folders[1])))  # while the first is open
    assert first._run.id != second._run.id
    first._run.summary["mark"] = 1
    assert "mark" not in dict(second._run.summary)
    for sink in (first, second, plugin.build_sink(query=SinkQuery(RUN, str(folders[2])))):
        sink.fail(RuntimeError())
    assert [len(runs(folder)) for folder in folders] == [1, 1, 1]


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is there, the server is not."""
    real = wandb.init

    def init(**options: Any) -> Any:
        if options["mode"] == "online":
            raise CommError("no route to host")
        return real(**options)

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
