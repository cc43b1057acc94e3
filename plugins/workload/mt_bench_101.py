"""Real dialogues of several turns: each prompt is all that was said before and a new question.

Source: mtbench101/mt-bench-101 (Apache-2.0), ACL 2024, arXiv:2402.14762.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from core.config import require
from core.errors import ConfigError
from core.records import RequestRecord
from core.request import Request, SamplingParams
from plugins.workload.common import Ids, arrivals, stream
from plugins.workload.dialogues import Said, after_answer, encode_turns, read_dialogues

ANSWERS = ("recorded", "generated")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One question. think_s: from the end of the answer before it (open loop: its arrival)."""

    name: str
    session: str
    said: Said
    think_s: float


class MtBench101:
    """`num_dialogues` of 1,388 dialogues of 2 to 7 turns, drawn in an order that the seed decides.

    A turn's prompt is all that was said before it and a question. answers: recorded = with the data
    set's answers, so that each policy serves the same prompts and a turn finds in the prefix cache
    what the prompt before it left; generated = with the answers as they were generated (a closed
    loop of forced lengths), whose pages it then finds too. task: only the dialogues of a task (two
    letters), None = all 13. closed_loop: a question comes `think time` after the answer before it
    has ended; else after its question came. think_s: mean of the think times, which are
    exponential. rate: dialogues that begin a second, a Poisson process, None = all at 0;
    rate_scale: all times are divided by it. chat: through the tokenizer's chat template; else as
    lines "User: ..." and "Assistant: ...". forced: answers have as many tokens as the recorded
    ones. max_tokens: what requests state as their maximum, all that policies see of a forced
    length; None = the longest answer of the run (needed without forced). max_prompt, max_output:
    what the model can take; a dialogue ends before its first turn beyond them, and how many turns
    were left out is logged and in the manifest.
    """

    def __init__(
        self,
        num_dialogues: int = 32,
        task: str | None = None,
        closed_loop: bool = True,
        think_s: float = 5.0,
        rate: float | None = None,
        rate_scale: float = 1.0,
        chat: bool = True,
        answers: str = "recorded",
        forced: bool = True,
        max_tokens: int | None = None,
        max_prompt: int | None = None,
        max_output: int | None = None,
        temperature: float = 0.0,
    ) -> None:
        require(think_s >= 0, "workload.think_s", ">= 0", think_s)
        require(rate_scale > 0, "workload.rate_scale", "> 0", rate_scale)
        require(num_dialogues >= 1, "workload.num_dialogues", ">= 1", num_dialogues)
        limits = {"max_tokens": max_tokens, "max_prompt": max_prompt, "max_output": max_output}
        for field, value in limits.items():
            require(value is None or value >= 1, f"workload.{field}", ">= 1 or null", value)
        given = forced or max_tokens is not None
        require(given, "workload.max_tokens", "given without workload.forced", max_tokens)
        require(answers in ANSWERS, "workload.answers", f"one of {', '.join(ANSWERS)}", answers)
        grows = answers == "recorded" or (closed_loop and forced)
        rule = "recorded without workload.closed_loop and workload.forced"
        require(grows, "workload.answers", rule, answers)
        self.name = "mt_bench_101"
        self.num_dialogues = num_dialogues
        self.task = task
        self.closed_loop = closed_loop
        self.think_s = think_s
        self.rate = rate
        self.rate_scale = rate_scale
        self.chat = chat
        self.answers = answers
        self.forced = forced
        self.max_tokens = max_tokens
        self.max_prompt = max_prompt
        self.max_output = max_output
        self.temperature = temperature
        self.total_requests = 0
        self.facts: dict[str, Any] = {}

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The first turn of each dialogue, or every turn in an open loop, in order of arrival. Ids
        mt_bench_101-DIALOGUE-TURN. Raises ConfigError without a tokenizer."""
        if tokenizer is None:
            raise ConfigError(
                f"workload {self.name} holds text and needs a model with a tokenizer;"
                " workload=agent_sessions is a closed loop that needs none"
            )
        entries = read_dialogues(self.task)
        rule = f"<= {len(entries)}, the dialogues there are"
        require(
            self.num_dialogues <= len(entries), "workload.num_dialogues", rule, self.num_dialogues
        )
        order = stream(seed, "choice").permutation(len(entries))[: self.num_dialogues]
        dialogues = [self._turns(tokenizer, entries[index], seed) for index in order]
        asked = sum(len(entries[index]["history"]) for index in order)
        self._describe([turns for turns in dialogues if turns], asked)
        times = arrivals(len(dialogues), self.rate, seed) / self.rate_scale
        begun = [(turns, at) for turns, at in zip(dialogues, times, strict=True) if turns]
        self._after = {
            turn.name: following for turns, _ in begun for turn, following in pairwise(turns)
        }
        self._prompts: dict[str, Ids] = {}
        if self.closed_loop:
            return [self._request(turns[0], turns[0].said.prompt, float(at)) for turns, at in begun]
        every = [
            self._request(turn, turn.said.prompt, float(at + wait_s))
            for turns, at in begun
            for turn, wait_s in zip(turns, np.cumsum([t.think_s for t in turns]), strict=True)
        ]
        return sorted(every, key=lambda request: request.arrival_s)

    def follow_up(self, record: RequestRecord) -> Sequence[Request]:
        """The next turn of the dialogue, whatever became of this one."""
        turn, ended_s = self._after.get(record.request_id), record.finished_s
        assert ended_s is not None, "a request that has ended has an end"
        before = self._prompts.pop(record.request_id)
        if turn is None:
            return []
        prompt = turn.said.prompt
        if self.answers == "generated":
            answer = np.array(record.choices[0].token_ids, dtype=np.int32)
            prompt = after_answer(before, answer, turn.said.question)
        return [self._request(turn, prompt, ended_s + turn.think_s)]

    def describe(self) -> dict[str, Any]:
        """What is replayed, for the manifest; complete after `requests`."""
        return self.facts

    def _turns(self, tokenizer: Any, entry: dict[str, Any], seed: int) -> list[Turn]:
        """The turns that the model can take, up to the first that it cannot."""
        think = stream(seed, "arrival", entry["id"]).exponential(
            self.think_s / self.rate_scale, len(entry["history"])
        )
        session = f"{self.name}-{entry['id']}"
        turns: list[Turn] = []
        grown = 0  # tokens of the prompt, if answers are as long as the recorded ones
        for number, said in enumerate(encode_turns(tokenizer, entry["history"], self.chat)):
            grown += len(said.question)
            if self._beyond(len(said.prompt) if self.answers == "recorded" else grown, said):
                break
            grown += said.answer_tokens
            think_s = float(think[number]) if number else 0.0
            turns.append(Turn(f"{session}-{number}", session, said, think_s))
        return turns

    def _beyond(self, prompt_tokens: int, said: Said) -> bool:
        long = prompt_tokens > (self.max_prompt or math.inf)
        return long or (self.forced and said.answer_tokens > (self.max_output or math.inf))

    def _request(self, turn: Turn, prompt: Ids, arrival_s: float) -> Request:
        self._prompts[turn.name] = prompt
        return Request(
            request_id=turn.name,
            prompt=prompt,
            params=self._params,
            arrival_s=arrival_s,
            session=turn.session,
            forced_output=turn.said.answer_tokens if self.forced else None,
        )

    def _describe(self, dialogues: list[list[Turn]], asked: int) -> None:
        """Count what is replayed and what is left out; the maximum that requests state."""
        turns = [turn for dialogue in dialogues for turn in dialogue]
        require(bool(turns), "workload.max_prompt", "enough for at least one turn", self.max_prompt)
        longest = max(turn.said.answer_tokens for turn in turns) if self.forced else 1
        limit = longest if self.max_tokens is None else self.max_tokens
        require(limit >= longest, "workload.max_tokens", f">= {longest}", limit)
        self._params = SamplingParams(max_tokens=limit, temperature=self.temperature)
        self.total_requests = len(turns)
        self.facts = {
            "dialogues": len(dialogues),
            "requests": len(turns),
            "recorded_prompt_tokens": sum(len(turn.said.prompt) for turn in turns),
            "recorded_answer_tokens": sum(turn.said.answer_tokens for turn in turns),
            "answers": self.answers,
            "max_tokens": limit,
            "skipped": asked - len(turns),
        }
        if asked > len(turns):
            text = "workload mt_bench_101: %d of %d turns left out (max_prompt %s, max_output %s)"
            logger.warning(text, asked - len(turns), asked, self.max_prompt, self.max_output)
