"""What the attention benchmark compares: this repository's kernels, torch's, and others' from a
file of wrappers. Each takes a case's inputs and a layer, and returns a call that returns its
output."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from experiments.kernels.cases import HEAD_DIM, HEADS, KV_HEADS, SCALE, Inputs
from kernels import extend_dense
from kernels.split_kv import SplitKV
from plugins.executor.attend import at_once

Call = Callable[[], Tensor]
Build = Callable[[Inputs, int], Call]

OURS, SDPA, FLEX = "tritium", "torch SDPA (cuDNN)", "FlexAttention"
COMPILED = (OURS, FLEX, "vllm_triton")
"""Those that compile when first called."""

CONTIGUOUS = (SDPA, FLEX)
"""Those that read contiguous K and V, and take rows of one length alone."""


def implementations(
    peers: Path | None, only: Iterable[str] = (), without: Iterable[str] = ()
) -> dict[str, Build]:
    """All by name, ours first; `only` some (none named: all), `without` others. peers: a file with
    a dict IMPL; see bench.py. Raises ValueError for a name that is not there."""
    known: dict[str, Build] = {OURS: ours, SDPA: torch_cudnn, FLEX: flex}
    known |= {name: _peer(function) for name, function in load_peers(peers).items()}
    only, without = list(only), list(without)
    for name in (*only, *without):
        if name not in known:
            raise ValueError(f"implementation must be one of {', '.join(known)}, got {name}")
    return {
        name: build
        for name, build in known.items()
        if name not in without and (not only or name in only)
    }


class Step:
    """A step of ours, as the engine runs it: decode rows by SplitKV, the others by the extend
    kernel at the same time; planned once, then called for each layer. Ours get what the engine
    gives them: the new tokens' K and V also packed, as the projections leave them."""

    def __init__(
        self, inputs: Inputs, kernel: SplitKV, new_kv: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        """new_kv: by layer, of the rows that are not decode rows; empty without such."""
        rows = len(inputs.case.new)
        self._inputs, self._kernel, self._new_kv = inputs, kernel, new_kv
        self._split = split = num_others(inputs)  # decode rows follow in these cases
        self._decode = inputs.rows(split, rows) if split < rows else None
        self._plan = kernel.plan(self._decode) if self._decode else None
        self._extend = inputs.rows(0, split) if split else None
        if self._extend and self._decode:
            self._extend = replace(self._extend, beside=True)
        self._extend_plan = extend_dense.plan_extend(self._extend) if self._extend else None
        self._tokens = sum(inputs.case.new[:split])
        self._side = torch.cuda.Stream() if inputs.q.is_cuda else None

    def __call__(self, layer: int) -> Tensor:
        """The attention of one layer."""
        if self._decode is None:
            return self._extended(layer)
        if self._extend is None:
            return self._decoded(layer)
        out = torch.empty_like(self._inputs.q)
        extend = partial(self._extended, layer, out[: self._tokens])
        at_once(partial(self._decoded, layer, out[self._tokens :]), extend, self._side)
        return out

    def _decoded(self, layer: int, out: Tensor | None = None) -> Tensor:
        inputs, rows = self._inputs, self._decode
        tensors = (*inputs.caches[layer], rows.page_table, rows.context_lens, SCALE)
        return self._kernel(inputs.q[self._tokens :], *tensors, plan=self._plan, out=out)

    def _extended(self, layer: int, out: Tensor | None = None) -> Tensor:
        inputs, rows = self._inputs, self._extend
        k_new, v_new = self._new_kv[layer]
        tensors = (*inputs.caches[layer], rows.page_table, rows.context_lens, rows.query_starts)
        options = {"plan": self._extend_plan, "k_new": k_new, "v_new": v_new, "out": out}
        return extend_dense.extend(inputs.q[: self._tokens], *tensors, SCALE, **options)


def num_others(inputs: Inputs) -> int:
    """Rows of several new tokens, which come first."""
    return sum(new > 1 for new in inputs.case.new)


def ours(inputs: Inputs, layer: int) -> Call:
    """One layer of a step planned beforehand."""
    others = num_others(inputs)
    new_kv = {layer: inputs.new_kv(0, others, layer)} if others else {}
    step = Step(inputs, SplitKV(), new_kv)
    return lambda: step(layer)


def our_layers(inputs: Inputs) -> Callable[[], None]:
    """A step's plan and all its layers."""
    others, layers = num_others(inputs), range(len(inputs.caches))
    new_kv = {layer: inputs.new_kv(0, others, layer) for layer in layers} if others else {}
    kernel = SplitKV()

    def run() -> None:
        step = Step(inputs, kernel, new_kv)
        for layer in layers:
            step(layer)

    return run


def torch_cudnn(inputs: Inputs, layer: int) -> Call:
    """scaled_dot_product_attention over contiguous K and V, by cuDNN."""
    q, k, v = _contiguous(inputs, layer)
    new, total = q.shape[2], k.shape[2]
    if new not in (1, total):
        raise ValueError("its causal mask is not aligned to the end")

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True)
        return _packed(out)

    return call


def flex(inputs: Inputs, layer: int) -> Call:
    """FlexAttention over contiguous K and V, compiled for the shape."""
    q, k, v = _contiguous(inputs, layer)
    new, total = q.shape[2], k.shape[2]
    mask = None
    if new > 1:
        before = total - new

        def causal(_b: Tensor, _h: Tensor, i_q: Tensor, i_k: Tensor) -> Tensor:
            return i_q + before >= i_k

        mask = create_block_mask(causal, None, None, new, total, device=q.device)
    torch._dynamo.reset()  # compiled once a shape, without a limit on their number
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: _packed(compiled(q, k, v, block_mask=mask, enable_gqa=True))


def load_peers(path: Path | None) -> Mapping[str, Any]:
    """IMPL of a Python file; nothing for None."""
    if path is None:
        return {}
    spec = importlib.util.spec_from_file_location("peer_kernels", path)
    assert spec is not None, f"{path} is a Python file"
    assert spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions: Mapping[str, Any] = module.IMPL
    return functions


def _peer(function: Callable[..., Any]) -> Build:
    def build(inputs: Inputs, layer: int) -> Call:
        case, table = inputs.case, inputs.table
        pages = [-(-total // case.page_size) for total in case.context]
        ids = torch.cat([table[row, :count] for row, count in enumerate(pages)])
        tensors = (inputs.q, *inputs.caches[layer], table)
        x = (*tensors, inputs.query_starts, inputs.context_lens, ids, pages)
        call, out = function(x, list(case.new), list(case.context), case.page_size)

        def run() -> Tensor:
            call()
            return out

        return run

    return build


def _contiguous(inputs: Inputs, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, K and V, each [rows, heads, tokens, HEAD_DIM]."""
    case = inputs.case
    if len(set(case.context)) > 1 or len(set(case.new)) > 1:
        raise ValueError("rows differ in length")
    count = len(case.new)
    pairs = [inputs.contiguous(row, layer) for row in range(count)]
    k, v = (torch.stack(one).transpose(1, 2).contiguous() for one in zip(*pairs, strict=True))
    q = inputs.q.view(count, case.new[0], HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    assert k.shape == (count, KV_HEADS, case.context[0], HEAD_DIM), "rows of one length"
    return q, k, v


def _packed(out: Tensor) -> Tensor:
    return out.transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)
