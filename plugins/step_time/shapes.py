"""Shapes of models as a step's time depends on them: sizes of layers, vocabulary and cache.

Sources: the models' config.json on Hugging Face. Those that conf/model also holds are the same."""

from collections.abc import Mapping
from dataclasses import dataclass

from core.config import require

BYTES = 2  # of a weight, an activation, a cached K or V: bfloat16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with gated MLPs and grouped-query attention, in bfloat16."""

    num_layers: int
    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False  # the output head is the embedding

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrix products."""
        heads = self.num_q_heads + self.num_kv_heads
        return 2 * self.hidden * heads * self.head_dim + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.hidden * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """All weights, embedding included."""
        tables = 1 if self.tied else 2
        return BYTES * (self.num_layers * self.layer_weights + tables * self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * BYTES * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def activation_bytes(self) -> int:
        """What norms with their residuals, rotary and SwiGLU read and write for a token in all
        layers: 8 hidden, 2 (q + k + v) and 3 intermediate values."""
        heads = self.num_q_heads + 2 * self.num_kv_heads
        values = 8 * self.hidden + 2 * heads * self.head_dim + 3 * self.intermediate
        return BYTES * self.num_layers * values


SHAPES: Mapping[str, ModelShape] = {
    "smollm2_135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, tied=True),
    "qwen3_0_6b": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    "qwen3_8b": ModelShape(36, 4096, 12288, 32, 8, 128, 151936),
    "qwen3_32b": ModelShape(64, 5120, 25600, 64, 8, 128, 151936),
    "llama_8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama_70b": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
    "llama2_7b": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "llama2_70b": ModelShape(80, 8192, 28672, 64, 8, 128, 32000),
}


def shape_of(model: str) -> ModelShape:
    """The shape of that name. Raises ConfigError for one that is not here."""
    require(model in SHAPES, "step_time.model", f"one of {', '.join(SHAPES)}", model)
    return SHAPES[model]
