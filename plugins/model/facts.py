"""What a model knows about itself beside its arithmetic: name, limits, end tokens, tokenizer."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """vocab_size: ids that may be sampled. max_model_len: tokens. load_tokenizer: returns the
    transformers tokenizer, or None if the model has none; models call it once, when first asked."""

    name: str
    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    load_tokenizer: Callable[[], Any]


def end_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens that transformers.generate stops at: every id generation_config.json lists, or
    else those of config.json."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in ids))


def sampled_vocab_size(head_rows: int, tokenizer_folder: Path | None) -> int:
    """Head rows that may be sampled: those up to the largest id of the tokenizer, all without
    one."""
    if tokenizer_folder is None:
        return head_rows
    return min(head_rows, _largest_id(tokenizer_folder) + 1)


def model_length(limit: int, wanted: int | None) -> int:
    """Longest sequence in tokens. Raises ConfigError if `wanted` is beyond the model's `limit`."""
    if wanted is None:
        return limit
    if not 2 <= wanted <= limit:
        raise ConfigError(f"model.max_model_len must be in [2, {limit}], got {wanted!r}")
    return wanted


def resolve_dtype(wanted: str, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU; elsewhere the checkpoint's half precision, bfloat16 for a float32
    one. Warns of float16 for a bfloat16 checkpoint, whose values may be beyond its range."""
    saved = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if wanted == "auto":
        half = saved if saved in ("float16", "bfloat16") else "bfloat16"
        wanted = "float32" if device.type == "cpu" else half
    if wanted not in DTYPES:
        raise ConfigError(f"model.dtype must be auto or one of {', '.join(DTYPES)}, got {wanted!r}")
    if (saved, wanted) == ("bfloat16", "float16"):
        warnings.warn(
            "model.dtype should be bfloat16 or float32 for a bfloat16 checkpoint, got 'float16':"
            " values beyond 65504 become infinite and requests may fail with logits that are not"
            " finite",
            stacklevel=2,
        )
    dtype = getattr(torch, wanted)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder through transformers, None if the folder has none."""
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer in a form that transformers reads."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no such file. Raises ConfigError naming a broken
    file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} must hold JSON, got {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _largest_id(folder: Path) -> int:
    """Read from tokenizer.json where there is one: building the tokenizer takes far longer."""
    raw = read_json(folder / "tokenizer.json")
    if not raw:
        return int(max(load_tokenizer(folder).get_vocab().values()))
    vocabulary = raw["model"]["vocab"]
    ids = [entry["id"] for entry in raw.get("added_tokens") or []]
    # Unigram vocabularies are lists of (piece, score), all others map pieces to ids.
    ids += vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return max(int(token) for token in [*ids, *decoder])
