"""Rotary tables equal transformers' for every scaling and both spellings of the config (case
G06)."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import ConfigError
from plugins.model.rope import Rotary, extended_length, rope_spec, rotate

HEAD_DIM = 64
MAX_POSITIONS = 4096
POSITIONS = [0, 1, 8191, 32768]
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_attention": {"factor": 4.0, "attention_factor": 1.25, "beta_fast": 16.0},
    "yarn_mscale": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
}


def reference(settings: dict[str, Any], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 10_000.0, **settings},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    return cos[0], sin[0]


def ours(config: dict[str, Any], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    spec = rope_spec(config, HEAD_DIM, MAX_POSITIONS, 10_000.0)
    rotary = Rotary(spec, torch.float32, torch.device("cpu"))
    cos, sin = rotary(torch.tensor(positions))
    signs = torch.cat((-torch.ones(HEAD_DIM // 2), torch.ones(HEAD_DIM // 2)))
    return cos[:, 0], sin[:, 0] * signs


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str, spelling: str) -> None:
    rope_type = name.split("_")[0]
    settings = SCALINGS[name]
    if spelling == "rope_parameters":
        config = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **settings}}
    else:
        config = {"rope_scaling": {spelling: rope_type, **settings}, "rope_theta": 10_000.0}
    expected = reference({"rope_type": rope_type, **settings}, POSITIONS)
    for mine, theirs in zip(ours(config, POSITIONS), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("position", [0, 100, 4095, 4096, 8191, 32768])
def test_dynamic_rotates_each_position_as_if_the_sequence_ended_there(position: int) -> None:
    settings = {"rope_type": "dynamic", "factor": 3.0}
    expected = reference(settings, [position])
    mine = ours({"rope_scaling": settings, "rope_theta": 10_000.0}, [position])
    # Angles of 3e4 radians: one ulp of the frequency is 1e-3 there.
    torch.testing.assert_close(mine[0], expected[0], atol=4e-3, rtol=0)
    torch.testing.assert_close(mine[1], expected[1], atol=4e-3, rtol=0)


def test_dynamic_does_not_depend_on_the_other_tokens_of_the_pass() -> None:
    config = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    together = ours(config, [5, 20_000, 4096])
    alone = ours(config, [5])
    assert torch.equal(together[0][:1], alone[0])


def test_rotation_equals_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = [0, 3, 7, 100, 4000]
    spec = rope_spec({}, HEAD_DIM, MAX_POSITIONS, 10_000.0)
    cos, sin = Rotary(spec, torch.float32, torch.device("cpu"))(torch.tensor(positions))
    expected, _ = apply_rotary_pos_emb(x, x, *reference({"rope_type": "default"}, positions))
    assert torch.equal(rotate(x, cos, sin), expected)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_type_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=r"rope_type must be one of .*got 'longrope'"):
        rope_spec({"rope_scaling": {key: "longrope", "factor": 2.0}}, 64, 4096, 10_000.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor must be given"),
        ({"rope_type": "linear"}, "factor must be given"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"full_attention": {"rope_type": "default"}}, "must be the same for all layers"),
    ],
)
def test_incomplete_or_foreign_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_spec({"rope_parameters": settings}, 64, 4096, 10_000.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ],
)
def test_longest_sequence_follows_the_scaling(settings: dict[str, Any], expected: int) -> None:
    spec = rope_spec({"rope_scaling": settings}, 64, 4096, 10_000.0)
    assert extended_length(spec, 4096) == expected
