"""The contiguous path of ragged prefill, alone and beside the plain one."""

from dataclasses import asdict

import pytest
import torch

from kernels.extend_dense import DenseConfig, extend, plan_extend, takes_dense
from kernels.jit import INTERPRETED
from kernels.probe import compiles
from tests.kernels.extend_case import DEVICE, Case

SMALL = DenseConfig(min_tokens=32)
MIXED = [(150, 40), (1, 1), (0, 3), (65, 65), (30, 20), (140, 33)]
FRESH = [(40, 40), (7, 7), (65, 65), (33, 33)]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_dense = pytest.mark.skipif(
    not INTERPRETED and not HOPPER, reason="the dense path needs a device of capability 9"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_extend_mixes_long_and_short_rows(dtype, page_size):
    case = Case(MIXED, (4, 2), page_size=page_size, dtype=dtype, num_padding=2)
    plan = plan_extend(case.plan_rows(), SMALL)
    assert len(plan.long_lens) == 3
    assert plan.has_prefix
    assert plan.short is not None
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))


@needs_dense
@pytest.mark.parametrize(
    "config",
    [
        DenseConfig(min_tokens=32, head_fast=True),
        DenseConfig(block_m=128, num_warps=8, min_tokens=32),
        DenseConfig(block_n=32, q_registers=True, min_tokens=32),
        DenseConfig(block_m=128, block_n=128, num_warps=8, num_stages=2, min_tokens=32),
    ],
    ids=str,
)
def test_dense_configurations_agree(config):
    case = Case([(170, 40), (65, 65)], head_dim=128)
    assert takes_dense(case.q, config)
    plan = plan_extend(case.plan_rows(), config)
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))
    assert plan.tiles
    assert plan.short is None


GLUON = [
    DenseConfig("pipelined", 128, 128, 8, 2, min_tokens=32),
    DenseConfig("pipelined", 128, 64, 8, 4, kv_bytes=1, min_tokens=32),
    DenseConfig("pipelined", min_tokens=32),
    DenseConfig("paired", min_tokens=32),
    DenseConfig("paired", num_stages=2, kv_bytes=1, min_tokens=32),
]


@pytest.mark.gpu
@needs_dense
@pytest.mark.parametrize("config", GLUON, ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64)])
def test_gluon_equals_dense_attention(config, dtype, head_dim):
    # Rows of 1 .. 20 key tiles, prefixes, an unaligned diagonal, and more items than programs.
    rows = [(1300, 700), (300, 300), (1, 1), (129, 128), (640, 33), (90, 90)]
    case = Case(rows, (8, 2), head_dim=head_dim, dtype=dtype, num_padding=3)
    assert takes_dense(case.q, config)
    plan = plan_extend(case.plan_rows(), config)
    for _ in range(2):
        case.check(*extend(*case.inputs(), plan=plan, return_lse=True))
        case.check(extend(*case.inputs(), plan=plan))


@pytest.mark.gpu
@needs_dense
@pytest.mark.parametrize("config", [SMALL, *GLUON], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64)])
def test_maxima_grow_along_the_keys_in_some_rows_alone(config, dtype, head_dim):
    rows = [(1300, 700), (300, 300), (640, 33), (90, 90)]
    case = Case(rows, (8, 2), head_dim=head_dim, dtype=dtype, growing=True)
    plan = plan_extend(case.plan_rows(), config)
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))


@pytest.mark.gpu
@needs_dense
@pytest.mark.parametrize("heads", [(32, 8), (24, 8)], ids=str)
def test_much_work_is_done_for_two_heads_at_once(heads, monkeypatch):
    monkeypatch.setattr("kernels.extend_dense.PAIRED_ROUNDS", 0.5)
    case = Case([(1300, 1300), (600, 600), (1700, 700)], heads, head_dim=128)
    plan = plan_extend(case.plan_rows())
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))
    (config,) = plan.chosen.values()
    assert config.form == ("paired" if heads == (32, 8) else "pipelined")


