"""Parts of a decoder: what each rank has of the whole, read or drawn."""

import pytest
import torch

from core.errors import ConfigError
from plugins.model.checkpoint import MemoryTensors, SafetensorsFolder, load_weights
from plugins.model.cut import WHOLE, Cut, Part
from plugins.model.facts import read_json
from plugins.model.spec import decoder_spec
from plugins.model.weights import allocate, fill_random, slots
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "smollm": {}, "biased": {"mlp_bias": True}}


def saved(family, folder, **overrides):
    """A checkpoint and its shape."""
    biased = {"attention_bias": True} | FAMILIES["biased"] if family == "biased" else {}
    save_tiny("llama" if family == "biased" else family, folder, seed=3, **biased, **overrides)
    return SafetensorsFolder(folder), decoder_spec(read_json(folder / "config.json"))


def loaded(source, spec, cut=WHOLE):
    return load_weights(source, spec, torch.float32, CPU, False, cut)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_checkpoint_are_those_of_the_whole(family, size, tmp_path):
    if family == "smollm":
        size = 2  # six query heads
    source, spec = saved(family, tmp_path)
    whole = slots(loaded(source, spec), spec)
    for rank in range(size):
        cut = Cut(rank, size)
        for name, slot in slots(loaded(source, spec, cut), spec, cut).items():
            view = whole[name].view
            if slot.view.dim() == len(slot.shape):
                view = view if slot.part is None else slot.part.of(view)
            else:  # one norm repeated for every head
                view = view[: len(slot.view)]
            assert torch.equal(slot.view, view), (name, rank)


def test_parts_cover_the_whole_once():
    spec = decoder_spec(
        {
            "model_type": "llama", "vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 1,
            "intermediate_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4,
        }
    )  # fmt: skip
    for size in (1, 2, 4, 12):
        cuts = [Cut(rank, size) for rank in range(size)]
        for method, length in (("q", 48), ("inner", 96), ("head", 100)):
            parts = [getattr(cut, method)(spec) or Part(0, 0, length) for cut in cuts]
            covered = [index for part in parts for index in range(part.begin, part.end)]
            assert covered == list(range(length)), (method, size)


def test_ranks_beyond_the_kv_heads_repeat_them():
    """Eight ranks with 16 query heads and 4 KV heads of size 8: rank r has query heads 2 r and
    2 r + 1, which read KV head r // 2."""
    spec = decoder_spec(
        {
            "model_type": "llama", "vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 1,
            "intermediate_size": 96, "num_attention_heads": 16, "num_key_value_heads": 4,
        }
    )  # fmt: skip
    for rank in range(8):
        cut = Cut(rank, 8)
        cut.check(spec)
        assert cut.local(spec).num_kv_heads == 1
        assert cut.q(spec) == Part(0, 16 * rank, 16 * rank + 16)
        assert cut.kv(spec) == Part(0, 8 * (rank // 2), 8 * (rank // 2) + 8)


def test_the_head_is_cut_at_multiples_of_16_rows():
    spec = decoder_spec(
        {
            "model_type": "llama", "vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 1,
            "intermediate_size": 96, "num_attention_heads": 4,
        }
    )  # fmt: skip
    heads = [Cut(rank, 4).head(spec) for rank in range(4)]
    assert heads == [Part(0, 0, 32), Part(0, 32, 64), Part(0, 64, 90), Part(0, 90, 90)]


@pytest.mark.parametrize("size", [2, 4])
def test_random_parts_are_those_of_the_whole(size, tmp_path):
    _, spec = saved("qwen3", tmp_path)
    weights = allocate(spec, torch.float32, CPU)
    fill_random(weights, spec, seed=5)
    whole = slots(weights, spec)
    for rank in range(size):
        cut = Cut(rank, size)
        weights = allocate(spec, torch.float32, CPU, cut)
        fill_random(weights, spec, 5, cut)
        for name, slot in slots(weights, spec, cut).items():
            if "_norm" not in name:
                part = slot.part.of(whole[name].view) if slot.part else whole[name].view
                assert torch.equal(slot.view, part), (name, rank)


def test_a_rank_reads_its_part_alone(tmp_path):
    source, spec = saved("llama", tmp_path)
    cut, counts = Cut(1, 4), []
    table = slots(allocate(spec, torch.float32, CPU, cut), spec, cut)
    parts = {name: slot.part for name, slot in table.items() if slot.part is not None}
    source.read({name: slot.view for name, slot in table.items()}, counts.append, parts)
    assert sum(counts) == sum(slot.view.nbytes for slot in table.values())
    layer = 64 * 64 // 4 * 2 + 2 * 16 * 64 + 3 * 96 * 64 // 4 + 2 * 64  # q, o; one KV head; mlp
    assert sum(counts) == 4 * (128 * 64 + 32 * 64 + 64 + 2 * layer)


def test_columns_are_read_across_blocks_and_cast(tmp_path, monkeypatch):
    """A block of 512 bytes holds two rows of 48 values, four of 32."""
    from plugins.model import disk

    monkeypatch.setattr(disk, "BLOCK_BYTES", 512)
    source, spec = saved("llama", tmp_path)
    whole = loaded(source, spec)
    cut = Cut(1, 2)
    part = load_weights(source, spec, torch.bfloat16, CPU, False, cut)
    for one, all_of_it in zip(part.layers, whole.layers, strict=True):
        assert torch.equal(one.o, all_of_it.o[:, 32:].bfloat16())
        assert torch.equal(one.down, all_of_it.down[:, 48:].bfloat16())


def test_a_tied_checkpoint_with_a_head_of_its_own_gives_each_rank_its_rows(tmp_path):
    source, spec = saved("smollm", tmp_path)
    shapes = source.shapes
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    source.read(tensors, lambda count: None)
    tensors["lm_head.weight"] = torch.randn(spec.vocab_size, spec.hidden_size)
    with pytest.warns(UserWarning, match="the stored head is used"):
        part = loaded(MemoryTensors(tensors, "memory"), spec, Cut(1, 2))
    assert torch.equal(part.head, tensors["lm_head.weight"][64:])


def test_a_wrong_shape_is_named_as_the_file_has_it(tmp_path):
    source, spec = saved("llama", tmp_path)
    source.shapes["model.layers.0.mlp.down_proj.weight"] = (64, 48)
    with pytest.raises(ConfigError, match=r"down_proj.weight .* shape \(64, 96\), got \(64, 48\)"):
        loaded(source, spec, Cut(0, 2))
