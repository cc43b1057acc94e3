"""From loader settings to a running model: find the files, choose the implementation, fill the
weights."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core.config import require
from core.errors import ConfigError
from core.queries import ModelQuery
from plugins.model import fallback
from plugins.model.checkpoint import (
    ACCEPTED,
    MemoryTensors,
    SafetensorsFolder,
    TensorSource,
    load_weights,
    weight_files,
)
from plugins.model.cut import FIELD, Cut
from plugins.model.decoder import Decoder
from plugins.model.facts import (
    ModelFacts,
    end_token_ids,
    has_tokenizer,
    load_tokenizer,
    model_length,
    read_json,
    resolve_dtype,
    sampled_vocab_size,
)
from plugins.model.loader import LoadSettings
from plugins.model.ops import LayerOps, TorchOps
from plugins.model.remote import download_snapshot, read_gguf
from plugins.model.spec import FAMILIES, DecoderSpec, decoder_spec
from plugins.model.weights import allocate, fill_random, keep_biases_of_sums_once
from plugins.shared.model_protocols import Model

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class _Found:
    """A located checkpoint. tokenizer_folder: None when the folder holds none or there is no
    folder."""

    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    folder: Path | None
    load_tokenizer: Callable[[], Any]
    tokenizer_folder: Path | None


@dataclass(frozen=True, slots=True)
class DecoderShards:
    """A model_protocols.ModelShards: each rank loads its own."""

    settings: LoadSettings
    query: ModelQuery

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self.settings.tensor_parallel

    def build(self, rank: int, device: str) -> Model:
        """Load one."""
        query = replace(self.query, device=device, progress=False)
        return build(self.settings, query, rank)


def build(settings: LoadSettings, query: ModelQuery, rank: int = 0) -> Model:
    """The model that `settings` describe, on `query.device`; of one that is cut, a rank's part."""
    if settings.path is not None and settings.path.endswith(".gguf"):
        return _build_gguf(Path(settings.path).expanduser(), settings, query, rank)
    found = _locate(settings)
    device = torch.device(query.device)
    spec = _spec(found, settings)
    dtype = resolve_dtype(settings.dtype, found.config, device)
    if spec is None:
        model = _transformers_model(found, settings, query, dtype)
        return _bind(model.to(device), found, settings)
    if settings.load == "weights":
        assert found.folder is not None, "weights come from a folder"
        source = SafetensorsFolder(found.folder)
        return _decoder(source, spec, found, settings, dtype, query, rank)
    return _decoder(None, spec, found, settings, dtype, query, rank)


def flat_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A composite model's config with the fields of its language part (`text_config`) on top."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    types = (nested.get("model_type"), config.get("model_type"))
    known = next((kind for kind in types if kind in FAMILIES), None)
    return config if known is None else {**config, **nested, "model_type": known}


def _locate(settings: LoadSettings) -> _Found:
    if settings.path is None:
        config = flat_config(settings.config or {})
        name = str(config.get("model_type", "model"))
        return _Found(name, config, {}, None, lambda: None, None)
    folder = Path(settings.path).expanduser()
    if not folder.exists() and HUB_ID.fullmatch(settings.path):
        folder = download_snapshot(settings.path)
    if not folder.is_dir():
        raise ConfigError(f"model.path must exist, got {settings.path!r}; {ACCEPTED}")
    config = flat_config(read_json(folder / "config.json"))
    if not config:
        raise ConfigError(f"{folder} must hold config.json; {ACCEPTED}")
    generation = read_json(folder / "generation_config.json")
    return _Found(
        Path(settings.path).name,
        config,
        generation,
        folder,
        partial(load_tokenizer, folder),
        folder if has_tokenizer(folder) else None,
    )


def _spec(found: _Found, settings: LoadSettings) -> DecoderSpec | None:
    """The decoder's shape, None for the fallback."""
    insists, size = settings.implementation, settings.tensor_parallel
    spec = None if insists == "transformers" else decoder_spec(found.config)
    if spec is None and insists == "decoder":
        raise ConfigError(
            f"model_type must be one of {', '.join(FAMILIES)} for implementation=decoder, "
            f"got {found.config.get('model_type')!r}"
        )
    if spec is not None:
        Cut(0, size).check(spec)
    rule = f"1 for a model that runs through transformers ({found.name})"
    require(spec is not None or size == 1, FIELD, rule, size)
    return spec


def _facts(found: _Found, head_rows: int, max_positions: int, settings: LoadSettings) -> ModelFacts:
    return ModelFacts(
        name=found.name,
        vocab_size=sampled_vocab_size(head_rows, found.tokenizer_folder),
        max_model_len=model_length(max_positions, settings.max_model_len),
        end_token_ids=end_token_ids(found.config, found.generation),
        load_tokenizer=found.load_tokenizer,
    )


def _decoder(
    source: TensorSource | None,
    spec: DecoderSpec,
    found: _Found,
    settings: LoadSettings,
    dtype: torch.dtype,
    query: ModelQuery,
    rank: int,
) -> Decoder:
    """source: None = random weights."""
    facts = _facts(found, spec.vocab_size, spec.max_positions, settings)
    device, cut = torch.device(query.device), Cut(rank, settings.tensor_parallel)
    ops = _checked_ops(settings, spec, dtype, device)
    draw: Callable[[int], None] | None = None
    if source is None:
        weights = allocate(spec, dtype, device, cut)
        draw = partial(fill_random, weights, spec, cut=cut)
        draw(query.seed)
    else:
        weights = load_weights(source, spec, dtype, device, query.progress, cut)
    keep_biases_of_sums_once(weights, cut)
    shards = DecoderShards(settings, query) if cut.size > 1 else None
    return Decoder(spec, weights, facts, ops, cut, shards, draw)


def _checked_ops(
    settings: LoadSettings, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> LayerOps:
    ops: LayerOps = settings.ops or TorchOps()
    try:
        ops.check(device, dtype, spec.head_dim)
    except ValueError as error:
        raise ConfigError(f"model.ops: {error}") from error
    return ops


def _build_gguf(path: Path, settings: LoadSettings, query: ModelQuery, rank: int) -> Model:
    if not path.is_file():
        raise ConfigError(f"model.path must exist, got {str(path)!r}; {ACCEPTED}")
    if settings.load != "weights":
        raise ConfigError(f"model.load must be weights for a GGUF file, got {settings.load!r}")
    model, tokenizer = read_gguf(path)
    config = model.config.to_dict()
    generation = model.generation_config.to_dict()
    found = _Found(path.stem, config, generation, None, tokenizer, None)
    spec = _spec(found, settings)
    device = torch.device(query.device)
    dtype = resolve_dtype(settings.dtype, {}, device)
    if spec is None:
        return _bind(model.to(device=device, dtype=dtype), found, settings)
    source = MemoryTensors(model.state_dict(), str(path))
    return _decoder(source, spec, found, settings, dtype, query, rank)


def _transformers_model(
    found: _Found, settings: LoadSettings, query: ModelQuery, dtype: torch.dtype
) -> Any:
    fallback.refuse_by_config(found.config)
    if settings.load == "dummy":
        return fallback.random_model(found.config, dtype, query.seed)
    assert found.folder is not None, "weights come from a folder"
    weight_files(found.folder)
    return fallback.load_model(found.folder, dtype)


def _bind(model: Any, found: _Found, settings: LoadSettings) -> Model:
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or settings.max_model_len
    if limit is None:
        raise ConfigError(
            f"model.max_model_len must be given: {found.name} does not state its longest sequence"
        )
    facts = _facts(found, config.vocab_size, limit, settings)
    return fallback.TransformersModel(model, facts)
