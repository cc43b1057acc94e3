"""From bodies to requests: ids, parameters and limits, with SmolLM2's tokenizer."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.server.asked import ask_chat, ask_completion, ask_text, ask_tokens
from plugins.server.errors import ApiError
from plugins.server.limits import Limits
from plugins.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)
from tests.plugins.server.asking import CASES, HELLO, MODEL, chat, complete, facts, refusal
from tests.plugins.server.asking import with_facts as changed

ASK = {
    "/v1/completions": (CompletionBody, ask_completion),
    "/v1/chat/completions": (ChatBody, ask_chat),
}
# A 400 where the case prefers 200 but takes either: what cannot be honoured is never ignored.
REFUSED = {"rq-108": "foo_bar", "rq-146": "tools"}
# Field that the error names, without the path below it.
PARAMS = {
    "rq-009": "top_p",
    "rq-010": "temperature",
    "rq-017": "repetition_penalty",
    "rq-018": "presence_penalty",
    "rq-019": "logit_bias",
    "rq-020": "logit_bias",
    "rq-021": "logit_bias",
    "rq-022": "logit_bias",
    "rq-023": "logit_bias",
    "rq-035": "max_tokens",
    "rq-039": "max_tokens",
    "rq-044": "n",
    "rq-045": "max_tokens",
    "rq-046": "n",
    "rq-047": "n",
    "rq-051": "prompt",
    "rq-052": "prompt",
    "rq-055": "prompt",
    "rq-056": "prompt",
    "rq-057": "prompt",
    "rq-058": "prompt",
    "rq-063": "prompt",
    "rq-064": "prompt",
    "rq-065": "prompt",
    "rq-066": "prompt",
    "rq-067": "prompt",
    "rq-068": "prompt",
    "rq-075": "model",
    "rq-076": "model",
    "rq-077": "model",
    "rq-078": "model",
    "rq-079": "model",
    "rq-080": "stop",
    "rq-081": "stop",
    "rq-082": "stop",
    "rq-087": None,
    "rq-088": None,
    "rq-089": None,
    "rq-090": None,
    "rq-114": "cache_salt",
    "rq-130": "messages",
    "rq-131": "messages",
    "rq-133": "messages",
    "rq-139": "messages",
    "rq-151": "top_logprobs",
    **REFUSED,
}


def lines():
    """Lines of the case list that have a body for one of the two endpoints."""
    whole = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    return [line for line in whole if line["path"] in ASK]


def raw(line):
    if "raw_body" in line:
        return line["raw_body"].encode()
    body = line["body"]
    if expand := line.get("expand"):
        *path, last = expand["at"].split("/")[1:]
        place = body
        for step in path:
            place = place[int(step) if isinstance(place, list) else step]
        place[int(last) if isinstance(place, list) else last] = expand["unit"] * expand["times"]
    return json.dumps(body).encode()


def ask(line):
    model, ask_it = ASK[line["path"]]
    return ask_it(parse(model, raw(line)), facts())


def preferred(line):
    expected = line["expect"]["status"]
    return expected[0] if isinstance(expected, list) else expected


@pytest.mark.parametrize(
    "line", [line for line in lines() if line["id"] in PARAMS], ids=lambda line: line["id"]
)
def test_case_is_refused_by_name(line):
    error = refusal(ask, line)
    expected = line["expect"]["status"]
    assert error.status in (expected if isinstance(expected, list) else [expected])
    param = error.param and error.param.split(".")[0].split("[")[0]
    assert param == PARAMS[line["id"]], error.message
    assert error.message
    assert not any(word in error.message for word in ("Traceback", "pydantic", "Error("))


@pytest.mark.parametrize(
    "line", [line for line in lines() if line["id"] not in PARAMS], ids=lambda line: line["id"]
)
def test_case_passes(line):
    assert preferred(line) == 200
    assert ask(line).requests("cmpl-1")


def test_refused_are_the_cases_that_prefer_it():
    prefer = {line["id"] for line in lines() if preferred(line) != 200}
    assert set(PARAMS) - set(REFUSED) == prefer


def test_defaults_are_those_of_openai():
    asked = complete()
    params = asked.prompts[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)
    assert (params.logprobs, params.prompt_logprobs, params.seed) == (None, None, None)
    assert (asked.stop, asked.stream, asked.usage, asked.echo) == ((), False, False, False)
    assert asked.skip_special_tokens
    assert not asked.include_stop


def test_fields_reach_the_parameters():
    asked = complete(
        temperature=0,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100},
        min_tokens=2,
        stop_token_ids=[7, 8],
        ignore_eos=True,
        logprobs=3,
        n=2,
        seed=-1,
        best_of=2,
        max_tokens=9,
        stop="x",
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stream=True,
        stream_options={"include_usage": True},
    )
    params = asked.prompts[0].params
    assert (params.temperature, params.top_k, params.min_p) == (0, 0, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.2, -2)
    assert (params.frequency_penalty, params.logit_bias) == (2, {5: -100})
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos) == (2, (7, 8), True)
    assert (params.logprobs, params.n, params.seed, params.max_tokens) == (3, 2, -1, 9)
    assert (asked.n, asked.stop, asked.logprobs) == (2, ("x",), 3)
    assert (asked.include_stop, asked.skip_special_tokens) == (True, False)
    assert (asked.stream, asked.usage) == (True, True)


def test_top_k_beyond_the_vocabulary_is_clamped():
    assert complete(top_k=9_999_999).prompts[0].params.top_k == facts().vocab_size


def test_hints_reach_the_requests():
    hints = {"priority": -3, "cache_salt": "tenant", "deadline_ms": 250, "prompt_cache_key": "s"}
    (request,) = complete(**hints, user="u").requests("cmpl-1")
    assert (request.request_id, request.priority, request.namespace) == ("cmpl-1", -3, "tenant")
    assert (request.client, request.session, request.deadline_s) == ("u", "s", 0.25)
    (request,) = complete(user="u", client="c").requests("cmpl-1")
    assert (request.client, request.namespace, request.deadline_s) == ("c", "", None)


def test_each_prompt_is_a_request_in_order():
    asked = complete(prompt=["One plus one is", "The sky is"])
    requests = asked.requests("cmpl-1")
    assert [request.request_id for request in requests] == ["cmpl-1-0", "cmpl-1-1"]
    texts = [facts().tokenizer.decode(request.prompt) for request in requests]
    assert texts == ["One plus one is", "The sky is"]
    assert [prompt.text for prompt in asked.prompts] == texts


def test_ids_are_taken_as_they_are():
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        (one,) = complete(prompt=prompt).prompts
        assert one.ids.tolist() == [5, 6, 7]
        assert one.ids.dtype == np.int32
        assert one.text is None


def test_echo_with_logprobs_scores_the_prompt():
    params = complete(echo=True, max_tokens=0, logprobs=1).prompts[0].params
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, 1, 1)
    assert complete(echo=True).prompts[0].params.prompt_logprobs is None


def test_chat_logprobs():
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).prompts[0].params.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).logprobs is None
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"


def test_too_long_a_call_states_limit_prompt_and_output():
    """H02: p = 8, max_tokens = L - 3."""
    error = refusal(complete, prompt=[1] * 8, max_tokens=8192 - 3)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    for number in ("8192", " 8 in prompt", "8189 in max_tokens", "8197"):
        assert number in error.message
    assert complete(prompt=[1] * 8, max_tokens=8192 - 8).prompts[0].params.max_tokens == 8184
    assert refusal(complete, prompt=[1] * 8, max_tokens=8192 - 7).param == "max_tokens"


def test_too_long_a_prompt_states_its_length():
    error = refusal(complete, prompt=[[1], [1] * 8192])
    assert (error.code, error.param) == ("context_length_exceeded", "prompt[1]")
    assert "8192 in prompt[1]" in error.message
    assert complete(prompt=[1] * 8191).prompts[0].params.max_tokens == 1
    assert complete(prompt=[1] * 8192, max_tokens=0, echo=True).prompts[0].params.max_tokens == 0


def test_a_text_of_megabytes_is_refused_by_its_beginning():
    """Tokenising all of it would take seconds."""
    of, seen = changed(max_model_len=256), []
    tokenizer = of.tokenizer

    def watched(text, **options):
        seen.append(len(text))
        return tokenizer(text, **options)

    error = refusal(complete, replace(of, tokenizer=watched), prompt="hello " * 100_000)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert sum(seen) == 8 * 256
    assert "256 tokens" in error.message
    # Few tokens for many characters: nothing is refused unseen.
    assert len(complete(of, prompt=" " * 5000).prompts[0].ids) < 256


def test_chat_without_a_limit_has_the_contexts_room():
    asked = chat()
    assert asked.prompts[0].params.max_tokens == 8192 - len(asked.prompts[0].ids)


def test_the_default_limit_fits_the_pool():
    of = changed(pool_tokens=20)
    assert complete(of, prompt=[1] * 15).prompts[0].params.max_tokens == 6
    error = refusal(complete, of, prompt=[1] * 21)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")


def test_max_completion_tokens_wins():
    assert chat(max_tokens=9, max_completion_tokens=2).prompts[0].params.max_tokens == 2
    assert chat(max_completion_tokens=3).prompts[0].params.max_tokens == 3
    assert refusal(chat, max_completion_tokens=9000).param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("limits", "body", "param"),
    [
        (Limits(max_choices=4), {"n": 5}, "n"),
        (Limits(max_choices=4), {"n": 2, "prompt": ["a", "b", "c"]}, "prompt"),
        (Limits(max_tokens=10), {"max_tokens": 11}, "max_tokens"),
        (Limits(max_stop=1), {"stop": ["a", "b"]}, "stop"),
        (Limits(max_stop_chars=2), {"stop": "abc"}, "stop"),
        (Limits(max_logprobs=3), {"logprobs": 4}, "logprobs"),
        (Limits(max_listed_tokens=1), {"stop_token_ids": [1, 2]}, "stop_token_ids"),
        (Limits(max_listed_tokens=1), {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
    ],
)
def test_limits_of_the_server_hold(limits, body, param):
    error = refusal(complete, changed(limits=limits), **body)
    assert (error.status, error.param) == (400, param)
    complete(**body)


def test_the_servers_limit_bounds_the_default():
    assert chat(changed(limits=Limits(max_tokens=10))).prompts[0].params.max_tokens == 10


def test_parameters_that_contradict_are_refused():
    assert refusal(complete, min_tokens=20).param == "min_tokens"
    assert refusal(complete, best_of=2).param == "best_of"
    assert refusal(complete, stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(complete, stop_token_ids=[49152]).param == "stop_token_ids"
    assert refusal(chat, add_generation_prompt=True, continue_final_message=True).param == (
        "add_generation_prompt"
    )


def test_text_parts_are_joined_in_order():
    parts = [{"type": "text", "text": "The word is "}, {"type": "text", "text": "banana."}]
    split = chat(messages=[{"role": "user", "content": parts}]).prompts[0].ids
    whole = chat(messages=[{"role": "user", "content": "The word is banana."}]).prompts[0].ids
    assert split.tolist() == whole.tolist()


def test_developer_is_the_templates_system():
    def ids(role):
        messages = [{"role": role, "content": "Be brief."}, *HELLO]
        return chat(messages=messages).prompts[0].ids.tolist()

    assert ids("developer") == ids("system")


def test_chat_equals_the_template():
    expected = facts().tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
    assert chat().prompts[0].ids.tolist() == expected["input_ids"]


def test_final_message_can_be_continued():
    messages = [*HELLO, {"role": "assistant", "content": "One, two,"}]
    ids = chat(messages=messages, continue_final_message=True).prompts[0].ids
    assert facts().tokenizer.decode(ids).endswith("assistant\nOne, two,")


def tokenizer_with_bos(template):
    """Adds a BOS to every text, as Llama's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<unk>", "hi", "user", ":"]
    base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(["<s>"])
    base.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def test_chat_has_one_bos():
    """H24: both the template and the tokenizer would add it."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}{% endfor %}"
    )
    of = changed(tokenizer=tokenizer_with_bos(template))
    messages = [{"role": "user", "content": "hi"}]
    assert chat(of, messages=messages).prompts[0].ids.tolist() == [0, 3, 4, 2]
    assert complete(of, prompt="hi").prompts[0].ids.tolist() == [0, 2]
    assert complete(of, prompt="").prompts[0].ids.tolist() == [0]
    assert complete(of, prompt="hi", add_special_tokens=False).prompts[0].ids.tolist() == [2]


def test_chat_without_a_template_is_refused_and_completions_work():
    """H23."""
    of = changed(tokenizer=tokenizer_with_bos(None))
    error = refusal(chat, of)
    assert error.status == 400
    assert "chat template" in error.message
    assert complete(of, prompt="hi").prompts[0].ids.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + messages }}", "cannot render"),
    ],
)
def test_a_template_that_fails_is_a_400(template, message):
    error = refusal(chat, changed(tokenizer=tokenizer_with_bos(template)))
    assert (error.status, error.param) == (400, "messages")
    assert message in error.message


def test_template_takes_variables_but_not_arguments():
    template = "{% if enable_thinking %}hi{% endif %} user"
    of = changed(tokenizer=tokenizer_with_bos(template))
    on = chat(of, chat_template_kwargs={"enable_thinking": True}).prompts[0].ids.tolist()
    off = chat(of, chat_template_kwargs={"enable_thinking": False}).prompts[0].ids.tolist()
    assert (on, off) == ([2, 3], [3])
    for name in ("tokenize", "chat_template", "messages", "tools"):
        error = refusal(chat, of, chat_template_kwargs={name: "x"})
        assert error.param == "chat_template_kwargs"


def test_a_model_without_a_tokenizer_takes_ids_alone():
    of = changed(tokenizer=None)
    assert complete(of, prompt=[1, 2]).prompts[0].ids.tolist() == [1, 2]
    assert refusal(complete, of).param == "prompt"
    assert refusal(chat, of).param == "messages"
    assert refusal(complete, of, prompt=[1], stop="x").param == "stop"


def test_tokenize_and_detokenize_are_inverse():
    body = parse(TokenizeBody, json.dumps({"prompt": "Grüße, 世界"}).encode())
    ids = ask_tokens(body, facts())
    assert ids == facts().tokenizer("Grüße, 世界")["input_ids"]
    text = ask_text(parse(DetokenizeBody, json.dumps({"tokens": ids}).encode()), facts())
    assert text == "Grüße, 世界"
    messages = parse(TokenizeBody, json.dumps({"messages": HELLO, "model": MODEL}).encode())
    assert ask_tokens(messages, facts()) == chat().prompts[0].ids.tolist()


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}])
def test_tokenize_takes_a_prompt_or_messages(body):
    with pytest.raises(ApiError) as caught:
        ask_tokens(parse(TokenizeBody, json.dumps(body).encode()), facts())
    assert caught.value.param == "prompt"


def test_detokenize_refuses_ids_outside_the_vocabulary():
    with pytest.raises(ApiError) as caught:
        ask_text(parse(DetokenizeBody, b'{"tokens":[49152]}'), facts())
    assert caught.value.param == "tokens"


FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "foo"})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("call", [complete, chat])
@given(body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
@settings(max_examples=400, deadline=None)
def test_any_body_is_asked_or_refused(call, body):
    refused = None
    try:
        asked = call(**body)
    except ApiError as error:
        refused = error
    if refused is None:
        assert asked.requests("cmpl-1")
    else:
        assert refused.status in (400, 404)
        assert json.loads(json.dumps(refused.body(), allow_nan=False))["error"]["message"]
