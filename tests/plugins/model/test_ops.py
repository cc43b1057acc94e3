"""A decoder with fused layer operations answers as the torch one, in four launches a layer."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from core.config import EngineConfig
from core.errors import ConfigError
from core.launch import PoolLayout
from core.queries import ExecutorQuery, ModelQuery
from kernels import rms_norm, rotary_store, swiglu
from kernels.fused import ACTIVATIONS, FusedOps, FusedPaging
from kernels.torch_reference import paged_decode, paged_extend
from plugins.attention.paged import PagedAttention
from plugins.executor.pool import KVPool
from plugins.executor.torch_runner import TorchRunner
from plugins.model import spec
from plugins.model.loader import HuggingFaceModel
from plugins.model.ops import TorchOps
from plugins.shared.clocks import RealClock
from tests.plugins.executor.launch_driver import Driver
from tests.tiny_models import random_prompts, save_tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = random_prompts([9, 4, 1], seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family, settings in (
        ("llama", {}),
        ("qwen3", {}),
        ("smollm3", {"num_hidden_layers": 4}),  # its fourth layer does not rotate
        ("qwen2", {"hidden_act": "gelu_new"}),  # a bias on q, k and v
    ):
        made[family] = tmp_path_factory.mktemp(family)
        save_tiny(family, made[family], seed=5, **settings)
    return made


def load(folder, ops, dtype="float32"):
    plugin = HuggingFaceModel(path=str(folder), dtype=dtype, ops=ops)
    return plugin.build_model(ModelQuery(DEVICE, 0, False))


def driver(model, paging=None, **options):
    backend = PagedAttention(paged_decode, paged_extend)
    query = ExecutorQuery(
        engine=EngineConfig(),
        seed=0,
        clock=RealClock(),
        model=lambda: model,
        attention=backend.build_attention,
    )
    return Driver(TorchRunner(paging=paging, **options).build_executor(query), num_tokens=256)


def serve(core):
    """Outputs of three prompts in mixed batches, and the pool's K and V."""
    for row, prompt in enumerate(PROMPTS):
        core.start(row, prompt)
    core.step((0, 4), (2, 1))
    core.step((0, 5), (1, 4), (2, 1))
    core.step((0, 1), (1, 1), (2, 1))
    return core.outputs, core.executor._state.pool.kv  # page 0 holds what nobody reads


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "qwen2"])
def test_fused_decoder_answers_as_torch(folders, family):
    outputs, kv = serve(driver(load(folders[family], TorchOps())))
    fused_outputs, fused_kv = serve(driver(load(folders[family], FusedOps()), FusedPaging()))
    assert fused_outputs == outputs
    torch.testing.assert_close(fused_kv[:, :, 1:], kv[:, :, 1:], rtol=1e-4, atol=1e-5)


def test_float8_pool_holds_scaled_values_of_either_ops(folders):
    """Each layer's K and V to float8's precision, read back with the scales; the second layer's
    depend on attention over the first's."""
    wide = serve(driver(load(folders["qwen3"], TorchOps())))[1][:, :, 1:]
    scales = torch.tensor([0.25, 0.125], device=DEVICE).view(1, 2, 1, 1, 1, 1)
    options = {"dtype": "float8_e4m3fn", "k_scale": 0.25, "v_scale": 0.125}
    pools = []
    for ops, paging in ((TorchOps(), None), (FusedOps(), FusedPaging())):
        core = driver(load(folders["qwen3"], ops), paging, **options)
        kv = serve(core)[1][:, :, 1:]
        assert kv.dtype == torch.float8_e4m3fn
        pools.append(kv.float() * scales)
        torch.testing.assert_close(pools[-1][0], wide[0], rtol=2**-4, atol=2**-10)
        error = (pools[-1][1] - wide[1]).norm() / wide[1].norm()
        assert error < 0.1
    different = pools[0][0] != pools[1][0]
    assert different.float().mean() < 0.01  # where the last bits of float32 decide the rounding


