"""Relaunching a compiled kernel: straight to the driver, and through Triton for a profiler."""

from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from kernels import launch
from kernels.launch import Launcher, form_of, type_of


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.calls = []

    def run(self, *arguments):
        self.calls.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("seen", grid, *arguments))


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    known = Launcher(SimpleNamespace())
    known._compiled["key"] = (Compiled(), (128, True), 0)
    return known


def test_second_launch_skips_tritons_lookup(launcher):
    assert launcher.again("key", (3, 2), (11, 0.5))
    compiled = launcher._compiled["key"][0]
    hooks = (None, None, None)
    expected = (3, 2, 1, "stream", "function", "metadata", *hooks, 11, 0.5, 128, True)
    assert compiled.calls == [expected]
    assert not launcher.again("another", (3, 2), (11, 0.5))


def test_profiler_sees_every_launch(launcher):
    knobs.runtime.launch_enter_hook.add(print)
    try:
        launcher.again("key", (3, 2), (11,))
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert launcher._compiled["key"][0].calls == [("seen", (3, 2, 1), 11, 128, True)]


def test_form_does_not_grow_with_the_batch():
    one, other = torch.zeros(5, 4, 8), torch.zeros(700, 4, 8)
    assert form_of(one, None) == form_of(other, None)
    assert form_of(one) != form_of(one[:, :2])
    assert form_of(one) != form_of(one.half())
    assert form_of(one.flatten()[4:]) == form_of(one.flatten())  # 16 bytes further
    assert form_of(one.flatten()[1:]) != form_of(one.flatten())
    assert type_of(one.flatten()[1:]) == type_of(one.flatten())
    assert type_of(one) != type_of(one.half())


class Jitted:
    """As a jit function; what it was launched with."""

    arg_names = ("p_x", "SIZE", "EARLY")

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launched = options

        return launch


@pytest.mark.parametrize("early", [False, True])
def test_waiting_kernel_is_launched_early_where_the_device_can(early, monkeypatch):
    monkeypatch.setattr(launch, "starts_early", lambda device: early)
    kernel = Jitted()
    Launcher(kernel)("key", (1, 1), (torch.zeros(1),), lambda: {"SIZE": 4}, num_warps=2)
    expected = {"SIZE": 4, "EARLY": early, "num_warps": 2}
    assert kernel.launched == expected | ({"launch_pdl": True} if early else {})


def test_interpreter_starts_nothing_early(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for interpreted in (True, False):
        monkeypatch.setattr(launch, "INTERPRETED", interpreted)
        launch.starts_early.cache_clear()
        assert launch.starts_early(torch.device("cuda")) is not interpreted
    launch.starts_early.cache_clear()
