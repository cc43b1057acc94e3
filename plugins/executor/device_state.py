"""What an executor keeps on its device, and how it is made."""

import platform
from dataclasses import dataclass, field

import torch

from core.launch import Launch, PoolLayout
from plugins.executor.chunk_graphs import ChunkGraphs
from plugins.executor.forward import Forward
from plugins.executor.graphs import DecodeGraphs
from plugins.executor.mixed_graphs import MixedGraphs
from plugins.executor.padding import Padding
from plugins.executor.paging import Paging
from plugins.executor.penalties import PenaltyCounts
from plugins.executor.pool import FLOAT8, KVPool
from plugins.executor.rows import SamplingRows
from plugins.executor.sharing import SharedPages
from plugins.shared.model_protocols import AttentionBackend, AttentionQuery, Model, RankGroup

SHARED_ROWS = 16
"""Fewest rows for which a launch that shares a prefix has graphs of its own."""


@dataclass(slots=True, eq=False)
class DeviceState:
    """All that a layout sizes. padding: None = launches stay as they are. sharing: None where it is
    of no use to know. graphs: of launches of one-token rows, by whether these share a
    prefix; none where they cannot be or are not wanted, and why_not says so. mixed_graphs: of other
    launches, likewise; chunk_graphs: of what lies between their attentions, None = there are
    none."""

    pool: KVPool
    rows: SamplingRows
    penalties: PenaltyCounts
    forward: Forward
    padding: Padding | None = None
    sharing: SharedPages | None = None
    graphs: dict[bool, DecodeGraphs] = field(default_factory=dict)
    chunk_graphs: ChunkGraphs | None = None
    mixed_graphs: dict[bool, MixedGraphs] = field(default_factory=dict)
    why_not: str = ""

    def shares_prefix(self, launch: Launch) -> bool:
        """Note a launch's changes of the block table, and tell whether its one-token rows share
        enough of a prefix."""
        if self.sharing is None:
            return False
        self.sharing.note(launch)
        return self.sharing.worth_sharing(launch)

    def graphs_for(self, launch: Launch, shares_prefix: bool) -> DecodeGraphs | None:
        """Graphs that can stand for a launch, None = there are none."""
        graphs = self.graphs.get(shares_prefix and len(launch.row_ids) >= SHARED_ROWS)
        return graphs if graphs is not None and graphs.takes(launch, self.rows) else None

    def mixed_for(self, launch: Launch, shares_prefix: bool) -> tuple[MixedGraphs | None, int]:
        """Graphs one of which can stand for any other launch, None = there are none; and to how
        many tokens they pad it."""
        graphs = self.mixed_graphs.get(shares_prefix and launch.num_decode_rows >= SHARED_ROWS)
        size = 0 if graphs is None else graphs.size_for(launch)
        return (graphs if size else None), size


def allocate(
    layout: PoolLayout,
    model: Model,
    backend: AttentionBackend,
    paging: Paging,
    dtype: torch.dtype,
    scales: tuple[float, float],
    side: torch.cuda.Stream | None,
    keep_plans: bool,
    group: RankGroup | None = None,
) -> DeviceState:
    """A state without graphs. dtype, scales: the pool's (see KVPool). side, keep_plans, group: see
    Forward."""
    shape = (model.num_layers, model.num_kv_heads, model.head_dim)
    pool = KVPool(layout, *shape, dtype, model.device, *scales)
    on_gpu = torch.device(model.device).type == "cuda"
    sharing = None
    if getattr(backend, "uses_sharing", False):
        sharing = SharedPages(layout.num_rows, layout.page_size)
    return DeviceState(
        pool=pool,
        rows=SamplingRows(layout.num_rows + 1, model.vocab_size),
        penalties=PenaltyCounts(layout.num_rows, model.vocab_size, model.device),
        forward=Forward(model, pool, backend, paging, side, [] if keep_plans else None, group),
        padding=Padding(layout.max_num_batched_tokens) if on_gpu else None,
        sharing=sharing,
    )


def attention_query(
    model: Model, page_size: int, dtype: torch.dtype, scales: tuple[float, float]
) -> AttentionQuery:
    """What a backend for the model must serve, over a pool of this dtype and these scales."""
    return AttentionQuery(
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype_name(model.dtype if dtype == FLOAT8 else dtype),
        kv_dtype=dtype_name(dtype),
        page_size=page_size,
        device=str(torch.device(model.device)),
        k_scale=scales[0],
        v_scale=scales[1],
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As configs write it."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The maker's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
