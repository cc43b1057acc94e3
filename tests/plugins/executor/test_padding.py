"""Launches padded to few sizes."""

import pytest
import torch

from core.request import SamplingParams
from kernels.jit import INTERPRETED
from plugins.executor.padding import FINE, STEP, Padding
from plugins.model.ops import TorchOps
from tests.plugins.executor.graph_run import DRAWS, device_decode, make
from tests.plugins.executor.launch_driver import Driver
from tests.plugins.executor.toy_model import ToyModel
from tests.plugins.model.dense import load
from tests.tiny_models import save_tiny


@pytest.mark.parametrize("largest", [1, 7, 100, FINE, FINE + 1, 5000])
def test_sizes_hold_every_count_with_little_waste(largest):
    padding = Padding(largest)
    assert padding.sizes == sorted(set(padding.sizes))
    assert padding.sizes[-1] == largest
    for count in range(1, largest + 1):
        size = padding(count)
        assert count <= size <= largest
        assert size in padding.sizes
        assert size - count < max(8, count / 8, 0 if count <= FINE else STEP)
    assert padding(largest + 1) == largest + 1
    assert padding(0) == 0
    assert len(padding.sizes) <= 60 + largest / STEP


def run(padding, graphs):
    """Chunks, mixed launches, one-token launches, scored prompts; the driver."""
    params = [*DRAWS, SamplingParams(logprobs=2), SamplingParams(prompt_logprobs=1, logprobs=1)]
    core = Driver(make(ToyModel(), graphs=graphs, decode=device_decode), 4, num_rows=12)
    core.executor._state.padding = padding
    for row, one in enumerate(params):
        core.start(row, range(1, 12 + row), one, seed=row)
    core.step(*((row, 5) for row in range(len(params))))
    core.step(*((row, 6 + row) for row in range(len(params))))
    core.start(8, range(3, 40))
    core.step(*((row, 1) for row in range(len(params))), (8, 37))
    core.step(*((row, 1) for row in (*range(len(params)), 8)))
    core.step((5, 1))
    return core


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on a CPU")
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_padding_changes_no_result(graphs):
    padding = Padding(2048)
    padded, plain = run(padding, graphs), run(None, graphs)
    assert padded.outputs == plain.outputs
    for one, other in zip(padded.results, plain.results, strict=True):
        assert str(one.logprobs) == str(other.logprobs)
        assert str(one.prompt_logprobs) == str(other.prompt_logprobs)


def test_products_meet_sizes_alone(monkeypatch):
    met = []
    executor = make(ToyModel(), graphs="off")
    forward = executor.model.forward

    def watched(token_ids, positions, attend, logits_rows):
        met.append((len(token_ids), len(logits_rows)))
        return forward(token_ids, positions, attend, logits_rows)

    monkeypatch.setattr(executor.model, "forward", watched)
    core = Driver(executor, 4, num_rows=12)
    core.executor._state.padding = Padding(2048)
    met.clear()
    for row in range(11):
        core.start(row, range(1, 4 + row))
    core.step(*((row, 3 + row) for row in range(11)))
    core.step(*((row, 1) for row in range(11)))
    core.start(11, range(1, 20))
    core.step((11, 9))
    assert met == [(88, 16), (16, 16), (16, 0)], "nothing sampled, no logits"


def test_a_decoder_multiplies_all_sizes_beforehand(tmp_path):
    save_tiny("llama", tmp_path)
    model = load(tmp_path)
    met = set()

    class Watched(TorchOps):
        def linear(self, x, weight, bias):
            met.add((len(x), tuple(weight.shape)))
            return super().linear(x, weight, bias)

    model._ops = Watched()
    with torch.inference_mode():
        Padding(16).meet(model, 3)
    layer = model.weights.layers[0]
    wanted = {(n, tuple(one.shape)) for n in (1, 2, 4, 8, 16) for one in layer.matrices}
    wanted |= {(n, tuple(model._head.shape)) for n in (1, 2, 4)}
    assert met == wanted
    Padding(16).meet(object(), 3)
