"""plugins/mode/bounds.py by hand: a step takes 1 s and 10 ms a token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.executor.simulated import Simulated
from plugins.mode.simulate import Simulate
from plugins.step_time.fixed import Fixed
from plugins.workload.synthetic import Synthetic
from tests.plugins.mode.mode_session import VOCAB, Given, make_session

TIMES = Fixed(step_s=1.0, token_s=0.01)


def request(name: str, prompt: int, output: int, arrival_s: float = 0.0, alike: bool = False):
    rng = np.random.default_rng(0 if alike else [1, *name.encode()])
    ids = rng.integers(1, VOCAB, 400)[:prompt].astype(np.int32)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(name, ids, params, arrival_s=arrival_s, forced_output=output)


def bounds(folder: Path, requests: Any, step_time: Any = TIMES, **more: Any) -> dict[str, Any]:
    executor = Simulated(step_time, vocab_size=VOCAB, max_model_len=512)
    workload = requests if hasattr(requests, "requests") else Given(requests)
    session = make_session(folder, workload, executor=executor, **more)
    summary = Simulate(bounds=True).run(session)
    found: dict[str, Any] = summary["bounds"]
    return found | {"summary": summary}


def test_request_alone_takes_full_chunks_and_a_step_a_token(tmp_path: Path):
    """200 tokens in two steps of at most 128: 2 + 2 s; two more tokens: 2.02 s. The run's slices of
    64 take four steps: 6 s."""
    found = bounds(tmp_path, [request("a", 200, 3)])
    assert found["isolated_ttft_s"]["max"] == pytest.approx(4.0)
    assert found["isolated_e2e_s"]["max"] == pytest.approx(6.02)
    assert found["ttft_slowdown"]["max"] == pytest.approx(6 / 4)
    assert found["e2e_slowdown"]["max"] == pytest.approx(8.02 / 6.02)


def test_stability_is_that_of_the_largest_batch_that_the_pool_holds(tmp_path: Path):
    """Prompts: 200 tokens in full steps of 2.28 s, 1.78 s a request. Ten decodes each, reading
    105.5 on average, of which 384 slots hold 3.64 rows: 2.85 s a request, the longer."""
    found = bounds(tmp_path, [request("a", 100, 11), request("b", 100, 11, 4.0)])
    rows = 384 / 105.5
    limit = rows / (10 * (1 + 0.01 * rows))
    assert found["stability_limit_requests_per_s"] == pytest.approx(limit)
    assert found["roofline_output_tokens_per_s"] == pytest.approx(11 * limit)
    assert found["offered_requests_per_s"] == pytest.approx(0.25)
    assert found["load"] == pytest.approx(0.25 / limit)
    assert found["infinite_hit_rate"] == 0.0


def test_what_a_cache_without_end_finds_costs_nothing(tmp_path: Path):
    """The same 100 tokens twice: 6 whole pages of 99 tokens are found."""
    pair = [request(name, 100, 1, at, alike=True) for name, at in (("a", 0.0), ("b", 9.0))]
    found = bounds(tmp_path, pair)
    assert found["infinite_hit_rate"] == pytest.approx(96 / 200)
    assert found["min_hit_rate"] == pytest.approx(96 / 200)
    assert found["summary"]["hit_rate"] == pytest.approx(96 / 200)
    assert found["stability_limit_requests_per_s"] == pytest.approx(2 / (104 / 128 * 2.28))
    assert found["ttft_slowdown"]["p50"] < found["ttft_slowdown"]["max"]


def test_no_run_is_better_than_its_bounds(tmp_path: Path):
    workload = Synthetic(40, output={"kind": "uniform", "low": 2, "high": 40})
    costs = {"step_s": 0.01, "token_s": 1e-4, "kv_token_s": 1e-6, "pair_s": 1e-7}
    found = bounds(tmp_path, workload, Fixed(**costs), pages=200)
    summary = found["summary"]
    rate = summary["throughput"]["requests_per_s"]
    assert rate < found["stability_limit_requests_per_s"] < 3 * rate
    tokens = summary["throughput"]["output_tokens_per_s"]
    assert tokens < found["roofline_output_tokens_per_s"]
    assert found["offered_requests_per_s"] is None, "all at once"
    assert min(found["e2e_slowdown"]["p50"], found["ttft_slowdown"]["p50"]) >= 1


def test_bounds_are_absent_unless_asked_for_and_need_a_model(tmp_path: Path):
    executor = Simulated(TIMES, vocab_size=VOCAB, max_model_len=512)
    session = make_session(tmp_path, Given([request("a", 20, 2)]), executor=executor)
    assert Simulate().run(session)["bounds"] is None
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"mode.bounds must be false but for executor=simulated"):
        Simulate(bounds=True).run(make_session(tmp_path / "b", Given([request("a", 20, 2)])))
