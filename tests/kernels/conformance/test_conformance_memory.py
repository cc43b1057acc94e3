"""Addresses: tails and stale memory, permutations, tensors beyond 32 bits, plans and graphs that
outlive the lengths they were made with."""

import pytest
import torch

from kernels.conformance import Case, paged_case
from tests.kernels.conformance.kit import DEVICE

thorough = pytest.mark.thorough
BEYOND = 2**31
GROWTH = [1, 40, 64, 65, 200, 300] if DEVICE == "cpu" else [1, 64, 511, 513, 1025, 4097, 20_000]


@thorough
def test_table_tails_may_hold_anything_valid(kernel, page_size, agrees):
    """Tails on page 0 and tails on pages of others give the same result."""
    contexts, options = [33, 1, 64, 0], {"page_size": page_size, "max_pages": 80, "seed": 1}
    zeros, _ = agrees(kernel, kernel.case(contexts, **options))
    others, _ = agrees(kernel, kernel.case(contexts, **options, garbage_tails=True))
    assert torch.equal(zeros, others)


@thorough
def test_inputs_are_left_as_they_were(kernel):
    case = kernel.case([65, 1, 0, 20])
    tensors = (case.q, case.k_cache, case.v_cache, case.page_table, case.context_lens)
    before = [tensor.clone() for tensor in tensors]
    kernel(case)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


@thorough
def test_result_does_not_depend_on_where_pages_lie(kernel, agrees):
    """Same tokens on other pages, in a larger pool: the same result."""
    case = kernel.case([100, 33, 1], seed=2)
    moved = moved_to(case, page_size=case.page_size, seed=3)
    assert torch.equal(agrees(kernel, case)[0], agrees(kernel, moved)[0])


@thorough
def test_result_does_not_depend_on_the_page_size(kernel, page_size, agrees):
    """The same tokens as in pages of the kernel's usual size, to tolerance."""
    case = kernel.case([100, 33, 1], seed=4)
    agrees(kernel, moved_to(case, page_size, seed=5))


def test_calls_with_one_plan_repeat_exactly(kernel, agrees):
    """Layers share a plan; what a call counts with must be back at its start after it."""
    contexts = [0, 1, 70 if kernel.quick else 130]
    case, other = (kernel.case(contexts, seed=seed) for seed in (6, 7))
    other.page_table, other.context_lens = case.page_table, case.context_lens
    other.k_cache.copy_(case.k_cache)
    other.v_cache.copy_(case.v_cache)
    other.keys, other.values = case.keys, case.values
    plan = kernel.plan(case)
    first, _ = agrees(kernel, case, result=kernel(case, plan=plan))
    agrees(kernel, other, result=kernel(other, plan=plan))
    assert torch.equal(kernel(case, plan=plan)[0], first)


def test_cache_beyond_2_31_elements(kernel, agrees):
    """Slots near both ends of a pool whose offsets leave 32 bits. On a CPU the pool is virtual
    memory: only the pages used are touched."""
    head_dim, num_kv_heads, page_size = kernel.axis("head_dim")[-1], 2, kernel.page_size
    dtype = torch.float16 if "float16" in kernel.limits.dtypes else kernel.dtype
    num_pages = 5 * BEYOND // 4 // (head_dim * num_kv_heads * page_size) + 1
    need_room(2 * num_pages * page_size * num_kv_heads * head_dim * dtype.itemsize)
    options = {"heads": (4, 2), "head_dim": head_dim, "page_size": page_size, "dtype": dtype}
    case = kernel.case([20, 33], **options)
    caches = []
    for cache in (case.k_cache, case.v_cache):
        large = torch.empty((num_pages, *cache.shape[1:]), dtype=dtype, device=DEVICE)
        large[-len(cache) :] = cache
        caches.append(large)
    case.page_table = case.page_table + (num_pages - len(case.k_cache))
    case.k_cache, case.v_cache = caches
    agrees(kernel, case)


def test_queries_beyond_2_31_elements(kernel, agrees):
    """sgl-project/sglang#20389: query offset overflows 32 bits. Tokens lie far apart in memory;
    a clear refusal will do (N01)."""
    stride = BEYOND // 2
    dtype = torch.float16 if "float16" in kernel.limits.dtypes else kernel.dtype
    need_room(3 * stride * dtype.itemsize)
    queries = {"queries": [3]} if kernel.kind == "extend" else {}
    case = kernel.case([20] if queries else [20, 1, 33], dtype=dtype, **queries)
    room = torch.empty(2 * stride + case.q[0].numel(), dtype=dtype, device=DEVICE)
    far = room.as_strided(case.q.shape, (stride, *case.q.stride()[1:]))
    far.copy_(case.q)
    case.q = far
    served_or_refused(kernel, case, agrees)


