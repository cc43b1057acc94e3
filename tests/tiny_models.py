"""Tiny random checkpoints of each model family, and what transformers generates from them.

`save_tiny("qwen3", tmp_path)` writes a Hugging Face folder in a few milliseconds;
`reference_generate` is the greedy answer of `transformers.generate` in float32 that every other
code path must reproduce.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 128
END_TOKENS = [2, 7]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END_TOKENS,
    "pad_token_id": 0,
}

# family -> (transformers configuration class, its settings on top of _COMMON); the decoder's own
# families
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "smollm": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 48},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
}

# families the decoder does not know, for the generic fallback
OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 8}),
}


def save_tiny(
    family: str,
    folder: Path | str,
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` (float32 safetensors, config, generation_config) to
    `folder`.

    overrides: settings of the configuration, e.g. rope_parameters={...}. Norm weights and biases
    are random too, so that a dropped or swapped one shows. No tokenizer: see `save_tokenizer`.
    Returns the folder.
    """
    import transformers

    class_name, settings = (FAMILIES | OTHER_FAMILIES)[family]
    config = getattr(transformers, class_name)(**(_COMMON | settings | overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.15)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(1 + noise * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def save_tokenizer(folder: Path | str, num_tokens: int = VOCAB_SIZE) -> None:
    """Write a word-level tokenizer of `num_tokens` ids: <pad> <s> </s> <unk>, then the words w4,
    w5, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    words = specials + [f"w{i}" for i in range(len(specials), num_tokens)]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    fast.chat_template = (
        "{% for message in messages %}"
        "{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    fast.save_pretrained(folder)


def edit_config(folder: Path | str, *, remove: Sequence[str] = (), **changes: Any) -> None:
    """Rewrite config.json of a saved model: drop the keys `remove`, set `changes`."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    config = {key: value for key, value in config.items() if key not in remove} | changes
    path.write_text(json.dumps(config, indent=2))


def random_prompts(
    lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    """Prompts of the given lengths, of ids that are neither special nor end tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def reference_generate(
    folder: Path | str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    ignore_eos: bool = False,
) -> list[list[int]]:
    """New tokens of greedy `transformers.generate` in float32, one prompt at a time; an end token
    is included."""
    model = reference_model(folder)
    if ignore_eos:
        model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def reference_model(folder: Path | str) -> Any:
    """The checkpoint as a transformers model in float32, eager attention."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
