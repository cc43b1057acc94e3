"""The attention plugin: kernels are checked at start and handed the right rows."""

from dataclasses import asdict

import pytest
import torch

from core.errors import ConfigError
from core.hooks import Hooks
from kernels import extend as plain
from kernels import extend_dense
from kernels.declare import Capabilities, declare
from kernels.extend import ExtendConfig
from kernels.invariant import InvariantExtend
from kernels.jit import INTERPRETED
from kernels.torch_reference import paged_decode, paged_extend
from plugins.attention.paged import PagedAttention, PagedBackend
from plugins.shared.model_protocols import AttentionBatch, AttentionQuery


def query(**changes):
    facts = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    facts |= {"kv_dtype": changes.get("dtype", "float32"), "page_size": 16, "device": "cpu"}
    return AttentionQuery(**(facts | changes))


def kernel(**limits):
    capabilities = Capabilities(**({"dtypes": ("float32",), "devices": ("cpu",)} | limits))

    @declare(capabilities)
    def some_kernel(*arguments):
        return arguments

    return some_kernel


@pytest.mark.parametrize(
    ("limits", "changes", "message"),
    [
        ({}, {"device": "cuda:1"}, "attention.decode: device must be one of cpu .*, got 'cuda'"),
        ({}, {"dtype": "float16"}, "attention.decode: dtype must be .* float32 .* got 'float16'"),
        ({"head_dims": (64, 128)}, {"head_dim": 80}, "head_dim must be one of 64, 128 .* got 80"),
        ({"page_sizes": (16,)}, {"page_size": 1}, "page_size must be one of 16 .*, got 1"),
        (
            {},
            {"kv_dtype": "float8_e4m3fn"},
            "decode: kv_dtype must be one of float32 for .* got 'float8_e4m3fn'",
        ),
        ({"max_group": 1}, {}, "query heads to a KV head must be at most 1 .*some_kernel, got 2"),
        ({}, {"num_kv_heads": 3}, "num_q_heads must be a multiple of num_kv_heads .3., got 4"),
    ],
)
def test_kernel_that_does_not_fit_is_refused(limits, changes, message):
    with pytest.raises(ConfigError, match=message):
        PagedAttention(kernel(**limits), kernel()).build_attention(query(**changes))


def test_kernel_for_gpus_alone_says_how_to_run_on_a_cpu():
    with pytest.raises(
        ConfigError, match=r"device must be one of cuda .*TRITON_INTERPRET=1.*'cpu'"
    ):
        PagedAttention(kernel(devices=("cuda",)), kernel()).build_attention(query())


