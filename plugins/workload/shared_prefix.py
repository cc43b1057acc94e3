"""Groups of requests that begin with the same tokens: few-shot prompts, for a prefix cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.request import Request, SamplingParams
from plugins.workload.common import DATA, arrival_times, read_jsonl, stream

Ids = NDArray[np.int32]


class SharedPrefix:
    """`num_groups * requests_per_group` requests, groups interleaved at random.

    With a tokenizer, a group's prefix is worked GSM8K examples cut to exactly `prefix_tokens`, and
    each request adds the last `suffix_tokens` (or fewer) of another question; without one, both are
    random ids of exactly those lengths. rate: Poisson arrivals a second, None = all at once.
    ignore_eos: every answer has max_tokens tokens.
    """

    def __init__(
        self,
        num_groups: int = 4,
        requests_per_group: int = 8,
        prefix_tokens: int = 256,
        suffix_tokens: int = 64,
        max_tokens: int = 32,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        rate: float | None = None,
    ) -> None:
        for field, value in (
            ("num_groups", num_groups),
            ("requests_per_group", requests_per_group),
            ("prefix_tokens", prefix_tokens),
            ("suffix_tokens", suffix_tokens),
        ):
            require(value >= 1, f"workload.{field}", ">= 1", value)
        self.name = "shared_prefix"
        self.num_groups = num_groups
        self.requests_per_group = requests_per_group
        self.prefix_tokens = prefix_tokens
        self.suffix_tokens = suffix_tokens
        self.params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos
        )
        self.rate = rate

    def requests(self, tokenizer: Any | None, vocab_size: int, seed: int) -> Sequence[Request]:
        """The requests in order of arrival. Ids gG-R: member R of group G; session gG."""
        num = self.num_groups * self.requests_per_group
        if tokenizer is None:
            prefixes, suffixes = self._random(num, vocab_size, seed)
        else:
            prefixes, suffixes = self._few_shot(num, tokenizer, seed)
        order = stream(seed, "choice").permutation(num)
        arrivals = arrival_times(num, self.rate, seed)
        requests = []
        for arrival_s, index in zip(arrivals, order, strict=True):
            group, member = divmod(int(index), self.requests_per_group)
            requests.append(
                Request(
                    request_id=f"g{group}-{member}",
                    prompt=np.concatenate([prefixes[group], suffixes[index]]),
                    params=self.params,
                    arrival_s=arrival_s,
                    session=f"g{group}",
                )
            )
        return requests

    def _random(self, num: int, vocab_size: int, seed: int) -> tuple[list[Ids], list[Ids]]:
        draw = stream(seed, "token_ids")
        prefixes = draw.integers(0, vocab_size, (self.num_groups, self.prefix_tokens), np.int32)
        suffixes = draw.integers(0, vocab_size, (num, self.suffix_tokens), np.int32)
        return list(prefixes), list(suffixes)

    def _few_shot(self, num: int, tokenizer: Any, seed: int) -> tuple[list[Ids], list[Ids]]:
        problems = [entry for _, entry in read_jsonl(DATA / "gsm8k.jsonl", "workload data")]
        draw = stream(seed, "token_ids")
        examples = [f"Question: {p['question']}\nAnswer: {p['answer']}\n\n" for p in problems]
        prefixes = [
            self._prefix(tokenizer, examples, draw.permutation(len(examples)))
            for _ in range(self.num_groups)
        ]
        asked = draw.permutation(len(problems))
        texts = [
            f"Question: {problems[asked[number % len(asked)]]['question']}\nAnswer:"
            for number in range(num)
        ]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return prefixes, [np.array(row[-self.suffix_tokens :], np.int32) for row in ids]

    def _prefix(self, tokenizer: Any, examples: list[str], order: NDArray[np.int64]) -> Ids:
        """Whole examples, one after the other, until there are `prefix_tokens` ids to cut to."""
        ids: list[int] = list(tokenizer("")["input_ids"])  # the beginning token, where there is one
        used = 0
        while len(ids) < self.prefix_tokens:
            text = examples[order[used % len(order)]]
            ids.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
            used += 1
        return np.array(ids[: self.prefix_tokens], np.int32)
