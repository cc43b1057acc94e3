"""Decode attention over a paged KV cache, split over the context (FlashDecoding).

Every (row, KV head, split) is a program of its own. The query heads that share the KV head form one
tile, so K and V are read once; softmax runs online in base 2 (FlashAttention, arXiv:2205.14135).
A row in one split is written straight to the output. Otherwise each program leaves a normalised
float32 partial result and its log-sum-exp. In a large batch the last program of the (row, KV head)
to arrive merges them, in the order of splits, so that the result does not depend on who was last;
in a small one, where that would be the critical path of few programs, a kernel of its own does, on
Hopper launched early and waiting on the device (programmatic dependent launch).

Shapes: N rows, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head_dim. Caches [num_pages,
page_size, Hkv, D]."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.check import check_paged, check_softcap, check_table, check_window, require
from kernels.declare import Capabilities, Rows
from kernels.jit import DEVICES, INTERPRETED
from kernels.launch import form_of, num_sms, type_of
from kernels.pinned import Choice, Shape, choose
from kernels.split_launch import (
    Address,
    DecodeConfig,
    DecodeLauncher,
    Ready,
    Scores,
    candidates,
    likeness,
    outputs,
)
from kernels.split_plan import (
    MAX_SPLITS,
    Contexts,
    PlanShape,
    SplitTable,
    balanced,
    fixed_count,
    fixed_length,
)

MAX_GROUP = 16
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
DTYPES = ("float32", "float16", "bfloat16")
CAPABILITIES = Capabilities(
    dtypes=DTYPES,
    devices=DEVICES,
    head_dims=HEAD_DIMS,
    kv_dtypes=(*DTYPES, "float8_e4m3fn"),
    max_group=MAX_GROUP,
    graph_safe=True,
    returns_lse=True,
    takes_out=True,
    softcap=True,
)

Planner = Callable[[Contexts, PlanShape], SplitTable]


@dataclass(slots=True, eq=False)
class SplitPlan:
    """A step's decode rows: a table of items for each window in use, and room for partial results,
    which all layers use in turn."""

    context_lens: Tensor
    longest: int
    tables: dict[int | None, SplitTable] = field(default_factory=dict)
    partials: tuple[Tensor, Tensor] | None = None
    ready: dict[tuple[Any, ...], Ready] = field(default_factory=dict)

    def read(self) -> dict[str, dict[str, int | list[int]]]:
        """What the planner decided, by window. Waits for the device: for records, not for every
        step."""
        return {str(window): table.read() for window, table in self.tables.items()}


class SplitKV:
    """The decode kernel: an object with `capabilities`, `plan` and a call, configured once.

    splits: "auto" cuts by the lengths in the batch; "invariant" at fixed positions, so that a row's
    result is the same bit for bit in any batch; a number up to 1024 cuts every row in that many,
    1 = a single pass. planner: a callable that replaces the rule; see kernels/split_plan.py.
    config: launch parameters, None = the pinned ones for the device. Raises ValueError."""

    def __init__(
        self,
        splits: str | int = "auto",
        planner: Planner | None = None,
        config: DecodeConfig | None = None,
    ) -> None:
        holds = planner is None or callable(planner)
        require(holds, "planner", "None or a callable (contexts, shape)", planner)
        rule = _planner(splits)
        self._planner = planner or rule
        self._config = config
        self._configs: dict[Any, DecodeConfig] = {}
        self._checked: set[tuple[Any, ...]] = set()
        self._launch = DecodeLauncher()
        self.splits = splits if planner is None else _name(planner)
        invariant = planner is None and splits != "auto"
        self.capabilities = replace(CAPABILITIES, batch_invariant=invariant)

    def plan(self, rows: Rows) -> SplitPlan:
        """Nothing is decided on the host; the tables are made when a layer first needs one. Raises
        ValueError for a page table or lengths that kernels cannot read."""
        check_table(rows.page_table, rows.context_lens)
        return SplitPlan(rows.context_lens, rows.page_table.shape[1] * rows.page_size)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
        *,
        plan: SplitPlan | None = None,
        softcap: float | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One query token a row over its context.

        q [N, Hq, D] fp32, fp16 or bf16; caches in q's dtype or float8_e4m3fn; page_table int32 [N,
        max_pages]; context_lens int32 [N]; window: see that many latest positions, None = all;
        softcap: scores become softcap * tanh(scores / softcap); K is k_scale times the cache, V
        likewise. Returns like q, accumulated in fp32, and with return_lse float32 [N, Hq]: the
        natural log-sum-exp of the scores (-inf where a row sees nothing; its output is 0). out: a
        contiguous tensor like q to write to. Raises ValueError for a dtype, head_dim, stride or
        shape that it cannot take."""
        scores = Scores(scale, softcap, k_scale, v_scale)
        cache = (k_cache, v_cache)
        if plan is not None:  # the step's other layers most often look like its first
            done = self.again(q, cache, page_table, plan, scores, window, return_lse, out)
            if done is not None:
                return done
        self.check(q, k_cache, v_cache, page_table, context_lens)
        page_size = k_cache.shape[1]
        plan = plan or SplitPlan(context_lens, page_table.shape[1] * page_size)
        address = Address(page_table, None, page_size)
        return self.run(q, cache, address, plan, scores, window, return_lse, out)

    def configuration(
        self, device: torch.device, head_dim: int, kv_dtype: torch.dtype, page_size: int, group: int
    ) -> Choice[DecodeConfig]:
        """Launch parameters for a shape, and where they come from."""
        if self._config is not None:
            return Choice(self._config, "given")
        name = str(kv_dtype).removeprefix("torch.")
        shape = Shape(head_dim, name, page_size, group)

        def shared_bytes(config: DecodeConfig) -> int:
            # Buffers of K and V, the queries, and the scores between the two products.
            row = triton.next_power_of_2(head_dim)
            buffers = 2 * max(1, config.num_stages - 1) * config.block_n * row * kv_dtype.itemsize
            return buffers + 16 * (row + config.block_n) * 4

        return choose("split_kv", device, shape, candidates(head_dim, kv_dtype), shared_bytes)

    def describe(
        self, device: str, head_dim: int, kv_dtype: str, page_size: int, group: int
    ) -> dict[str, Any]:
        """Splits and configuration, for the manifest."""
        dtype = getattr(torch, kv_dtype)
        choice = self.configuration(torch.device(device), head_dim, dtype, page_size, group)
        return {"splits": self.splits, **choice.describe()}

    def check(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lens: Tensor
    ) -> None:
        """Raise ValueError for what the kernel cannot take; what was checked once is remembered."""
        form = (
            *(q.device, q.shape, q.stride(), q.dtype),
            *(k_cache.shape, k_cache.stride(), k_cache.dtype),
            *(v_cache.shape, v_cache.stride(), v_cache.dtype),
            *(page_table.shape, page_table.stride(), page_table.dtype),
            *(lens.shape, lens.stride(), lens.dtype),
            *(one.get_device() for one in (k_cache, v_cache, page_table, lens)),
        )
        pointers = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
        if form not in self._checked or pointers % 16:
            check_paged(CAPABILITIES, q, k_cache, v_cache, page_table, lens)
            require(len(q) == len(lens), "q", f"{len(lens)} rows", len(q))
            self._checked.add(form)

    def again(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        table: Tensor,
        plan: SplitPlan,
        scores: Scores,
        window: int | None,
        return_lse: bool,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """The call with what an earlier one on this plan checked and compiled; None if none was so
        alike."""
        ready = plan.ready.get(likeness(q, cache, scores, window, return_lse))
        pointers = q.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr()
        if ready is None or ready.table is not table or any(p % 16 for p in pointers):
            return None
        out, lse = outputs(q, return_lse, out)
        self._launch.again(ready, (*pointers, out.data_ptr(), lse.data_ptr()))
        return (out, lse) if return_lse else out

    def run(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        address: Address,
        plan: SplitPlan,
        scores: Scores,
        window: int | None,
        return_lse: bool,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The call, once its tensors are checked. Caches [..., Hkv, D], slots evenly strided."""
        check_window(window)
        check_softcap(scores.softcap)
        # An int would compile a kernel of its own, under the key of a float.
        numbers = (scores.scale, scores.softcap, scores.k_scale, scores.v_scale)
        scores = Scores(*(None if one is None else float(one) for one in numbers))
        config = self._pinned(q, cache[0], address.page_size)
        out, lse = outputs(q, return_lse, out)
        if len(q):
            resident = config.per_sm * num_sms(q.device, on_cpu=1)
            shape = PlanShape(cache[0].shape[-2], config.block_n, resident)
            if window not in plan.tables:
                contexts = Contexts(plan.context_lens, plan.longest, window)
                plan.tables[window] = self.table(contexts, shape, q, cache, address)
            table = plan.tables[window]
            if plan.partials is None or plan.partials[1].shape[0] < table.max_parts:
                plan.partials = _partials(q, table.max_parts)
                plan.ready.clear()
            apart = self.capabilities.batch_invariant or shape.is_small(len(q))
            form = *form_of(q, *cache), *type_of(address.slots), address.starts is None
            key = (form, address.page_size, scores.softcap is not None, return_lse, apart)
            tensors = (q, *cache, out, lse)
            ready = self._launch.first(
                key, tensors, plan.partials, table, address, scores, config, apart
            )
            if address.page_size and not INTERPRETED:
                plan.ready[likeness(q, cache, scores, window, return_lse)] = ready
        return (out, lse) if return_lse else out

    def table(
        self,
        contexts: Contexts,
        shape: PlanShape,
        q: Tensor,  # noqa: ARG002
        cache: tuple[Tensor, Tensor],  # noqa: ARG002
        address: Address,  # noqa: ARG002
    ) -> SplitTable:
        """A step's items. A kernel that plans more than splits replaces this, and asks the last
        three."""
        return self._planner(contexts, shape)

    def _pinned(self, q: Tensor, k_cache: Tensor, page_size: int) -> DecodeConfig:
        key = (q.device, q.shape[2], k_cache.dtype, page_size, q.shape[1] // k_cache.shape[-2])
        if key not in self._configs:
            self._configs[key] = self.configuration(*key).config
        return self._configs[key]


def _planner(splits: str | int) -> Planner:
    if splits == "auto":
        return balanced
    if splits == "invariant":
        return fixed_length
    holds = isinstance(splits, int) and not isinstance(splits, bool) and 1 <= splits <= MAX_SPLITS
    require(holds, "splits", f"auto, invariant or a number in 1 .. {MAX_SPLITS}", splits)
    return partial(fixed_count, splits=int(splits))


def _name(planner: Planner) -> str:
    """module.qualname of a function, of a partial's function, or of an object's class."""
    named = getattr(planner, "func", planner)
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _partials(q: Tensor, count: int) -> tuple[Tensor, Tensor]:
    out = q.new_empty(count, *q.shape[1:], dtype=torch.float32)
    return out, q.new_empty(count, q.shape[1], dtype=torch.float32)
