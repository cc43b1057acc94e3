"""Bodies that the server answers with, as pydantic models, in OpenAI's shapes."""

from typing import Literal

from pydantic import BaseModel

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot hold; OpenAI's convention


class ErrorFacts(BaseModel):
    """param: the field at fault, as a path into the body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of every answer other than success."""

    error: ErrorFacts


class PromptDetails(BaseModel):
    """cached_tokens: prompt tokens whose KV the prefix cache held."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens of a call, over all its prompts and choices; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(BaseModel):
    """Entry i of each list is token i of the choice's text, its prompt included under echo, whose
    first token has no log-probability. bytes: UTF-8 of each token, also of half a character."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    bytes: list[list[int]]


class CompletionChoice(BaseModel):
    """index: prompt * n + choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    """Answer of /v1/completions and, with finish_reason null until the end, its stream's chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A candidate of a position. bytes: UTF-8 of the token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(BaseModel):
    """A token of the answer with the best candidates of its position, best first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice, or of the tokens of a chunk."""

    content: list[ChatLogprob]


class ChatMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """role: in the first chunk of a choice alone."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """finish_reason: null but in the last chunk of the choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """An event of a chat's stream; usage has a chunk of its own, without choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A served model. max_model_len: prompt and output, tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tritium"
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    """Answer of /tokenize. token_strs: if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Answer of /detokenize."""

    prompt: str
