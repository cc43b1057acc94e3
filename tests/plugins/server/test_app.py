"""What the HTTP side answers, over a fake client: beyond the cases of requests.jsonl."""

import re
from collections.abc import Iterator

import openai
import pytest

from plugins.server.client import State
from plugins.server.replies import ChatChunk, ChatCompletion, Completion
from tests.plugins.server.asking import facts, with_facts
from tests.plugins.server.calls import CHAT, MESSAGES, TEXT, ask, ids_of, talk, total
from tests.plugins.server.live import Live, events, serving

LONG = "Hello world  two  é👩‍🚀 spaces"
LONG_STOP = "d  tw"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(facts()) as server:
        yield server


@pytest.mark.parametrize("lag_s", [0.0, 0.002])
@pytest.mark.parametrize("stop", [None, [LONG_STOP], ["nowhere"]])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_stream_equals_plain_whatever_stops_it(
    live: Live, stop: list[str] | None, logprobs: int | None, lag_s: float
) -> None:
    body = ask(prompt=["a", "b"], n=2, stop=stop, logprobs=logprobs, echo=True, max_tokens=40)
    with live.scripted(script=lambda *_: ids_of(LONG), step_s=lag_s):
        plain = live.post(TEXT, body).json()
        stream = events(live.post(TEXT, {**body, "stream": True}).text)
    Completion.model_validate(plain)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    for choice in plain["choices"]:
        same = (choice["text"], choice["logprobs"], choice["finish_reason"])
        assert stream.joined(choice["index"]) == same
        cut = "Hello worl" if stop == [LONG_STOP] else LONG
        assert choice["text"] == "aabb"[choice["index"]] + cut


def test_a_stop_string_ends_the_request_in_the_engine(live: Live) -> None:
    with live.scripted(script=lambda *_: ids_of("one two three four five"), step_s=0.05) as client:
        client.aborted.clear()
        answer = live.post(TEXT, ask(stop=" thr", max_tokens=64)).json()
        assert answer["choices"][0]["text"] == "one two"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3
        assert client.aborted == [answer["id"]]


def test_an_end_token_with_text_is_left_out_of_the_text_alone(live: Live) -> None:
    ids = ids_of("one two three")
    body = ask(stop_token_ids=[ids[-1]], logprobs=0, max_tokens=9)
    with live.scripted(script=lambda *_: ids):
        answer = live.post(TEXT, body).json()
        kept = live.post(TEXT, {**body, "include_stop_str_in_output": True}).json()
    assert answer["choices"][0]["text"] == "one two"
    assert kept["choices"][0]["text"] == "one two three"
    for one in (answer, kept):
        assert one["choices"][0]["logprobs"]["tokens"] == ["one", " two", " three"]
        assert one["usage"]["completion_tokens"] == 3
        assert one["choices"][0]["finish_reason"] == "stop"


def test_chat_chunks_follow_the_models_of_the_openapi_page(live: Live) -> None:
    body = talk(n=2, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(live.post(CHAT, body).json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    read = events(live.post(CHAT, body | options).text)
    for chunk in read.chunks:
        ChatChunk.model_validate(chunk)
    assert {choice["delta"].get("role") for choice in read.choices(1)} == {"assistant", None}
    assert read.chunks[-1]["usage"]["completion_tokens"] == 12


def test_a_prompt_is_scored_without_an_answer(live: Live) -> None:
    body = ask(prompt="Is water wet? Yes", max_tokens=0, echo=True, logprobs=1)
    answer = live.post(TEXT, body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "Is water wet? Yes" == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


def test_unknown_paths_and_methods_have_the_error_shape(live: Live) -> None:
    assert live.post("/v1/nothing", {}).json()["error"]["code"] == "not_found"
    answer = live.get(TEXT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_tokens_and_text_go_both_ways(live: Live) -> None:
    text = "Hello  wörld"
    made = live.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert made["tokens"] == ids_of(text)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert live.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = live.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat["count"] == live.post(CHAT, talk()).json()["usage"]["prompt_tokens"]


def test_engine_state_is_shown_as_json_and_as_metrics(live: Live) -> None:
    report = State(True, waiting=3, running=2, pool={"pages_free": 9}, totals={"steps": 4})
    with live.scripted(report=report):
        shown = live.get("/v1/engine").json()
        assert (shown["waiting"], shown["policy"], shown["pool"]) == (3, "fcfs", {"pages_free": 9})
        assert total(live, "waiting") == 3
        assert total(live, "pool_pages_free") == 9
        assert total(live, "engine_steps_total") == 4


def test_the_openai_package_is_served(live: Live) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["MODEL"]
    plain = client.chat.completions.create(model="MODEL", messages=MESSAGES, max_tokens=5)
    chunks = client.chat.completions.create(
        model="MODEL",
        messages=MESSAGES,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = list(chunks)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == plain.choices[0].message.content
    assert last.usage == plain.usage
    scored = client.completions.create(model="MODEL", prompt=[5, 6], max_tokens=3, logprobs=2)
    assert len(scored.choices[0].logprobs.tokens) == 3
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="MODEL", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with live.scripted(error="it broke", error_after=1), pytest.raises(openai.APIError):
        list(client.completions.create(model="MODEL", prompt="x", stream=True))
    client.close()


def test_an_engine_without_a_tokenizer_answers_in_ids() -> None:
    with serving(with_facts(tokenizer=None)) as live:
        with live.scripted(script=lambda *_: [7, 11]):
            answer = live.post(TEXT, ask(prompt=[5, 6], logprobs=0, max_tokens=2)).json()
        assert answer["choices"][0]["text"] == "7 11 "
        assert live.post(TEXT, ask()).status_code == 400


def test_the_openapi_page_names_all_endpoints(live: Live) -> None:
    page = live.get("/openapi.json").json()
    assert set(page["paths"]) >= {TEXT, CHAT, "/tokenize", "/detokenize", "/v1/models", "/metrics"}
    (parameter,) = page["paths"]["/v1/models/{model_id}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("model_id", "path")
    body = page["paths"][TEXT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rpartition("/")[2] in page["components"]["schemas"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/MODEL", "/health", "/metrics", "/docs", "/openapi.json"]
)
def test_head_is_get_without_a_body(live: Live, path: str) -> None:
    got, head = live.get(path), live.http.head(live.url + path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", *(["content-length"] if path != "/metrics" else [])):
        assert head.headers[name] == got.headers[name]


def test_head_of_what_never_ends_does(live: Live) -> None:
    head = live.http.head(live.url + "/v1/engine/steps")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


def test_other_methods_are_told_what_a_path_takes(live: Live) -> None:
    answer = live.post("/v1/models", {})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert live.http.head(live.url + TEXT).status_code == 405


def test_docs_need_no_network_where_their_files_are_installed(live: Live) -> None:
    pytest.importorskip("fastapi_offline")
    page = live.get("/docs").text
    assert "/openapi.json" in page
    assert "https://" not in page
    for name in re.findall(r'(?:src|href)="(/[^"]*)"', page):
        assert live.get(name).status_code == 200
        assert len(live.get(name).content) > 1000


def test_docs_name_a_network_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugins.server.docs.find_spec", lambda name: None)
    with serving(with_facts(tokenizer=None), api_key="s3cr3t") as live:
        assert 'src="https://' in live.get("/docs").text
        assert live.get("/docs/files/swagger-ui.css").status_code == 404