class Attend:
    """The storing half of a launch's attention."""

    def __init__(self, pool, slots):
        self.pool, self.slots = pool, slots

    def target(self, layer):
        return self.pool.target(layer, self.slots)

    def store(self, layer, k, v):
        self.pool.store(layer, self.slots, k, v)

    def __call__(self, layer, q, k, v, scale, window):
        return torch.ops.aten.clone(q)  # stands for the attention kernel


class Launches(TorchDispatchMode):
    """Counts operations that launch something: torch's, and Triton kernels by their names."""

    FREE = ("view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "empty", "t")
    FREE += ("transpose", "detach", "alias", "empty_like", "new_empty", "expand", "unsqueeze")

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in self.FREE:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    def launcher(self, name, launch):
        """A stand-in for a kernel's launcher that counts."""

        def counted(*args, **kwargs):
            self.counts[name] += 1
            with _disable_current_modes():
                launch(*args, **kwargs)

        return counted


def launches(model, monkeypatch):
    """What one layer launches beside matrix products and attention: of n layers less n - 1."""
    counter = Launches()
    for module in (rms_norm, rotary_store, swiglu):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "_run", counter.launcher(name, module._run))
    layout = PoolLayout(5, 16, 2, 4, 8)
    shape = (model.num_layers, model.num_kv_heads, model.head_dim)
    attend = Attend(
        KVPool(layout, *shape, torch.float32, model.device), torch.tensor([3, 5], device=DEVICE)
    )
    inputs = torch.tensor([3, 4], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    totals = []
    every = model._layers
    for count in (1, 2):
        model._layers = every[:count]
        counter.counts.clear()
        with torch.no_grad(), counter:  # inference mode hides which products F.linear takes
            model.forward(*inputs, attend, inputs[1])
        totals.append(counter.counts.copy())
    model._layers = every
    layer = totals[1] - totals[0]
    assert layer.pop("clone") == 1
    products = layer.pop("mm", 0) + layer.pop("addmm", 0)
    assert products == 4
    return layer


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_layer_has_four_launches_beside_products_and_attention(folders, family, monkeypatch):
    layer = launches(load(folders[family], FusedOps()), monkeypatch)
    assert layer == {"rms_norm": 2, "rotary_store": 1, "swiglu": 1}


def test_torch_layer_has_more_launches(folders, monkeypatch):
    """The count above can fail."""
    assert launches(load(folders["llama"], TorchOps()), monkeypatch).total() > 10


def test_manifest_tells_the_operations_and_their_parameters(folders):
    facts = {}
    for ops in (TorchOps(), FusedOps(), FusedOps(invariant=True)):
        facts[ops.batch_invariant, type(ops)] = load(folders["llama"], ops).describe(torch.float16)
    assert facts[False, TorchOps] == {"ops": {"name": "torch", "invariant": False}}
    fused = facts[False, FusedOps]["ops"]
    assert set(fused) == {"name", "invariant", "rotary_store", "rotary_store_few"}
    assert set(fused["rotary_store"]["configuration"]) == {"heads", "num_warps"}
    assert "rotary_store_few" not in facts[True, FusedOps]["ops"]


def test_every_activation_of_a_config_has_a_kernel():
    assert set(ACTIVATIONS) == set(spec.ACTIVATIONS)
    x = torch.linspace(-4, 4, 12, device=DEVICE)[None]
    for name in spec.ACTIVATIONS:
        torch.testing.assert_close(FusedOps().gate(x, name), TorchOps().gate(x, name))


def test_model_that_the_kernels_cannot_serve_is_refused(folders, monkeypatch):
    monkeypatch.setattr("kernels.fused.INTERPRETED", False)
    plugin = HuggingFaceModel(path=str(folders["llama"]), ops=FusedOps())
    with pytest.raises(ConfigError, match=r"model\.ops: device must be cuda .*, got 'cpu'"):
        plugin.build_model(ModelQuery("cpu", 0, False))


@pytest.mark.parametrize(("dim", "message"), [(512, "even and <= 256, got 512"), (9, "got 9")])
def test_head_dims_that_do_not_fit_are_refused(dim, message):
    with pytest.raises(ValueError, match=f"head_dim must be {message}|{message}"):
        FusedOps().check(torch.device(DEVICE), torch.float16, dim)
