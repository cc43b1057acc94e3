"""plugins/step_time/roofline.py, shapes.py and devices.py against arithmetic done by hand."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from core.errors import ConfigError
from plugins.step_time.devices import DEVICES
from plugins.step_time.roofline import Roofline
from plugins.step_time.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[3]
IDEAL = {"product_share": 1.0, "attention_share": 1.0, "bandwidth_share": 1.0}
BARE = IDEAL | {"step_s": 0.0, "layer_s": 0.0}


def test_sizes_of_llama_8b_are_the_published_ones():
    """8.03e9 weights (Llama 3's report), here all but the norms; 128 KiB of K and V a token."""
    shape = SHAPES["llama_8b"]
    assert shape.weight_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)
    assert shape.kv_bytes == 128 * 1024


@pytest.mark.parametrize("name", ["llama_8b", "qwen3_0_6b"])
def test_shapes_equal_those_of_the_model_files(name: str):
    config = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())["config"]
    shape = SHAPES[name]
    assert shape.num_layers == config["num_hidden_layers"]
    assert shape.hidden == config["hidden_size"]
    assert shape.intermediate == config["intermediate_size"]
    assert shape.num_q_heads == config["num_attention_heads"]
    assert shape.num_kv_heads == config["num_key_value_heads"]
    assert shape.head_dim == config["head_dim"]
    assert shape.vocab_size == config["vocab_size"]
    assert shape.tied == config["tie_word_embeddings"]


def test_decode_of_one_row_takes_the_time_to_read_the_weights():
    shape, device = SHAPES["llama_8b"], DEVICES["h200"]
    read = shape.weight_bytes - 2 * shape.head_weights  # a row of the embedding alone
    seconds = Roofline("h200", "llama_8b", **BARE).seconds(1, 1, 0, 0)
    moved = shape.activation_bytes / device.bandwidth
    assert seconds == pytest.approx(read / device.bandwidth + moved)


def test_long_chunk_takes_the_time_of_its_arithmetic():
    shape, device = SHAPES["llama_8b"], DEVICES["h200"]
    seconds = Roofline("h200", "llama_8b", **BARE).seconds(1, 4096, 0, 0)
    flops = 2 * (4096 * 32 * shape.layer_weights + shape.head_weights)
    moved = 4096 * shape.activation_bytes / device.bandwidth
    assert seconds == pytest.approx(flops / device.flops + moved)


def test_attention_adds_its_pairs_and_the_context_it_reads():
    model = Roofline("h200", "llama_8b", **BARE)
    without, pairs, context = (
        model.seconds(4, 4, *facts) for facts in ((0, 0), (0, 10**9), (10**6, 0))
    )
    assert pairs - without == pytest.approx(4 * 32 * 32 * 128 * 1e9 / 989e12)
    assert context - without == pytest.approx(1e6 * 131072 / 4.8e12)


def test_shares_and_fixed_times_slow_their_part_alone():
    fixed = Roofline("h200", "llama_8b", **IDEAL, step_s=1.0, layer_s=0.5).seconds(1, 1, 0, 0)
    bare = Roofline("h200", "llama_8b", **BARE).seconds(1, 1, 0, 0)
    assert fixed - bare == pytest.approx(1.0 + 32 * 0.5)
    half = Roofline("h200", "llama_8b", **(BARE | {"product_share": 0.5}))
    assert half.seconds(1, 1, 0, 0) == pytest.approx(bare)
    assert half.seconds(1, 8192, 0, 0) > 1.7 * Roofline(**BARE).seconds(1, 8192, 0, 0)


def test_more_devices_split_the_work_and_reduce_activations():
    shape, device = SHAPES["llama_70b"], DEVICES["h100"]
    one, four = (Roofline("h100", "llama_70b", num, **BARE, reduce_s=0.0) for num in (1, 4))
    reduced = 2 * 3 / 4 * 2 * 80 * 2 * shape.hidden / device.link
    for facts in ((1, 1, 1000, 1000), (1, 8192, 9000, 10**8)):
        expected = one.seconds(*facts) / 4 + reduced * facts[1]
        assert four.seconds(*facts) == pytest.approx(expected)
    slower = Roofline("h100", "llama_70b", 4, **BARE, reduce_s=1e-5).seconds(1, 1, 0, 0)
    assert slower - four.seconds(1, 1, 0, 0) == pytest.approx(2 * 80 * 1e-5)
    assert four.pool_tokens(0.9) == (4 * (0.9 * 80e9 - 4e9) - shape.weight_bytes) // 327_680


def test_arrays_give_what_numbers_give():
    model = Roofline()
    rows = np.array([1, 64, 256])
    together = model.seconds(rows, rows, 1000 * rows, 1000 * rows)
    assert together.tolist() == [model.seconds(n, n, 1000 * n, 1000 * n) for n in (1, 64, 256)]


def test_times_on_an_h200_are_near_those_measured():
    """experiments/engines: 6.26 and 2.30 s for 256 requests of 128 tokens in and 512 out: four
    steps of 64 prompts, then 511 of decode rows."""
    for name, measured in (("llama_8b", 6.26), ("qwen3_0_6b", 2.30)):
        model, context = Roofline("h200", name), 256 * (128 + np.arange(1, 512))
        prompts = 4 * model.seconds(64, 8192, 8192, 64 * 128 * 129 // 2)
        whole = prompts + model.seconds(256, 256, context, context).sum()
        assert whole == pytest.approx(measured, rel=0.1)


def test_names_and_values_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"step_time.device must be one of h200.*got 'h20'"):
        Roofline("h20")
    with pytest.raises(ConfigError, match=r"step_time.model must be one of .*llama_8b"):
        Roofline(model="gpt")
    with pytest.raises(ConfigError, match=r"num_devices must be >= 1 and a divisor of 8 KV heads"):
        Roofline(num_devices=3)
    with pytest.raises(ConfigError, match=r"product_share must be in \(0, 1\], got 0"):
        Roofline(product_share=0.0)
    with pytest.raises(ConfigError, match="a device that holds llama_70b on 1, got 'l4'"):
        Roofline("l4", "llama_70b").pool_tokens(0.9)
