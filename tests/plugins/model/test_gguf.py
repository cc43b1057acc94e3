"""GGUF files through transformers' reader, on a tiny model written here."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from core.errors import ConfigError
from tests.plugins.model.dense import load, prompt_logits
from tests.tiny_models import random_prompts, save_tiny

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
HEADS = {"q_proj": 4, "k_proj": 2}


def write_gguf(folder: Path, path: Path) -> None:
    """The tiny Llama of `folder` as a float32 GGUF file, Q and K in GGUF's row order."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(128)
    writer.add_eos_token_id(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(128)])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        for part, heads in HEADS.items():
            if part in name:
                tensor = tensor.view(heads, 2, -1, 64).transpose(1, 2).reshape(tensor.shape)
        if stem in TOP:
            target = TOP[stem]
        else:
            _, _, layer, inner = stem.split(".", 3)
            target = f"blk.{layer}.{NAMES[inner]}"
        writer.add_tensor(f"{target}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    write_gguf(tmp_path, tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_gguf_runs_on_the_decoder_like_its_safetensors_twin(tiny_gguf: Path) -> None:
    prompt = random_prompts((12,))[0]
    model = load(tiny_gguf)
    assert type(model).__name__ == "Decoder"
    assert (model.name, model.vocab_size, model.max_model_len) == ("tiny", 128, 512)
    assert model.end_token_ids == (2,)
    expected = prompt_logits(load(tiny_gguf.parent), prompt)
    torch.testing.assert_close(prompt_logits(model, prompt), expected, atol=1e-5, rtol=1e-5)


def test_gguf_without_its_packages_names_them(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name in ("gguf", "accelerate") else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ConfigError, match="needs the packages gguf, accelerate: pip install"):
        load(tiny_gguf)


def test_broken_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model at all")
    with pytest.raises(ConfigError, match=r"x\.gguf cannot be read through transformers"):
        load(tmp_path / "x.gguf")


def test_dummy_weights_of_a_gguf_are_refused(tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.load must be weights for a GGUF file"):
        load(tiny_gguf, load="dummy")
