"""Bodies that clients send, as pydantic models: OpenAI's fields and this server's own.

null is the same as a field left out. Types are strict: no field takes `true` for 1, 1.5 for a token
id or "3" for a number. Fields that only label a call (`metadata`, `safety_identifier`) have no
effect. Fields of OpenAI's schema that a text model cannot honour are known by name and take their
neutral values alone; any other value, and any unknown field, is an error that names the field.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from plugins.server.errors import from_validation, shown

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
LABEL_CHARS = 256

Body = TypeVar("Body", bound=BaseModel)


def parse(model: type[Body], raw: bytes) -> Body:
    """A request's body as `model`. Raises ApiError 400 for broken JSON and for a wrong field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def _form(value: Any) -> str | None:
    """Which form of text a value has; decided once, so that errors tell of that form alone."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<>"


def _text_or_list(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<>" if isinstance(value, list) else None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("<texts>")]
    | Annotated[Tokens, Tag("<>")]
    | Annotated[list[Tokens], Field(min_length=1, fail_fast=True), Tag("<lists>")],
    Discriminator(
        _form,
        custom_error_type="prompt_type",
        custom_error_message="must be a text, token ids, or a list of either",
    ),
]
Stop = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(fail_fast=True), Tag("<>")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_type",
        custom_error_message="must be a text or a list of texts",
    ),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Label = Annotated[str, StringConstraints(max_length=LABEL_CHARS)]
BiasedToken = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continuous_usage_stats": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "modalities": (["text"], []),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "refusal": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


def _neutral(value: Any, info: ValidationInfo) -> Any:
    accepted = _NEUTRAL[info.field_name or ""]
    if value is None or any(type(value) is type(one) and value == one for one in accepted):
        return value
    values = " or ".join(["null", *map(shown, accepted)])
    raise PydanticCustomError(
        "unsupported",
        "is not supported: it must be {values}, got {got}",
        {"values": values, "got": shown(value)},
    )


class StreamOptions(BaseModel):
    """include_usage: one more chunk, without choices, counts the tokens."""

    model_config = STRICT
    include_usage: bool | None = None
    include_obfuscation: Any = None
    continuous_usage_stats: Any = None

    refuse = field_validator("include_obfuscation", "continuous_usage_stats")(_neutral)


class SampledBody(BaseModel):
    """Fields of both completion endpoints.

    Beyond OpenAI's: top_k (0 or -1 = off), min_p, repetition_penalty, min_tokens, ignore_eos,
    stop_token_ids, skip_special_tokens and include_stop_str_in_output (of the text), priority
    (smaller is more urgent), cache_salt (prefixes are shared only among calls with the same one),
    client (who asks, for fairness; `user` serves if it is not given), deadline_ms (from arrival, a
    hint for policies: the answer is not cut). prompt_cache_key: a session for routing."""

    model_config = STRICT
    model: str
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[BiasedToken, Bias] | None = None
    user: Label | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Any = None
    store: Any = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    client: Label | None = None
    deadline_ms: Annotated[float, Field(gt=0, le=1e12)] | None = None

    refuse_shared = field_validator("service_tier", "store")(_neutral)


class CompletionBody(SampledBody):
    """POST /v1/completions. max_tokens: 0 with echo alone, to score a prompt. best_of must equal n.
    add_special_tokens: whether the tokenizer may add its own (BOS) to a text; true."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Any = None
    add_special_tokens: bool | None = None

    refuse = field_validator("suffix")(_neutral)


class TextPart(BaseModel):
    """A part of a message; a text model takes no other type."""

    model_config = STRICT
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<>")],
    Discriminator(
        _text_or_list,
        custom_error_type="content_type",
        custom_error_message="must be a text or a list of text parts",
    ),
]


class Message(BaseModel):
    """A message of a chat. Role developer is the template's system; name is the template's to
    use."""

    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Label | None = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None
    tool_calls: Any = None

    refuse = field_validator("audio", "function_call", "refusal", "tool_calls")(_neutral)


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
TemplateValues = dict[str, bool | int | float | str | None]


class ChatBody(SampledBody):
    """POST /v1/chat/completions. max_completion_tokens wins over max_tokens; without either the
    context's room is the limit. chat_template_kwargs: variables of the template, e.g.
    enable_thinking."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues | None = None

    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    refuse = field_validator(
        *("audio", "chat_template", "documents", "function_call", "functions", "modalities"),
        *("moderation", "parallel_tool_calls", "prediction", "prompt_cache_retention"),
        *("reasoning_effort", "response_format", "tool_choice", "tools", "verbosity"),
        "web_search_options",
    )(_neutral)


class TokenizeBody(BaseModel):
    """POST /tokenize: prompt, or messages through the chat template; not both."""

    model_config = STRICT
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = STRICT
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
