"""Real prompts: GSM8K or MT-bench questions shipped with the project, or a user's JSONL file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.config import require
from core.errors import ConfigError
from core.request import Request, SamplingParams
from plugins.workload.common import DATA, arrival_times, encode, read_jsonl, stream

DATASETS = {"gsm8k": 200, "mt_bench": 80}


class Prompts:
    """`num_requests` distinct prompts of a data set, drawn in an order that the seed decides.

    dataset: gsm8k (200 questions), mt_bench (the first turn of 80), or a path to JSONL (also .gz)
    whose lines have `prompt`, `question` or `turns` (the first is taken). rate: Poisson arrivals a
    second, None = all at once. chat: wrap each prompt as a user message in the tokenizer's chat
    template. ignore_eos: generate max_tokens tokens whatever the model says. max_tokens,
    temperature, top_k, top_p: as in SamplingParams.
    """

    def __init__(
        self,
        dataset: str = "gsm8k",
        num_requests: int = 32,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        ignore_eos: bool = False,
        rate: float | None = None,
        chat: bool = True,
    ) -> None:
        require(num_requests >= 1, "workload.num_requests", ">= 1", num_requests)
        self.name = dataset if dataset in DATASETS else Path(dataset).name
        self.dataset = dataset
        self.num_requests = num_requests
        self.params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            ignore_eos=ignore_eos,
        )
        self.rate = rate
        self.chat = chat

    def requests(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        seed: int,
    ) -> Sequence[Request]:
        """The requests in order of arrival; ids NAME-0, NAME-1, ...

        Raises ConfigError without a tokenizer, or if there are fewer prompts than asked for.
        """
        if tokenizer is None:
            raise ConfigError(
                f"workload {self.name} holds text and needs a model with a tokenizer;"
                " workload=synthetic needs none"
            )
        texts = read_prompts(self.dataset)
        rule = f"<= {len(texts)}, the prompts in {self.name}"
        require(self.num_requests <= len(texts), "workload.num_requests", rule, self.num_requests)
        order = stream(seed, "choice").permutation(len(texts))[: self.num_requests]
        arrivals = arrival_times(self.num_requests, self.rate, seed)
        return [
            Request(
                request_id=f"{self.name}-{number}",
                prompt=encode(tokenizer, texts[index], self.chat),
                params=self.params,
                arrival_s=arrivals[number],
            )
            for number, index in enumerate(order)
        ]


def read_prompts(dataset: str) -> list[str]:
    """The prompt texts of a shipped data set or a JSONL file, in file order. Raises ConfigError."""
    shipped = dataset in DATASETS
    path = DATA / f"{dataset}.jsonl" if shipped else Path(dataset).expanduser()
    rule = f"{', '.join(DATASETS)} or an existing file"
    require(path.is_file(), "workload.dataset", rule, dataset)
    texts = []
    for number, entry in read_jsonl(path, "workload.dataset"):
        turns = entry.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        text = entry.get("prompt", entry.get("question", first))
        where = f"{path}, line {number}: prompt, question or turns[0]"
        require(isinstance(text, str) and text != "", where, "a text that is not empty", text)
        texts.append(str(text))
    require(bool(texts), "workload.dataset", "a file with at least one prompt", dataset)
    return texts
