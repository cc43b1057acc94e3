"""What each hook is asked and what it answers. Queries are frozen: new fields break no plugin.

Decisions name ids from the query's tables and carry a short reason, which the step record has."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import EngineConfig
from core.records import RequestRecord, StepRecord
from core.request import Request
from core.table import RequestTable

Ids = NDArray[np.int64]


class Hold(Enum):
    """How long order keys stay valid when the request itself does not change."""

    ALWAYS = "always"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class OrderQuery:
    """Waiting requests that need a key: new, changed (preempted, a late token) or out of hold.

    cached_tokens(ids): tokens of each that the prefix cache holds now, int32; computed on call.
    request(id): what the client asked."""

    waiting: RequestTable
    now_s: float
    step: int
    cached_tokens: Callable[[Ids], NDArray[np.int32]]
    request: Callable[[int], Request]


@dataclass(frozen=True, slots=True)
class OrderDecision:
    """keys: float64 [n] or [n, k], smallest first, later columns break ties; then preempted
    requests go first, then the earlier submission. hold: Hold, or until which time they stand."""

    keys: NDArray[np.float64]
    hold: Hold | float = Hold.ALWAYS
    reason: str = ""


class Verdict(Enum):
    """ADMIT starts the request now; WAIT stops admission for this step; SKIP tries the next."""

    ADMIT = "admit"
    WAIT = "wait"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class AdmissionQuery:
    """May `candidate` (a table of one row) start now? A slot is free for it.

    cached_tokens: its tokens in the prefix cache. pages_needed: pages for its known tokens beyond
    those. pages_at_most: pages for its longest possible length beyond those. pages_free,
    pages_evictable: supply after its cached prefix is locked. pages_promised: pages that running
    requests still need for tokens they already have. pages_reserved_at_once: what the allocator
    takes on admission (0 = on demand); allocatable(n): whether it can hand out n pages at once,
    evicting if needed. running: those running now, admitted ones included. waiting: how many wait,
    this one included. request(id): what the client asked, of the candidate or a running one.
    step_time: a plugins.shared.step_time.StepTimeModel."""

    candidate: RequestTable
    cached_tokens: int
    pages_needed: int
    pages_at_most: int
    pages_free: int
    pages_evictable: int
    pages_promised: int
    pages_reserved_at_once: int
    pool_pages: int
    page_size: int
    allocatable: Callable[[int], bool]
    request: Callable[[int], Request]
    running: RequestTable
    waiting: int
    now_s: float
    step: int
    step_time: Any


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The verdict on one candidate, with its reason."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BatchQuery:
    """Choose this step's rows from `running`, in admission order; every row has remaining >= 1.

    waiting: requests still waiting. token_limit: engine.max_num_batched_tokens. replanning: True
    when an earlier choice of this step did not fit memory. step_time: a StepTimeModel."""

    running: RequestTable
    waiting: int
    token_limit: int
    now_s: float
    step: int
    replanning: bool
    step_time: Any


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """ids int64 [k], distinct, from query.running; num_tokens [k], 1 <= num_tokens <= remaining,
    their sum at most token_limit. Rows that come first are served first when memory is short.
    holds: a promise that the next steps would be chosen alike, whatever the time, while nobody
    comes or goes and no prompt ends; in the step in which one does, its row has what is left."""

    ids: Ids
    num_tokens: NDArray[np.int32]
    reason: str = ""
    holds: bool = False


class Cause(Enum):
    """Why victims are sought: PAGES: running rows cannot grow. SLOTS, DISPLACE: `beneficiary`, the
    first waiting request, could start but for a slot (max_num_seqs) or for pages."""

    PAGES = "pages"
    SLOTS = "slots"
    DISPLACE = "displace"


@dataclass(frozen=True, slots=True)
class PreemptionQuery:
    """Rank victims among `candidates`. pages_short: pages that must come free (0 for SLOTS,
    or if a waiting request lacks only the margin of the admission policy).

    beneficiary: a table of one waiting request for SLOTS and DISPLACE, else None. random: a
    generator seeded by the run's seed and the step. step_time: as in AdmissionQuery."""

    cause: Cause
    candidates: RequestTable
    pages_short: int
    beneficiary: RequestTable | None
    random: np.random.Generator
    now_s: float
    step: int
    step_time: Any


@dataclass(frozen=True, slots=True)
class PreemptionDecision:
    """victims: ids, first to go first. The core preempts from the front until enough pages are
    really free, so ranking every candidate is right; for PAGES at least one is kept running."""

    victims: Ids
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CacheAdmissionQuery:
    """Shall the whole pages of `request` enter the prefix cache? num_tokens: known tokens at its
    first publication. cached_tokens: how many of them it took from the cache."""

    request: Request
    num_tokens: int
    cached_tokens: int
    now_s: float


@dataclass(frozen=True, slots=True)
class CacheAdmissionDecision:
    """Whether the request's pages are kept for reuse, with the reason. num_tokens: only whole pages
    within its first so many tokens; None = all."""

    admit: bool
    reason: str = ""
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AllocatorQuery:
    """pool_tokens: KV slots to manage (page 0 comes on top). max_model_len: in tokens."""

    pool_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class EvictorQuery:
    """page_size in tokens."""

    page_size: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQuery:
    """page_size in tokens; evictor: for this cache alone."""

    page_size: int
    evictor: Any


@dataclass(frozen=True, slots=True)
class LengthPredictorQuery:
    """seed of the run."""

    seed: int


@dataclass(frozen=True, slots=True)
class StepTimeQuery:
    """model() builds the model: its shape, for one who computes times from it."""

    model: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ModelQuery:
    """device: "cpu", "cuda" or "cuda:N"; seed for random weights; progress: show bars."""

    device: str
    seed: int
    progress: bool


@dataclass(frozen=True, slots=True)
class ExecutorQuery:
    """model() and attention(AttentionQuery) build the other parts on first call: an executor
    without a device imports none. seed: the run's. clock: the engine's. progress: show bars."""

    engine: EngineConfig
    seed: int
    clock: Any
    model: Callable[[], Any]
    attention: Callable[[Any], Any]
    progress: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepEvent:
    """One committed step. rows: (request id, choice) of each that got a token; token_ids int32: the
    latest of each. They got record.steps each, the last num_late record.slices - 1 fewer.

    finished: records of the requests that ended in it."""

    record: StepRecord
    rows: list[tuple[str, int]]
    token_ids: NDArray[np.int32]
    finished: tuple[RequestRecord, ...] = ()
    num_late: int = 0


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A request that arrived or ended; its record so far."""

    request: Request
    record: RequestRecord
