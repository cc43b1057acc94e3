"""The model plugin for anything in a Hugging Face format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config import require
from core.errors import ConfigError
from core.hookspecs import hookimpl
from core.queries import ModelQuery
from plugins.shared.model_protocols import Model

LOADS = ("weights", "dummy")
IMPLEMENTATIONS = ("auto", "decoder", "transformers")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The plugin's arguments, checked."""

    path: str | None
    load: str
    dtype: str
    max_model_len: int | None
    config: Mapping[str, Any] | None
    implementation: str
    ops: Any = None
    tensor_parallel: int = 1


class HuggingFaceModel:
    """Loads a causal language model and runs it on the decoder, or else through transformers.

    path: a folder with safetensors, a hub id, or a GGUF file. load: `weights`, or `dummy` for
    seeded random weights from a config alone: a folder's config.json or `config`, its values
    inline. dtype: auto, float32, float16 or bfloat16. max_model_len: longest sequence in tokens,
    null = the model's own limit. implementation: `auto` takes the decoder for the families it
    knows; `decoder` or `transformers` insists. ops: a plugins.model.ops.LayerOps for the decoder,
    null = torch; a transformers model runs its own. tensor_parallel: devices that a decoder is cut
    for, the executor's number.
    """

    def __init__(
        self,
        path: str | None = None,
        load: str = "weights",
        dtype: str = "auto",
        max_model_len: int | None = None,
        config: dict[str, Any] | None = None,
        implementation: str = "auto",
        ops: Any = None,
        tensor_parallel: int = 1,
    ) -> None:
        _one_of("load", load, LOADS)
        _one_of("implementation", implementation, IMPLEMENTATIONS)
        if load == "weights" and path is None:
            raise ConfigError("model.path must name a folder, a hub id or a GGUF file, got None")
        if load == "weights" and config is not None:
            raise ConfigError(
                "model.config must be null unless load=dummy: weights bring their own"
            )
        if load == "dummy" and (path is None) == (config is None):
            raise ConfigError(
                "load=dummy needs either model.path or model.config, got both or none"
            )
        require(tensor_parallel >= 1, "executor.tensor_parallel", ">= 1", tensor_parallel)
        limits = dtype, max_model_len
        self.settings = LoadSettings(
            path, load, *limits, config, implementation, ops, tensor_parallel
        )

    @hookimpl
    def build_model(self, query: ModelQuery) -> Model:
        """Load the model. Raises ConfigError for anything missing, unused or unknown in the
        checkpoint."""
        # Imported here: a run without a device never imports torch.
        from plugins.model.build import build

        return build(self.settings, query)


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"model.{field} must be one of {', '.join(choices)}, got {value!r}")
