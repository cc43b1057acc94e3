"""Checkpoints as named tensors: safetensors folders (single or sharded) and tensors already in
memory.

`load_weights` checks every name and shape against the headers before it allocates or reads a
tensor.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from core.errors import ConfigError
from plugins.model.cut import WHOLE, Cut, Part
from plugins.model.disk import Stored, read_tensors, stored_tensors
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
NO_PARTS: Mapping[str, Part] = MappingProxyType({})


class TensorSource(Protocol):
    """Named tensors of a checkpoint."""

    where: str
    shapes: dict[str, tuple[int, ...]]

    def read(
        self,
        targets: Mapping[str, Tensor],
        on_read: Callable[[int], None],
        parts: Mapping[str, Part] = NO_PARTS,
    ) -> None:
        """Fill the contiguous targets from the tensors of those names, or from their `parts`, of
        the same shapes, casting where types differ; on_read gets the bytes of target as they
        arrive."""


class SafetensorsFolder:
    """The safetensors files of a folder; only headers are read on construction.

    Raises ConfigError for a missing shard, a folder without safetensors or a file that is cut
    short.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._stored: dict[str, Stored] = {}
        for path in weight_files(folder):
            found = stored_tensors(path)
            if twice := [name for name in found if name in self._stored]:
                raise ConfigError(
                    f"{path} must hold what no other file of the folder holds, got {listed(twice)}"
                )
            self._stored |= found
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def read(
        self,
        targets: Mapping[str, Tensor],
        on_read: Callable[[int], None],
        parts: Mapping[str, Part] = NO_PARTS,
    ) -> None:
        """See TensorSource and `read_tensors`."""
        order = [name for name in self._stored if name in targets]  # that of the files' bytes
        stored = {name: self._stored[name] for name in order}
        stored |= {
            name: stored[name].part(part.dim, part.begin, part.end) for name, part in parts.items()
        }
        read_tensors([(stored[name], targets[name]) for name in order], on_read)


class MemoryTensors:
    """Tensors that some other reader (GGUF) has already made."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where = where
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors

    def read(
        self,
        targets: Mapping[str, Tensor],
        on_read: Callable[[int], None],
        parts: Mapping[str, Part] = NO_PARTS,
    ) -> None:
        """See TensorSource."""
        for name, target in targets.items():
            tensor = self._tensors[name]
            target.copy_(parts[name].of(tensor) if name in parts else tensor)
            on_read(target.nbytes)


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
    cut: Cut = WHOLE,
) -> Weights:
    """Read a checkpoint into freshly allocated parameters: of a cut's part nothing else is read.

    Raises ConfigError, before anything is read, for tensors that are missing, unused or of another
    shape, and while reading for a file that ends early or cannot be read.
    """
    names = {name: _canonical(name) for name in source.shapes if not _HARMLESS.search(name)}
    present = set(names.values())
    if spec.tied and EMBEDDING not in present and HEAD in present:
        names = {
            name: EMBEDDING if canonical == HEAD else canonical for name, canonical in names.items()
        }
    twice = [canonical for canonical, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise ConfigError(f"{source.where} must hold each tensor once, got more: {listed(twice)}")
    weights = allocate(spec, torch.float32, torch.device("meta"))
    _check(
        {canonical: source.shapes[name] for name, canonical in names.items()}, weights, spec, source
    )
    weights = allocate(spec, dtype, device, cut)
    table = slots(weights, spec, cut)
    wanted = {name: table[canonical] for name, canonical in names.items() if canonical in table}
    targets = {name: _first(slot) for name, slot in wanted.items()}
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not progress
    ) as bar:
        task = bar.add_task("", total=sum(target.nbytes for target in targets.values()))
        parts = {name: slot.part for name, slot in wanted.items() if slot.part is not None}
        source.read(targets, partial(bar.advance, task), parts)
    for name, slot in wanted.items():
        if slot.view.dim() != len(slot.shape):
            slot.view.copy_(targets[name].clone())
    if spec.tied:
        _untie_if_different(weights, source, names, cut.head(spec))
    return weights


def _first(slot: Slot) -> Tensor:
    """The contiguous part of a slot that has the stored shape; the others repeat it."""
    return slot.view[(0,) * (slot.view.dim() - len(slot.shape))]


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
        table = table | {HEAD: Slot(weights.head, tuple(weights.embedding.shape))}
    for name, shape in found.items():
        if shape != table[name].shape:
            raise ConfigError(
                f"{name} in {source.where} must have shape {table[name].shape}, got {shape}"
            )


def _untie_if_different(
    weights: Weights, source: TensorSource, names: Mapping[str, str], part: Part | None
) -> None:
    """A tied checkpoint may store its head all the same; one that differs is used, as transformers
    does. part: the rows that are kept, None = all."""
    for name in [name for name, canonical in names.items() if canonical == HEAD]:
        stored = torch.empty_like(weights.embedding)
        source.read({name: stored}, lambda _: None)
        if not torch.equal(stored, weights.embedding):
            warnings.warn(
                f"{source.where} sets tie_word_embeddings but its {HEAD} differs from {EMBEDDING}: "
                "the stored head is used",
                stacklevel=2,
            )
            weights.head = stored if part is None else part.of(stored).clone()


def _canonical(name: str) -> str:
    """Name of a tensor without the prefix under which composite models nest their language
    model."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def listed(names: list[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
