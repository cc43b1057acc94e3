"""Thousands of broken calls: each gets 200 or a 4xx in the error's shape; the server goes on.

experiments/serving/fuzz.py sends more of them, and schemathesis's, to a server in processes of its
own."""

import random

import pytest

from experiments.serving.fuzz import fault_of, mutated, served_calls
from plugins.server.limits import Limits
from tests.plugins.server.asking import with_facts
from tests.plugins.server.live import serving

CALLS = 2000


@pytest.mark.live
def test_mutated_bodies_never_fail_the_server():
    rng, served = random.Random(5), served_calls()
    statuses: dict[int, int] = {}
    with serving(with_facts(limits=Limits(max_tokens=16, max_choices=8))) as live:
        for _ in range(CALLS):
            path, raw = mutated(rng, served)
            answer = live.post(path, content=raw)
            assert not fault_of(answer), (path, raw, answer.text)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        live.until(lambda: not live.client.live)
    assert statuses.keys() == {200, 400, 404}
    assert min(statuses.values()) >= 2, statuses


class Answer:
    def __init__(self, status_code, body=None):
        self.status_code = status_code
        self.body = body

    def json(self):
        if self.body is None:
            raise ValueError
        return self.body


def test_fault_is_anything_but_200_and_an_error_of_the_client_in_its_shape():
    shaped = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
    assert fault_of(Answer(200)) == fault_of(Answer(404, shaped)) == ""
    assert fault_of(Answer(500, shaped)) == "status 500"
    assert fault_of(Answer(307, shaped)) == "status 307"
    for body in (None, {}, [], {"detail": "no"}):
        assert fault_of(Answer(400, body)) == "400 without the error's shape"
    assert "400 with" in fault_of(Answer(400, {"error": {"message": "m"}}))