@pytest.mark.parametrize(
    ("kv_capability", "device", "refused"),
    [
        ({}, (8, 6), False),  # needs nothing
        (None, (8, 6), True),  # Triton's conversions need 8.9
        (None, (8, 9), False),
        ({"float8_e4m3fn": 90}, (8, 9), True),
    ],
)
def test_cache_dtype_that_the_device_cannot_convert_is_refused(
    kv_capability, device, refused, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    limits = {"dtypes": ("float32",), "devices": ("cuda",), "kv_dtypes": ("float8_e4m3fn",)}
    if kv_capability is not None:
        limits["kv_capability"] = kv_capability
    one = kernel(**limits)
    asked = query(device="cuda:1", kv_dtype="float8_e4m3fn")
    if not refused:
        assert PagedAttention(one, one).build_attention(asked)
        return
    rule = (
        r"attention.decode: CUDA capability must be at least \d\.\d where kv_dtype is float8_e4m3fn"
    )
    with pytest.raises(ConfigError, match=rule + rf" .*some_kernel, got {device[0]}\.{device[1]}"):
        PagedAttention(one, one).build_attention(asked)


@pytest.mark.parametrize(
    ("capability", "served_by"),
    [((9, 0), "kernels.extend_dense.extend"), ((8, 0), "kernels.extend.extend")],
)
def test_manifest_says_which_extend_kernel_serves(capability, served_by, monkeypatch):
    monkeypatch.setattr("kernels.extend_dense.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    plain = {"served_by": "kernels.extend.extend", "configuration": asdict(ExtendConfig())}
    facts = extend_dense.describe("cuda:0", 128, "bfloat16", 16, 4)
    assert facts["served_by"] == served_by
    assert facts.get("other_rows", facts) == plain
    assert extend_dense.describe("cuda:0", 96, "float8_e4m3fn", 16, 4) == plain
    assert extend_dense.describe("cpu", 128, "bfloat16", 16, 4) == plain


def test_extend_kernel_is_checked_too():
    plugin = PagedAttention(kernel(), kernel(head_dims=(128,)))
    with pytest.raises(
        ConfigError, match=r"attention\.extend: head_dim must be one of 128 .*some_kernel"
    ):
        plugin.build_attention(query())


def test_rows_are_split_between_the_kernels():
    calls = []

    def plan(rows):
        lens = rows.context_lens.tolist()
        assert lens == rows.host_context_lens
        assert (rows.num_q_heads, rows.num_kv_heads, rows.head_dim) == (4, 2, 64)
        calls.append((rows.page_table.tolist(), lens, rows.host_query_lens, rows.page_size))
        return "planned"

    @declare(Capabilities(("float32",), ("cpu",)), plan=plan)
    def extend(q, k_cache, v_cache, page_table, context_lens, query_starts, scale, window, plan):
        calls.append((page_table.tolist(), context_lens.tolist(), query_starts.tolist(), plan))
        return q

    def decode(q, k_cache, v_cache, page_table, context_lens, scale, window):
        calls.append((page_table.tolist(), context_lens.tolist(), scale, window))
        return q

    backend = PagedAttention(decode, extend).build_attention(query())
    batch = AttentionBatch(
        page_table=torch.tensor([[1], [2], [3], [4]]),
        context_lens=torch.tensor([5, 6, 7, 8], dtype=torch.int32),
        query_starts=torch.tensor([0, 1, 2, 6, 9], dtype=torch.int32),
        host_context_lens=[5, 6, 7, 8],
        host_query_lens=[1, 1, 4, 3],
        num_decode_rows=2,
        page_size=16,
    )
    made = backend.plan(batch)
    backend.decode(torch.zeros(2, 4, 64), None, None, made, 0.5, None)
    backend.extend(torch.zeros(7, 4, 64), None, None, made, 0.5, 9)
    assert calls == [
        ([[3], [4]], [7, 8], [4, 3], 16),
        ([[1], [2]], [5, 6], 0.5, None),
        ([[3], [4]], [7, 8], [0, 4, 7], "planned"),
    ]


def test_a_launch_in_a_graph_gives_all_tokens_to_the_kernel_that_may_be_captured():
    calls = []

    @declare(Capabilities(("float32",), ("cpu",), graph_safe=True, takes_out=True))
    def captured(q, k_cache, v_cache, table, lens, starts, scale, window, out):
        calls.append((len(q), table.tolist(), lens.tolist(), starts.tolist()))
        return out

    @declare(Capabilities(("float32",), ("cpu",)), in_graph=captured)
    def extend(*arguments):
        raise AssertionError("reads lengths on the host")

    backend = PagedAttention(paged_decode, extend).build_attention(query())
    assert backend.extends_in_graph
    batch = AttentionBatch(
        page_table=torch.tensor([[1], [2], [3], [4]]),
        context_lens=torch.tensor([5, 1, 7, 0], dtype=torch.int32),
        query_starts=torch.tensor([0, 0, 1, 5, 5], dtype=torch.int32),
        host_context_lens=[1] * 4,
        host_query_lens=[1] * 4,
        num_decode_rows=2,
        page_size=16,
        in_graph=True,
    )
    made, out = backend.plan(batch), torch.empty(6, 4, 64)
    assert backend.extend(torch.zeros(6, 4, 64), None, None, made, 0.5, None, out=out) is out
    assert calls == [(6, [[3], [4]], [7, 0], [1, 5, 5])]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"takes_out": True},
            "extend.in_graph: graph_safe must be declared by the kernel .*captured",
        ),
        ({"graph_safe": True}, "extend.in_graph: takes_out must be declared by .*, got False"),
        (
            {"graph_safe": True, "takes_out": True, "dtypes": ("float16",)},
            "extend.in_graph: dtype must be one of float16 .* got 'float32'",
        ),
    ],
)
def test_a_kernel_that_cannot_be_captured_is_refused_as_one(limits, message):
    @declare(Capabilities(**({"dtypes": ("float32",), "devices": ("cpu",)} | limits)))
    def captured(*arguments):
        return arguments

    @declare(Capabilities(("float32",), ("cpu",)), in_graph=captured)
    def extend(*arguments):
        return arguments

    with pytest.raises(ConfigError, match=message):
        PagedAttention(paged_decode, extend).build_attention(query())


