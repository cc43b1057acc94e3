"""Choices left to the device."""

import pytest
from omegaconf import OmegaConf

import conf.auto
from conf.auto import choose_by_device

AUTO = {
    "device": "auto",
    "attention": {"by_device": {"cuda": "cascade", "cpu": "torch_reference"}},
    "ops": {"by_device": {"cuda": "fused", "cpu": "torch"}},
}


@pytest.mark.parametrize(
    ("device", "kernel", "ops"),
    [
        ("cpu", "kernels.torch_reference.paged_decode", "plugins.model.ops.TorchOps"),
        ("cuda:1", "kernels.split_kv.SplitKV", "kernels.fused.FusedOps"),
    ],
)
def test_device_decides_between_the_files(monkeypatch, device, kernel, ops):
    monkeypatch.setattr(conf.auto, "resolve_device", lambda wanted: device)
    chosen = choose_by_device(OmegaConf.create(AUTO))
    assert chosen.attention.decode.path == kernel
    assert chosen.ops.layers._target_ == ops
    assert "by_device" not in chosen.attention
    assert AUTO["attention"] == {"by_device": {"cuda": "cascade", "cpu": "torch_reference"}}


@pytest.mark.parametrize(
    ("device", "kernel"),
    [("cpu", "kernels.torch_invariant.decode"), ("cuda", "kernels.invariant.decode")],
)
def test_deterministic_engine_has_choices_of_its_own(monkeypatch, device, kernel):
    monkeypatch.setattr(conf.auto, "resolve_device", lambda wanted: device)
    exact = {"cuda": "invariant", "cpu": "torch_invariant"}
    attention = AUTO["attention"] | {"by_device_deterministic": exact}
    config = AUTO | {"attention": attention, "engine": {"deterministic": True}}
    chosen = choose_by_device(OmegaConf.create(config))
    assert chosen.attention.decode.path == kernel
    assert "by_device_deterministic" not in chosen.attention
    assert chosen.ops.layers.invariant
    config["engine"]["deterministic"] = False
    chosen = choose_by_device(OmegaConf.create(config))
    assert chosen.attention.decode.path != kernel
    assert not chosen.ops.layers.invariant


def test_kernel_named_over_auto_stands(monkeypatch):
    monkeypatch.setattr(conf.auto, "resolve_device", lambda wanted: "cuda")
    config = OmegaConf.merge(AUTO, {"attention": {"_target_": "mine.Backend"}})
    assert choose_by_device(config).attention == {"_target_": "mine.Backend"}


def test_nothing_left_to_the_device_is_left_alone():
    config = OmegaConf.create({"device": "cuda", "attention": {"_target_": "mine.Backend"}})
    assert choose_by_device(config) is config
