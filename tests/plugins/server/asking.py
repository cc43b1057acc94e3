"""Facts of a server over SmolLM2's tokenizer, and calls through schema and checks alone."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from plugins.model.smollm2_files import model_folder
from plugins.server.asked import Asked, ask_chat, ask_completion
from plugins.server.client import Facts
from plugins.server.errors import ApiError
from plugins.server.limits import Limits
from plugins.server.schema import ChatBody, CompletionBody, parse

MODEL = "MODEL"
CASES = Path(__file__).with_name("requests.jsonl")
HELLO = [{"role": "user", "content": "Say hi in one word."}]


@cache
def facts() -> Facts:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(False))
    return Facts(MODEL, 49152, 8192, 100_000, tokenizer, "fcfs", {}, 0, Limits())


def with_facts(**changes: Any) -> Facts:
    return replace(facts(), **changes)


def complete(of: Facts | None = None, **body: Any) -> Asked:
    whole = {"model": MODEL, "prompt": "The capital of France is", **body}
    return ask_completion(parse(CompletionBody, json.dumps(whole).encode()), of or facts())


def chat(of: Facts | None = None, **body: Any) -> Asked:
    whole = {"model": MODEL, "messages": HELLO, **body}
    return ask_chat(parse(ChatBody, json.dumps(whole).encode()), of or facts())


def refusal(call: Any, *arguments: Any, **body: Any) -> ApiError:
    """The ApiError that the call ends with; fails if there is none."""
    try:
        call(*arguments, **body)
    except ApiError as error:
        return error
    raise AssertionError(f"nothing was refused in {body}")
