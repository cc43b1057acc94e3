"""Random token ids with lengths from a distribution: needs no tokenizer, repeats under a seed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.config import require
from core.request import Request, SamplingParams
from plugins.workload.common import arrivals, lengths, stream
from plugins.workload.contents import RandomPrompts
from plugins.workload.lazy import LazyRequests


class Synthetic:
    """`num_requests` prompts of uniformly random ids over the vocabulary: no two share a prefix.

    prompt, output: length distributions in tokens, {kind: fixed, value}, {kind: uniform, low,
    high}, {kind: lognormal, median, sigma, low, high}, {kind: choice, values, weights} or {kind:
    mixture, values, weights} of lengths and distributions. rate: arrivals a second, None = all at
    once; arrival_cv: coefficient of variation of the gaps, 1 = Poisson, else Gamma. forced: each
    request emits exactly its output length, end tokens ignored, so that no policy can win by
    shorter answers. max_tokens: what a request states as its maximum, all that policies see of a
    forced length; None = the longest output of the run. Without forced, a request's maximum is its
    output length. num_clients: labels client-0 .. dealt round robin, for fairness studies; 1 = no
    labels. Requests are built as they are asked for: a million fit any memory.
    """

    def __init__(
        self,
        num_requests: int = 64,
        prompt: Mapping[str, Any] | None = None,
        output: Mapping[str, Any] | None = None,
        rate: float | None = None,
        arrival_cv: float = 1.0,
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
        self.arrival_cv = arrival_cv
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
        contents = RandomPrompts(num, int(prompts.max()), vocab_size, seed)
        times = arrivals(num, self.rate, seed, self.arrival_cv)
        limit = int(outputs.max()) if self.max_tokens is None else self.max_tokens
        require(limit >= outputs.max(), "workload.max_tokens", f">= {outputs.max()}", limit)
        stated = SamplingParams(max_tokens=limit, temperature=self.temperature)

        def build(number: int) -> Request:
            length = int(outputs[number])
            return Request(
                request_id=f"{self.name}-{number}",
                prompt=contents.prompt(number, int(prompts[number])),
                params=stated if self.forced else replace(stated, max_tokens=length),
                arrival_s=float(times[number]),
                client=f"client-{number % self.num_clients}" if self.num_clients > 1 else "",
                forced_output=length if self.forced else None,
            )

        return LazyRequests(num, build)
