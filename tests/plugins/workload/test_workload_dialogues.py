"""plugins/workload/mt_bench_101.py on a tokenizer of characters."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from core.hookspecs import hookimpl
from plugins.executor.fake import Fake
from plugins.mode.bench import Bench
from plugins.workload.dialogues import after_answer, read_dialogues
from plugins.workload.mt_bench_101 import MtBench101
from tests.plugins.mode.mode_session import Recorder, make_session


class Characters:
    """One token a character; its chat template wraps roles in angle brackets."""

    chat_template: str | None = "template"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [1] * add_special_tokens + [ord(c) % 300 for c in text]}

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def text_of(ids: Any) -> str:
    return "".join(chr(i) for i in ids if i > 1)


def play(workload: MtBench101, service_s: float = 1.0, seed: int = 0) -> dict[str, Any]:
    todo = list(workload.requests(Characters(), 300, seed))
    seen = {}
    while todo:
        request = todo.pop(0)
        seen[request.request_id] = request
        ended = SimpleNamespace(
            request_id=request.request_id, finished_s=request.arrival_s + service_s
        )
        todo += workload.follow_up(ended)
    return seen


def test_all_dialogues_are_there() -> None:
    entries = read_dialogues(None)
    assert len(entries) == 1388
    assert sum(len(entry["history"]) for entry in entries) == 4208
    assert Counter(e["task"] for e in entries)["AR"] == len(read_dialogues("AR")) == 153
    with pytest.raises(ConfigError, match=r"workload.task must be one of AR, CC, .* got 'XX'"):
        read_dialogues("XX")


def test_prompt_is_all_that_was_said_and_the_new_question() -> None:
    workload = MtBench101(num_dialogues=3, task="GR")
    seen = play(workload)
    entries = {entry["id"]: entry["history"] for entry in read_dialogues("GR")}
    assert len(seen) == workload.total_requests
    for name, request in seen.items():
        _, number, turn = name.rsplit("-", 2)
        history = entries[int(number)]
        said = "".join(
            f"<user>{both['user']}<assistant>{both['bot']}" for both in history[: int(turn)]
        )
        wanted = f"{said}<user>{history[int(turn)]['user']}<assistant>"
        assert text_of(request.prompt) == "".join(chr(ord(c) % 300) for c in wanted)
        assert request.forced_output == len(history[int(turn)]["bot"])
        assert request.session == f"mt_bench_101-{number}"
    longest = max(request.forced_output for request in seen.values())
    assert {request.params.max_tokens for request in seen.values()} == {longest}


def test_prompt_of_a_turn_begins_with_that_of_the_one_before() -> None:
    seen = play(MtBench101(num_dialogues=20))
    followers = [name for name in seen if not name.endswith("-0")]
    assert len(followers) > 20
    for name in followers:
        dialogue, turn = name.rsplit("-", 1)
        before = seen[f"{dialogue}-{int(turn) - 1}"].prompt
        assert np.array_equal(seen[name].prompt[: len(before)], before)


def test_closed_loop_waits_for_the_answer_and_an_open_one_does_not() -> None:
    closed = play(MtBench101(num_dialogues=12, rate=1.0), service_s=3.0)
    swift = play(MtBench101(num_dialogues=12, rate=1.0), service_s=0.0)
    workload = MtBench101(num_dialogues=12, rate=1.0, closed_loop=False)
    opened = workload.requests(Characters(), 300, 0)
    assert not workload.closed_loop
    times = [request.arrival_s for request in opened]
    assert times == sorted(times)
    assert {r.request_id for r in opened} == set(closed) == set(swift)
    for request in opened:
        turn = int(request.request_id.rsplit("-", 1)[1])
        assert swift[request.request_id].arrival_s == pytest.approx(request.arrival_s)
        wait_s = closed[request.request_id].arrival_s - request.arrival_s
        assert wait_s == pytest.approx(3.0 * turn)


def test_think_times_have_their_mean_and_the_rate_scale_divides_all() -> None:
    def gaps(workload: MtBench101) -> list[float]:
        seen = play(workload, service_s=0.0)
        return [
            seen[name].arrival_s - seen[f"{name.rsplit('-', 1)[0]}-{int(name[-1]) - 1}"].arrival_s
            for name in seen
            if not name.endswith("-0")
        ]

    slow = gaps(MtBench101(num_dialogues=400, think_s=8.0))
    assert np.mean(slow) == pytest.approx(8.0, rel=0.1)
    assert np.std(slow) == pytest.approx(8.0, rel=0.15)
    fast = gaps(MtBench101(num_dialogues=400, think_s=8.0, rate_scale=4.0))
    assert fast == pytest.approx([gap / 4 for gap in slow])


def test_seed_decides_which_dialogues() -> None:
    first, again = (play(MtBench101(num_dialogues=5), seed=1) for _ in range(2))
    other = play(MtBench101(num_dialogues=5), seed=2)
    assert list(first) == list(again) != list(other)
    assert [r.arrival_s for r in first.values()] == [r.arrival_s for r in again.values()]


def test_dialogue_ends_before_a_turn_that_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    whole = play(MtBench101(num_dialogues=30))
    workload = MtBench101(num_dialogues=30, max_prompt=600, max_output=500)
    with caplog.at_level(logging.WARNING):
        kept = play(workload)
    fits = {n: len(r.prompt) <= 600 and r.forced_output <= 500 for n, r in whole.items()}
    wanted = {
        name
        for name in whole
        if all(fits[f"{name.rsplit('-', 1)[0]}-{turn}"] for turn in range(int(name[-1]) + 1))
    }
    assert set(kept) == wanted
    left_out = len(whole) - len(kept)
    assert workload.describe()["skipped"] == left_out > 0
    assert f"{left_out} of {len(whole)} turns left out (max_prompt 600" in caplog.text


def test_plain_lines_without_a_template() -> None:
    bare = Characters()
    bare.chat_template = None
    (first,) = MtBench101(1, task="GR", chat=False).requests(bare, 300, 0)
    assert text_of(first.prompt).startswith("User: ")
    assert text_of(first.prompt).endswith("\nAssistant:")
    with pytest.raises(ConfigError, match=r"workload.chat must be false"):
        MtBench101(1).requests(bare, 300, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_dialogues": 0}, r"workload.num_dialogues must be >= 1, got 0"),
        ({"think_s": -1}, r"workload.think_s must be >= 0, got -1"),
        ({"forced": False}, r"workload.max_tokens must be given without workload.forced"),
        ({"answers": "none"}, r"workload.answers must be one of recorded, generated, got 'none'"),
        (
            {"answers": "generated", "closed_loop": False},
            r"workload.answers must be recorded without workload.closed_loop and",
        ),
    ],
)
def test_bad_argument_names_field_rule_and_value(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MtBench101(**arguments)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model with a tokenizer"):
        MtBench101().requests(None, 300, 0)
    with pytest.raises(ConfigError, match="num_dialogues must be <= 1388, the dialogues there are"):
        MtBench101(num_dialogues=1389).requests(Characters(), 300, 0)
    with pytest.raises(ConfigError, match=r"workload.max_prompt must be enough for at least one"):
        MtBench101(num_dialogues=2, max_prompt=3).requests(Characters(), 300, 0)


class Spoken(Fake):
    """The scripted executor with a tokenizer."""

    @hookimpl
    def build_executor(self, query: Any) -> Any:
        executor = super().build_executor(query=query)
        executor.tokenizer = Characters()
        return executor


def test_end_token_of_an_answer_is_in_the_next_prompt_once() -> None:
    ids = [np.array(part, np.int32) for part in ([1, 2], [5, 9], [9, 7], [8])]
    assert after_answer(ids[0], ids[1], ids[2]).tolist() == [1, 2, 5, 9, 7]
    assert after_answer(ids[0], ids[1], ids[3]).tolist() == [1, 2, 5, 9, 8]


def test_bench_finds_prompt_and_generated_answer_in_the_prefix_cache(tmp_path: Any) -> None:
    workload = MtBench101(2, task="GR", max_output=200, think_s=0.5, answers="generated")
    recorder, executor = Recorder(), Spoken(vocab_size=300, max_model_len=8192)
    session = make_session(tmp_path, workload, pages=4000, executor=executor, recorder=recorder)
    summary = Bench().run(session)
    assert summary["requests"]["completed"] == workload.total_requests
    records = {record.request_id: record for record in recorder.requests}
    followers = [name for name in records if not name.endswith("-0")]
    assert len(followers) >= 2
    for name in followers:
        dialogue, turn = name.rsplit("-", 1)
        before = records[f"{dialogue}-{int(turn) - 1}"]
        # the last generated token is never computed, so its page is not whole
        known = before.prompt_tokens + before.output_tokens - 1
        assert records[name].prompt_tokens > known
        assert records[name].cached_tokens >= known // 16 * 16


def test_bench_finds_each_last_prompt_in_the_prefix_cache(tmp_path: Any) -> None:
    """Page size 16, a pool for all: a turn reuses the whole pages of the prompt before it."""
    workload, recorder = MtBench101(2, task="GR", max_output=200, think_s=0.5), Recorder()
    executor = Spoken(vocab_size=300, max_model_len=8192)
    session = make_session(tmp_path, workload, pages=4000, executor=executor, recorder=recorder)
    summary = Bench().run(session)
    assert summary["requests"]["completed"] == workload.total_requests
    records = {record.request_id: record for record in recorder.requests}
    followers = [name for name in records if not name.endswith("-0")]
    assert len(followers) >= 2
    for name in followers:
        dialogue, turn = name.rsplit("-", 1)
        before = records[f"{dialogue}-{int(turn) - 1}"]
        assert records[name].arrival_s > before.finished_s
        assert records[name].cached_tokens >= before.prompt_tokens // 16 * 16
