"""What a run leaves behind: one record a step with reasons, one timeline a request."""

from array import array
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from core.launch import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision about one sequence: which plugin made it, why, what it cost in tokens or pages.

    kind: admitted, resumed, refused, skipped, unadmitted (its pages were short after all),
    preempted, finished. detail holds the figures of the kind: cached_tokens, pages_freed,
    lost_tokens, cause, beneficiary."""

    request_id: str
    choice: int
    kind: str
    plugin: str
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    """One engine step. Times in seconds of the run's clock; host times in microseconds by part.

    A step's tokens: prefill_tokens + decode_tokens; recomputed_tokens (a part of the former) were
    computed before and lost to a preemption. num_rows: token streams that ran; rows: (request id,
    choice, tokens) of each, empty if the engine does not list them. graph_tokens and attention: see
    LaunchResult. kv_tokens: context that its rows read, their new tokens included; attended: pairs
    of a new token and a token it attends to.
    Pages: pages_free + pages_tree + pages_request = pool_pages. pages_evictable of pages_tree are
    unlocked. used_tokens: slots of request pages that hold a live token; the rest of them is waste.
    external_tokens: free slots that a refused allocation could not use (contiguous), else 0.
    steps > 1: so many steps in one: their sums, in rows too; levels at their end; who ends in
    choices does so in the last, whose prefill_tokens are last_prefill_tokens. slices: of several,
    those until prompts end; graph_tokens is of those after. later_tokens: computed after a step,
    later_pages: request pages taken after it, later_free: those of them free until then, means over
    their time."""

    step: int
    start_s: float
    launched_s: float = 0.0
    end_s: float = 0.0
    steps: int = 1
    waiting: int = 0
    running: int = 0
    num_rows: int = 0
    graph_tokens: int = 0
    prefill_tokens: int = 0
    last_prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    sampled_tokens: int = 0
    kv_tokens: int = 0
    attended: int = 0
    duplicate_prefill_tokens: int = 0
    pages_free: int = 0
    pages_tree: int = 0
    pages_evictable: int = 0
    pages_request: int = 0
    pages_evicted: int = 0
    used_tokens: int = 0
    external_tokens: int = 0
    slices: int = 0
    later_tokens: float = 0.0
    later_pages: float = 0.0
    later_free: float = 0.0
    batch_plugin: str = ""
    batch_reason: str = ""
    rows: list[tuple[str, int, int]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)

    def note(
        self, key: tuple[str, int], kind: str, plugin: str, reason: str, **detail: Any
    ) -> None:
        """Write down a decision about a sequence: request id and choice."""
        self.choices.append(Choice(*key, kind, plugin, reason, detail))

    def lap(self, part: str, since_s: float) -> float:
        """Book the host's time since then under `part`; returns now, of perf_counter."""
        now_s = perf_counter()
        self.host_us[part] = self.host_us.get(part, 0.0) + (now_s - since_s) * 1e6
        return now_s


@dataclass(slots=True, eq=False)
class ChoiceRecord:
    """One token stream of a request: the time and step at which each token was committed; its ids
    once it has ended (StepEvent carries them as they come)."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    times_s: "array[float]" = field(default_factory=lambda: array("d"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The timeline of one request. Times in seconds of the run's clock, None = never happened.

    cached_tokens: prompt tokens taken from the prefix cache at its first admission (choice 0);
    pages that a resumed request finds again count in resumed_cached_tokens and never as hits.
    recomputed_tokens: computed again after a preemption. predicted_output: as predicted at
    arrival. finish_reason: see FinishReason; error: the message for capacity and error."""

    request_id: str
    client: str
    arrival_s: float
    prompt_tokens: int
    admitted_s: float | None = None
    finished_s: float | None = None
    predicted_output: float | None = None
    cached_tokens: int = 0
    resumed_cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finish_reason: str = ""
    error: str = ""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    choices: list[ChoiceRecord] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def first_token_s(self) -> float | None:
        """When the first token of any choice was committed."""
        return min((c.times_s[0] for c in self.choices if len(c.times_s)), default=None)
