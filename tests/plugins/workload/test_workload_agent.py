"""plugins/workload/agent_sessions.py: who waits for whom, and what prompts share."""

import heapq
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.executor.fake import Fake
from plugins.mode.bench import Bench
from plugins.workload.agent_sessions import AgentSessions
from plugins.workload.agent_trace import read_sessions
from tests.plugins.mode.mode_session import Recorder, make_session

VOCAB = 49_152


def play(workload, service_s=1.0, vocab=VOCAB, most=10_000):
    """Every request takes `service_s`: requests in order of arrival, each once."""
    waiting = [(r.arrival_s, i, r) for i, r in enumerate(workload.requests(None, vocab, 0))]
    heapq.heapify(waiting)
    number, seen = len(waiting), []
    while waiting and len(seen) < most:
        at, _, request = heapq.heappop(waiting)
        seen.append(request)
        ended = SimpleNamespace(request_id=request.request_id, finished_s=at + service_s)
        for follower in workload.follow_up(ended):
            number += 1
            heapq.heappush(waiting, (follower.arrival_s, number, follower))
    return {request.request_id: request for request in seen}


def test_whole_file_has_its_counts():
    workload = AgentSessions()
    first = workload.requests(None, VOCAB, 0)
    assert len(first) == 710
    assert {request.arrival_s for request in first} == {0.0}
    facts = workload.describe()
    assert (facts["sessions"], facts["requests"], facts["of_sub_agents"]) == (710, 49_334, 676)
    assert workload.total_requests == 49_334
    assert (facts["prompt_tokens"], facts["output_tokens"]) == (6_037_445_403, 21_709_947)
    assert facts["max_tokens"] == 18_195
    one = first[0]  # the first line of the file
    assert (one.request_id, len(one.prompt), one.forced_output) == ("trace_0001-0", 71_175, 169)
    assert (one.session, one.client, one.namespace) == ("trace_0001",) * 3


def test_next_call_waits_for_the_one_before_and_its_think_time():
    """trace_0001 has no sub-agent; its think times begin 0, 12, 8, 18."""
    seen = play(AgentSessions(num_sessions=1, max_turns=4), service_s=2.5)
    assert list(seen) == [f"trace_0001-{turn}" for turn in range(4)]
    assert [r.arrival_s for r in seen.values()] == [0.0, 14.5, 25.0, 45.5]
    assert [len(r.prompt) for r in seen.values()] == [71_175, 72_762, 91_825, 96_785]


def test_rate_scale_and_the_cap_shorten_think_times():
    seen = play(AgentSessions(num_sessions=1, max_turns=4, rate_scale=2.0, max_think_s=10.0))
    # 10/2, 8/2, 10/2 between calls of 1 s
    assert [r.arrival_s for r in seen.values()] == [0.0, 6.0, 11.0, 17.0]
    none = play(AgentSessions(num_sessions=1, max_turns=3, max_think_s=0.0))
    assert [r.arrival_s for r in none.values()] == [0.0, 1.0, 2.0]


def test_sub_agents_run_side_by_side_and_the_next_call_waits_for_the_last():
    """trace_0254, number 246: a call at 30 s takes 22.85 s; three sub-agents end at 137.013,
    143.843, 149.516 after 83.993, 90.823, 96.496 s; the next call is sent at 164."""
    (session,) = read_sessions(246, 1)
    assert session.name == "trace_0254"
    turn = next(i for i, turn in enumerate(session.turns) if turn.agents)
    assert [len(agent) for agent in session.turns[turn].agents] == [7, 4, 6]
    assert session.turns[turn].agents[0][0].delay_s == pytest.approx(53.02 - 52.85)
    assert session.turns[turn + 1].call.delay_s == pytest.approx(164.0 - 149.516)
    seen = play(AgentSessions(start=246, num_sessions=1, max_turns=turn + 2), service_s=3.0)
    name = f"trace_0254-{turn}"
    begun = seen[name].arrival_s + 3.0
    for agent in range(3):
        start = seen[f"{name}.{agent}-0"].arrival_s
        assert start == pytest.approx(begun + session.turns[turn].agents[agent][0].delay_s)
    last = max(seen[f"{name}.{agent}-{n - 1}"].arrival_s for agent, n in enumerate((7, 4, 6)))
    after = seen[f"trace_0254-{turn + 1}"].arrival_s
    assert after == pytest.approx(last + 3.0 + 164.0 - 149.516)


def shared_tokens(one, other):
    """Tokens of the longest common prefix of two prompts."""
    num = min(len(one), len(other))
    differ = np.flatnonzero(one[:num] != other[:num])
    return int(differ[0]) if len(differ) else num


