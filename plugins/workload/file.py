"""Requests from a JSONL file: recorded traces, hand-made cases, priorities, deadlines."""

import difflib
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import ConfigError, RequestError
from core.request import Request, SamplingParams
from plugins.workload.common import encode, read_jsonl, stream

_NUMBER = (int, float)
PROMPT_FIELDS = {"prompt": (str,), "prompt_token_ids": (list,), "prompt_tokens": (int,)}
REQUEST_FIELDS: dict[str, tuple[type, ...]] = {
    "request_id": (str,),
    "arrival_s": _NUMBER,
    "priority": (int,),
    "client": (str,),
    "session": (str,),
    "namespace": (str,),
    "deadline_s": _NUMBER,
    "forced_output": (int,),
    "cache": (bool,),
}
SAMPLING_FIELDS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": _NUMBER,
    "top_k": (int,),
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": (dict,),
    "min_tokens": (int,),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "logprobs": (int,),
    "prompt_logprobs": (int,),
    "n": (int,),
    "seed": (int,),
}
FIELDS: dict[str, tuple[type, ...]] = {**PROMPT_FIELDS, **REQUEST_FIELDS, **SAMPLING_FIELDS}


class File:
    """One request a line, sorted by arrival_s (equal times keep file order).

    A line names its prompt in one of three ways: `prompt` (text), `prompt_token_ids` (ids) or
    `prompt_tokens` (a number: that many random ids under the seed). All other fields are optional
    and mean what they mean in core.request.Request and SamplingParams: request_id (default line-N),
    arrival_s, priority, client, session, namespace, deadline_s, forced_output, cache; max_tokens,
    temperature and so on. null = not given. A line with forced_output and no max_tokens states the
    longest forced_output of the file as its maximum: policies see that, not the true length. chat:
    wrap text prompts in the tokenizer's chat template. time_scale: arrival and deadline times are
    multiplied by it (0.5 = twice the load). limit: only the first so many lines.
    """

    def __init__(
        self, path: str, chat: bool = False, time_scale: float = 1.0, limit: int | None = None
    ) -> None:
        require(time_scale >= 0, "workload.time_scale", ">= 0", time_scale)
        require(limit is None or limit >= 1, "workload.limit", ">= 1 or null", limit)
        self.name = Path(path).name
        self.path = Path(path).expanduser()
        self.chat = chat
        self.time_scale = time_scale
        self.limit = limit

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival. ConfigError names line, field, rule and value."""
        entries = list(islice(read_jsonl(self.path, "workload.path"), self.limit))
        require(bool(entries), "workload.path", "a file with at least one request", str(self.path))
        lines: dict[str, int] = {}
        given: list[dict[str, Any]] = []
        for number, entry in entries:
            fields = {name: value for name, value in entry.items() if value is not None}
            for name, value in fields.items():
                self._check(number, name, value)
            given.append({"request_id": f"line-{number}", **fields})
            first = lines.setdefault(given[-1]["request_id"], number)
            rule = f"unique (line {first} has it too)"
            require(first == number, self._at(number, "request_id"), rule, given[-1]["request_id"])
        longest = max((fields.get("forced_output", 0) for fields in given), default=0)
        draw = stream(seed, "token_ids")
        requests = []
        for (number, _), fields in zip(entries, given, strict=True):
            prompt = self._prompt(number, fields, tokenizer, vocab_size, draw)
            requests.append(self._request(number, fields, prompt, longest))
        return sorted(requests, key=lambda request: request.arrival_s)

    def _at(self, number: int, field: str) -> str:
        return f"{self.path}, line {number}: {field}"

    def _request(
        self, number: int, given: dict[str, Any], prompt: NDArray[np.int32], longest: int
    ) -> Request:
        sampling = {name: given[name] for name in SAMPLING_FIELDS if name in given}
        if "forced_output" in given:
            sampling.setdefault("max_tokens", longest)
        if "stop_token_ids" in sampling:
            sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        fields = {name: given[name] for name in REQUEST_FIELDS if name in given}
        for name in {"arrival_s", "deadline_s"} & set(fields):
            fields[name] = float(fields[name]) * self.time_scale
        try:
            if "logit_bias" in sampling:
                bias = sampling["logit_bias"]
                sampling["logit_bias"] = {int(token): float(bias[token]) for token in bias}
            return Request(prompt=prompt, params=SamplingParams(**sampling), **fields)
        except (RequestError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}, line {number}: {error}") from None

    def _check(self, number: int, name: str, value: Any) -> None:
        """Refuse an unknown field, a value of another type (true is no number), a bad time."""
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{self._at(number, name)} is no field of a request{hint}")
        types = FIELDS[name]
        fits = isinstance(value, types) and (isinstance(value, bool) == (bool in types))
        words = " or ".join(kind.__name__ for kind in types)
        require(fits, self._at(number, name), f"of type {words}", value)
        if name in ("arrival_s", "deadline_s"):
            finite = 0 <= value < math.inf
            require(finite, self._at(number, name), "a time in seconds >= 0", value)

    def _prompt(
        self,
        number: int,
        given: dict[str, Any],
        tokenizer: Any | None,
        vocab_size: int,
        draw: np.random.Generator,
    ) -> NDArray[np.int32]:
        named = sorted(PROMPT_FIELDS.keys() & given.keys())
        choices = " or ".join(PROMPT_FIELDS)
        require(len(named) == 1, self._at(number, "prompt"), f"given once, as {choices}", named)
        value = given[named[0]]
        at = self._at(number, named[0])
        if named[0] == "prompt_tokens":
            require(value >= 1, at, ">= 1", value)
            return draw.integers(0, vocab_size, int(value), np.int32)
        if named[0] == "prompt_token_ids":
            whole = all(isinstance(token, int) and 0 <= token < vocab_size for token in value)
            require(whole and len(value) > 0, at, f"a list of ids in [0, {vocab_size})", value)
            return np.array(value, dtype=np.int32)
        if tokenizer is None:
            raise ConfigError(f"{at} is text, but the model has no tokenizer: use prompt_token_ids")
        ids = encode(tokenizer, value, self.chat)
        require(len(ids) > 0, at, "a text of at least one token", value)
        return ids
