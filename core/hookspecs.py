"""The hook contract: every point at which a plugin decides, builds or observes. Version 1.

`decide_*`: once a step or a request, unless memory forces a new plan; a frozen query in, a decision
or None out (None: the next plugin is asked, last the default). `build_*`: once a run; the object is
kept and called directly. `on_*`: every plugin is called; nothing is returned. The core checks each
decision and alone changes state.

In simulated time steps may go in one, if each plugin with decide_batch or on_step has `steady =
True`: while all who run have one token to compute and nobody comes or goes, it chooses them all at
any time (BatchDecision.holds tells of other steps); and it takes records of several steps. Not with
overlap if one in charge of something has on_step: of a launch it hears after the next plan."""

from typing import Any

import pluggy

from core import protocols, queries

PROJECT = "tritium"
HOOK_VERSION = 1
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Write a method of the same name, marked `@hookimpl`, in a class of your own."""

    @hookspec(firstresult=True)
    def decide_order(self, query: queries.OrderQuery) -> queries.OrderDecision | None:
        """Keys that order the waiting requests, smallest first. Asked at most once a step, when
        requests arrive, change or their keys run out. Checked: one row of finite keys for each."""

    @hookspec(firstresult=True)
    def decide_admission(self, query: queries.AdmissionQuery) -> queries.AdmissionDecision | None:
        """May the next waiting request start? Asked in order until the first WAIT, while a slot is
        free; again for the first one after each victim displaced for it. Checked: a Verdict; and an
        idle engine in which everyone waits for 8 steps is a PolicyError. An admitted request whose
        first tokens find no page is taken back unharmed."""

    @hookspec(firstresult=True)
    def decide_batch(self, query: queries.BatchQuery) -> queries.BatchDecision | None:
        """The step's rows: which requests compute how many tokens. Asked once a step with someone
        running, and again, with `replanning`, each time that the choice did not fit. Checked:
        known distinct ids, 1 <= tokens <= remaining, the sum within token_limit, at least a row."""

    @hookspec(firstresult=True)
    def decide_preemption(
        self, query: queries.PreemptionQuery
    ) -> queries.PreemptionDecision | None:
        """Victims, first to go first. Asked when pages run short; and, if any configured plugin has
        a true attribute `displaces`, when the first waiting request cannot start (None: displace
        nobody). Checked: distinct ids of candidates; for PAGES enough pages come free, else
        PolicyError. If all answer None to PAGES: PolicyError."""

    @hookspec(firstresult=True)
    def decide_cache_admission(
        self, query: queries.CacheAdmissionQuery
    ) -> queries.CacheAdmissionDecision | None:
        """Do a sequence's pages enter the prefix cache? Asked once, after its first launch."""

    @hookspec(firstresult=True)
    def build_allocator(self, query: queries.AllocatorQuery) -> protocols.Allocator | None:
        """Which free pages to hand out, and the page size. Asked once more, before and for the page
        size alone, where engine.pool_tokens is auto. Checked: ids are free and distinct."""

    @hookspec(firstresult=True)
    def build_prefix_cache(self, query: queries.PrefixCacheQuery) -> protocols.PrefixCache | None:
        """The index of reusable pages. Checked in strict mode: its pages and locks."""

    @hookspec(firstresult=True)
    def build_evictor(self, query: queries.EvictorQuery) -> Any:
        """Which unlocked leaf of the prefix cache goes first: plugins.shared.cache_protocols."""

    @hookspec(firstresult=True)
    def build_length_predictor(
        self, query: queries.LengthPredictorQuery
    ) -> protocols.LengthPredictor | None:
        """Expected output lengths, for every other policy."""

    @hookspec(firstresult=True)
    def build_step_time_model(self, query: queries.StepTimeQuery) -> Any:
        """How long a step will take, for policies that weigh time: plugins.shared.step_time."""

    @hookspec(firstresult=True)
    def build_model(self, query: queries.ModelQuery) -> Any:
        """The model, loaded: a plugins.shared.model_protocols.Model, for the executor alone."""

    @hookspec(firstresult=True)
    def build_attention(self, query: Any) -> Any:
        """AttentionQuery -> AttentionBackend of the same file; ConfigError: cannot serve it."""

    @hookspec(firstresult=True)
    def build_executor(self, query: queries.ExecutorQuery) -> protocols.Executor | None:
        """Who computes launches: a device, a simulation, a script."""

    @hookspec
    def build_sink(self, query: Any) -> protocols.Sink | None:
        """A receiver of records, from a plugins.shared.run_info.SinkQuery; every answer is used."""

    @hookspec(firstresult=True)
    def build_server(self, query: Any) -> Any:
        """Who brings in requests in mode serve: plugins.shared.server_protocol's Server."""

    @hookspec(firstresult=True)
    def decide_route(self, query: Any) -> Any:
        """Which replica takes a request: plugins.shared.routing's RouteQuery -> RouteDecision."""

    @hookspec
    def on_run_start(self, query: Any) -> None:
        """Before the first step; query is a plugins.shared.run_info.RunInfo."""

    @hookspec
    def on_step(self, query: queries.StepEvent) -> None:
        """After each committed step."""

    @hookspec
    def on_request_arrived(self, query: queries.RequestEvent) -> None:
        """A request entered the waiting queue or was refused at once."""

    @hookspec
    def on_request_finished(self, query: queries.RequestEvent) -> None:
        """A request ended, once, for whatever reason."""

    @hookspec
    def on_run_end(self, query: dict[str, Any]) -> None:
        """After the last step; query is the run's summary."""
