"""plugins/workload/file.py: what a line may say, and how a bad one is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.workload.file import FIELDS, PROMPT_FIELDS, REQUEST_FIELDS, SAMPLING_FIELDS, File


def write(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "trace.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return str(path)


def test_every_field_of_a_request_can_be_given() -> None:
    assert set(SAMPLING_FIELDS) == set(SamplingParams.__slots__)
    not_asked = {"prompt", "params", "resumed"}  # the last: output that another engine made
    assert set(REQUEST_FIELDS) == set(Request.__slots__) - not_asked
    assert len(FIELDS) == len(PROMPT_FIELDS) + len(REQUEST_FIELDS) + len(SAMPLING_FIELDS)


def test_lines_become_requests_in_order_of_arrival(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"request_id": "late", "prompt_token_ids": [1, 2], "arrival_s": 5, "deadline_s": 9},
        "",
        {"prompt_tokens": 6, "forced_output": 4, "client": "c", "priority": 2, "cache": False},
        {"prompt_tokens": 1, "arrival_s": 5, "logit_bias": {"3": 1.5}, "stop_token_ids": [7]},
    )
    early, late, tie = File(path, time_scale=0.5).requests(None, 10, 0)
    assert (early.request_id, late.request_id, tie.request_id) == ("line-3", "late", "line-4")
    assert (late.arrival_s, late.deadline_s, late.prompt.tolist()) == (2.5, 4.5, [1, 2])
    assert (len(early.prompt), early.forced_output, early.params.max_tokens) == (6, 4, 4)
    assert (early.client, early.priority, early.cache) == ("c", 2, False)
    assert (dict(tie.params.logit_bias), tie.params.stop_token_ids) == ({3: 1.5}, (7,))


def test_forced_length_is_not_told_as_the_maximum(tmp_path: Path) -> None:
    lines = [{"prompt_tokens": 1, "forced_output": 3}, {"prompt_tokens": 1, "forced_output": 8}]
    stated = {"prompt_tokens": 1, "forced_output": 2, "max_tokens": 5}
    requests = File(write(tmp_path, *lines, stated)).requests(None, 10, 0)
    assert [(r.output_limit, r.params.max_tokens) for r in requests] == [(3, 8), (8, 8), (2, 5)]


def test_limit_takes_the_first_lines(tmp_path: Path) -> None:
    path = write(tmp_path, *[{"prompt_tokens": 1, "arrival_s": 9 - i} for i in range(5)])
    assert [r.request_id for r in File(path, limit=2).requests(None, 10, 0)] == ["line-2", "line-1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_tokens": 1,}', "line 2 must be JSON"),
        ([1], "line 2 must be a JSON object"),
        (
            {"prompt_tokens": 1, "priorty": 1},
            "line 2: priorty is no field .* did you mean priority",
        ),
        (
            {"prompt_tokens": 1, "max_tokens": "9"},
            "line 2: max_tokens must be of type int, got '9'",
        ),
        ({"prompt_tokens": True}, "line 2: prompt_tokens must be of type int, got True"),
        ({"prompt_tokens": 0}, "line 2: prompt_tokens must be >= 1, got 0"),
        ({"max_tokens": 4}, "line 2: prompt must be given once"),
        ({"prompt_tokens": 1, "prompt": "x"}, "line 2: prompt must be given once"),
        (
            {"prompt_token_ids": [1, 10]},
            r"line 2: prompt_token_ids must be a list of ids in \[0, 10",
        ),
        ({"prompt_token_ids": []}, "line 2: prompt_token_ids must be a list of ids"),
        ({"prompt": "text"}, "line 2: prompt is text, but the model has no tokenizer"),
        ({"prompt_tokens": 1, "arrival_s": -1}, "line 2: arrival_s must be a time in seconds >= 0"),
        (
            {"prompt_tokens": 1, "temperature": -1},
            r"line 2: temperature must be in \[0, 100\], got -1",
        ),
        ({"prompt_tokens": 1, "logit_bias": {"x": 1}}, "line 2: .*'x'"),
        (
            {"prompt_tokens": 1, "request_id": "a"},
            r"line 2: request_id must be unique \(line 1 has",
        ),
    ],
)
def test_bad_line_is_named_by_number_field_rule_and_value(
    tmp_path: Path, line: Any, message: str
) -> None:
    path = write(tmp_path, {"request_id": "a", "prompt_tokens": 3}, line)
    with pytest.raises(ConfigError, match=message):
        File(path).requests(None, 10, 0)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload.path must be an existing file"):
        File(str(tmp_path / "none.jsonl")).requests(None, 10, 0)
    with pytest.raises(ConfigError, match="at least one request"):
        File(write(tmp_path, "")).requests(None, 10, 0)
