"""What a config.json says about a decoder of the Llama family, with the defaults of each family.

The file is read without transformers, whose configuration classes take seconds to import; the
defaults for absent keys are theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError
from plugins.model.rope import RopeSpec, extended_length, rope_spec

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class Family:
    """Where a model_type differs from Llama, and its configuration's defaults.

    qkv_bias, o_bias: True, False or "config" = as `attention_bias` says; mlp_bias likewise.
    windows: which layers `sliding_window` binds: none, all, or those of `layer_types`.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str = "none"
    rope_theta: float = 10_000.0
    tied: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 32_768
    no_rope_interval: int | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family("config", "config", "config", max_positions=2048),
    "mistral": Family(windows="all", num_kv_heads=8, max_positions=131_072),
    "qwen2": Family(qkv_bias=True, windows="layer_types", num_kv_heads=32),
    "qwen3": Family(
        "config", "config", qk_norm=True, windows="layer_types", num_kv_heads=32, head_dim=128
    ),
    "smollm3": Family(
        "config",
        "config",
        "config",
        windows="layer_types",
        rope_theta=2_000_000.0,
        tied=True,
        num_kv_heads=4,
        no_rope_interval=4,
    ),
}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything that shapes the decoder's arithmetic. windows and rope_layers have one entry a
    layer.

    vocab_size: rows of embedding and head. max_positions: longest sequence the rotary scaling is
    meant for. initializer_range: standard deviation of random weights.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]
    rope: RopeSpec
    max_positions: int
    initializer_range: float


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec | None:
    """The decoder's shape from a (flat) config, or None when its model_type is not of this family.

    Raises ConfigError for a missing field or a setting of a known family that the decoder cannot
    compute.
    """
    model_type = config.get("model_type", "")
    family = FAMILIES.get(model_type)
    if family is None:
        return None
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    num_layers = _integer(config, "num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or family.num_kv_heads or heads
    head_dim = config.get("head_dim") or family.head_dim or hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads must divide {heads} query heads, got {kv_heads!r}")
    positions = int(config.get("max_position_embeddings") or family.max_positions)
    rope = rope_spec(config, head_dim, positions, family.rope_theta)
    rope_layers = _rope_layers(config, family, num_layers)
    return DecoderSpec(
        model_type=model_type,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=_activation(config),
        qkv_bias=_bias(config, family.qkv_bias, "attention_bias"),
        o_bias=_bias(config, family.o_bias, "attention_bias"),
        mlp_bias=_bias(config, family.mlp_bias, "mlp_bias"),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        windows=_windows(config, family, num_layers, rope_layers),
        rope_layers=rope_layers,
        rope=rope,
        max_positions=extended_length(rope, positions),
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} of the model's config must be an integer >= 1, got {value!r}")
    return value


def _bias(config: Mapping[str, Any], rule: bool | str, field: str) -> bool:
    return bool(config.get(field, False)) if rule == "config" else bool(rule)


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return str(name)


def _rope_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    if family.no_rope_interval is None:
        return (True,) * num_layers
    given = config.get("no_rope_layers")
    if given is not None:
        if len(given) < num_layers:
            raise ConfigError(f"no_rope_layers must have {num_layers} entries, got {given!r}")
        return tuple(bool(flag) for flag in given[:num_layers])
    interval = config.get("no_rope_layer_interval") or family.no_rope_interval
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _windows(
    config: Mapping[str, Any], family: Family, num_layers: int, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The window of each layer; None = it sees everything."""
    window = config.get("sliding_window", None if family.no_rope_interval else 4096)
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    if family.windows == "all":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    types = config.get("layer_types")
    if types is None and family.no_rope_interval is not None:
        bound = [not has_rope for has_rope in rope_layers]
    elif types is None:
        first = config.get("max_window_layers", 28)
        bound = [layer >= first for layer in range(num_layers)]
    else:
        bound = [kind == "sliding_attention" for kind in types]
    if len(bound) != num_layers:
        raise ConfigError(f"layer_types must have {num_layers} entries, got {types!r}")
    return tuple(int(window) if sliding else None for sliding in bound)