def test_the_manifest_names_the_kernel_that_is_captured():
    asked = query(device="cpu" if INTERPRETED else "cuda")
    facts = PagedAttention(paged_decode, extend_dense.extend).build_attention(asked).describe()
    assert facts["extend_in_graph"]["kernel"] == "kernels.extend.extend"
    facts = PagedAttention(paged_decode, paged_extend).build_attention(asked).describe()
    assert "extend_in_graph" not in facts


@pytest.mark.parametrize(
    ("extend", "there"),
    [
        (kernel(graph_safe=True, takes_out=True), False),  # it may read what it must not write
        (paged_extend, False),
        (extend_dense.extend, True),
        (plain.extend, True),
        (InvariantExtend(128), False),
    ],
    ids=["silent", "torch", "dense", "plain", "invariant"],
)
def test_only_kernels_that_say_so_are_captured_with_decodes(extend, there):
    backend = PagedBackend("any", paged_decode, extend, query())
    assert backend.extends_in_graph is there


@pytest.mark.parametrize(
    ("takes", "kv_dtype", "given"),
    [
        (True, "float32", {"k_new": "k", "v_new": "v"}),
        (False, "float32", {}),
        (True, "float8_e4m3fn", {}),  # what later steps read is rounded
    ],
)
def test_new_kv_reach_the_kernels_that_take_them(takes, kv_dtype, given):
    limits = {"dtypes": ("float32",), "devices": ("cpu",), "kv_dtypes": (kv_dtype,)}
    seen = []

    @declare(Capabilities(**limits, takes_new_kv=takes))
    def extend(*arguments, **options):
        seen.append(options)

    decode = kernel(kv_dtypes=(kv_dtype,))
    backend = PagedAttention(decode, extend).build_attention(query(kv_dtype=kv_dtype))
    one = torch.tensor([1], dtype=torch.int32)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    made = backend.plan(AttentionBatch(one[None], one + 1, starts, [2], [2], 0, 16))
    backend.extend(torch.zeros(2, 4, 64), None, None, made, 0.5, None, "k", "v")
    backend.extend(torch.zeros(2, 4, 64), None, None, made, 0.5, None)
    assert seen == [given, {}]


def test_hook_build_attention():
    hooks = Hooks({"attention": PagedAttention(paged_decode, paged_extend)}, {})
    backend = hooks.build("build_attention", query(dtype="bfloat16", page_size=1))
    assert backend.name == "kernels.torch_reference.paged_decode"
    facts = backend.describe()
    assert facts["extend"]["kernel"] == "kernels.torch_reference.paged_extend"
    assert facts["decode"]["capabilities"]["address"] == "table"
    undeclared = PagedAttention(lambda: None, paged_extend, name="mine").build_attention(query())
    assert undeclared.name == "mine"
    assert undeclared.describe()["decode"]["capabilities"] == "undeclared"
