"""The request sets that engines are compared on, as files of plugins/workload/file.py.

All draw token ids in [0, 10000] from Python's `random.Random(0)`, in a fixed order:

nano      for each of 256 requests its prompt's length (uniform, 100 to 1,024) and then its ids;
          after all prompts the output lengths, likewise (nano-vllm's bench.py); temperature 0.6
decode    256 prompts of 128 ids, 512 output tokens
prefill   128 prompts of 4,096 ids, 16 output tokens
prefix    2,048 ids that all prompts begin with, then 256 times 128 ids; 128 output tokens
online-R  prompts as in nano; after all of them output lengths (uniform, 64 to 384); after all of
          them exponential gaps of rate R a second, the first before the first request; 0.6

`scale` keeps the first requests of the offline sets, whatever was drawn for the others."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

OFFLINE = ("nano", "decode", "prefill", "prefix")
ONLINE = "online-"
LARGEST_ID = 10_000
ONLINE_REQUESTS = 192


@dataclass(frozen=True, slots=True)
class Load:
    """Requests by index: prompts (token ids), output lengths in tokens, arrivals in seconds. All
    prompts begin with the same `shared_tokens`."""

    prompts: list[list[int]]
    outputs: list[int]
    arrivals_s: list[float]
    temperature: float = 0.0
    shared_tokens: int = 0


def load(name: str, scale: float = 1.0, online_requests: int = ONLINE_REQUESTS) -> Load:
    """The request set of a name. Raises ValueError for an unknown one."""
    rng = random.Random(0)
    if name.startswith(ONLINE):
        return _online(rng, float(name.removeprefix(ONLINE)), online_requests)
    if name not in OFFLINE:
        raise ValueError(f"workload must be one of {', '.join(OFFLINE)} or online-R, got {name!r}")
    count = max(1, int((128 if name == "prefill" else 256) * scale))
    now = [0.0] * count
    if name == "nano":
        prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)]
        return Load(prompts[:count], outputs[:count], now, temperature=0.6)
    if name == "decode":
        return Load([_ids(rng, 128) for _ in range(count)], [512] * count, now)
    if name == "prefill":
        return Load([_ids(rng, 4096) for _ in range(count)], [16] * count, now)
    shared = _ids(rng, 2048)
    prompts = [shared + _ids(rng, 128) for _ in range(count)]
    return Load(prompts, [128] * count, now, shared_tokens=len(shared))


def warm_up_load(temperature: float, num_requests: int = 64) -> Load:
    """What every engine runs before it is measured: prompts of 700 ids of a seed of their own."""
    rng = random.Random(1)
    prompts = [_ids(rng, 700) for _ in range(num_requests)]
    return Load(prompts, [16] * num_requests, [0.0] * num_requests, temperature)


def lines(load: Load) -> list[dict[str, object]]:
    """One request a line: exactly its output length, end tokens ignored."""
    entries = zip(load.prompts, load.outputs, load.arrivals_s, strict=True)
    return [
        {
            "request_id": f"r{number}",
            "prompt_token_ids": prompt,
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": load.temperature,
            "arrival_s": arrival_s,
        }
        for number, (prompt, length, arrival_s) in enumerate(entries)
    ]


def write(load: Load, path: Path) -> Path:
    """Write the request file; returns its path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(load)), encoding="utf-8")
    return path


def _online(rng: random.Random, rate: float, count: int) -> Load:
    if rate <= 0:
        raise ValueError(f"the rate of an online workload must be > 0, got {rate}")
    prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(count)]
    outputs = [rng.randint(64, 384) for _ in range(count)]
    due_s, arrivals_s = 0.0, []
    for _ in range(count):
        due_s += rng.expovariate(rate)
        arrivals_s.append(due_s)
    return Load(prompts, outputs, arrivals_s, temperature=0.6)


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, LARGEST_ID) for _ in range(length)]
