"""What a launch computes on the device, from its uploaded inputs on: logits, and for one-token rows
the tokens too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugins.executor.attend import LaunchAttention
from plugins.executor.chunk_graphs import ChunkGraphs
from plugins.executor.paging import Paging, StepTables
from plugins.executor.pool import KVPool
from plugins.executor.sampler import COLUMNS
from plugins.executor.sampling import SamplingKernels
from plugins.shared.model_protocols import AttentionBackend, AttentionBatch, Model, RankGroup


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A model over the paged pool. side: see LaunchAttention. plans: where a launch's plan of
    attention is left, None = nowhere. group: the ranks of a model that is cut, of which the first
    samples for all."""

    model: Model
    pool: KVPool
    backend: AttentionBackend
    paging: Paging
    side: torch.cuda.Stream | None
    plans: list[Any] | None = None
    group: RankGroup | None = None

    @property
    def follows(self) -> bool:
        """Whether another rank samples."""
        return self.group is not None and self.group.rank > 0

    def logits(
        self,
        token_ids: Tensor,
        inputs: dict[str, Tensor],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        num_decode: int,
        shares_prefix: bool = False,
        graphs: ChunkGraphs | None = None,
    ) -> Tensor:
        """Logits [k, vocab_size]. token_ids int64 [T]; inputs: the others of PackedLaunch.arrays,
        for a block table that is up to date; context_lens, query_lens: those lengths on the
        host. graphs: of the model, for launches that they take."""
        lens = context_lens, query_lens
        step, plan = self._plan(inputs, *lens, num_decode, shares_prefix=shares_prefix)
        if self.plans is not None:
            self.plans[:] = [plan]
        taken = graphs is not None and graphs.takes(len(token_ids))
        out = graphs.out(len(token_ids)) if graphs is not None and taken else None
        rows = num_decode, num_decode < len(query_lens)
        attend = LaunchAttention(self.pool, self.backend, step.slots, plan, *rows, self.side, out)
        positions, scored = inputs["positions"], inputs["logits_rows"]
        if graphs is not None and taken:
            return self.score(graphs.run(token_ids, positions, step.slots, attend), scored)
        return self._read(self.model.forward(token_ids, positions, attend, scored))

    def score(self, states: tuple[Tensor, Tensor], logits_rows: Tensor) -> Tensor:
        """Logits [k, vocab_size] of packed tokens int64 [k], from what all layers left of them."""
        model: Any = self.model  # a LayeredModel
        return self._read(model.score(*states, logits_rows))

    def states(
        self,
        token_ids: Tensor,
        inputs: dict[str, Tensor],
        ones: int,
        chunks: int,
        shares_prefix: bool,
    ) -> tuple[Tensor, Tensor]:
        """All layers of a launch with room for so many rows of one token and of several: what
        `score` takes. It reads nothing but tensors (see MixedGraphs), so it may be captured."""
        model: Any = self.model  # a LayeredModel
        lens = [1] * (ones + chunks)  # graph-safe kernels read only how many
        step, plan = self._plan(
            inputs, lens, lens, ones, in_graph=True, shares_prefix=shares_prefix
        )
        rows = ones, True
        attend = LaunchAttention(self.pool, self.backend, step.slots, plan, *rows, in_graph=True)
        hidden, shared = model.embed(token_ids, inputs["positions"])
        delta: Any = None
        for index in range(model.num_layers):
            hidden, q, k, v = model.enter(index, hidden, delta, shared, attend)
            found = model.attend(attend, index, q, k, v)
            hidden, delta = model.leave(index, hidden, found)
        return hidden, delta

    def _plan(
        self,
        inputs: dict[str, Tensor],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        num_decode: int,
        **flags: bool,
    ) -> tuple[StepTables, Any]:
        """A launch's tables and attention's metadata. flags: of AttentionBatch."""
        pool = self.pool
        step = self.paging.step(
            pool.table,
            inputs["row_ids"],
            inputs["context_lens"],
            inputs["query_starts"],
            inputs["token_rows"],
            inputs["positions"],
            pool.page_size,
        )
        batch = AttentionBatch(
            page_table=step.page_table,
            context_lens=step.context_lens,
            query_starts=step.query_starts,
            host_context_lens=context_lens,
            host_query_lens=query_lens,
            num_decode_rows=num_decode,
            page_size=pool.page_size,
            **flags,
        )
        return step, self.backend.plan(batch)

    def _read(self, logits: Tensor) -> Tensor:
        logits = logits[:, : self.model.vocab_size]  # padding of the head is never scored
        # A neighbour's penalties must not decide in which type all logits are read.
        return logits.float() if getattr(self.model, "batch_invariant", False) else logits

    def decode(
        self, inputs: dict[str, Tensor], kernels: SamplingKernels, shares_prefix: bool
    ) -> Tensor:
        """A launch of one-token rows, which reads nothing but inputs (see DecodeGraphs), so that it
        may be captured. Returns tokens int64 [rows], NO_TOKEN included."""
        pool, rows = self.pool, inputs["row_ids"]
        self.paging.update(pool.table, rows[:0], inputs["updates"])
        fed = inputs["feedback"] != 0
        token_ids = torch.where(fed, pool.last_tokens[rows], inputs["token_ids"])
        ones = [1] * len(rows)  # graph-safe kernels read only how many
        logits = self.logits(token_ids, inputs, ones, ones, len(rows), shares_prefix)
        if self.follows:
            tokens = torch.empty_like(rows)
        else:
            tokens = kernels.draw(logits, {name: inputs[name] for name in COLUMNS})
        self.keep(inputs["sampled_rows"], tokens)
        return tokens

    def keep(self, rows: Tensor, tokens: Tensor) -> None:
        """Remember tokens int64 [k] as the last ones of table rows int64 [k]. Of several ranks all
        take the first one's, in place."""
        if self.group is not None:
            self.group.take_first(tokens)
        # The next launch may read a row's mark as a token before the host knows that it failed.
        self.pool.last_tokens[rows] = tokens.clamp(min=0)
