"""plugins/step_time/splitwise.py, vidur.py and tables.py: what the published tables hold."""

from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.step_time.roofline import Roofline
from plugins.step_time.splitwise import Splitwise
from plugins.step_time.tables import curve
from plugins.step_time.vidur import Vidur


def test_curve_goes_through_medians_and_on_in_proportion():
    own = curve([(4, 10.0), (2, 1.0), (2, 3.0), (2, 8.0)])
    assert own.at(np.array([1, 2, 3, 4, 8])).tolist() == [3.0, 3.0, 6.5, 10.0, 20.0]


def test_splitwise_gives_its_own_points_and_the_middle_between_two():
    """H100, 8 devices, batch sizes 32 and 64: medians 38.62 and 50.16 ms between tokens; 512
    tokens in 64 prompts: 2,936 ms."""
    model = Splitwise()
    assert model.seconds(64, 64, 0, 0) == pytest.approx(50.16e-3, abs=1e-5)
    assert model.seconds(48, 48, 0, 0) == pytest.approx((38.62e-3 + 50.16e-3) / 2, abs=1e-5)
    assert model.seconds(64, 64 * 512, 0, 0) == pytest.approx(2.93633, abs=1e-4)


def test_splitwise_never_takes_less_with_a_chunk_than_without():
    model = Splitwise("a100", "bloom_176b")
    assert model.seconds(64, 65, 0, 0) >= model.seconds(64, 64, 0, 0)


def test_vidur_sums_its_operations():
    """H100, Llama2-7B, one token, medians in ms: norms 4 us twice, 38, 4, 16, 64, 6, 38, additions
    1 us twice, 32 layers, embedding 2 us."""
    layer_us = 4 + 38 + 4 + 16 + 4 + 64 + 6 + 38 + 2 * 1
    roofline = Roofline("h100", "llama2_7b")
    rest = roofline.attention_seconds(100, 100) + roofline.head_seconds(1)
    found = Vidur(step_s=0.0).seconds(1, 1, 100, 100)
    assert found == pytest.approx(32 * layer_us * 1e-6 + 2e-6 + rest)


def test_vidur_adds_two_all_reduces_a_layer():
    """256 tokens of 4,096 values: 2 MiB each, 64 of them; some 20 to 100 us apiece on NVLink."""
    alone = Vidur(num_devices=8, step_s=0.0)
    assert alone._reduce is not None
    one = float(alone._reduce.at(2 * 4096 * 256))
    assert 2e-5 < one < 1e-4
    rest = alone._rest.attention_seconds(0, 0) + alone._rest.head_seconds(256)
    whole = alone.seconds(256, 256, 0, 0)
    assert whole == pytest.approx(64 * one + alone._products.at(256) + rest)


@pytest.mark.parametrize(
    "model", [Splitwise(), Vidur(), Vidur(num_devices=8), Vidur("a100", "llama_8b")]
)
def test_arrays_give_what_numbers_give(model: Any):
    rows, tokens = np.array([1, 64, 64, 100]), np.array([1, 64, 5000, 100])
    together = model.seconds(rows, tokens, 100 * tokens, 200 * tokens)
    pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
    assert together.tolist() == [float(model.seconds(r, t, 100 * t, 200 * t)) for r, t in pairs]
    reads = np.array([10, 20, 30])
    assert np.shape(model.seconds(4, 4, reads, reads)) == (3,)


def test_memory_beside_the_weights_is_the_pool():
    """8 x (0.9 x 80 - 4) GB less 138 GB of weights, 320 KiB a token."""
    assert Splitwise().pool_tokens(0.9) == (8 * 68 * 10**9 - 2 * 68_976_648_192) // 327_680
    with pytest.raises(ConfigError, match="memory_share must be enough for bloom_176b on 8"):
        Splitwise("h100", "bloom_176b").pool_tokens(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Splitwise("h200"), "step_time.device must be one of a100, h100, h100_capped"),
        (lambda: Splitwise(model="llama_8b"), "step_time.model must be one of llama2_70b, bloom"),
        (lambda: Splitwise(num_devices=1), "num_devices must be one of 2, 4, 8, on which llama2"),
        (lambda: Splitwise("h100", "bloom_176b", 4), "num_devices must be one of 8, on which bl"),
        (lambda: Vidur("h200"), "one of h100 with llama2_7b, a100 with llama_8b, got 'h200 with"),
        (lambda: Vidur("a100", "llama_8b", 2), "num_devices must be 1 on a100"),
    ],
)
def test_what_the_tables_do_not_hold_is_refused(make: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        make()
