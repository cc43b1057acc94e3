"""Checkpoints as named tensors: safetensors folders (single or sharded) and tensors already in
memory.

`load_weights` checks every name and shape against the headers before it allocates or reads a
tensor.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import safe_open
from torch import Tensor

from core.errors import ConfigError
from plugins.model.facts import read_json
from plugins.model.spec import DecoderSpec
from plugins.model.weights import EMBEDDING, HEAD, Slot, Weights, allocate, slots

ACCEPTED = (
    "accepted are a folder with config.json and *.safetensors (single or sharded), the id of such "
    "a repository on the Hugging Face hub, or a .gguf file"
)
# Buffers that old checkpoints carry though they follow from the config.
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
INDEX = "model.safetensors.index.json"
SHOWN_NAMES = 8


class TensorSource(Protocol):
    """Named tensors of a checkpoint, read one at a time."""

    where: str
    shapes: dict[str, tuple[int, ...]]

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors in storage order, on the CPU, valid until the next is asked for."""


class SafetensorsFolder:
    """The safetensors files of a folder; only headers are read on construction.

    Raises ConfigError for a missing shard, a folder without safetensors or a file that is cut
    short.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[Path, list[str]] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files[path] = list(file.keys())
                    for name in self._files[path]:
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
            except Exception as error:  # safetensors raises its own error type for a broken file
                raise ConfigError(f"{path} must be a whole safetensors file: {error}") from error

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """See TensorSource."""
        for path, stored in self._files.items():
            wanted = [name for name in stored if name in names]
            if not wanted:
                continue
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    yield name, file.get_tensor(name)


class MemoryTensors:
    """Tensors that some other reader (GGUF) has already made."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where = where
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors

    def tensors(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """See TensorSource."""
        return ((name, tensor) for name, tensor in self._tensors.items() if name in names)


def weight_files(folder: Path) -> list[Path]:
    """The files a folder's weights are in, all present. Raises ConfigError naming what is
    missing."""
    index = read_json(folder / INDEX)
    if index:
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ConfigError(f"{folder / INDEX} names shards that are missing: {listed(missing)}")
        return files
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt"))
        found = f"found only {listed(others)}" if others else "found no weights"
        raise ConfigError(f"{folder} must hold *.safetensors, {found}; {ACCEPTED}")
    return files


def load_weights(
    source: TensorSource,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
) -> Weights:
    """Copy a checkpoint into freshly allocated parameters, tensor by tensor.

    Raises ConfigError, before anything is read, for tensors that are missing, unused or of another
    shape.
    """
    names = {name: _canonical(name) for name in source.shapes if not _HARMLESS.search(name)}
    present = set(names.values())
    if spec.tied and EMBEDDING not in present and HEAD in present:
        names = {
            name: EMBEDDING if canonical == HEAD else canonical for name, canonical in names.items()
        }
    weights = allocate(spec, torch.float32, torch.device("meta"))
    _check(
        {canonical: source.shapes[name] for name, canonical in names.items()}, weights, spec, source
    )
    weights = allocate(spec, dtype, device)
    table = slots(weights, spec)
    wanted = {name for name, canonical in names.items() if canonical in table}
    with Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("loading weights", total=len(wanted))
        for name, tensor in source.tensors(wanted):
            table[names[name]].view.copy_(tensor)
            bar.advance(task)
    if spec.tied:
        _untie_if_different(weights, source, names)
    return weights


def _check(
    found: dict[str, tuple[int, ...]], weights: Weights, spec: DecoderSpec, source: TensorSource
) -> None:
    table = slots(weights, spec)
    missing = [name for name in table if name not in found]
    if missing:
        raise ConfigError(f"{source.where} must hold every tensor, missing: {listed(missing)}")
    unused = [name for name in found if name not in table and not (spec.tied and name == HEAD)]
    if unused:
        raise ConfigError(
            f"{source.where} holds tensors that a {spec.model_type} decoder with this config does "
            f"not use: {listed(unused)}"
        )
    if spec.tied:
        table = table | {HEAD: Slot(weights.head, tuple(weights.head.shape))}
    for name, shape in found.items():
        if shape != table[name].shape:
            raise ConfigError(
                f"{name} in {source.where} must have shape {table[name].shape}, got {shape}"
            )


def _untie_if_different(weights: Weights, source: TensorSource, names: Mapping[str, str]) -> None:
    """A tied checkpoint may store its head all the same; one that differs is used, as transformers
    does."""
    heads = {name for name, canonical in names.items() if canonical == HEAD}
    for _, tensor in source.tensors(heads):
        stored = tensor.to(weights.embedding)
        if not torch.equal(stored, weights.embedding):
            warnings.warn(
                f"{source.where} sets tie_word_embeddings but its {HEAD} differs from {EMBEDDING}: "
                "the stored head is used",
                stacklevel=2,
            )
            weights.head = stored


def _canonical(name: str) -> str:
    """Name of a tensor without the prefix under which composite models nest their language
    model."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def listed(names: list[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
