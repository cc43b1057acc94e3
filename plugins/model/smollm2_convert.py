"""Converts SmolLM2's GGUF file to a Hugging Face folder: config, tokenizer, float32 safetensors.

transformers can read the file too, but parses its 100,000 vocabulary entries three times (over half
a minute on two cores) and drops the tokenizer's digit splitting, so that "  12" would become other
tokens than the model was trained on. The matrices are Q4_1 (a 4-bit index, a float16 scale and
minimum for 32 weights), the embedding Q8_0: their values fit neither float16 nor bfloat16, so the
folder holds float32.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.errors import ConfigError

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path, progress: bool) -> None:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors to `folder`.

    Raises ConfigError if the file is not a Llama model with a SmolLM tokenizer.
    """
    with Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("converting", total=None)
        reader = GGUFReader(source)
        _expect(reader, "general.architecture", "llama")
        _expect(reader, "tokenizer.ggml.pre", "smollm")
        config = _config(reader)
        bar.update(task, total=len(reader.tensors))
        tensors = {}
        for tensor in reader.tensors:
            name = _name(tensor.name)
            tensors[name] = _values(tensor, name, config)
            bar.advance(task)
    _write_json(folder / "config.json", config)
    end = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", end)
    _write_tokenizer(reader, folder, config["max_position_embeddings"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _config(reader: GGUFReader) -> dict[str, Any]:
    tensors = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _name(name: str) -> str:
    """The checkpoint name of a GGUF tensor."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
    top = _TOP_NAMES.get(name.removesuffix(".weight"))
    if top is None:
        raise ConfigError(f"GGUF tensors must be those of a Llama model, got {name!r}")
    return f"{top}.weight"


def _values(tensor: Any, name: str, config: dict[str, Any]) -> NDArray[np.float32]:
    """Float32 values in the layout of transformers. GGUF pairs neighbouring dimensions for the
    rotation, transformers the two halves of a head: rows of Q and K are put back."""
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, field in heads.items():
        if f".{part}." in name:
            paired = values.reshape(config[field], -1, 2, values.shape[-1])
            values = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
    return values.astype(np.float32, copy=False)


def _write_tokenizer(reader: GGUFReader, folder: Path, max_length: int) -> None:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {
        f"{short}_token": tokens[_field(reader, f"tokenizer.ggml.{long}_token_id")]
        for short, long in special.items()
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
        **names,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ConfigError(f"the GGUF file must hold {key}, got no such field")
    return field.contents()


def _expect(reader: GGUFReader, key: str, value: str) -> None:
    found = _field(reader, key)
    if found != value:
        raise ConfigError(f"{key} of the GGUF file must be {value!r}, got {found!r}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
