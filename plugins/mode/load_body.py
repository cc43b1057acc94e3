"""What mode load asks: a request of a workload as the body of a call to OpenAI's API."""

import json
from typing import Any

from core.request import Request, SamplingParams

PROMPTS = ("ids", "text", "chat")
DEFAULTS = SamplingParams()
PLAIN = ("top_p", "presence_penalty", "frequency_penalty", "seed")
EXTENDED = ("top_k", "min_p", "repetition_penalty", "min_tokens")  # as vLLM and others have them


class Bodies:
    """Makes the bodies of calls to `path`. prompts: ids; text, decoded by `tokenizer`; chat, that
    text without special tokens as one user message. extensions: with fields that OpenAI's API has
    not. dropped: field -> how many requests wished for it in vain."""

    def __init__(self, model: str, prompts: str, tokenizer: Any | None, extensions: bool) -> None:
        self.path = "chat/completions" if prompts == "chat" else "completions"
        self.dropped: dict[str, int] = {}
        self._model = model
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._extensions = extensions

    def body(self, request: Request) -> bytes:
        """The JSON of a streamed call."""
        params = request.params
        body: dict[str, Any] = {"model": self._model, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._prompt(request)}
        body |= {"max_tokens": request.output_limit, "temperature": params.temperature}
        body |= _changed(params, PLAIN)
        if params.n > 1:
            body["n"] = params.n
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if request.client:
            body["user"] = request.client
        if params.logprobs is not None:
            body |= self._logprobs(params.logprobs)
        wishes = extended(request)
        if self._extensions:
            body |= wishes
            if self._prompts == "text":
                body["add_special_tokens"] = False  # the text has those of the workload
        else:
            self._drop(wishes)
        self._drop(impossible(request))
        return json.dumps(body).encode()

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self._prompts == "ids":
            return {"prompt": request.prompt.tolist()}
        assert self._tokenizer is not None, "checked by mode load"
        chat = self._prompts == "chat"
        options = {"skip_special_tokens": chat, "clean_up_tokenization_spaces": False}
        text = self._tokenizer.decode(request.prompt.tolist(), **options)
        return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    def _logprobs(self, count: int) -> dict[str, Any]:
        if self._prompts == "chat":
            return {"logprobs": True, "top_logprobs": count}
        return {"logprobs": count}

    def _drop(self, fields: dict[str, Any]) -> None:
        for name in fields:
            self.dropped[name] = self.dropped.get(name, 0) + 1


def extended(request: Request) -> dict[str, Any]:
    """The fields beyond OpenAI's that a request wishes for. A forced length is max_tokens with
    ignore_eos."""
    params = request.params
    fields = _changed(params, EXTENDED)
    if params.ignore_eos or request.forced_output is not None:
        fields["ignore_eos"] = True
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if request.priority:
        fields["priority"] = request.priority
    if request.namespace:
        fields["cache_salt"] = request.namespace
    if request.session:
        fields["prompt_cache_key"] = request.session
    if request.deadline_s is not None and request.deadline_s > request.arrival_s:
        fields["deadline_ms"] = 1000 * (request.deadline_s - request.arrival_s)
    return fields


def impossible(request: Request) -> dict[str, Any]:
    """What a request wishes for and no field can say."""
    fields: dict[str, Any] = {}
    if not request.cache:
        fields["cache"] = False
    if request.params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = request.params.prompt_logprobs
    if request.deadline_s is not None and request.deadline_s <= request.arrival_s:
        fields["deadline_s"] = request.deadline_s
    return fields


def _changed(params: SamplingParams, names: tuple[str, ...]) -> dict[str, Any]:
    """Those that are not at their defaults."""
    values = {name: getattr(params, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
