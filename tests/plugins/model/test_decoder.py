"""The decoder against transformers, in float32, for tiny random models of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from core.errors import ConfigError
from plugins.model.spec import decoder_spec
from tests.plugins.model.dense import DenseCache, greedy, load, prompt_logits
from tests.tiny_models import (
    FAMILIES,
    edit_config,
    random_prompts,
    reference_generate,
    reference_model,
    save_tiny,
)

LENGTHS = (5, 17, 1, 40)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    prompts = random_prompts(LENGTHS)
    model = load(tmp_path)
    assert type(model).__name__ == "Decoder"
    expected = reference_generate(tmp_path, prompts, 16)
    assert greedy(model, prompts, 16) == expected
    assert greedy(model, prompts, 16, chunk=3) == expected
    with torch.inference_mode():
        reference = reference_model(tmp_path)(torch.tensor([prompts[3]])).logits[0]
    torch.testing.assert_close(prompt_logits(model, prompts[3]), reference, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_greedy_tokens_equal_transformers_with_rope_scaling(
    rope: str, family: str, tmp_path: Path
) -> None:
    settings = {"rope_theta": 10_000.0, **ROPES[rope]}
    save_tiny(family, tmp_path, rope_parameters=settings, max_position_embeddings=128)
    prompts = random_prompts((60, 9))
    assert greedy(load(tmp_path), prompts, 12) == reference_generate(tmp_path, prompts, 12)


def test_dynamic_rope_equals_transformers_while_generation_passes_the_trained_length(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    save_tiny("llama", tmp_path, rope_parameters=rope, max_position_embeddings=24)
    prompts = random_prompts((20, 23))  # 24 would meet transformers' state of the prompt before
    model = load(tmp_path)
    expected = reference_generate(tmp_path, prompts, 30, ignore_eos=True)
    assert greedy(model, prompts, 30, end_token_ids=()) == expected
    edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    assert greedy(load(tmp_path, max_model_len=24), prompts, 30, end_token_ids=()) != expected


@pytest.mark.parametrize("old_spelling", ["type", "rope_type"])
def test_configs_before_transformers_5_load_alike(old_spelling: str, tmp_path: Path) -> None:
    rope = ROPES["llama3"]
    save_tiny("llama", tmp_path, rope_parameters={"rope_theta": 5000.0, **rope})
    expected = prompt_logits(load(tmp_path), random_prompts((50,))[0])
    scaling = {old_spelling: "llama3"} | {k: v for k, v in rope.items() if k != "rope_type"}
    edit_config(tmp_path, remove=["rope_parameters"], rope_theta=5000.0, rope_scaling=scaling)
    assert torch.equal(prompt_logits(load(tmp_path), random_prompts((50,))[0]), expected)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("mistral", {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "hidden_act": "relu"}),
    ],
)
def test_options_of_a_family_equal_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, **overrides)
    prompts = random_prompts(LENGTHS)
    assert greedy(load(tmp_path), prompts, 12) == reference_generate(tmp_path, prompts, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_absent_fields_are_those_of_transformers(family: str) -> None:
    model_type = "llama" if family == "smollm" else family
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    config = {"model_type": model_type, "num_hidden_layers": 5, "num_attention_heads": 64, **sizes}
    values = {key: value for key, value in config.items() if key != "model_type"}
    theirs = AutoConfig.for_model(model_type, **values)
    spec = decoder_spec(config)
    assert spec is not None
    head_dim = getattr(theirs, "head_dim", None) or 1
    assert (spec.num_kv_heads, spec.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.tied == theirs.tie_word_embeddings
    assert spec.max_positions == theirs.max_position_embeddings
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]
    assert spec.activation == theirs.hidden_act
    window = theirs.sliding_window if family == "mistral" else None
    assert spec.windows == (window,) * 5
    assert spec.initializer_range == theirs.initializer_range


def test_unknown_family_has_no_decoder() -> None:
    assert decoder_spec({"model_type": "gpt_neox"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "xielu"}, "hidden_act must be one of .*got 'xielu'"),
        ({"hidden_size": None}, "hidden_size of the model's config must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4 query heads, got 3"),
    ],
)
def test_unusable_config_names_field_rule_and_value(change: dict[str, Any], message: str) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    with pytest.raises(ConfigError, match=message):
        decoder_spec(config | change)


def test_window_that_no_sequence_can_exceed_is_dropped(tmp_path: Path) -> None:
    save_tiny("mistral", tmp_path, sliding_window=16)
    windows = []

    class Recorder(DenseCache):
        def __call__(self, layer: int, q: Any, k: Any, v: Any, scale: float, window: Any) -> Any:
            windows.append(window)
            return super().__call__(layer, q, k, v, scale, window)

    for limit in (16, 17):
        cache = Recorder()
        cache.begin([(0, 3)])
        rows = torch.arange(3)
        load(tmp_path, max_model_len=limit).forward(rows + 8, rows, cache, rows)
    assert windows == [None, None, 16, 16]
