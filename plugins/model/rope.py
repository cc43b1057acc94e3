"""Rotary position embedding with its scalings: default, linear, dynamic, llama3, yarn.

Tables are computed a step, from the positions, in float32, with the arithmetic order of
transformers' modeling_rope_utils. `dynamic` (NTK by length) is the one scaling whose reference
depends on more than the position: transformers rotates a whole forward pass by its longest
sequence. Keys in a KV cache keep the rotation they were written with, and pages are shared between
sequences of different lengths, so here the token at position p is rotated as if the sequence ended
with it: frequencies of length max(p + 1, max_position_embeddings). For one sequence this equals
transformers with a KV cache whenever the prompt is no longer than max_position_embeddings, however
far generation goes; a longer prompt equals transformers fed token by token. It is independent of
chunking, batching and preemption.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A model's rotary settings, whichever way its config spells them.

    head_dim: rotated dimensions. original_length: positions seen in pretraining (llama3, yarn) or
    the length from which `dynamic` scales. attention_factor multiplies cos and sin.
    """

    rope_type: str
    theta: float
    head_dim: int
    original_length: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def rope_spec(
    config: Mapping[str, Any], head_dim: int, max_positions: int, default_theta: float
) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (before), in
    which the type is called `rope_type` or `type`. Raises ConfigError for a type or a form it does
    not know."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ConfigError(f"rope_parameters must be the same for all layers, got {settings!r}")
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {rope_type!r}")
    share = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise ConfigError(f"partial_rotary_factor must be 1 for this decoder, got {share!r}")
    theta = settings.get("rope_theta") or config.get("rope_theta") or default_theta
    original = config.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings"
    )
    if rope_type == "dynamic":
        original = max_positions
    original = int(original or max_positions)
    factor = _factor(settings, rope_type, max_positions / original)
    attention_factor = _attention_factor(settings, factor) if rope_type == "yarn" else 1.0
    return RopeSpec(
        rope_type,
        float(theta),
        head_dim,
        original,
        factor,
        attention_factor,
        low_freq_factor=_number(settings, "low_freq_factor", rope_type == "llama3", 1.0),
        high_freq_factor=_number(settings, "high_freq_factor", rope_type == "llama3", 4.0),
        beta_fast=settings.get("beta_fast") or 32.0,
        beta_slow=settings.get("beta_slow") or 1.0,
        truncate=settings.get("truncate", True),
    )


def extended_length(spec: RopeSpec, max_positions: int) -> int:
    """Longest sequence in tokens that the scaling is meant for."""
    if spec.rope_type in ("linear", "dynamic"):
        return int(max_positions * spec.factor)
    if spec.rope_type == "yarn":
        return max(max_positions, int(spec.original_length * spec.factor))
    return max_positions


class Rotary:
    """cos and sin of packed positions, cast to the model's dtype after a float32 computation."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.inv_freq = inverse_frequencies(spec).to(device)
        self._exponents = _exponents(spec.head_dim).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [N]. Returns cos and signed sin, both [N, 1, head_dim], as `rotate` takes
        them."""
        inv_freq = self._dynamic(positions) if self.spec.rope_type == "dynamic" else self.inv_freq
        angles = positions[:, None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.spec.attention_factor != 1.0:
            cos, sin = cos * self.spec.attention_factor, sin * self.spec.attention_factor
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def _dynamic(self, positions: Tensor) -> Tensor:
        """Inverse frequencies [N, head_dim / 2], each for the length that ends at its position."""
        spec = self.spec
        lengths = (positions + 1)[:, None]
        stretch = spec.factor * lengths / spec.original_length - (spec.factor - 1)
        base = spec.theta * stretch ** (spec.head_dim / (spec.head_dim - 2))
        return torch.where(
            lengths > spec.original_length, 1.0 / base**self._exponents, self.inv_freq
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, heads, head_dim]; cos and sin from `Rotary`. The first half's sin carries the
    minus."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians a position for each pair of dimensions, float32 [head_dim / 2]."""
    plain = 1.0 / spec.theta ** _exponents(spec.head_dim)
    if spec.rope_type == "linear":
        return plain / spec.factor
    if spec.rope_type == "llama3":
        return _llama3(spec, plain)
    if spec.rope_type == "yarn":
        return _yarn(spec)
    return plain


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    long = wavelengths > spec.original_length / spec.low_freq_factor
    short = wavelengths < spec.original_length / spec.high_freq_factor
    scaled = torch.where(long, plain / spec.factor, plain)
    blend = (spec.original_length / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - blend) * scaled / spec.factor + blend * scaled
    return torch.where(~short & ~long, blended, scaled)


def _yarn(spec: RopeSpec) -> Tensor:
    """Blend of kept and interpolated frequencies along a ramp over the dimensions
    (arXiv:2309.00071)."""
    frequencies = spec.theta ** _exponents(spec.head_dim)
    kept, interpolated = 1.0 / frequencies, 1.0 / (spec.factor * frequencies)
    low, high = (_yarn_dimension(spec, turns) for turns in (spec.beta_fast, spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return interpolated * (1 - keep) + kept * keep


def _yarn_dimension(spec: RopeSpec, turns: float) -> float:
    """The dimension whose wavelength fits `turns` times into the original length."""
    ratio = spec.original_length / (turns * 2 * math.pi)
    return (spec.head_dim * math.log(ratio)) / (2 * math.log(spec.theta))


def _attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    numerator, denominator = settings.get("mscale"), settings.get("mscale_all_dim")
    if numerator and denominator:
        return _mscale(factor, numerator) / _mscale(factor, denominator)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factor(settings: Mapping[str, Any], rope_type: str, implied: float) -> float:
    if rope_type == "default":
        return 1.0
    if rope_type == "yarn" and settings.get("factor") is None:
        return implied
    return _number(settings, "factor", True, 1.0)


def _number(settings: Mapping[str, Any], name: str, required: bool, default: float) -> float:
    value = settings.get(name)
    if value is None and required:
        raise ConfigError(
            f"rope_parameters.{name} must be given for this rope_type, got {settings!r}"
        )
    return default if value is None else float(value)
