"""plugins/workload/prompts.py and shared_prefix.py on a tokenizer of characters."""

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.common import DATA
from plugins.workload.prompts import Prompts, read_prompts
from plugins.workload.shared_prefix import SharedPrefix


class Characters:
    """One token a character; its chat template wraps in angle brackets."""

    chat_template: str | None = "template"

    def __call__(self, text: Any, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in text]}
        return {"input_ids": [1] * add_special_tokens + [ord(c) % 1000 for c in text]}

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<{messages[0]['role']}>{messages[0]['content']}<answer>"


def text_of(ids: Any) -> str:
    return "".join(chr(i) for i in ids if i > 1)


def test_vendored_files_match_their_attribution() -> None:
    table = (DATA / "README.md").read_text()
    entries = re.findall(r"\| `(\w+\.jsonl)` .*`([0-9a-f]{64})` \|", table)
    assert sorted(name for name, _ in entries) == ["gsm8k.jsonl", "mt_bench.jsonl"]
    for name, digest in entries:
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest
    assert "Copyright (c) 2021 OpenAI" in (DATA / "MIT-grade-school-math.txt").read_text()
    assert "Apache License" in (DATA / "Apache-2.0.txt").read_text()


@pytest.mark.parametrize(("dataset", "size"), [("gsm8k", 200), ("mt_bench", 80)])
def test_shipped_data_sets_have_their_size(dataset: str, size: int) -> None:
    assert len(read_prompts(dataset)) == size


def test_prompts_are_distinct_seeded_and_in_order_of_arrival() -> None:
    workload = Prompts(num_requests=20, rate=5.0, chat=False)
    first = workload.requests(Characters(), 1000, seed=3)
    again = workload.requests(Characters(), 1000, seed=3)
    other = workload.requests(Characters(), 1000, seed=4)
    assert [r.prompt.tolist() for r in first] == [r.prompt.tolist() for r in again]
    assert [r.arrival_s for r in first] == [r.arrival_s for r in again]
    assert [r.prompt.tolist() for r in first] != [r.prompt.tolist() for r in other]
    assert len({r.prompt.tobytes() for r in first}) == 20
    assert [r.arrival_s for r in first] == sorted(r.arrival_s for r in first)
    assert first[0].arrival_s > 0
    assert [r.request_id for r in first[:2]] == ["gsm8k-0", "gsm8k-1"]


def test_rate_changes_arrivals_and_not_prompts() -> None:
    slow = Prompts(num_requests=8, rate=1.0).requests(Characters(), 1000, 0)
    fast = Prompts(num_requests=8, rate=100.0).requests(Characters(), 1000, 0)
    assert [r.prompt.tolist() for r in slow] == [r.prompt.tolist() for r in fast]
    assert slow[-1].arrival_s == pytest.approx(100 * fast[-1].arrival_s)


def test_chat_wraps_in_the_template_without_a_second_beginning_token() -> None:
    plain = Prompts(num_requests=1, chat=False).requests(Characters(), 1000, 0)[0].prompt
    chat = Prompts(num_requests=1, chat=True).requests(Characters(), 1000, 0)[0].prompt
    assert plain[0] == 1
    assert text_of(chat) == f"<user>{text_of(plain)}<answer>"
    assert 1 not in chat


def test_chat_without_a_template_is_refused() -> None:
    bare = Characters()
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r"workload.chat must be false"):
        Prompts(num_requests=1).requests(bare, 1000, 0)


def test_prompts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="needs a model with a tokenizer"):
        Prompts().requests(None, 1000, 0)


def test_more_requests_than_prompts_are_refused() -> None:
    message = "workload.num_requests must be <= 80, the prompts in mt_bench, got 81"
    with pytest.raises(ConfigError, match=message):
        Prompts("mt_bench", num_requests=81).requests(Characters(), 1000, 0)


def test_own_file_may_be_gzipped_and_name_its_text_in_three_ways(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"question": "b"}, {"turns": ["c", "d"]}]
    path = tmp_path / "mine.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.write("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(str(path)) == ["a", "b", "c"]


@pytest.mark.parametrize("line", ['{"text": "a"}', '{"prompt": ""}', '{"turns": []}', "[1]", "{"])
def test_bad_line_of_own_file_is_named_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(str(path))


def test_unknown_data_set_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"gsm8k, mt_bench or an existing file, got 'gsm9k'"):
        read_prompts("gsm9k")


@pytest.mark.parametrize("tokenizer", [None, Characters()])
def test_groups_share_their_prefix_and_nothing_more(tokenizer: Any) -> None:
    workload = SharedPrefix(
        num_groups=3, requests_per_group=4, prefix_tokens=300, suffix_tokens=40, max_tokens=5
    )
    requests = workload.requests(tokenizer, 1000, seed=1)
    groups: dict[str, list[Any]] = {}
    for request in requests:
        groups.setdefault(request.session, []).append(request.prompt)
    assert sorted(len(prompts) for prompts in groups.values()) == [4, 4, 4]
    prefixes = {name: {p[:300].tobytes() for p in prompts} for name, prompts in groups.items()}
    assert all(len(found) == 1 for found in prefixes.values())
    assert len(set.union(*prefixes.values())) == 3
    assert len({request.prompt[300:].tobytes() for request in requests}) == 12
    assert all(300 < len(request.prompt) <= 340 for request in requests)
    assert len({request.request_id for request in requests}) == 12
    order = [request.session for request in requests]
    assert order != sorted(order)  # interleaved
    again = workload.requests(tokenizer, 1000, seed=1)
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(requests, again, strict=True))


def test_few_shot_prefix_is_readable_text_and_suffix_ends_in_the_question() -> None:
    workload = SharedPrefix(1, 2, prefix_tokens=200, suffix_tokens=50)
    prompt = workload.requests(Characters(), 1000, 0)[0].prompt
    assert prompt[0] == 1
    assert text_of(prompt[:200]).startswith("Question: ")
    assert text_of(prompt).endswith("\nAnswer:")
