"""Interfaces between an executor, the model and attention, which the core never calls. Tensors are
Any: no torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.config import require


@dataclass(frozen=True, slots=True, eq=False)
class KVTarget:
    """Where a launch's K and V of a layer go: caches [num_slots, num_kv_heads, head_dim], which
    hold K / k_scale and V / v_scale; slots int64 [num_tokens], one below 0 stores nothing."""

    k_cache: Any
    v_cache: Any
    slots: Any
    k_scale: float
    v_scale: float


class Attend(Protocol):
    """A launch's attention. In each layer the model stores K and V, then calls it."""

    def target(self, layer: int) -> KVTarget:
        """For a model that stores by itself."""

    def store(self, layer: int, k: Any, v: Any) -> None:
        """Store k, v [num_tokens, num_kv_heads, head_dim]."""

    def __call__(self, layer: int, q: Any, k: Any, v: Any, scale: float, window: int | None) -> Any:
        """Attend over all tokens of each row: q [num_tokens, num_q_heads, head_dim]; returns like
        q. k, v: as stored. window: a query sees that many latest positions, itself included; None =
        all."""


class Model(Protocol):
    """A causal language model over packed tokens. It never sees pages."""

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # tokens that may be sampled; the head may have more rows, which are cut off
    max_model_len: int
    end_token_ids: tuple[int, ...]
    dtype: Any  # torch.dtype of weights and KV
    device: Any

    @property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer, loaded on first use; None for random weights."""

    def forward(self, token_ids: Any, positions: Any, attend: Attend, logits_rows: Any) -> Any:
        """token_ids, positions: int64 [num_tokens]; logits_rows: int64 [k] into the packed tokens.
        Returns logits [k, vocab_size], float32 or rounded to the model's dtype."""


class RankGroup(Protocol):
    """What ranks of a cut model do together: all call the same in the same order, with tensors of
    one shape. Nothing waits for a device, and a CUDA graph may capture it."""

    rank: int
    size: int

    def sum(self, x: Any) -> Any:
        """x added up over the ranks, in place."""

    def gather(self, x: Any) -> Any:
        """[size, *x.shape], rank by rank."""

    def take_first(self, x: Any) -> Any:
        """Rank 0's x, in place."""


class ModelShards(Protocol):
    """The parts of a model that is cut, one a rank; it pickles. A Model that is such a part has it
    as `shards`, and a method `join(RankGroup)` to compute together with the others; rank 0's logits
    are then the whole model's."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    def build(self, rank: int, device: str) -> Model:
        """Load a rank's part."""


def check_shards(model: Any, num_ranks: int) -> None:
    """Raise ConfigError unless the model is one of so many parts, 1 = whole."""
    shards: ModelShards | None = getattr(model, "shards", None)
    found = 1 if shards is None else shards.num_ranks
    rule = f"executor.tensor_parallel ({num_ranks})"
    require(found == num_ranks, f"model.tensor_parallel of {model.name}", rule, found)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """What a launch gives an attention backend (executor -> attention): N rows, one-token rows
    first, their new tokens packed row by row.

    page_table: int32 [N, max_pages], the rows' page ids, tails on page 0. context_lens: int32 [N],
    tokens a row holds once the launch has stored its own. query_starts: int32 [N + 1], where a
    row's new tokens begin in the packed order. These are device tensors; host_context_lens and
    host_query_lens [N] are the lengths and the numbers of new tokens as integers, so that planning
    waits for no device. num_decode_rows: rows [0, that) have one new token each and go to the
    decode kernel; shares_prefix: enough of them begin with the same pages. in_graph: a CUDA graph
    captures the launch, whose tokens may be fewer than rows: the first num_decode_rows tokens are
    taken for one-token rows, then extend, with all tokens, writes over those that are not, from
    the first query_starts of the other rows on. Host lengths count for nothing then."""

    page_table: Any
    context_lens: Any
    query_starts: Any
    host_context_lens: Sequence[int]
    host_query_lens: Sequence[int]
    num_decode_rows: int
    page_size: int
    shares_prefix: bool = False
    in_graph: bool = False


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """What the backend must serve; it refuses with ConfigError naming what does not fit.

    dtype: of queries; kv_dtype: of the pool, whose values times k_scale and v_scale are K and V."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    device: str
    k_scale: float = 1.0
    v_scale: float = 1.0


class AttentionBackend(Protocol):
    """Attention over the paged pool. Caches are [num_pages, page_size, num_kv_heads, head_dim]."""

    name: str

    def plan(self, batch: AttentionBatch) -> Any:
        """Device metadata for a launch, once a step."""

    def decode(
        self, q: Any, k_cache: Any, v_cache: Any, plan: Any, scale: float, window: int | None,
        out: Any = None,
    ) -> Any:  # fmt: skip
        """One-token rows: q [num_decode_rows, num_q_heads, head_dim]; like q, in `out` if any."""

    def extend(
        self, q: Any, k_cache: Any, v_cache: Any, plan: Any, scale: float, window: int | None,
        k_new: Any = None, v_new: Any = None, out: Any = None,
    ) -> Any:  # fmt: skip
        """Rows of any length, packed: q [num_tokens, num_q_heads, head_dim]; returns like q. k_new,
        v_new: their tokens' K and V, which the caches hold too. out: contiguous, as in decode."""

    def read(self, plan: Any) -> dict[str, Any]:
        """What was planned, for the step record; waits for the device."""

    def describe(self) -> dict[str, Any]:
        """Names and pinned configurations of the kernels, for the manifest."""
