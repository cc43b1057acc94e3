"""From a body that follows its schema to what the engine is asked: ids, parameters, wishes.

Everything that can be refused is refused here, for all prompts of a call, before any of them is
submitted. Tokenising is synchronous and takes about a second for a megabyte of text: a caller with
an event loop hands long bodies to a thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.errors import RequestError
from core.request import Request, SamplingParams
from plugins.server.checks import (
    check_completion,
    check_ids,
    check_logprobs,
    check_model,
    check_shared,
    check_vocabulary,
    given,
    output_limit,
    stop_strings,
)
from plugins.server.client import Facts
from plugins.server.errors import ApiError, from_request_error, invalid, unsupported
from plugins.server.rendered import encode, render
from plugins.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SampledBody,
    TokenizeBody,
)

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt of a call: a request of its own. ids int32 [prompt_len]. text: as the client gave
    it, None for ids and chats. params: max_tokens may differ between prompts."""

    ids: NDArray[np.int32]
    text: str | None
    params: SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One call, checked. n: choices of each prompt. stop: strings; include_stop: they stay in the
    text. echo: the text begins with the prompt. logprobs: top entries beside each token, None = no
    log-probabilities. usage: a stream ends with a chunk that counts tokens. priority and below: as
    in core.request.Request; deadline_s counts from arrival."""

    prompts: tuple[Prompt, ...]
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    logprobs: int | None
    stream: bool
    usage: bool
    priority: int
    namespace: str
    client: str
    session: str
    deadline_s: float | None

    def requests(self, call_id: str) -> list[Request]:
        """One request a prompt, in order, named `call_id`, or `call_id`-index if there are more.
        arrival_s is left to the engine's end, which shifts deadline_s by it."""
        names = [call_id]
        if len(self.prompts) > 1:
            names = [f"{call_id}-{index}" for index in range(len(self.prompts))]
        return [
            Request(
                name,
                prompt.ids,
                prompt.params,
                priority=self.priority,
                client=self.client,
                session=self.session,
                namespace=self.namespace,
                deadline_s=self.deadline_s,
            )
            for name, prompt in zip(names, self.prompts, strict=True)
        ]


def ask_completion(body: CompletionBody, facts: Facts) -> Asked:
    """What a call of /v1/completions asks. Raises ApiError: 404 for another model, else 400."""
    check_shared(body, facts)
    check_completion(body, facts)
    texts, lists = _forms(body.prompt)
    most = facts.limits.max_choices // given(body.n, 1)
    if len(lists) > most:
        raise invalid("prompt", f"must hold <= {most} prompts (with this n), got {len(lists)}")
    prompts = []
    for index, (text, ids) in enumerate(zip(texts, lists, strict=True)):
        where = f"prompt[{index}]" if len(lists) > 1 else "prompt"
        if ids is None:
            add = body.add_special_tokens is not False
            ids = encode(facts.tokenizer, text or "", add, where, facts.max_model_len)
        check_ids(ids, facts, where)
        limit = output_limit(
            len(ids), "max_tokens", body.max_tokens, COMPLETION_TOKENS, facts, where
        )
        params = _params(body, facts, limit, body.logprobs, bool(body.echo))
        prompts.append(Prompt(np.array(ids, np.int32), text, params))
    return _asked(body, prompts, body.logprobs, bool(body.echo))


def ask_chat(body: ChatBody, facts: Facts) -> Asked:
    """What a call of /v1/chat/completions asks. Raises ApiError: 404 for another model, else
    400."""
    check_shared(body, facts)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "is allowed with logprobs true alone")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    check_logprobs("top_logprobs", logprobs, facts)
    ids = render(facts.tokenizer, body, facts.max_model_len)
    check_ids(ids, facts, "messages")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = output_limit(len(ids), name, wanted, None, facts, "messages")
    params = _params(body, facts, limit, logprobs, False)
    return _asked(body, [Prompt(np.array(ids, np.int32), None, params)], logprobs, False)


def ask_tokens(body: TokenizeBody, facts: Facts) -> list[int]:
    """The ids of /tokenize. Raises ApiError."""
    check_model(body.model, facts)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "or messages is required, and not both")
    if body.messages is not None:
        if body.add_special_tokens:
            raise unsupported("add_special_tokens", "must be false with messages")
        return render(facts.tokenizer, body)
    add = body.add_special_tokens is not False
    return encode(facts.tokenizer, body.prompt or "", add, "prompt")


def ask_text(body: DetokenizeBody, facts: Facts) -> str:
    """The text of /detokenize. Raises ApiError."""
    check_model(body.model, facts)
    if facts.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer", param="tokens", code="unsupported_value")
    check_vocabulary(body.tokens, facts, "tokens")
    return str(facts.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))


def _asked(body: SampledBody, prompts: Sequence[Prompt], logprobs: int | None, echo: bool) -> Asked:
    options = body.stream_options
    return Asked(
        prompts=tuple(prompts),
        n=given(body.n, 1),
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=echo,
        logprobs=logprobs,
        stream=bool(body.stream),
        usage=bool(options and options.include_usage),
        priority=given(body.priority, 0),
        namespace=body.cache_salt or "",
        client=given(body.client, body.user or ""),
        session=body.prompt_cache_key or "",
        deadline_s=None if body.deadline_ms is None else body.deadline_ms / 1000,
    )


def _params(
    body: SampledBody, facts: Facts, limit: int, logprobs: int | None, echo: bool
) -> SamplingParams:
    top_k = max(0, given(body.top_k, 0))  # -1 means off too
    try:
        return SamplingParams(
            max_tokens=limit,
            temperature=given(body.temperature, 1.0),
            top_k=min(top_k, facts.vocab_size),
            top_p=given(body.top_p, 1.0),
            min_p=given(body.min_p, 0.0),
            repetition_penalty=given(body.repetition_penalty, 1.0),
            presence_penalty=given(body.presence_penalty, 0.0),
            frequency_penalty=given(body.frequency_penalty, 0.0),
            logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
            min_tokens=given(body.min_tokens, 0),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
            n=given(body.n, 1),
            seed=body.seed,
        )
    except RequestError as error:
        raise from_request_error(error) from None


def _forms(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[list[str | None], list[list[int] | None]]:
    """Texts and ids of the prompts; of each, one is None."""
    if isinstance(prompt, str):
        return [prompt], [None]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    if texts:
        return list(texts), [None] * len(texts)
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if not lists:
        lists = [[entry for entry in prompt if isinstance(entry, int)]]
    return [None] * len(lists), list(lists)
