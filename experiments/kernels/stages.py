"""Variants of the pipelined prefill kernel, kernels/extend_gluon.py, with a stage left out or made
cheaper; try_stages.py times them."""

import importlib.util
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from kernels import extend_gluon
from kernels.extend_tma import DenseConfig

WHOLE = "whole kernel"
ALL_HEADS_BYTES = 1 << 40

SOFTMAX = """\
        b_w, b_max, b_sum, b_old = softmax(
            b_s, b_max, b_sum, b_position, j * BLOCK_N, scale, MASKED
        )
"""
WEIGHTS = "        b_p = operand(b_w, q_s.dtype, O_LAYOUT)\n    return"
RESCALE = """\
        b_acc = rescale(b_acc, b_old)
        mbarrier.wait(full.index(slot), j // STAGES & 1)
"""
SCORES = """\
        b_s = warpgroup_mma(b_q, k_s.index(slot).permute((1, 0)), zeros, use_acc=False,
                            is_async=True)  # fmt: skip
"""
VALUES = "        b_acc = warpgroup_mma(b_p, v_s.index(slot), b_acc, is_async=True)\n        _load"
SCORES_WAIT = "        b_s = warpgroup_mma_wait(1, deps=(b_s,))\n"
MAXIMUM = """\
b_new = gl.max(b_s, 1) * scale
    b_new = gl.where(b_new > b_max + SLACK, b_new, b_max)"""
FIRST_MAXIMUM = 'b_max = gl.full([BLOCK_M], float("-inf"), gl.float32, ROWS)'
ZERO_MAXIMUM = "b_max = gl.zeros([BLOCK_M], gl.float32, ROWS)"
EXP2 = "b_p = _exp2(b_s * scale - b_new[:, None])"
MULTIPLICATION = """\
b_p = gl.inline_asm_elementwise(
        "mul.f32 $0, $1, $1;", "=f,f", [b_s * scale - b_new[:, None]], dtype=gl.float32,
        is_pure=True, pack=1,
    )"""
WHOLE_TILES = "whole = gl.minimum(gl.maximum((nearest + 1) // BLOCK_N, 1), count)"
MASKED_LOOP = """\
    b_acc, b_max, b_sum, b_old, b_p = _attend(
        b_acc, b_max, b_sum, b_old, b_p, b_position, q_s, k_s, v_s, full,
        d_k, d_v, base, column, whole, count, count, scale, True, STAGES, NUM_WARPS,
    )  # fmt: skip
"""
LOOP_BARRIER = "        barrier()  # all warps are done with load j - 1\n"
LOOP_WAIT = "mbarrier.wait(full.index(slot), j // STAGES & 1)"
LAST_WAIT = "mbarrier.wait(full.index(slot), count // STAGES & 1)"

