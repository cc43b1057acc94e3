"""What the batch-invariant kernels compile to for Hopper on a machine without a GPU."""

import pytest

from kernels.compiled import Launcher, inspect_all
from kernels.matmul import CONFIGS

FOLDER = "tests.kernels.invariant_launches:"
ATTENTION = {  # arguments, programs that a multiprocessor must hold at once
    "one split": ({}, 2),
    "page 1, group 4": ({"page_size": 1, "group": 4, "pages": 1024}, 2),
    "folded": ({"pages": 2560}, 2),
    "in parts": ({"pages": 2560, "rows": 4}, 2),
    "d64": ({"head_dim": 64}, 4),
    "float8": ({"kv_dtype": "float8_e4m3fn"}, 2),
    "d256": ({"head_dim": 256}, 1),
}
PRODUCTS = {str(config): index for index, config in enumerate(CONFIGS)}


@pytest.fixture(scope="module")
def compiled():
    launchers = [Launcher(name, FOLDER + "decode", given) for name, (given, _) in ATTENTION.items()]
    launchers += [
        Launcher(name, FOLDER + "product", {"config": index}) for name, index in PRODUCTS.items()
    ]
    return inspect_all(launchers, timeout_s=360)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_spills_nothing_and_shares_a_multiprocessor(compiled, name):
    kernel = next(one for one in compiled[name] if one.kernel == "invariant_kernel")
    assert kernel.has_wgmma
    assert kernel.stack_bytes == 0
    assert min(kernel.kv_buffers) >= 2
    assert kernel.programs >= ATTENTION[name][1]


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_tile_of_a_product_takes_the_same_instruction(compiled, name):
    (kernel,) = compiled[name]
    assert kernel.has_wgmma
    assert kernel.stack_bytes == 0
    assert kernel.async_copy_bytes == (16,)
    assert min(kernel.kv_buffers) >= 3
