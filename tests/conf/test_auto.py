"""Choices left to the device."""

import pytest
from omegaconf import OmegaConf

import conf.auto
from conf.auto import choose_by_device

AUTO = {
    "device": "auto",
    "attention": {"by_device": {"cuda": "split_kv", "cpu": "torch_reference"}},
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
    assert AUTO["attention"] == {"by_device": {"cuda": "split_kv", "cpu": "torch_reference"}}


def test_kernel_named_over_auto_stands(monkeypatch):
    monkeypatch.setattr(conf.auto, "resolve_device", lambda wanted: "cuda")
    config = OmegaConf.merge(AUTO, {"attention": {"_target_": "mine.Backend"}})
    assert choose_by_device(config).attention == {"_target_": "mine.Backend"}


def test_nothing_left_to_the_device_is_left_alone():
    config = OmegaConf.create({"device": "cuda", "attention": {"_target_": "mine.Backend"}})
    assert choose_by_device(config) is config
