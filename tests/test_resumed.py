"""Sampled tokens of a request that moves to another engine equal those of one that never moved."""

import dataclasses

import numpy as np
import pytest

from core.request import Request, SamplingParams
from tests.test_equality import make, tiny

TOKENS = 24
PARAMS = {
    "sampled": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 0.8,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.3,
    },
    "biased": {"temperature": 0.8, "logit_bias": {5: 4.0, 9: -50.0}},
    "scored": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2},
    "ends": {"temperature": 0.8, "min_tokens": 9, "ignore_eos": False},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_moved_request_gets_the_same_tokens(name, overlap):
    model, prompts, _ = tiny("llama")
    params = SamplingParams(**{"ignore_eos": True, "n": 2, "max_tokens": TOKENS} | PARAMS[name])
    requests = [
        Request(str(index), np.array(prompt, np.int32), params)
        for index, prompt in enumerate(prompts[:4])
    ]
    whole = serve(engine_of(model, overlap), requests)
    for have in (1, 5, 16):
        moved = [with_output(request, whole[request.request_id], have) for request in requests]
        going = [request for request in moved if request.resumed]
        rest = serve(engine_of(model, overlap), going)
        for request in going:
            for choice in request.resumed:
                before, after = whole[request.request_id].choices[choice], rest[request.request_id]
                got = after.choices[choice]
                assert list(got.token_ids) == list(before.token_ids)[have:]
                assert got.finish_reason == before.finish_reason
                same_logprobs(got.logprobs, before.logprobs[have:])
            same_logprobs(rest[request.request_id].prompt_logprobs, before_prompt(whole, request))


def engine_of(model, overlap):
    return make(model, "chunked", 16, "radix", 4096, overlap=overlap, seqs=16)


def serve(engine, requests):
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return engine.records


def with_output(request, record, have):
    """The choices that were not done after `have` tokens."""
    made = {
        choice: np.array(entry.token_ids[:have], np.int32)
        for choice, entry in enumerate(record.choices)
        if len(entry.token_ids) > have
    }
    return dataclasses.replace(request, resumed=made)


def before_prompt(whole, request):
    return whole[request.request_id].prompt_logprobs


def same_logprobs(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_ids.tolist() == other.top_ids.tolist()
