"""plugins/executor/simulated.py: the fake executor's decisions, a model's times."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.config import EngineConfig
from core.engine import Engine
from core.errors import ConfigError
from core.queries import ExecutorQuery
from core.request import Request, SamplingParams
from plugins.executor.fake import Fake
from plugins.executor.simulated import Simulated
from plugins.preemption.evict_shortest import EvictShortest
from plugins.shared.clocks import RealClock
from plugins.step_time.fixed import Fixed
from plugins.step_time.roofline import Roofline
from tests.engine_harness import VOCAB, Arrival, finish, make_engine

STEP_S, TOKEN_S = 2**-7, 2**-13  # sums of these are exact, in any order
TIMES = Fixed(step_s=STEP_S, token_s=TOKEN_S)


def simulated(step_time: Any = TIMES, **arguments: Any) -> Simulated:
    return Simulated(step_time, vocab_size=VOCAB, max_model_len=1024, **arguments)


def pressing() -> list[Request]:
    """30 requests that share prefixes in threes and need far more than the pool."""
    rng = np.random.default_rng(7)
    requests = []
    for index in range(30):
        prompt = np.random.default_rng(index // 3).integers(0, VOCAB, 100)[: rng.integers(20, 100)]
        length = int(rng.integers(1, 60))
        requests.append(
            Request(
                f"r{index}",
                prompt.astype(np.int32),
                SamplingParams(max_tokens=60),
                arrival_s=0.02 * index,
                forced_output=length,
            )
        )
    return requests


def replay(engine: Engine, requests: list[Request]) -> list[dict[str, Any]]:
    """Every step's record but host times, requests submitted when they arrive."""
    pending, records = list(requests), []
    while pending or engine.has_work:
        while pending and pending[0].arrival_s <= engine.clock.now():
            engine.submit(pending.pop(0))
        event = engine.step()
        if event is not None:
            record = asdict(event.record)
            del record["host_us"]
            record["tokens"] = event.token_ids.tolist()
            records.append(record)
        if pending and (engine.stalled or not engine.has_work):
            engine.clock.wait_until(pending[0].arrival_s)
    return records


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_step_records_equal_those_of_the_fake_executor(overlap: bool, page_size: int):
    runs = []
    for executor in (Fake(VOCAB, 1024, step_s=STEP_S, token_s=TOKEN_S), simulated()):
        engine = make_engine(
            pages=256 // page_size,
            page_size=page_size,
            overlap=overlap,
            preemption=EvictShortest(),
            executor=executor,
        )
        runs.append(replay(engine, pressing()))
    assert runs[0] == runs[1]
    kinds = [choice["kind"] for record in runs[1] for choice in record["choices"]]
    assert kinds.count("preempted") > 5, "the pool was to be too small"
    assert sum(record["pages_evicted"] for record in runs[1]) > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("forced", [None, 35])
