"""Checkpoints: which files and tensors are accepted, what is refused and how it is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import ConfigError
from tests.plugins.model.dense import load, prompt_logits, rewrite
from tests.tiny_models import edit_config, random_prompts, reference_model, save_tiny

PROMPT = random_prompts((12,))[0]


def reference_logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(folder)(torch.tensor([PROMPT])).logits[0]
    return logits


def assert_like_reference(folder: Path) -> None:
    expected = reference_logits(folder)
    torch.testing.assert_close(prompt_logits(load(folder), PROMPT), expected, atol=3e-5, rtol=1e-5)


# --- weights and heads ------------------------------------------------------------------------


def test_sharded_checkpoint_loads_like_transformers(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_like_reference(tmp_path)


@pytest.mark.parametrize("where", ["top", "nested"])
def test_tied_checkpoint_without_head_shares_the_embedding(where: str, tmp_path: Path) -> None:
    save_tiny("smollm", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    expected = reference_logits(tmp_path)
    if where == "nested":
        edit_config(
            tmp_path, remove=["tie_word_embeddings"], text_config={"tie_word_embeddings": True}
        )
    model = load(tmp_path)
    assert model.weights.head is model.weights.embedding
    torch.testing.assert_close(prompt_logits(model, PROMPT), expected, atol=3e-5, rtol=1e-5)


def test_language_part_of_a_composite_checkpoint_loads(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    expected = prompt_logits(load(tmp_path), PROMPT)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": config}))

    def nest(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    rewrite(tmp_path, nest)
    assert torch.equal(prompt_logits(load(tmp_path), PROMPT), expected)


def test_tied_checkpoint_with_an_equal_head_shares_the_embedding(tmp_path: Path) -> None:
    save_tiny("smollm", tmp_path)
    expected = prompt_logits(load(tmp_path), PROMPT)
    rewrite(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    model = load(tmp_path)
    assert model.weights.head is model.weights.embedding
    assert torch.equal(prompt_logits(model, PROMPT), expected)


def test_tied_checkpoint_with_another_head_uses_it_as_transformers_does(tmp_path: Path) -> None:
    save_tiny("smollm", tmp_path)
    rewrite(
        tmp_path,
        lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}),
    )
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        mine = prompt_logits(load(tmp_path), PROMPT)
    torch.testing.assert_close(mine, reference_logits(tmp_path), atol=3e-5, rtol=1e-5)


def test_tied_checkpoint_with_only_a_head_takes_it_as_embedding(tmp_path: Path) -> None:
    save_tiny("smollm", tmp_path)
    expected = prompt_logits(load(tmp_path), PROMPT)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(prompt_logits(load(tmp_path), PROMPT), expected)


def test_untied_checkpoint_without_head_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight"):
        load(tmp_path)


def test_unused_tensors_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    edit_config(tmp_path, model_type="llama")  # a Llama has no qkv bias
    with pytest.raises(ConfigError, match=r"does not use: .*self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_rotary_buffers_are_skipped(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda t: t.update({name: torch.ones(8)}))
    assert_like_reference(tmp_path)


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    edit_config(tmp_path, intermediate_size=80)
    with pytest.raises(ConfigError, match=r"must have shape \(64, 80\), got \(64, 96\)"):
        load(tmp_path)


# --- files ------------------------------------------------------------------------------------


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a parameter is allocated or a tensor read."""

    def refuse(*args: Any) -> None:
        raise AssertionError("allocated before the files were checked")

    monkeypatch.setattr("plugins.model.checkpoint.allocate", refuse)


@pytest.mark.usefixtures("untouched")
def test_missing_shard_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"names shards that are missing: {shard.name}"):
        load(tmp_path)


@pytest.mark.usefixtures("untouched")
def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    whole = tmp_path / "model.safetensors"
    whole.rename(tmp_path / "a.safetensors")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"b\.safetensors must hold what no other file .* got "):
        load(tmp_path)


@pytest.mark.usefixtures("untouched")
def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold config\.json"):
        load(tmp_path)


@pytest.mark.usefixtures("untouched")
def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"found no weights; accepted are"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_folder_of_bin_files_is_told_the_accepted_formats(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"found only pytorch_model\.bin; accepted are .*gguf"):
        load(tmp_path)


@pytest.mark.usefixtures("untouched")
def test_truncated_file_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="must be a whole safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/folder", "models/a/b", "nowhere.gguf"])
def test_missing_path_is_refused_with_the_accepted_formats(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must exist, got .*accepted are"):
        load(path)


def test_hub_id_is_fetched_through_the_hub_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path)
    asked = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load("owner/tiny-llama").name == "tiny-llama"
    assert asked == ["owner/tiny-llama"]


def test_unreachable_hub_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    message = r"'owner/model' is no local folder.*OSError: no route to host\); give the path"
    with pytest.raises(ConfigError, match=message):
        load("owner/model")
