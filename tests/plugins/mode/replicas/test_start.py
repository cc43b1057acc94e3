"""What keeps replicas from starting is said by name, before anything runs."""

import importlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import ConfigError
from plugins.executor.torch_runner import TorchRunner
from plugins.mode.replicas import fleet
from plugins.mode.replicas.fleet import Came, Mailbox, RaySettings
from plugins.mode.replicas.plan import plan_of
from plugins.mode.serve import Serve
from plugins.router.earliest_start import EarliestStart
from plugins.shared.clocks import RealClock
from tests.plugins.mode.mode_session import make_session


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": ""}, "ray.address must be null or not empty, got ''"),
        ({"cpus": -1.0}, "ray.cpus must be >= 0, got -1.0"),
        ({"gpus": 0.0}, "ray.gpus must be > 0 or null, got 0.0"),
    ],
)
def test_bad_settings_name_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Serve(ray=values)


class AskedError(Exception):
    """What Ray was asked for."""


def started(
    folder: Any, monkeypatch: pytest.MonkeyPatch, device: str, num_ranks: int, gpus: float | None
) -> None:
    """Replicas of an executor of so many ranks; raises AskedError before there is one."""

    def ask(**options: Any) -> None:
        raise AskedError(options)

    ray = SimpleNamespace(remote=lambda _: SimpleNamespace(options=ask))
    monkeypatch.setattr(fleet, "_import_ray", lambda: ray)
    monkeypatch.setattr(fleet, "_connect", lambda *_: None)
    executor = TorchRunner(tensor_parallel=num_ranks)
    session = make_session(folder, clock=RealClock(), executor=executor)
    session.hooks_again, session.device = (lambda: session.hooks), device
    fleet.RayFleet(plan_of(session, True, 0.25, "off"), 2, RaySettings(gpus=gpus))


@pytest.mark.parametrize(
    ("device", "num_ranks", "gpus", "given"),
    [
        ("cuda", 1, None, 1),
        ("cuda", 1, 0.5, 0.5),
        ("cuda", 4, None, 4),
        ("cuda", 2, 3.0, 3),
        ("cpu", 2, 1.0, 0),
    ],
)
def test_a_replica_gets_a_gpu_for_each_rank(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    num_ranks: int,
    gpus: float | None,
    given: float,
) -> None:
    with pytest.raises(AskedError) as caught:
        started(tmp_path, monkeypatch, device, num_ranks, gpus)
    assert caught.value.args[0]["num_gpus"] == given


def test_fewer_gpus_than_ranks_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"ray\.gpus must be >= 2 = executor\.tensor_parallel, or null, got 1\.5"
    with pytest.raises(ConfigError, match=message):
        started(tmp_path, monkeypatch, "cuda", 2, 1.5)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs Ray in mode serve: pip install '\.\[replicas\]'"):
        fleet._import_ray()


def test_a_cluster_that_nobody_can_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "VARIABLES", {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"ray.address must be .* got '{address}'"):
            fleet._connect(None, RaySettings(address=address), 1, 0.0)


@pytest.mark.parametrize(("needed", "starts"), [(0.0, True), (2.0, True), (2.5, False)])
def test_more_gpus_than_this_machine_has_are_refused(
    needed: float, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas would wait for them for ever."""
    for name, value in fleet.VARIABLES.items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {}
    ended: list[bool] = []
    ray = SimpleNamespace(
        init=lambda **options: given.update(options),
        cluster_resources=lambda: {"CPU": 4.0, "GPU": 2.0},
        shutdown=lambda: ended.append(True),
    )
    if starts:
        fleet._connect(ray, RaySettings(), 4, needed)
    else:
        message = "replicas must be few enough for the 2 GPUs .*, got a need of 2.5"
        with pytest.raises(ConfigError, match=message):
            fleet._connect(ray, RaySettings(), 4, needed)
    assert (given["num_cpus"], given["_node_ip_address"]) == (4, "127.0.0.1")
    assert bool(ended) is not starts


def test_plugins_without_a_config_cannot_be_built_again(tmp_path: Any) -> None:
    session = make_session(tmp_path, clock=RealClock())
    with pytest.raises(ConfigError, match="replicas must be 1 for plugins that no config"):
        plan_of(session, True, 0.25, "off")


def test_an_oracle_cannot_route_real_requests(tmp_path: Any) -> None:
    session = make_session(tmp_path, clock=RealClock(), oracle=EarliestStart())
    session.replicas = 2
    with pytest.raises(ConfigError, match="none that knows the future in mode serve, got oracle"):
        Serve(lock="off").run(session)


def test_a_mailbox_rings_once_for_all_that_is_in_it() -> None:
    box = Mailbox()
    box.put(Came("0", "a"))
    box.put(Came("1", "b"))
    assert [came.replica for came in box.take()] == ["0", "1"]
    assert box.take() == []
    box.put(Came("2", "c"))
    assert [came.replica for came in box.take()] == ["2"]
    box.close()
