"""Other architectures through transformers' attention interface, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.errors import ConfigError
from tests.plugins.model.dense import greedy, load, prompt_logits, rewrite
from tests.tiny_models import (
    edit_config,
    random_prompts,
    reference_generate,
    reference_model,
    save_tiny,
)

LENGTHS = (5, 17, 1, 30)
RUNS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "olmo2": {},
    "phi3": {"sliding_window": 8},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
}


def save(name: str, config: Any, folder: Path) -> None:
    """Write a random model of a transformers configuration."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert (folder / "model.safetensors").is_file(), name


@pytest.mark.parametrize("family", RUNS)
def test_greedy_tokens_and_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path, **RUNS[family])
    prompts = random_prompts(LENGTHS)
    model = load(tmp_path)
    assert type(model).__name__ == "TransformersModel"
    expected = reference_generate(tmp_path, prompts, 12)
    assert greedy(model, prompts, 12) == expected
    assert greedy(model, prompts, 12, chunk=4) == expected
    with torch.inference_mode():
        reference = reference_model(tmp_path)(torch.tensor([prompts[3]])).logits[0]
    torch.testing.assert_close(prompt_logits(model, prompts[3]), reference, atol=3e-5, rtol=1e-5)


def test_a_known_family_runs_through_transformers_on_demand(tmp_path: Path) -> None:
    save_tiny("mistral", tmp_path)
    prompts = random_prompts((20, 9))
    by_hand, by_transformers = (
        load(tmp_path, implementation=name) for name in ("decoder", "transformers")
    )
    assert greedy(by_hand, prompts, 8) == greedy(by_transformers, prompts, 8)
    for fact in ("num_layers", "num_q_heads", "num_kv_heads", "head_dim", "end_token_ids"):
        assert getattr(by_hand, fact) == getattr(by_transformers, fact)


def test_two_models_in_one_process_do_not_meet(tmp_path: Path) -> None:
    prompts = random_prompts((6,))
    models = []
    for seed in (1, 2):
        save_tiny("gpt_neox", tmp_path / str(seed), seed=seed)
        models.append(load(tmp_path / str(seed)))
    first, second = (greedy(model, prompts, 6) for model in models)
    assert first == reference_generate(tmp_path / "1", prompts, 6)
    assert second == reference_generate(tmp_path / "2", prompts, 6)


def test_soft_capping_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny("gemma2", tmp_path)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM cannot run: its attention uses softc"):
        load(tmp_path)


def test_attention_sinks_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    save("gpt_oss", config, tmp_path)
    with pytest.raises(ConfigError, match="GptOssForCausalLM cannot run: its attention uses s_aux"):
        load(tmp_path)


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        pad_token_id=0,
    )
    save("deepseek_v3", config, tmp_path)
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM cannot run: q, k, v have head"):
        load(tmp_path)


def test_layers_without_attention_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0
    )
    save("mamba", config, tmp_path)
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot run: it takes no pos"):
        load(tmp_path, max_model_len=64)


def test_position_biases_outside_the_interface_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    save("bloom", config, tmp_path)
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot run: "):
        load(tmp_path, max_model_len=64)


def test_encoder_decoder_is_refused_from_its_config() -> None:
    config = {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5Model"]}
    with pytest.raises(ConfigError, match="T5Model cannot run: it is an encoder-decoder"):
        load(None, load="dummy", config=config)


def test_quantised_weights_are_refused_from_their_config(tmp_path: Path) -> None:
    save_tiny("gpt_neox", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="its weights are quantised"):
        load(tmp_path)


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny("gpt_neox", tmp_path)
    edit_config(tmp_path, model_type="brand_new")
    with pytest.raises(ConfigError, match=r"cannot be loaded through transformers.*brand_new"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("gpt_neox.layers.0.mlp.dense_4h_to_h.bias"), "missing_keys must be empty"),
        (lambda t: t.update({"extra.weight": torch.ones(2)}), "unexpected_keys must be empty"),
    ],
)
def test_incomplete_checkpoint_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    save_tiny("gpt_neox", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