Edit = tuple[str, str]
NO_RESCALE: Edit = (RESCALE, RESCALE[RESCALE.index("\n") + 1 :])
NO_MASKED_LOOP: tuple[Edit, ...] = ((WHOLE_TILES, "whole = count"), (MASKED_LOOP, ""))
NO_SOFTMAX: tuple[Edit, ...] = ((SOFTMAX, ""), NO_RESCALE)
SCORES_AS_WEIGHTS: Edit = (WEIGHTS, WEIGHTS.replace("b_w", "b_s"))
# b_acc stays what a product gives: the loop's variables keep their types.
NO_VALUES: tuple[Edit, ...] = (
    (VALUES, "        b_acc = warpgroup_mma_init(b_acc)\n        _load"),
    (SCORES_WAIT, SCORES_WAIT.replace("1", "0", 1)),
)
# A barrier whose phase 0 is over lets every later wait for phase 0 pass.
NO_COPIES: tuple[Edit, ...] = (
    ("wanted = i <= count", "wanted = (i <= count) & (i < STAGES)"),
    (LOOP_WAIT, "mbarrier.wait(full.index(slot), 0)"),
    (LAST_WAIT, "mbarrier.wait(full.index(slot), 0)"),
)
QUERIES_IN_SHARED: Edit = ("q_s.load(gl.DotOperandLayout(0, S_LAYOUT, 2))", "q_s")
EXACT_MAXIMUM: Edit = (MAXIMUM, "b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale)")
# By a multiplication of all values, changed or not.
ALWAYS_RESCALE: Edit = (
    RESCALE,
    RESCALE.replace(
        "rescale(b_acc, b_old)",
        "b_acc * gl.convert_layout(b_old, gl.SliceLayout(1, O_LAYOUT))[:, None]",
    ),
)
NO_BARRIER: Edit = (LOOP_BARRIER, "")
# The last scores alone are used, or the compiler would drop the product.
PRODUCTS: tuple[Edit, ...] = (
    *NO_SOFTMAX,
    (WEIGHTS, f"        if j + 1 == end:\n    {WEIGHTS.replace('b_w', 'b_s')}"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Replacements in the kernel's module, each of a text that occurs once, made in order, and the
    launch parameters. right: its results are the kernel's."""

    edits: tuple[Edit, ...] = ()
    config: DenseConfig = field(default_factory=lambda: DenseConfig("pipelined"))
    right: bool = False

    def source(self) -> str:
        """The module's text. Raises ValueError where a replaced text does not occur once."""
        text = inspect.getsource(extend_gluon)
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"text must occur once, got {text.count(old)}: {old!r}")
            text = text.replace(old, new)
        return text


VARIANTS = {
    WHOLE: Variant(),
    # Without the assembly in its place ptxas makes the products wait for each other.
    "a multiplication for exp2": Variant(((EXP2, MULTIPLICATION),)),
    # Grows as a maximum does, without a look at the scores.
    "no row maximum": Variant(((MAXIMUM, "b_new = b_max + scale"), (FIRST_MAXIMUM, ZERO_MAXIMUM))),
    "no rescale": Variant((NO_RESCALE,)),
    "no maximum, no rescale": Variant(
        ((MAXIMUM, "b_new = b_max"), (FIRST_MAXIMUM, ZERO_MAXIMUM), NO_RESCALE)
    ),
    "no masked loop": Variant(NO_MASKED_LOOP),
    "no softmax, scores are weights": Variant((*NO_SOFTMAX, SCORES_AS_WEIGHTS)),
    "no values' product": Variant(NO_VALUES),
    "scores' product alone": Variant((*NO_SOFTMAX, *NO_VALUES, SCORES_AS_WEIGHTS)),
    "values' product alone": Variant(
        (*NO_SOFTMAX, (SCORES, ""), (SCORES_WAIT, ""), (WEIGHTS, "    return"))
    ),
    "products alone": Variant(PRODUCTS),
    "products alone, no copies, barrier": Variant((*PRODUCTS, *NO_COPIES, NO_BARRIER)),
    "one tile copied again and again": Variant(
        (
            ("k_row = base + i * d_k.block_type.shape[0]", "k_row = base"),
            ("v_row = base + gl.maximum(i - 1, 0) * d_k.block_type.shape[0]", "v_row = base"),
        )
    ),
    "no copies after the first": Variant(NO_COPIES),
    "queries in shared memory": Variant((QUERIES_IN_SHARED,), right=True),
    "exact maximum": Variant((EXACT_MAXIMUM,), right=True),
    "exact maximum, always rescaled": Variant((EXACT_MAXIMUM, ALWAYS_RESCALE), right=True),
    "no barrier in the loop": Variant((NO_BARRIER,)),
    # A comparison keeps the result alive.
    "no output store": Variant(
        (("mask=valid[:, None])", "mask=valid[:, None] & (b_out.to(gl.float32) == 12345.0))"),)
    ),
    "one KV head at a time": Variant(config=DenseConfig("pipelined", kv_bytes=1)),
    "all heads at once": Variant(config=DenseConfig("pipelined", kv_bytes=ALL_HEADS_BYTES)),
    "2 stages": Variant(config=DenseConfig("pipelined", num_stages=2)),
    "4 stages, one program at a time": Variant(config=DenseConfig("pipelined", num_stages=4)),
}


def load(variant: Variant, folder: str) -> ModuleType:
    """The variant's module, from a file in `folder`: Triton reads a kernel's source there."""
    path = Path(folder) / "variant.py"
    path.write_text(variant.source())
    spec = importlib.util.spec_from_file_location("variant", path)
    assert spec is not None, f"{path} is a module"
    assert spec.loader is not None, f"{path} is a module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
