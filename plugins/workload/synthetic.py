"""Random token ids with lengths from a distribution: needs no tokenizer, repeats under a seed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from core.config import require
from core.request import Request, SamplingParams
from plugins.workload.common import arrival_times, lengths, stream


class Synthetic:
    """`num_requests` prompts of uniformly random ids over the vocabulary: no two share a prefix.

    prompt, output: length distributions in tokens, {kind: fixed, value}, {kind: uniform, low,
    high}, {kind: lognormal, median, sigma, low, high} or {kind: choice, values, weights}. rate:
    Poisson arrivals a second, None = all at once. forced: each request emits exactly its output
    length, end tokens ignored, so that no policy can win by shorter answers. max_tokens: what a
    request states as its maximum, all that policies see of a forced length; None = the longest
    output of the run. Without forced, a request's maximum is its output length. num_clients: labels
    client-0 .. dealt round robin, for fairness studies; 1 = no labels.
    """

    def __init__(
        self,
        num_requests: int = 64,
        prompt: Mapping[str, Any] | None = None,
        output: Mapping[str, Any] | None = None,
        rate: float | None = None,
        forced: bool = True,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        num_clients: int = 1,
    ) -> None:
        require(num_requests >= 1, "workload.num_requests", ">= 1", num_requests)
        require(num_clients >= 1, "workload.num_clients", ">= 1", num_clients)
        self.name = "synthetic"
        self.num_requests = num_requests
        self.prompt = prompt or {"kind": "uniform", "low": 32, "high": 256}
        self.output = output or {"kind": "uniform", "low": 16, "high": 128}
        self.rate = rate
        self.forced = forced
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.num_clients = num_clients

    def requests(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        seed: int,
    ) -> Sequence[Request]:
        """The requests in order of arrival; ids synthetic-0, synthetic-1, ..."""
        num = self.num_requests
        prompts = lengths(self.prompt, num, "workload.prompt", stream(seed, "prompt_length"))
        outputs = lengths(self.output, num, "workload.output", stream(seed, "output_length"))
        ids = stream(seed, "token_ids").integers(0, vocab_size, int(prompts.sum()), np.int32)
        parts = np.split(ids, np.cumsum(prompts)[:-1])
        arrivals = arrival_times(num, self.rate, seed)
        limit = int(outputs.max()) if self.max_tokens is None else self.max_tokens
        require(limit >= outputs.max(), "workload.max_tokens", f">= {outputs.max()}", limit)
        return [
            Request(
                request_id=f"{self.name}-{number}",
                prompt=parts[number],
                params=SamplingParams(
                    max_tokens=limit if self.forced else int(outputs[number]),
                    temperature=self.temperature,
                ),
                arrival_s=arrivals[number],
                client=f"client-{number % self.num_clients}" if self.num_clients > 1 else "",
                forced_output=int(outputs[number]) if self.forced else None,
            )
            for number in range(num)
        ]