@pytest.mark.gpu
@needs_dense
@pytest.mark.parametrize("config", GLUON, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gluon_reads_new_keys_in_place(config, head_dim):
    rows = [(40, 40), (7, 7), (256, 256), (300, 300), (33, 33)]
    case = Case(rows, (8, 2), head_dim=head_dim, num_padding=4)
    new = case.kv_new.clone()
    new[:, 40:47] = torch.nan
    plan = plan_extend(case.plan_rows(), config)
    out = extend(*case.inputs(), plan=plan, k_new=new[0], v_new=new[1], return_lse=True)
    case.check(*out)
    assert plan.slots is None, "nothing was to be gathered"


def test_gluon_compiles_without_a_device():
    config = DenseConfig("pipelined", 128, 64, 8, 2, min_tokens=1)
    arguments = {"capability": 90, "type_name": "fp16", "head_dim": 64, "config": asdict(config)}
    assert compiles("kernels.extend_dense:probe", arguments)


@pytest.mark.skipif(not INTERPRETED, reason="there Gluon runs")
def test_gluon_falls_back_in_the_interpreter():
    config = DenseConfig("pipelined", 128, 64, 8, 2, min_tokens=1)
    case = Case([(64, 40), (65, 65)])
    plan = plan_extend(case.plan_rows(), config)
    case.check(extend(*case.inputs(), plan=plan))
    assert plan.tiles


@needs_dense
def test_new_keys_are_read_in_place_and_their_neighbours_do_not_leak():
    case = Case(FRESH, (4, 2), num_padding=4)
    tokens, width = len(case.q), 2 * 64
    # K and V lie in one buffer with q, NaN around them; tokens of the short row are poisoned too.
    packed = torch.full((tokens, 4 * width), torch.nan, dtype=case.q.dtype, device=DEVICE)
    packed[:, width : 2 * width] = case.kv_new[0].flatten(1)
    packed[:, 3 * width :] = case.kv_new[1].flatten(1)
    packed[40:47] = torch.nan
    k_new = packed[:, width : 2 * width].unflatten(1, (2, 64))
    v_new = packed[:, 3 * width :].unflatten(1, (2, 64))
    plan = plan_extend(case.plan_rows(), SMALL)
    out = extend(*case.inputs(), plan=plan, k_new=k_new, v_new=v_new, return_lse=True)
    case.check(*out)
    assert plan.slots is None, "nothing was to be gathered"


def test_long_rows_alone_leave_padding_zero():
    case = Case([(64, 40), (32, 32)], num_padding=5)
    plan = plan_extend(case.plan_rows(), SMALL)
    assert plan.short is None
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))


def test_extend_without_a_plan_reads_the_lengths():
    case = Case([(64, 40), (3, 3)])
    case.check(extend(*case.inputs()))


@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 3.0}])
def test_windows_and_caps_take_the_plain_path(options):
    case = Case([(64, 40), (3, 3)], **options)
    plan = plan_extend(case.plan_rows(), SMALL)
    case.check(extend(*case.inputs(), **options, plan=plan))
    assert not plan.tiles


def test_fp8_cache_is_gathered_into_the_type_of_the_queries():
    case = Case([(90, 70), (65, 65)], kv_dtype=torch.float8_e4m3fn)
    case.q *= 2.0
    plan = plan_extend(case.plan_rows(), SMALL)
    new = {"k_new": case.kv_new[0], "v_new": case.kv_new[1]}
    options = {"k_scale": 0.5, "v_scale": 3.0, "return_lse": True}
    out, lse = extend(*case.inputs(), plan=plan, **new, **options)
    case.check(out / 3.0, lse)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.float16, 80)])
def test_other_types_and_head_dims_take_the_plain_path(dtype, head_dim):
    case = Case([(64, 40), (3, 3)], dtype=dtype, head_dim=head_dim)
    plan = plan_extend(case.plan_rows(), SMALL)
    case.check(extend(*case.inputs(), plan=plan))
    assert not plan.tiles


@needs_dense
def test_extend_refuses_misplaced_new_keys():
    case = Case(FRESH)
    plan = plan_extend(case.plan_rows(), SMALL)
    k_new, v_new = case.kv_new
    with pytest.raises(ValueError, match="k_new must be shaped"):
        extend(*case.inputs(), plan=plan, k_new=k_new[1:], v_new=v_new)
    with pytest.raises(ValueError, match="v_new dtype"):
        extend(*case.inputs(), plan=plan, k_new=k_new, v_new=v_new.float())


@needs_dense
def test_queries_before_position_0_see_nothing():
    case = Case([(0, 2), (64, 66), (90, 90)], head_dim=64)
    plan = plan_extend(case.plan_rows(), DenseConfig(min_tokens=32))
    case.check(*extend(*case.inputs(), plan=plan, return_lse=True))
