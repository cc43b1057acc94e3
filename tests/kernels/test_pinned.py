"""Which launch parameters a device and shape get, and where they come from."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kernels import pinned
from kernels.pinned import Shape, choose

CUDA = torch.device("cuda")
SHAPE = Shape(head_dim=128, dtype="bfloat16", page_size=16, group=4)


@dataclass(frozen=True)
class Config:
    stages: int = 4
    warps: int = 2


CANDIDATES = (Config(4), Config(3), Config(2))


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card named `Card` with 99 KB of shared memory; returns how to set its table."""
    properties = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(pinned, "TABLE", tmp_path / "pinned.json")

    def table(*entries):
        rows = [
            {"kernel": "k", "device": device, "shape": shape, "configuration": {"stages": stages}}
            for device, shape, stages in entries
        ]
        pinned.TABLE.write_text(json.dumps(rows))
        pinned._table.cache_clear()

    table()
    pinned._say_untuned.cache_clear()
    yield table
    pinned._table.cache_clear()


def shape(**changes):
    facts = {"head_dim": 128, "dtype": "bfloat16", "page_size": 16, "group": 4}
    return facts | changes


def chosen(asked=SHAPE, bytes_a_stage=32 * 1024):
    return choose("k", CUDA, asked, CANDIDATES, lambda config: config.stages * bytes_a_stage)


def test_measured_shape_is_pinned(card):
    card(("Card", shape(), 2), ("Other", shape(), 3))
    choice = chosen()
    assert (choice.config.stages, choice.source) == (2, "pinned")
    assert choice.describe()["configuration"] == {"stages": 2, "warps": 2}


def test_nearest_measured_shape_serves(card):
    card(
        ("Card", shape(group=8), 2),
        ("Card", shape(page_size=1), 3),
        ("Card", shape(head_dim=64), 1),
    )
    choice = chosen(Shape(head_dim=96, dtype="float16", page_size=64, group=4))
    assert (choice.config.stages, choice.source) == (2, "nearest")
    assert choice.measured == Shape(**shape(group=8))


def test_other_width_is_not_near_enough(card, caplog):
    card(("Card", shape(head_dim=64), 2))
    assert chosen().source == "default"
    assert "experiments.kernels.tune" in caplog.text


def test_unknown_device_gets_the_first_that_fits_and_one_line(card, caplog):
    assert chosen().config == Config(3)
    assert chosen().config == Config(3)
    assert [record.getMessage() for record in caplog.records] == [
        "no measured configuration of k for Card: using a default; to measure it: "
        "python -m experiments.kernels.tune"
    ]


def test_nothing_that_fits_is_an_error(card):
    with pytest.raises(
        ValueError, match=r"k must fit 101376 bytes of shared memory, got .* 131072"
    ):
        chosen(bytes_a_stage=64 * 1024)
