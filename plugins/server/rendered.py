"""Texts and chats to token ids, through a tokenizer of transformers."""

import inspect
from typing import Any

from jinja2 import TemplateError

from plugins.server.errors import ApiError, invalid, unsupported
from plugins.server.schema import ChatBody, Message, TokenizeBody

HEAD_CHARS = 8  # a token of the context, in characters that settle whether a text is too long
MARGIN_TOKENS = 64  # a cut changes the tokens around it


def encode(
    tokenizer: Any | None,
    text: str,
    add_special_tokens: bool,
    where: str,
    longest: int | None = None,
) -> list[int]:
    """Token ids of a text. where: the field it comes from. longest: tokens that the context holds;
    of a much longer text only the beginning is looked at, since megabytes take seconds.

    Raises ApiError 400 without a tokenizer, and for a text that is too long beyond doubt.
    """
    if tokenizer is None:
        raise unsupported(where, "must be token ids: this model has no tokenizer")
    if longest is not None and len(text) > 2 * HEAD_CHARS * longest:
        head = _ids(tokenizer, text[: HEAD_CHARS * longest], add_special_tokens)
        if len(head) > longest + MARGIN_TOKENS:
            raise ApiError(
                400,
                f"this model's context is {longest} tokens, and more were requested: {where} holds"
                f" {len(text)} characters, of which the first {HEAD_CHARS * longest} are"
                f" {len(head)} tokens",
                param=where,
                code="context_length_exceeded",
            )
    return _ids(tokenizer, text, add_special_tokens)


def render(
    tokenizer: Any | None, body: ChatBody | TokenizeBody, longest: int | None = None
) -> list[int]:
    """Token ids of a chat; longest: as for `encode`.

    The template alone says which special tokens there are, so that a BOS never comes twice. Raises
    ApiError 400 without a template, or for messages that it refuses.
    """
    messages = [_plain(message) for message in body.messages or ()]
    if tokenizer is None or not tokenizer.chat_template:
        rule = "need a chat template, and this model has none: use /v1/completions"
        raise unsupported("messages", rule)
    proceed = bool(body.continue_final_message)
    if proceed and body.add_generation_prompt:
        raise invalid("add_generation_prompt", "must be false with continue_final_message")
    values = body.chat_template_kwargs or {}
    if values:
        taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        if wrong := sorted(taken & set(values)):
            raise invalid("chat_template_kwargs", f"must not hold {wrong[0]!r}")
    generate = not proceed if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=generate,
            continue_final_message=proceed,
            **values,
        )
    except TemplateError as error:
        raise invalid("messages", f"are refused by the chat template: {error}") from error
    except Exception as error:  # a template is a program: it may fail in any way
        message = "the chat template cannot render these messages"
        raise ApiError(400, message, param="messages", code="invalid_value") from error
    return encode(tokenizer, text, False, "messages", longest)


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    # verbose: no warning about the length, which is checked elsewhere
    coded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    return list(coded["input_ids"])


def _plain(message: Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": text}
    return plain if message.name is None else {**plain, "name": message.name}
