"""The embedded default model, SmolLM2-135M-Instruct: no account, no hub, only the package index."""

from typing import Any

from core.config import require
from core.hookspecs import hookimpl
from core.queries import ModelQuery
from plugins.model.loader import LoadSettings
from plugins.shared.model_protocols import Model


class SmolLM2:
    """SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), fetched once into the user's cache.

    The weights come from a 4-bit GGUF file, kept as the exact float32 values it encodes.
    dtype: auto, float32, float16 or bfloat16. max_model_len: tokens, null = 8192. ops: a
    plugins.model.ops.LayerOps, null = torch. tensor_parallel: as for HuggingFaceModel.
    """

    def __init__(
        self,
        dtype: str = "auto",
        max_model_len: int | None = None,
        ops: Any = None,
        tensor_parallel: int = 1,
    ) -> None:
        require(tensor_parallel >= 1, "executor.tensor_parallel", ">= 1", tensor_parallel)
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.ops = ops
        self.tensor_parallel = tensor_parallel

    @hookimpl
    def build_model(self, query: ModelQuery) -> Model:
        """Fetch and convert if need be, then load. Raises ConfigError saying how to place the file
        by hand when it cannot be fetched."""
        # Imported here: a run without a device never imports torch.
        from plugins.model.build import build
        from plugins.model.smollm2_files import model_folder

        folder = model_folder(query.progress)
        settings = LoadSettings(
            path=str(folder),
            load="weights",
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            config=None,
            implementation="decoder",
            ops=self.ops,
            tensor_parallel=self.tensor_parallel,
        )
        return build(settings, query)