def test_calls_of_a_session_share_what_their_block_ids_share():
    """Turns 4 and 5 of trace_0001 have blocks 1 .. 1524 and 1 .. 1523, 1525 .. ."""
    seen = play(AgentSessions(num_sessions=1, max_turns=6))
    prompts = [r.prompt for r in seen.values()]
    assert shared_tokens(prompts[0], prompts[1]) == 1112 * 64
    assert shared_tokens(prompts[4], prompts[5]) == 1523 * 64
    assert max(int(p.max()) for p in prompts) < VOCAB


def test_system_blocks_are_common_only_if_asked():
    sessions = read_sessions(0, 60)
    like = {}
    for index, session in enumerate(sessions):
        like.setdefault((session.tool_tokens, session.system_tokens), []).append(index)
    pair = next(found for found in like.values() if len(found) > 1)[:2]
    system = sessions[pair[0]].system_blocks
    apart = AgentSessions(num_sessions=60).requests(None, VOCAB, 0)
    together = AgentSessions(num_sessions=60, share_system=True).requests(None, VOCAB, 0)
    first, second = (apart[index] for index in pair)
    assert first.namespace != second.namespace
    assert shared_tokens(first.prompt, second.prompt) == 0
    first, second = (together[index] for index in pair)
    assert first.namespace == second.namespace == ""
    assert shared_tokens(first.prompt, second.prompt) == system * 64
    tools = next(
        (a, b)
        for a in range(60)
        for b in range(a)
        if sessions[a].tool_tokens == sessions[b].tool_tokens
        and sessions[a].system_tokens != sessions[b].system_tokens
    )
    first, second = (together[index].prompt for index in tools)
    assert shared_tokens(first, second) == sessions[tools[0]].tool_blocks * 64


def test_session_ends_before_a_call_that_does_not_fit(caplog):
    """The third prompt of trace_0001 has 91,825 tokens."""
    workload = AgentSessions(num_sessions=1, max_prompt=80_000)
    with caplog.at_level(logging.WARNING):
        assert list(play(workload)) == ["trace_0001-0", "trace_0001-1"]
    calls = len(read_sessions(0, 1)[0].calls())
    assert workload.describe()["skipped"] == calls - 2
    assert f"{calls - 2} of {calls} calls left out (max_prompt 80000" in caplog.text


def test_clipped_session_keeps_all_its_calls():
    workload = AgentSessions(num_sessions=1, max_turns=3, max_prompt=80_000, too_long="clip")
    seen = list(play(workload).values())
    assert [len(r.prompt) for r in seen] == [71_175, 72_762, 80_000]
    assert workload.describe()["clipped"] == 1
    whole = list(play(AgentSessions(num_sessions=1, max_turns=3)).values())
    assert np.array_equal(seen[2].prompt, whole[2].prompt[:80_000])


def test_sessions_start_at_a_rate():
    first = AgentSessions(num_sessions=40, rate=0.5, max_turns=1).requests(None, VOCAB, 3)
    again = AgentSessions(num_sessions=40, rate=0.5, max_turns=1).requests(None, VOCAB, 3)
    times = [r.arrival_s for r in first]
    assert times == sorted(times) == [r.arrival_s for r in again]
    assert 40 < times[-1] < 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_sessions": 0}, r"workload.num_sessions must be >= 1 or null, got 0"),
        ({"max_think_s": -1}, r"workload.max_think_s must be >= 0 or null, got -1"),
        ({"rate_scale": 0}, r"workload.rate_scale must be > 0, got 0"),
        ({"too_long": "cut"}, r"workload.too_long must be one of skip, clip, got 'cut'"),
    ],
)
def test_bad_argument_names_field_rule_and_value(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AgentSessions(**arguments)


def test_no_call_that_fits_is_refused():
    with pytest.raises(ConfigError, match="such that at least one session has a call"):
        AgentSessions(num_sessions=2, max_prompt=100).requests(None, VOCAB, 0)


def test_bench_plays_sessions_to_their_end_and_repeats(tmp_path):
    """Clipped to what the scripted executor takes; two sessions with sub-agents."""
    runs = []
    for name in ("a", "b"):
        workload = AgentSessions(
            start=2, num_sessions=2, max_turns=4, max_prompt=200, max_output=6, too_long="clip"
        )
        folder, recorder = tmp_path / name, Recorder()
        folder.mkdir()
        executor = Fake(vocab_size=300, max_model_len=512)
        session = make_session(folder, workload, executor=executor, recorder=recorder)
        summary = Bench().run(session)
        assert summary["requests"]["completed"] == workload.total_requests
        assert session.run.manifest["workload"]["of_sub_agents"] > 0
        runs.append([(r.request_id, r.arrival_s, r.finished_s) for r in recorder.requests])
    assert runs[0] == runs[1]
