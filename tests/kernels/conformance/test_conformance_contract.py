"""What a kernel promises beside right numbers: wrong launches are refused, and what it says about
batches and chunks holds."""

from dataclasses import replace

import pytest
import torch

from kernels.torch_reference import paged_extend
from tests.kernels.conformance.kit import DEVICE

LENGTHS = (1, 63, 64, 130, 17, 300) if DEVICE == "cpu" else (1, 1000, 512, 5000, 17, 20_000)

WRONG = {
    "q of two dimensions": lambda case: {"q": case.q[:, 0]},
    "q heads no multiple of KV heads": lambda case: {"q": case.q[:, :3].contiguous()},
    "head_dim of q is not the cache's": lambda case: {"q": case.q[..., :16].contiguous()},
    "float64 q": lambda case: {"q": case.q.double()},
    "float64 caches": lambda case: {
        "k_cache": case.k_cache.double(),
        "v_cache": case.v_cache.double(),
    },
    "caches of different shape": lambda case: {"v_cache": case.v_cache[:, :, :1].contiguous()},
    "caches of different dtype": lambda case: {"v_cache": case.v_cache.double()},
    "int64 page table": lambda case: {"page_table": case.page_table.long()},
    "flat page table": lambda case: {"page_table": case.page_table.flatten()},
    "page table of fewer rows": lambda case: {"page_table": case.page_table[:-1]},
    "int64 context_lens": lambda case: {"context_lens": case.context_lens.long()},
    "context_lens of fewer rows": lambda case: {"context_lens": case.context_lens[:-1]},
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_launch_is_refused(kernel, mistake):
    """ValueError, before anything runs. The plan is right: a step
    is planned by the engine's facts, not by these tensors."""
    must_declare(kernel)
    case = kernel.case([20, 1, 5])
    plan = kernel.plan(case)
    with pytest.raises(ValueError, match=r"(?s)must be"):
        kernel(replace(case, **WRONG[mistake](case)), plan=plan)


def test_undeclared_head_dim_is_refused(kernel):
    must_declare(kernel)
    if kernel.limits.head_dims is None:
        pytest.skip("claims every head_dim")
    with pytest.raises(ValueError, match="head_dim"):
        kernel(kernel.case([20, 1, 5], head_dim=max(kernel.limits.head_dims) + 8))


def test_group_above_the_limit_is_refused(kernel):
    must_declare(kernel)
    if kernel.limits.max_group is None:
        pytest.skip("claims every group")
    with pytest.raises(ValueError, match="group"):
        kernel(kernel.case([20, 1, 5], heads=(kernel.limits.max_group + 1, 1)))


def test_query_starts_of_wrong_length_are_refused(kernel):
    must_declare(kernel)
    if kernel.kind != "extend":
        pytest.skip("is no extend kernel")
    case = kernel.case([20, 1, 5])
    with pytest.raises(ValueError, match="query_starts"):
        kernel(replace(case, query_starts=case.query_starts[:-1]), plan=kernel.plan(case))


def test_batch_does_not_change_a_row(kernel, batch, agrees, note):
    """kekzl/imp#1314, vllm-project/vllm#53257, jundot/omlx#3476: the same prompt answers
    differently under load (N13). Reported; an error only where the kernel claims otherwise."""
    lengths = (1, 63, 64, 17) if kernel.quick else LENGTHS
    contexts = [lengths[i % len(lengths)] for i in range(batch)]
    case = kernel.case(contexts, seed=batch)
    together, _ = agrees(kernel, case)
    rows = range(batch) if not kernel.quick else (1, batch - 1)
    changed = []
    for row in rows:
        alone, _ = kernel(case.alone(row))
        if not torch.equal(alone, together[case.part(row)]):
            changed.append(row)
    answer = f"no, {len(changed)} of {len(rows)} rows differ" if changed else "yes"
    note(f"batch of {batch}: rows equal alone and together bit for bit: {answer}")
    assert not (changed and kernel.limits.batch_invariant), f"rows {changed} differ"


def test_chunks_equal_the_whole_prompt(kernel, agrees):
    """One extend over a prompt, extends over its chunks, and one token at a time agree."""
    length = 70
    queries = {"queries": [length]} if kernel.kind == "extend" else {}
    whole = kernel.case([length], **queries, seed=3)
    if kernel.kind == "decode":
        check_decode_by_tokens(kernel, whole, agrees)
        return
    agrees(kernel, whole)
    for chunk, step in ((33, 33), (1, 35 if kernel.quick else 13)):
        for begin in range(0, length, step):
            agrees(kernel, tokens_of(whole, begin, min(begin + chunk, length)))


def check_decode_by_tokens(kernel, case, agrees):
    """Decode at each position against one extend of the reference."""
    length = case.contexts[0]
    shape = (length, *case.q.shape[1:])
    q = torch.randn(shape, dtype=torch.float32, device=DEVICE).to(case.q.dtype)
    starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    arguments = (case.k_cache, case.v_cache, case.page_table, case.context_lens, starts)
    whole = paged_extend(q, *arguments, case.scale)
    for end in (1, 65) if kernel.quick else (1, 2, 64, 65, length):
        out, _ = agrees(kernel, tokens_of(replace(case, q=q, queries=[length]), end - 1, end))
        error = (out[0].double() - whole[end - 1].double()).abs().max().item()
        assert error < 2e-2, error


def tokens_of(whole, begin, end):
    """Positions begin .. end of a one-row case whose prompt is all new."""
    lens = torch.tensor([end], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
    return replace(
        whole,
        q=whole.q[begin:end],
        context_lens=lens,
        query_starts=starts,
        contexts=[end],
        queries=[end - begin],
        keys=[whole.keys[0][:end]],
        values=[whole.values[0][:end]],
    )


def must_declare(kernel):
    """Who declares no limits cannot be held to them."""
    if not kernel.declared:
        pytest.skip("declares no capabilities")
