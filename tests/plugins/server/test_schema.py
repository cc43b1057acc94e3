"""Fields: strict types, null is not given, what cannot be honoured is refused by name."""

import json

import pytest
from pydantic import BaseModel

from plugins.server import replies
from plugins.server.errors import ApiError
from plugins.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)

SHARED_REFUSALS = {"service_tier": "flex", "store": True}
CHAT_REFUSALS = {
    "audio": {"voice": "x"},
    "chat_template": "{{ messages }}",
    "documents": [{"text": "x"}],
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"x": 1},
    "parallel_tool_calls": 1,
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "verbosity": "low",
    "web_search_options": {},
}
NEUTRAL = {
    "documents": [],
    "function_call": "none",
    "functions": [],
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "tools": [],
    "service_tier": "auto",
    "store": False,
    "metadata": {"k": "v"},
    "user": "u",
    "logit_bias": {},
    "stop": [],
}


def completion(**body):
    whole = {"model": "m", "prompt": "hi", **body}
    return parse(CompletionBody, json.dumps(whole).encode())


def chat(**body):
    whole = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return parse(ChatBody, json.dumps(whole).encode())


@pytest.mark.parametrize(("field", "value"), [*SHARED_REFUSALS.items(), *CHAT_REFUSALS.items()])
def test_field_that_cannot_be_honoured_is_refused_by_name(field, value):
    with pytest.raises(ApiError) as caught:
        chat(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_value")
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"), [*SHARED_REFUSALS.items(), ("suffix", "x"), ("tools", [1])]
)
def test_completions_refuse_them_too(field, value):
    with pytest.raises(ApiError) as caught:
        completion(**{field: value})
    assert caught.value.param == field


def test_neutral_values_pass():
    for field, value in NEUTRAL.items():
        chat(**{field: value})
    completion(suffix="", best_of=1, stream_options={"include_obfuscation": False})


@pytest.mark.parametrize(("model", "call"), [(CompletionBody, completion), (ChatBody, chat)])
def test_null_equals_not_given(model: type[BaseModel], call):
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    assert len(optional) > 20
    nulls = call(**dict.fromkeys(optional))
    assert nulls.model_dump() == call().model_dump()


@pytest.mark.parametrize("model", [CompletionBody, ChatBody])
def test_no_field_has_a_default_of_its_own(model: type[BaseModel]):
    """Else null and a field left out would differ."""
    optional = [field for field in model.model_fields.values() if not field.is_required()]
    assert all(field.default is None for field in optional)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", True),
        ("n", "3"),
        ("n", 1.0),
        ("max_tokens", 2.5),
        ("temperature", "1"),
        ("temperature", True),
        ("stream", 1),
        ("stream", "true"),
        ("echo", 0),
        ("seed", 2**63),
        ("prompt", [True]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], 2]),
        ("prompt", [-1]),
        ("prompt", 5),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", [1.5]),
        ("logit_bias", [1, 2]),
        ("logit_bias", {" 5": 1}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": 101}),
        ("cache_salt", 5),
        ("cache_salt", ""),
        ("priority", 2**31),
        ("deadline_ms", 0),
        ("top_k", -2),
        ("user", "x" * 257),
        ("model", None),
    ],
)
def test_wrong_type_or_range_is_refused(field, value):
    with pytest.raises(ApiError) as caught:
        completion(**{field: value})
    assert caught.value.param.startswith(field)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_must_be_finite(number):
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, b'{"model":"m","prompt":"a","temperature":' + number.encode() + b"}")
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    "prompt", ["", "a", ["a", "b"], [1, 2], [[1], [2, 3]], ["a", ""], "\u0000 \U0001f600"]
)
def test_each_form_of_prompt_is_kept_as_it_is(prompt):
    assert completion(prompt=prompt).prompt == prompt


def test_a_wrong_long_list_is_refused_at_its_first_fault():
    with pytest.raises(ApiError) as caught:
        completion(prompt=[0.5] * 200_000)
    assert caught.value.param == "prompt[0]"


def test_tokenize_and_detokenize_bodies_are_strict():
    assert parse(TokenizeBody, b'{"prompt":"a"}').prompt == "a"
    assert parse(DetokenizeBody, b'{"tokens":[]}').tokens == []
    for raw in (b'{"tokens":["1"]}', b'{"tokens":[true]}', b'{"tokens":[-1]}', b"{}"):
        with pytest.raises(ApiError):
            parse(DetokenizeBody, raw)
    with pytest.raises(ApiError):
        parse(TokenizeBody, b'{"prompt":["a"]}')


@pytest.mark.parametrize("model", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody])
def test_bodies_have_a_json_schema(model):
    schema = model.model_json_schema()
    assert schema["additionalProperties"] is False
    assert json.dumps(schema)


def test_answers_are_what_the_openai_package_reads():
    """Its own models are strict about names when asked to be."""
    from openai.types import Completion as OpenAICompletion
    from openai.types import Model as OpenAIModel
    from openai.types.chat import ChatCompletion as OpenAIChat
    from openai.types.chat import ChatCompletionChunk as OpenAIChunk

    head = {"id": "x", "created": 1, "model": "m"}
    usage = replies.Usage(
        prompt_tokens=3,
        completion_tokens=1,
        total_tokens=4,
        prompt_tokens_details=replies.PromptDetails(cached_tokens=2),
    )
    top = replies.TopLogprob(token="a", logprob=replies.FLOOR, bytes=[97])
    logprob = replies.ChatLogprob(token="a", logprob=-0.5, bytes=[97], top_logprobs=[top])
    chosen = replies.ChatLogprobs(content=[logprob])
    plain = replies.CompletionChoice(
        index=0,
        text="a",
        finish_reason="stop",
        logprobs=replies.CompletionLogprobs(
            tokens=["a"],
            token_logprobs=[-0.5],
            top_logprobs=[{"a": -0.5}],
            text_offset=[0],
            bytes=[[97]],
        ),
    )
    message = replies.ChatMessage(content="a")
    choice = replies.ChatChoice(index=0, message=message, logprobs=chosen, finish_reason="length")
    chunk = replies.ChatChunkChoice(index=0, delta=replies.ChatDelta(role="assistant"))
    answers = [
        (OpenAICompletion, replies.Completion(**head, choices=[plain], usage=usage)),
        (OpenAIChat, replies.ChatCompletion(**head, choices=[choice], usage=usage)),
        (OpenAIChunk, replies.ChatChunk(**head, choices=[chunk])),
        (OpenAIModel, replies.Model(id="m", created=1, max_model_len=8)),
    ]
    for theirs, answer in answers:
        theirs.model_validate(answer.model_dump(), strict=True)
