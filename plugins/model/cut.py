"""How a decoder is cut for tensor parallelism: Megatron-LM's split (arXiv:1909.08053).

Q, K and V and gate and up are cut by output rows, whole heads to a rank; what follows them, o and
down, by input columns, so that each block needs one sum over the ranks. The output head is cut by
vocabulary rows: all of it is read at every step, and gathering its logits moves less. The embedding
is whole everywhere: a step reads the rows of its tokens alone, and a sum over ranks would cost more
than the rows.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from core.config import require
from plugins.model.spec import DecoderSpec

FIELD = "executor.tensor_parallel"
HEAD_ROWS = 16
"""The head is cut at multiples of so many rows: a row of logits stays aligned."""


@dataclass(frozen=True, slots=True)
class Part:
    """Indices [begin, end) of dimension `dim`."""

    dim: int
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """That part of a tensor, a view."""
        return tensor.narrow(self.dim, self.begin, self.end - self.begin)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rank `rank`'s part of a model that is cut into `size`; of size 1, all of it. Each method
    takes the whole model's shape."""

    rank: int = 0
    size: int = 1

    def check(self, spec: DecoderSpec) -> None:
        """Raise ConfigError unless every rank gets as many heads and intermediate columns."""
        heads, kv_heads, inner = spec.num_q_heads, spec.num_kv_heads, spec.intermediate_size
        size = self.size
        require(heads % size == 0, FIELD, f"a divisor of the model's {heads} query heads", size)
        holds = kv_heads % size == 0 or size % kv_heads == 0
        rule = f"a divisor or a multiple of the model's {kv_heads} KV heads"
        require(holds, FIELD, rule, size)
        rule = f"a divisor of the model's intermediate size {inner}"
        require(inner % size == 0, FIELD, rule, size)

    def local(self, spec: DecoderSpec) -> DecoderSpec:
        """The shape of a rank's layers. KV heads are repeated where there are more ranks."""
        return replace(
            spec,
            num_q_heads=spec.num_q_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
        )

    def q(self, spec: DecoderSpec, dim: int = 0) -> Part | None:
        """Its query heads, in values of head_dim; None = all."""
        return self._equal(dim, spec.num_q_heads * spec.head_dim)

    def kv(self, spec: DecoderSpec) -> Part | None:
        """Its KV heads, in values of head_dim; None = all."""
        if spec.num_kv_heads >= self.size:
            return self._equal(0, spec.num_kv_heads * spec.head_dim)
        first = self.rank * spec.num_kv_heads // self.size * spec.head_dim
        return None if spec.num_kv_heads == 1 else Part(0, first, first + spec.head_dim)

    def inner(self, spec: DecoderSpec, dim: int = 0) -> Part | None:
        """Its part of the intermediate size; None = all."""
        return self._equal(dim, spec.intermediate_size)

    def head_rows(self, spec: DecoderSpec) -> int:
        """Rows of the output head that a rank has; the last ones may have fewer."""
        if self.size == 1:
            return spec.vocab_size
        return -(-spec.vocab_size // (self.size * HEAD_ROWS)) * HEAD_ROWS

    def head(self, spec: DecoderSpec) -> Part | None:
        """Its rows of the output head; None = all."""
        if self.size == 1:
            return None
        each = self.head_rows(spec)
        begin, end = (min(rank * each, spec.vocab_size) for rank in (self.rank, self.rank + 1))
        return Part(0, begin, end)

    def _equal(self, dim: int, length: int) -> Part | None:
        each = length // self.size
        return None if self.size == 1 else Part(dim, self.rank * each, (self.rank + 1) * each)


WHOLE = Cut()
