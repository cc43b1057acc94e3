"""Facts of a loaded model: end tokens, vocabulary, limits, dtypes, dummy weights, arguments."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ConfigError
from core.queries import ModelQuery
from plugins.model.facts import resolve_dtype
from plugins.model.loader import HuggingFaceModel
from tests.plugins.model.dense import greedy, load, prompt_logits, rewrite
from tests.tiny_models import (
    edit_config,
    random_prompts,
    reference_generate,
    reference_model,
    save_tiny,
    save_tokenizer,
)

PROMPT = random_prompts((12,))[0]
ROOT = Path(__file__).parents[3]


# --- end tokens, vocabulary, limits -----------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([2, 7], 2, (2, 7)),
        (7, 2, (7,)),
        (None, [2, 5], (2, 5)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_those_of_generation_config_else_of_config(
    generation: Any, config: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    edit_config(tmp_path, eos_token_id=config)
    content = {} if generation is None else {"eos_token_id": generation}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert load(tmp_path).end_token_ids == expected


def test_any_listed_end_token_stops_like_transformers(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, tie_word_embeddings=False)
    rewrite(tmp_path, lambda t: t["lm_head.weight"][7].mul_(40))  # token 7 soon wins
    prompts = random_prompts((4, 5, 6, 7))
    expected = reference_generate(tmp_path, prompts, 20)
    assert any(tokens[-1] == 7 and len(tokens) < 20 for tokens in expected)
    assert greedy(load(tmp_path), prompts, 20) == expected


def test_rows_beyond_the_tokenizer_are_cut_off(tmp_path: Path) -> None:
    """M12: padding of a head is in no logits, so it is neither drawn nor listed."""
    save_tiny("llama", tmp_path, vocab_size=192)
    rewrite(tmp_path, lambda t: t["lm_head.weight"][150].mul_(50))
    assert load(tmp_path).vocab_size == 192
    assert 150 in prompt_logits(load(tmp_path), PROMPT).argmax(-1)
    save_tokenizer(tmp_path, 128)
    model = load(tmp_path)
    assert model.vocab_size == 128
    assert prompt_logits(model, PROMPT).shape == (len(PROMPT), 128)


def test_row_of_the_largest_token_id_is_kept_when_ids_have_gaps(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, vocab_size=192)
    save_tokenizer(tmp_path, 128)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 160, "content": "<far>"})
    path.write_text(json.dumps(content))
    assert load(tmp_path).vocab_size == 161


def test_tokenizer_is_loaded_when_there_is_one(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    assert load(tmp_path).tokenizer is None
    save_tokenizer(tmp_path)
    model = load(tmp_path)
    assert model.tokenizer("w9 w11").input_ids == [9, 11]
    assert model.tokenizer is model.tokenizer


def test_max_model_len_is_bounded_by_the_model(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    assert load(tmp_path).max_model_len == 512
    assert load(tmp_path, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match=r"model\.max_model_len must be in \[2, 512\], got 513"):
        load(tmp_path, max_model_len=513)


# --- dummy weights, dtypes, arguments ---------------------------------------------------------

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 3,
}


def test_dummy_weights_follow_the_seed() -> None:
    def logits(seed: int) -> torch.Tensor:
        plugin = HuggingFaceModel(load="dummy", config=CONFIG)
        model = plugin.build_model(ModelQuery(device="cpu", seed=seed, progress=False))
        return prompt_logits(model, [5, 6, 7])

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_weights_drawn_anew_are_those_of_a_run_of_that_seed() -> None:
    plugin = HuggingFaceModel(load="dummy", config=CONFIG)
    first, second = (plugin.build_model(ModelQuery("cpu", seed, False)) for seed in (1, 2))
    places = first.weights.embedding.data_ptr(), first.weights.layers[1].down.data_ptr()
    first.reseed(2)
    assert torch.equal(prompt_logits(first, [5, 6, 7]), prompt_logits(second, [5, 6, 7]))
    assert places == (first.weights.embedding.data_ptr(), first.weights.layers[1].down.data_ptr())


def test_weights_of_a_file_stay_whatever_the_seed(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    model = load(tmp_path)
    before = prompt_logits(model, [5, 6, 7])
    model.reseed(9)
    assert torch.equal(prompt_logits(model, [5, 6, 7]), before)


def test_dummy_needs_only_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = load(tmp_path, load="dummy")
    assert (model.num_layers, model.head_dim, model.end_token_ids) == (2, 16, (3,))
    assert prompt_logits(model, [5, 6]).isfinite().all()
    assert model.tokenizer is None


def test_dummy_of_another_family_runs_through_transformers() -> None:
    config = {**CONFIG, "model_type": "gpt_neox"}
    del config["num_key_value_heads"]
    assert type(load(None, load="dummy", config=config)).__name__ == "TransformersModel"


@pytest.mark.parametrize(
    ("wanted", "saved", "device", "expected"),
    [
        ("auto", "bfloat16", "cpu", torch.float32),
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16),
        ("auto", "float32", "cuda", torch.bfloat16),
        ("float32", "bfloat16", "cuda", torch.float32),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_auto_follows_device_and_checkpoint(
    key: str, wanted: str, saved: str, device: str, expected: torch.dtype
) -> None:
    assert resolve_dtype(wanted, {key: saved}, torch.device(device)) == expected


def test_float16_for_a_bfloat16_checkpoint_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"model\.dtype should be .*, got 'float16'"):
        assert resolve_dtype("float16", {"dtype": "bfloat16"}, torch.device("cpu")) == torch.float16


def test_weights_are_converted_to_the_wanted_dtype(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    logits = prompt_logits(model, PROMPT)
    assert logits.dtype == torch.bfloat16
    with torch.inference_mode():
        reference = reference_model(tmp_path).bfloat16()(torch.tensor([PROMPT])).logits[0]
    # bfloat16 keeps 8 bits: logits of size 3 through two layers differ by a few 1e-2.
    torch.testing.assert_close(logits, reference, atol=0.15, rtol=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": None}, r"model\.path must name"),
        ({"path": "x", "load": "random"}, r"model\.load must be one of weights, dummy"),
        ({"path": "x", "implementation": "mine"}, r"model\.implementation must be one of"),
        ({"path": "x", "config": {}}, r"model\.config must be null unless load=dummy"),
        ({"path": None, "load": "dummy"}, r"needs either model\.path or model\.config"),
    ],
)
def test_bad_arguments_name_field_and_rule(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HuggingFaceModel(**arguments)


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.dtype must be auto or .*got 'int8'"):
        load(tmp_path, dtype="int8")


# --- transformers' kernel client --------------------------------------------------------------


def test_our_kernels_package_is_no_hub_client_to_transformers(tmp_path: Path) -> None:
    from transformers.utils import is_kernels_available

    import kernels

    assert [Path(entry) for entry in kernels.__path__] == [ROOT / "kernels"]
    assert not hasattr(kernels, "__version__")
    assert not is_kernels_available()
    save_tiny("llama", tmp_path)
    for implementation in ("decoder", "transformers"):
        assert greedy(load(tmp_path, implementation=implementation), [PROMPT], 2)


LOAD_WITHOUT = """
import sys
from core.queries import ModelQuery
from plugins.model.loader import HuggingFaceModel
sys.modules["kernels"] = None  # importing it fails
query = ModelQuery(device="cpu", seed=0, progress=False)
HuggingFaceModel({path!r}, implementation="transformers").build_model(query)
"""


def test_models_load_without_any_kernels_package(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    script = LOAD_WITHOUT.format(path=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
