"""Each fault becomes OpenAI's error shape, naming the field and nothing of the code."""

import json

import pytest

from core.errors import RequestError
from core.request import SamplingParams
from plugins.server import errors
from plugins.server.errors import ApiError, from_request_error
from plugins.server.schema import ChatBody, CompletionBody, parse


def test_body_has_openais_shape():
    error = ApiError(400, "n must be >= 1, got 0", param="n", code="invalid_value")
    assert error.body() == {
        "error": {
            "message": "n must be >= 1, got 0",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize(
    ("error", "status", "type", "code"),
    [
        (errors.model_not_found("x"), 404, "invalid_request_error", "model_not_found"),
        (errors.too_busy("full", 2.4), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.unavailable("draining"), 503, "server_error", "unavailable"),
    ],
)
def test_kinds_have_their_status_type_and_code(error, status, type, code):
    assert (error.status, error.type, error.code) == (status, type, code)
    assert error.message


def test_too_busy_says_when_to_come_again():
    assert errors.too_busy("full", 2.4).headers == {"Retry-After": "2"}
    assert errors.too_busy("full", 0.1).headers == {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"min_tokens": 20}, "min_tokens"), ({"top_p": 2.0}, "top_p"), ({"n": 0}, "n")],
)
def test_request_error_names_the_field(changes, param):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**changes)
    error = from_request_error(caught.value)
    assert (error.status, error.param, error.message) == (400, param, str(caught.value))


def test_request_error_about_the_servers_own_id_names_no_field():
    error = from_request_error(RequestError("request_id 'cmpl-1' must be unused"))
    assert error.param is None
    error = from_request_error(RequestError("prompt of request 'cmpl-1' must leave room"))
    assert error.param == "prompt"


@pytest.mark.parametrize(
    ("change", "param", "code", "message"),
    [
        ({"n": True}, "n", "invalid_type", "n must be a valid integer, got true"),
        ({"n": 0}, "n", "invalid_value", "n must be >= 1, got 0"),
        ({"prompt": [1, 1.5]}, "prompt[1]", "invalid_type", "must be a valid integer, got 1.5"),
        ({"prompt": []}, "prompt", "invalid_value", "must have at least 1 item"),
        ({"prompt": [[1], []]}, "prompt[1]", "invalid_value", "must have at least 1 item"),
        ({"prompt": None}, "prompt", "invalid_type", "must be a text, token ids, or a list"),
        ({"prompt": {}}, "prompt", "invalid_type", "must be a text, token ids, or a list"),
        ({"foo": 1}, "foo", "unknown_parameter", "foo is not a known field"),
        ({"suffix": "x"}, "suffix", "unsupported_value", 'must be null or "", got "x"'),
        (
            {"stream_options": {"foo": 1}},
            "stream_options.foo",
            "unknown_parameter",
            "is not a known field",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value", 'must be a token id, got "x"'),
        ({"top_p": 1.5}, "top_p", "invalid_value", "top_p must be <= 1, got 1.5"),
        ({"temperature": 10**400}, "temperature", "invalid_value", "must be a finite number"),
    ],
)
def test_validation_error_names_field_rule_and_value(change, param, code, message):
    body = {"model": "m", "prompt": "hi", **change}
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, json.dumps(body).encode())
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, code)
    assert message in error.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            ],
            "messages[1].content[0].type",
        ),
    ],
)
def test_validation_error_gives_the_path_into_messages(messages, param):
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
    assert caught.value.param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"model":"m","prompt":"Hi",}',
        b'{"model":"m",oops}',
        b'{"model":"\xff"}',
        rb'{"model":"\ud800"}',
        b'{"n":1' + b"0" * 5000 + b"}",
        b'{"prompt":' + b"[" * 5000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_broken_json_is_a_400_without_a_field(raw):
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, raw)
    assert (caught.value.status, caught.value.param) == (400, None)
    assert caught.value.code == "invalid_json"
    assert caught.value.message.startswith("the body must be valid JSON")


def test_message_shows_little_of_a_large_value():
    body = {"model": "m", "prompt": "hi", "stop": [5], "metadata": ["x" * 10_000]}
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, json.dumps({**body, "stop": None}).encode())
    assert caught.value.param == "metadata"
    assert len(caught.value.message) < 200


def test_a_long_key_does_not_fill_the_answer():
    body = json.dumps({"model": "m", "prompt": "hi", "k" * 10_000: 1}).encode()
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, body)
    assert len(json.dumps(caught.value.body())) < 500