@pytest.mark.gpu
def test_batch_of_more_than_2_31_elements(kernel, agrees):
    """sgl-project/sglang#20389 at its size: 262,400 new tokens of 64 heads (N01)."""
    if kernel.kind != "extend":
        pytest.skip("is no extend kernel")
    rows, tokens, head_dim = 256, 1025, kernel.axis("head_dim")[-1]
    num_q_heads = 8192 // head_dim
    heads = (num_q_heads, num_q_heads // min(num_q_heads, 8, kernel.limits.max_group or 8))
    need_room(4 * rows * tokens * 8192 * kernel.dtype.itemsize)
    one = kernel.case([tokens], queries=[tokens], heads=heads, head_dim=head_dim)
    lens = one.context_lens.repeat(rows)
    starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=DEVICE)
    many = Case(
        one.q.repeat(rows, 1, 1),
        *(one.k_cache, one.v_cache, one.page_table.repeat(rows, 1), lens, starts),
        *(rows * [tokens], rows * [tokens], rows * one.keys, rows * one.values, one.scale),
    )
    out, lse = kernel(many)
    for row in (0, rows // 2, rows - 1):
        part = many.part(row)
        agrees(kernel, one, result=(out[part], None if lse is None else lse[part]))


@thorough
def test_strided_queries_are_served_or_refused(kernel, agrees):
    """q as a slice of a fused projection, and with a stride in its last dimension."""
    case = kernel.case([40, 1, 17])
    dense = case.q
    for wide in (torch.cat([dense, dense], 1), dense.repeat_interleave(2, -1)):
        case.q = wide[:, : dense.shape[1], :: wide.shape[2] // dense.shape[2]]
        served_or_refused(kernel, case, agrees)


@thorough
def test_strided_caches_are_served_or_refused(kernel, agrees):
    """K and V interleaved in one tensor."""
    case = kernel.case([40, 1, 17])
    both = torch.stack([case.k_cache, case.v_cache], 2)
    case.k_cache, case.v_cache = both.unbind(2)
    served_or_refused(kernel, case, agrees)


def test_plan_reads_no_lengths_of_the_host(kernel, agrees):
    """Of a graph-safe kernel: what a captured plan saw on the host is stale in every replay."""
    if not kernel.limits.graph_safe:
        pytest.skip("does not claim graph_safe")
    captured = frame(kernel, [1, 1, 1, 1], 20)
    for length in GROWTH[3:4] if kernel.quick else GROWTH:
        case = frame(kernel, [length, 0, 3, 1], 20)
        rows = case.rows()
        stale = type(rows)(
            rows.page_table,
            rows.context_lens,
            rows.query_starts,
            captured.contexts,
            captured.queries,
            *(rows.page_size, rows.num_q_heads, rows.num_kv_heads, rows.head_dim),
        )
        agrees(kernel, case, result=kernel(case, plan=kernel.plan(case, stale)))


@pytest.mark.gpu
def test_replayed_graph_equals_eager(kernel, agrees, note):
    """paiml/aprender#2030, gittensor-ai-lab/sparkinfer#150: stale lengths and tables in a replayed
    graph after rows grew or others took their place (N18); xLLM-AI/xllm#1939: a padded batch whose
    metadata covers only the real rows (N14)."""
    if not kernel.limits.graph_safe:
        pytest.skip("does not claim graph_safe")
    static = frame(kernel, [1] * 8, 0)
    graph, out = captured(kernel, static)
    batches = [[length, 2] for length in GROWTH] + [[33] * n for n in (1, 3, 5, 7, 8)]
    exact = True
    for seed, contexts in enumerate(batches):
        case = frame(kernel, contexts + [0] * (8 - len(contexts)), seed)
        for name in ("q", "k_cache", "v_cache", "page_table", "context_lens", "query_starts"):
            getattr(static, name).copy_(getattr(case, name))
        for _ in range(2):
            graph.replay()
            result = tuple(None if tensor is None else tensor.clone() for tensor in out)
            agrees(kernel, case, result=result)
            tokens = sum(case.queries)  # what lies beyond belongs to no row
            exact &= torch.equal(result[0][:tokens], kernel(case)[0][:tokens])
    note(f"replays equal eager calls bit for bit: {'yes' if exact else 'no'}")


def moved_to(case, page_size, seed):
    """The case's tokens in another pool, on other pages."""
    heads = (case.q.shape[1], case.k_cache.shape[2])
    options = {"heads": heads, "head_dim": case.q.shape[2], "dtype": case.q.dtype}
    moved = paged_case(
        case.contexts, case.queries, page_size=page_size, device=DEVICE, seed=seed, **options
    )
    moved.q = case.q
    moved.keys, moved.values = case.keys, case.values
    for row in range(len(case.contexts)):
        for cache, tokens in ((moved.k_cache, case.keys[row]), (moved.v_cache, case.values[row])):
            cache.view(-1, *cache.shape[2:])[moved.slots(row)] = tokens
    return moved


def frame(kernel, contexts, seed):
    """A case of fixed shapes, whatever the lengths: what a graph was captured with. An extend
    kernel gets up to 16 new tokens a row, and packed room for no more than are there."""
    page_size = kernel.page_size
    pages = -(-max(GROWTH) // page_size) + 1
    options = {"max_pages": pages, "num_pages": 2 * pages + len(contexts) * (64 // page_size + 1)}
    room = 16 * len(contexts)
    if kernel.kind == "extend":
        options["queries"] = [min(context, 16) for context in contexts]
    case = kernel.case(contexts, seed=seed, **options)
    if kernel.kind == "extend":
        padding = case.q.new_full((room - len(case.q), *case.q.shape[1:]), torch.nan)
        case.q = torch.cat([case.q, padding])
    return case


def captured(kernel, static):
    """A graph of plan and call, and what it fills."""
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        kernel(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = kernel(static)
    return graph, out


def served_or_refused(kernel, case, agrees):
    """The right result, or ValueError."""
    try:
        result = kernel(case)
    except ValueError:
        return
    agrees(kernel, case, result=result)


def need_room(num_bytes):
    """Skip where the device has not that much memory free."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < num_bytes * 1.2:
        pytest.skip(f"needs {num_bytes * 1.2 / 2**30:.0f} GiB of free device memory")
