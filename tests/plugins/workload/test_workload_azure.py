"""plugins/workload/azure.py, and the part of a trace that plugins/workload/trace.py takes of it."""

import csv
import logging

import numpy as np
import pytest

from core.errors import ConfigError
from plugins.workload.azure import Azure
from plugins.workload.common import TRACES

VOCAB = 1000


@pytest.mark.parametrize(
    ("dataset", "num", "prompt", "output", "longest", "first", "last"),
    [
        # counts and sums of the files; mean prompt 2,047.8 and 1,154.7, output 27.9 and 211.1
        ("code", 8819, 18_059_974, 245_896, 1899, (4808, 10), (549, 173)),
        ("conv", 19366, 22_361_870, 4_088_665, 1000, (374, 44), (197, 183)),
    ],
)
def test_trace_is_whole_in_order_and_forced(dataset, num, prompt, output, longest, first, last):
    workload = Azure(dataset)
    requests = list(workload.requests(None, VOCAB, 0))
    assert len(requests) == num
    assert sum(len(r.prompt) for r in requests) == prompt
    assert sum(r.forced_output for r in requests) == output
    ends = [(len(r.prompt), r.forced_output) for r in (requests[0], requests[-1])]
    assert ends == [first, last]
    times = [r.arrival_s for r in requests]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert {r.params.max_tokens for r in requests} == {longest}  # the true length is not told
    assert requests[-1].request_id == f"azure_{dataset}-{num - 1}"
    facts = {"trace": f"azure_{dataset}", "requests": num, "prompt_tokens": prompt}
    assert workload.describe().items() >= facts.items()


def test_arrivals_are_seconds_since_the_first_stamp():
    requests = Azure("code").requests(None, VOCAB, 0)
    with open(TRACES / "azure2023" / "AzureLLMInferenceTrace_code.csv", newline="") as lines:
        second = list(csv.reader(lines))[2]
    assert second[0].endswith("18:17:04.0319600")  # after 18:17:03.9799600
    assert requests[1].arrival_s == pytest.approx(0.052, abs=1e-9)
    assert requests[-1].arrival_s == pytest.approx(3435.948056, abs=1e-6)


def test_no_two_prompts_share_a_beginning_and_all_stay_in_the_vocabulary():
    requests = Azure("conv").requests(None, VOCAB, 0)
    starts = {r.prompt[:4].tobytes() for r in requests if len(r.prompt) >= 4}
    assert len(starts) == sum(len(r.prompt) >= 4 for r in requests)
    assert max(int(r.prompt.max()) for r in requests[:200]) < VOCAB
    assert min(int(r.prompt.min()) for r in requests[:200]) >= 0
    assert requests[0].prompt.dtype == np.int32


def test_same_seed_same_requests_and_another_seed_other_prompts():
    first, again = (Azure("code").requests(None, VOCAB, 3) for _ in range(2))
    other = Azure("code").requests(None, VOCAB, 4)
    for number in (0, 77, 8818):
        assert np.array_equal(first[number].prompt, again[number].prompt)
        assert first[number].arrival_s == again[number].arrival_s == other[number].arrival_s
        assert not np.array_equal(first[number].prompt, other[number].prompt)


def test_rate_scale_squeezes_time_and_nothing_else():
    slow = Azure("code").requests(None, VOCAB, 0)
    fast = Azure("code", rate_scale=4.0).requests(None, VOCAB, 0)
    assert [r.arrival_s for r in fast] == pytest.approx([r.arrival_s / 4 for r in slow])
    assert [len(r.prompt) for r in fast] == [len(r.prompt) for r in slow]


def test_part_counts_from_its_first_request():
    whole = Azure("code").requests(None, VOCAB, 0)
    part = Azure("code", start=100, num_requests=50).requests(None, VOCAB, 0)
    assert [r.request_id for r in part] == [r.request_id for r in whole[100:150]]
    assert part[0].arrival_s == 0.0
    shift = whole[100].arrival_s
    assert part[-1].arrival_s == pytest.approx(whole[149].arrival_s - shift)
    window = Azure("code", start=100, window_s=60.0).requests(None, VOCAB, 0)
    assert len(window) == sum(shift <= r.arrival_s < shift + 60 for r in whole[100:])


def test_what_is_too_long_is_left_out_and_counted(caplog):
    workload = Azure("code", max_prompt=4096, max_output=512)
    whole = list(Azure("code").requests(None, VOCAB, 0))
    with caplog.at_level(logging.WARNING):
        requests = workload.requests(None, VOCAB, 0)
    fitting = [r.request_id for r in whole if len(r.prompt) <= 4096 and r.forced_output <= 512]
    assert [r.request_id for r in requests] == fitting
    left_out = 8819 - len(fitting)
    assert 0 < left_out < 8819
    assert workload.describe()["skipped"] == left_out
    assert f"azure_code: {left_out} of 8819 requests left out (max_prompt 4096" in caplog.text


def test_what_is_too_long_is_clipped_and_counted(caplog):
    whole = list(Azure("code").requests(None, VOCAB, 0))
    workload = Azure("code", max_prompt=4096, max_output=512, too_long="clip")
    with caplog.at_level(logging.WARNING):
        requests = list(workload.requests(None, VOCAB, 0))
    assert [len(r.prompt) for r in requests] == [min(len(r.prompt), 4096) for r in whole]
    assert [r.forced_output for r in requests] == [min(r.forced_output, 512) for r in whole]
    facts = workload.describe()
    assert facts["clipped_prompts"] == sum(len(r.prompt) > 4096 for r in whole)
    assert facts["clipped_outputs"] == sum(r.forced_output > 512 for r in whole)
    assert "requests cut (max_prompt 4096, max_output 512)" in caplog.text


def test_stated_maximum_can_be_set_above_the_longest_output():
    requests = Azure("code", num_requests=9, max_tokens=4000).requests(None, VOCAB, 0)
    assert {r.params.max_tokens for r in requests} == {4000}
    with pytest.raises(ConfigError, match=r"workload.max_tokens must be >= 1899, got 100"):
        Azure("code", max_tokens=100).requests(None, VOCAB, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chat"}, "workload.dataset must be one of code, conv, got 'chat'"),
        ({"start": -1}, "workload.start must be >= 0, got -1"),
        ({"num_requests": 0}, "workload.num_requests must be >= 1 or null, got 0"),
        ({"window_s": 0}, "workload.window_s must be > 0 or null, got 0"),
        ({"rate_scale": 0}, "workload.rate_scale must be > 0, got 0"),
        ({"max_prompt": 0}, "workload.max_prompt must be >= 1 or null, got 0"),
        ({"too_long": "cut"}, "workload.too_long must be one of skip, clip, got 'cut'"),
    ],
)
def test_bad_argument_names_field_rule_and_value(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Azure(**arguments)


def test_part_without_requests_is_refused():
    with pytest.raises(ConfigError, match=r"workload.start must be < 8819, the requests of azure_"):
        Azure("code", start=8819).requests(None, VOCAB, 0)
    with pytest.raises(ConfigError, match="max_prompt and max_output must be enough for at least"):
        Azure("code", max_prompt=2).requests(None, VOCAB, 0)
