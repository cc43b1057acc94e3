"""Reading safetensors files in blocks: the bits are those of safetensors' own reader, and an error
of any block reaches the caller."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.errors import ConfigError
from plugins.model import checkpoint, disk
from plugins.model.spec import decoder_spec
from plugins.model.weights import Weights, slots
from tests.plugins.model.dense import rewrite
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
SHAPES = {"scalar": (), "empty": (0, 4), "short": (3,), "odd": (5, 7), "long": (131, 33)}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tensors take several blocks, and the buffers are used many times."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 64)
    monkeypatch.setattr(disk, "THREADS", 3)
    monkeypatch.setattr(disk, "NUM_BUFFERS", 4)


def save(path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(s, generator=generator).to(dtype) for name, s in SHAPES.items()}, path
    )


def read(path: Path, dtype: torch.dtype, device: torch.device = CPU) -> dict[str, Tensor]:
    stored = disk.stored_tensors(path)
    targets = {
        name: torch.full(one.shape, torch.nan, device=device).to(dtype)
        for name, one in stored.items()
    }
    disk.read_tensors([(stored[name], targets[name]) for name in stored])
    return targets


def assert_read(path: Path, found: dict[str, Tensor], dtype: torch.dtype) -> None:
    expected = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = [one.to(dtype).reshape(-1).view(torch.uint8) for one in (tensor, found[name].cpu())]
        assert torch.equal(*bits), name


def replace_read(monkeypatch: pytest.MonkeyPatch, change: Callable[[disk._Block], None]) -> None:
    """Call `change` before each block is read."""
    plain = disk._read

    def changed(block: disk._Block, memory: Tensor) -> None:
        change(block)
        plain(block, memory)

    monkeypatch.setattr(disk, "_read", changed)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", FLOATS)
def test_tensors_are_those_safetensors_reads(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    save(tmp_path / "a.safetensors", stored)
    found = read(tmp_path / "a.safetensors", dtype)
    assert_read(tmp_path / "a.safetensors", found, dtype)


@pytest.mark.usefixtures("small_blocks")
def test_a_slow_block_does_not_mix_the_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.safetensors", torch.float32)
    made = []
    plain = disk._empty_buffer
    monkeypatch.setattr(disk, "_empty_buffer", lambda device: made.append(1) or plain(device))
    replace_read(monkeypatch, lambda block: time.sleep(0.01 if block.offset % 5 == 0 else 0))
    found = read(tmp_path / "a.safetensors", torch.bfloat16)
    assert_read(tmp_path / "a.safetensors", found, torch.bfloat16)
    assert len(made) == disk.NUM_BUFFERS


def slots_of(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Weights, list]:
    """The loaded weights, and each slot's view beside what must be in it."""
    spec = decoder_spec(json.loads((folder / "config.json").read_text()))
    assert spec is not None
    source = checkpoint.SafetensorsFolder(folder)
    weights = checkpoint.load_weights(source, spec, dtype, device, progress=False)
    stored = {}
    for path in checkpoint.weight_files(folder):
        stored |= load_file(path)
    table = slots(weights, spec)
    return weights, [
        (name, slot.view.cpu(), stored[name].to(dtype).expand(slot.view.shape))
        for name, slot in table.items()
    ]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["100KB", "1GB"])
def test_every_slot_is_filled(
    family: str, dtype: torch.dtype, shard_size: str, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, max_shard_size=shard_size)
    for name, found, expected in slots_of(tmp_path, dtype, CPU)[1]:
        assert torch.equal(found, expected), name


def test_progress_counts_the_bytes_of_the_targets(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", torch.float32)
    stored = disk.stored_tensors(tmp_path / "a.safetensors")
    pairs = [(one, torch.empty(one.shape, dtype=torch.float16)) for one in stored.values()]
    counts: list[int] = []
    disk.read_tensors(pairs, counts.append)
    assert sum(counts) == sum(target.nbytes for _, target in pairs)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_cut_short_after_its_header_was_read_is_named(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save(path, torch.float32)
    content = path.read_bytes()
    replace_read(monkeypatch, lambda _: path.write_bytes(content[:-100]))
    with pytest.raises(ConfigError, match=r"a\.safetensors must be a whole .* became shorter"):
        read(path, dtype)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path, torch.float32)
    pairs = [(one, torch.empty(one.shape)) for one in disk.stored_tensors(path).values()]
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.safetensors must be readable: .*No such file"):
        disk.read_tensors(pairs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_midway_stops_the_reading(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.safetensors", torch.float32)
    offsets: list[int] = []

    def fail(block: disk._Block) -> None:
        offsets.append(block.offset)
        if len(offsets) >= 10:
            raise ZeroDivisionError("told to fail")

    replace_read(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError, match="told to fail"):
        read(tmp_path / "a.safetensors", dtype)
    assert 10 <= len(offsets) <= 10 + disk.NUM_BUFFERS


def test_a_type_torch_cannot_cast_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(ConfigError, match=r"w in .* must have a type of F64, .*, got F8_E8M0"):
        disk.stored_tensors(path)


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    name = "model.norm.weight"
    rewrite(tmp_path, lambda t: t.update({f"language_model.{name}": t[name].clone()}))
    with pytest.raises(ConfigError, match=r"must hold each tensor once, got more: model\.norm"):
        slots_of(tmp_path, torch.float32, CPU)


# --- GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [4096, disk.BLOCK_BYTES])
def test_a_gpu_gets_the_same_bits(
    dtype: torch.dtype, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", block_bytes)
    save_tiny("qwen3", tmp_path, max_shard_size="100KB")
    weights, filled = slots_of(tmp_path, dtype, torch.device("cuda"))
    assert weights.embedding.is_cuda
    for name, found, expected in filled:
        assert torch.equal(found, expected), name
    for stored in (torch.float32, torch.bfloat16):
        save(tmp_path / "a.safetensors", stored)
        found = read(tmp_path / "a.safetensors", dtype, torch.device("cuda"))
        assert_read(tmp_path / "a.safetensors", found, dtype)