def test_no_stop_token_comes_before_the_minimum(overlap: bool, forced: int | None):
    """Half of the vocabulary would end it at once; with a forced length steps go in one."""
    stops = tuple(range(VOCAB // 2))
    params = SamplingParams(max_tokens=40, min_tokens=30, stop_token_ids=stops, ignore_eos=True)
    request = Request("a", np.arange(9, dtype=np.int32), params, forced_output=forced)
    engine = make_engine(executor=simulated(), overlap=overlap)
    engine.submit(request)
    events = [engine.step(np.inf) for _ in range(60) if engine.has_work]
    tokens = engine.records["a"].choices[0].token_ids.tolist()
    assert tokens == Fake(VOCAB, 1024).stream(0, request, 0, len(tokens))
    assert min(tokens[:30]) >= VOCAB // 2
    if forced is None:
        assert len(tokens) > 30
        assert tokens[-1] < VOCAB // 2
    else:
        assert max(event.record.steps for event in events if event) > 8
        assert len(tokens) == forced


def times_of(executor: Simulated, arrivals: list[Arrival], **engine: Any) -> list[float]:
    """When each step ended."""
    run = make_engine(pages=64, executor=executor, **engine)
    for arrival in arrivals:
        run.submit(arrival.request())
    return [event.record.end_s for event in finish(run)]


def test_step_takes_what_the_model_says_of_its_rows_tokens_context_and_pairs():
    model = Fixed(step_s=1.0, row_s=10.0, token_s=100.0, kv_token_s=1e4, pair_s=1e6)
    ends = times_of(simulated(model), [Arrival(0, "A", 5, 2), Arrival(0, "B", 3, 2)])
    # Prompts of 5 and 3: 2 rows, 8 tokens, 8 read, 1+2+3+4+5 + 1+2+3 pairs; then 6 and 4 read.
    first = 1 + 20 + 800 + 8e4 + 21e6
    assert ends == pytest.approx([first, first + 1 + 20 + 200 + 10e4 + 10e6])


def test_later_chunk_reads_and_attends_to_what_came_before():
    model = Fixed(step_s=0.0, token_s=0.0, kv_token_s=1.0, pair_s=1000.0)
    ends = times_of(simulated(model), [Arrival(0, "A", 10, 1)], budget=6)
    # Tokens 0-5: 6 read, 21 pairs; tokens 6-9: 10 read, 7 + 8 + 9 + 10 = 34 pairs.
    assert ends == pytest.approx([21_006, 21_006 + 34_010])


@pytest.mark.parametrize(("overlap", "steps_s"), [(False, 1.3), (True, 1.0)])
def test_host_time_is_hidden_behind_the_launch_before_with_overlap(overlap: bool, steps_s: float):
    executor = simulated(Fixed(step_s=1.0, token_s=0.0), host_s=0.2, host_row_s=0.1)
    ends = times_of(executor, [Arrival(0, "A", 4, 5)], overlap=overlap)
    assert ends[0] == pytest.approx(1.3)
    assert np.diff(ends) == pytest.approx([steps_s] * 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_host_pays_for_whom_it_admits_though_they_have_no_tokens_yet(overlap: bool):
    """Both are admitted at once; the second one's prompt has no room in the first launch."""
    executor = simulated(Fixed(step_s=1.0, token_s=0.0), host_s=0.2, host_new_s=2.0)
    arrivals = [Arrival(0, "A", 4, 1), Arrival(0, "B", 4, 2)]
    ends = times_of(executor, arrivals, overlap=overlap, budget=4)
    later_s = 1.0 if overlap else 1.2
    assert ends == pytest.approx([5.2 + later_s * step for step in range(3)])


def test_host_time_that_the_device_cannot_hide_sets_the_pace():
    executor = simulated(Fixed(step_s=0.5, token_s=0.0), host_s=2.0)
    ends = times_of(executor, [Arrival(0, "A", 4, 8)], overlap=True)
    # Seen once the host has started the launch after it; nothing comes after the last.
    assert ends == pytest.approx([4.0 + 2.0 * step for step in range(7)] + [16.5])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_ends_no_sooner_than_the_host_has_started_it(overlap: bool):
    executor = simulated(Fixed(step_s=1.0, token_s=0.0), host_s=0.5, launch_s={"decode": 2.0})
    ends = times_of(executor, [Arrival(0, "A", 4, 5)], overlap=overlap)
    # The prompt's chunk takes the host nothing to start: it runs from 0.5 to 1.5.
    alone = [1.5 + 2.5 * step for step in range(5)]
    chained = [3.0, 5.5, 8.0, 10.5, 10.5]
    assert ends == pytest.approx(chained if overlap else alone)


def test_a_launch_draws_one_of_several_times_by_the_seed():
    values = [1.0, 2.0, 4.0]
    runs = []
    for seed in (0, 0, 1):
        plugin = simulated(Fixed(step_s=0.0, token_s=0.0), launch_s={"decode": values})
        runs.append(np.diff(times_of(plugin, [Arrival(0, "A", 4, 40)], seed=seed)))
    assert runs[0].tolist() == runs[1].tolist() != runs[2].tolist()
    assert set(runs[0].tolist()) == set(values)


def test_step_of_one_token_rows_is_padded_to_a_graph():
    model = Fixed(step_s=0.0, token_s=1.0, kv_token_s=0.0)
    engine = make_engine(pages=64, executor=simulated(model, graph_sizes=[1, 2, 4]))
    for name in ("A", "B", "C"):
        engine.submit(Arrival(0, name, 7, 2).request())
    chunks, decode = (event.record for event in finish(engine))
    assert (chunks.graph_tokens, chunks.end_s) == (0, 21.0)
    assert (decode.graph_tokens, decode.end_s) == (4, 25.0)


def test_auto_pool_is_what_the_modelled_device_holds():
    """Llama-3.1-8B on an H200: (0.9 * 141 - 4 - 16.06) GB at 128 KiB a token."""
    plugin = Simulated(Roofline("h200", "llama_8b"))
    engine = make_engine(pages=1, engine_len=4096, executor=plugin)
    layout = _layout(max_pages=256)
    assert engine.executor.measure_pool(layout) == 815_120
    with pytest.raises(ConfigError, match=r"one request of .* needs 100000"):
        engine.executor.measure_pool(_layout(max_pages=100_000))


def test_auto_pool_is_refused_by_a_model_that_knows_no_memory():
    engine = make_engine(executor=simulated())
    with pytest.raises(ConfigError, match="pool_tokens must be a number, since Fixed knows no"):
        engine.executor.measure_pool(_layout(max_pages=8))


def test_request_that_asks_for_log_probabilities_fails_alone():
    engine = make_engine(pages=64, executor=simulated())
    engine.submit(Arrival(0, "plain", 5, 3).request())
    engine.submit(Arrival(0, "asks", 5, 3, params={"logprobs": 2}).request())
    finish(engine)
    assert engine.records["plain"].finish_reason == "length"
    assert engine.records["asks"].finish_reason == "error"
    assert "computes no log-probabilities" in engine.records["asks"].error


def test_real_clock_and_bad_values_are_refused():
    query = ExecutorQuery(EngineConfig(), 0, RealClock(), model=dict, attention=dict)
    with pytest.raises(ConfigError, match="clock must be virtual"):
        simulated().build_executor(query)
    with pytest.raises(ConfigError, match="graph_sizes must be null or >= 1, ascending"):
        simulated(graph_sizes=[4, 2])
    with pytest.raises(ConfigError, match=r"executor.step_time must be a model"):
        Simulated("roofline")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "one", [[], -1.0, None, "1 ms", [0.1, [0.2]], [0.1, float("nan")], float("inf")], ids=str
)
def test_a_launch_time_that_is_no_time_is_refused_by_name(one):
    with pytest.raises(ConfigError, match=r"executor\.launch_s must be null or seconds >= 0"):
        simulated(launch_s={"decode": one})
    with pytest.raises(ConfigError, match=r"by kind: decode, graphed, chunk, mixed, eager, got"):
        simulated(launch_s={"decodes": 0.1})


def test_description_names_the_model_and_its_error():
    roofline = make_engine(executor=simulated(Roofline("a100", "llama2_7b"))).executor.describe()
    assert roofline["step_time"]["device"] == "a100"
    assert roofline["step_time"]["error"] is None
    fixed = make_engine(executor=simulated()).executor.describe()
    assert fixed["step_time"] == {"source": "fixed", "error": None}


def _layout(max_pages: int) -> Any:
    from core.launch import PoolLayout

    return PoolLayout(1 << 30, 16, 16, max_pages, 64)


def test_tokenizer_is_read_from_its_folder_and_a_wrong_one_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"executor\.tokenizer must be a folder or a name"):
        simulated(tokenizer=str(tmp_path))
    assert make_engine(executor=simulated()).executor.tokenizer is None
