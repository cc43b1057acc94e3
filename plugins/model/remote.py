"""Checkpoints that transformers' own readers must fetch or decode: hub repositories and GGUF
files."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.errors import ConfigError

SNAPSHOT_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def download_snapshot(repo_id: str) -> Path:
    """The folder of a hub repository, from huggingface_hub's cache or fetched into it.

    Raises ConfigError when it is neither in the cache nor reachable.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=SNAPSHOT_PATTERNS))
    except Exception as error:  # the client's, the HTTP library's and the system's errors alike
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(
            f"model.path={repo_id!r} is no local folder, is not in the Hugging Face cache and "
            f"could not be fetched from the hub ({reason}); give the path of a folder that holds "
            "the files"
        ) from error


def read_gguf(path: Path) -> tuple[Any, Callable[[], Any]]:
    """A GGUF file as a dequantised float32 transformers model, and its tokenizer.

    Raises ConfigError without the packages that transformers needs for it, or for an architecture
    it does not know.
    """
    absent = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"reading {path} needs the packages {', '.join(absent)}: pip install them"
        )
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    try:
        model = auto.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read through transformers: {error}") from error
    tokenizer = partial(
        transformers.AutoTokenizer.from_pretrained, path.parent, gguf_file=path.name
    )
    return model.eval(), tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
