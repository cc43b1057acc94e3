"""Recorded dialogues as token ids: prompts, answers, and what a new question adds."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from core.config import require
from core.errors import ConfigError
from plugins.workload.common import TRACES, Ids, read_jsonl, render_dialogue


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """One turn. prompt: all that was said before, with the recorded answers, and the question.
    question: what that adds after the answer before it (of the first turn: the whole prompt).
    answer_tokens: of the recorded answer."""

    prompt: Ids
    question: Ids
    answer_tokens: int


def read_dialogues(task: str | None) -> list[dict[str, Any]]:
    """Dialogues of a task, in file order. Raises ConfigError naming the tasks."""
    path = TRACES / "prompts" / "mtbench101.jsonl.gz"
    entries = [entry for _, entry in read_jsonl(path, "workload data")]
    tasks = sorted({entry["task"] for entry in entries})
    require(task is None or task in tasks, "workload.task", f"one of {', '.join(tasks)}", task)
    return [entry for entry in entries if task in (None, entry["task"])]


def encode_turns(tokenizer: Any, history: list[dict[str, str]], chat: bool) -> list[Said]:
    """The turns of a dialogue, through the tokenizer's chat template or as plain lines.

    Raises ConfigError for a template that changes what was said before when more is said."""
    turns: list[Said] = []
    messages: list[tuple[str, str]] = []
    before = ""
    for both in history:
        messages.append(("user", both["user"]))
        text = render_dialogue(tokenizer, messages) if chat else _lines(messages)
        if not text.startswith(before):
            raise ConfigError("workload.chat must be false for a template that rewrites history")
        prompt = _ids(tokenizer, text, not chat)
        question = _ids(tokenizer, text[len(before) :], False) if before else prompt
        answer = both["bot"] if chat else f" {both['bot']}"
        turns.append(Said(prompt, question, max(1, len(_ids(tokenizer, answer, False)))))
        messages.append(("assistant", both["bot"]))
        before = text + answer
    return turns


def after_answer(prompt: Ids, answer: Ids, question: Ids) -> Ids:
    """A prompt that goes on from an answer as it was generated. An end token that closed it is the
    one that the question begins with, once."""
    if len(answer) and len(question) and answer[-1] == question[0]:
        answer = answer[:-1]
    return np.concatenate([prompt, answer, question])


def _lines(messages: list[tuple[str, str]]) -> str:
    return "".join(f"{role.capitalize()}: {text}\n" for role, text in messages) + "Assistant:"


def _ids(tokenizer: Any, text: str, special: bool) -> Ids:
    return np.array(tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)
