"""plugins/workload/qwen_bailian.py on a file made by hand."""

import hashlib
import json

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.qwen_bailian import QwenBailian

ROWS = [
    (7, -1, 1.0, 40, 5, "text", [10, 11, 12]),
    (9, 7, 3.5, 60, 0, "text", [10, 11, 13, 14]),
    (8, -1, 3.0, 32, 9, "search", [20, 21]),
    (12, 9, 9.0, 20, 2, "text", [10]),  # 4 tokens without a block id
    (13, -1, 9.0, 20, 2, "text", [10]),
]


@pytest.fixture
def given(tmp_path):
    names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type")
    lines = [dict(zip((*names, "hash_ids"), row, strict=True)) | {"turn": 1} for row in ROWS]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


def test_rows_become_requests_in_order_of_arrival(given):
    requests = list(QwenBailian(*given).requests(None, 1000, 0))
    facts = [
        (r.request_id[13:], r.arrival_s, len(r.prompt), r.forced_output, r.session, r.client)
        for r in requests
    ]
    assert facts == [
        ("0", 0.0, 40, 5, "session-7", "text"),
        ("2", 2.0, 32, 9, "session-8", "search"),
        ("1", 2.5, 60, 1, "session-7", "text"),  # an answer of 0 tokens counts as one of 1
        ("3", 8.0, 20, 2, "session-7", "text"),
        ("4", 8.0, 20, 2, "session-13", "text"),
    ]


@pytest.mark.parametrize("vocab", [16, 1000, 151_936])
def test_prompts_share_what_their_blocks_share(given, vocab):
    first, other, second, fourth, fifth = QwenBailian(*given).requests(None, vocab, 0)
    assert np.array_equal(first.prompt[:32], second.prompt[:32])
    assert (first.prompt[32:40] != second.prompt[32:40]).any()
    assert (first.prompt[:16] != other.prompt[:16]).any()
    assert np.array_equal(fourth.prompt[:16], fifth.prompt[:16])
    assert (fourth.prompt[16:] != fifth.prompt[16:]).any()
    assert max(int(r.prompt.max()) for r in (first, other, second)) < vocab


def test_another_file_is_refused_with_what_was_expected_and_found(given):
    path, found = given
    with pytest.raises(ConfigError, match=rf"3d74974cebb7.*\(qwen_coder_.*got sha256 {found}"):
        QwenBailian(path).requests(None, 1000, 0)
