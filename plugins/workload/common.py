"""What workloads share: seeded streams, arrival times, length distributions, text to token ids."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from core.config import require
from core.errors import ConfigError

DATA = Path(__file__).parent / "data"
TRACES = DATA / "traces"
STREAMS = ("choice", "arrival", "prompt_length", "output_length", "token_ids")

Ids = NDArray[np.int32]


def stream(seed: int, name: str, *part: int) -> np.random.Generator:
    """An independent generator for each purpose (one of STREAMS): changing the arrival rate, say,
    leaves prompts and lengths as they were. part: numbers >= 0 that tell apart what draws on its
    own, such as clients."""
    key = (int(seed < 0), STREAMS.index(name), *part)
    return np.random.default_rng(np.random.SeedSequence(entropy=abs(seed), spawn_key=key))


def arrivals(num: int, rate: float | None, seed: int, cv: float = 1.0) -> NDArray[np.float64]:
    """Seconds, ascending: gaps are drawn from a Gamma distribution of mean 1 / `rate` and
    coefficient of variation `cv` (1 = a Poisson process, above it bursts, towards 0 regular); all
    at 0 when rate is None."""
    require(rate is None or rate > 0, "workload.rate", "> 0 or null", rate)
    require(cv > 0, "workload.arrival_cv", "> 0", cv)
    if rate is None:
        return np.zeros(num)
    draw = stream(seed, "arrival")
    if cv == 1.0:
        return np.cumsum(draw.exponential(1.0 / rate, num))
    return np.cumsum(draw.gamma(1.0 / cv**2, cv**2 / rate, num))


def arrival_times(num: int, rate: float | None, seed: int) -> list[float]:
    """Seconds, ascending: a Poisson process of `rate` requests/s, or all at 0 when rate is None."""
    times: list[float] = arrivals(num, rate, seed).tolist()
    return times


def lengths(spec: Mapping[str, Any], num: int, field: str, generator: np.random.Generator) -> Ids:
    """`num` lengths in tokens, int32, each >= 1.

    spec: {kind: fixed, value}; {kind: uniform, low, high} (both ends included); {kind: lognormal,
    median, sigma, low, high} (clipped to low .. high); {kind: choice, values, weights}; {kind:
    mixture, values, weights}, where a value is a length or again a distribution. Raises ConfigError
    naming `field`, the rule and the value.
    """
    kind = str(spec.get("kind"))
    require(kind in _KINDS, f"{field}.kind", f"one of {', '.join(_KINDS)}", kind)
    wanted = {"kind", *_KINDS[kind]}
    for name in sorted(wanted ^ set(spec)):
        rule = "given" if name in wanted else f"absent for kind {kind}"
        raise ConfigError(f"{field}.{name} must be {rule}, got {spec.get(name, 'nothing')!r}")
    for name in wanted & {"value", "low", "median", "sigma"}:
        least = 0 if name == "sigma" else 1
        require(spec[name] >= least, f"{field}.{name}", f">= {least}", spec[name])
    if "high" in wanted:
        require(
            spec["high"] >= spec["low"], f"{field}.high", f">= low ({spec['low']})", spec["high"]
        )
    return _draw(kind, spec, num, field, generator)


def read_jsonl(path: Path, field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each non-blank line; gzip if the name ends in .gz.

    Raises ConfigError for a missing file, and naming the line that is not a JSON object.
    """
    require(path.is_file(), field, "an existing file", str(path))
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number} must be JSON: {error}") from None
            where = f"{path}, line {number}"
            require(isinstance(entry, dict), where, "a JSON object", line.strip()[:80])
            yield number, entry


def open_text(path: Path) -> TextIO:
    """A text file in UTF-8, open to be read; gzip if the name ends in .gz."""
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8", newline=""))
    return open(path, encoding="utf-8", newline="")


def encode(tokenizer: Any, text: str, chat: bool) -> Ids:
    """Token ids of a prompt, int32 [n]; chat: as one user message through the tokenizer's chat
    template.

    Raises ConfigError when chat is asked of a tokenizer without a template.
    """
    if not chat:
        return np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    prompt = render_dialogue(tokenizer, [("user", text)])
    return np.array(tokenizer(prompt, add_special_tokens=False)["input_ids"], dtype=np.int32)


def render_dialogue(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> str:
    """A chat as text up to where the next answer begins; messages: role, content.

    Raises ConfigError for a tokenizer without a chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "workload.chat must be false for a tokenizer without a chat template, got True"
        )
    said = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))


_KINDS: dict[str, tuple[str, ...]] = {
    "fixed": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma", "low", "high"),
    "choice": ("values", "weights"),
    "mixture": ("values", "weights"),
}


def _draw(
    kind: str, spec: Mapping[str, Any], num: int, field: str, generator: np.random.Generator
) -> Ids:
    if kind == "fixed":
        return np.full(num, spec["value"], np.int32)
    if kind == "uniform":
        return generator.integers(spec["low"], spec["high"], num, np.int32, endpoint=True)
    if kind == "lognormal":
        drawn = generator.lognormal(np.log(spec["median"]), spec["sigma"], num)
        return np.clip(np.rint(drawn), spec["low"], spec["high"]).astype(np.int32)
    if kind == "mixture":
        return _mixture(spec, num, field, generator)
    values = np.array(spec["values"])
    positive = len(values) > 0 and bool((values >= 1).all())
    require(positive, f"{field}.values", ">= 1 each", spec["values"])
    shares = _shares(spec, field)
    return generator.choice(values, num, p=shares).astype(np.int32)


def _shares(spec: Mapping[str, Any], field: str) -> NDArray[np.float64]:
    weights = np.array(spec["weights"], dtype=np.float64)
    fits = weights.shape == (len(spec["values"]),) and (weights >= 0).all() and weights.sum() > 0
    require(bool(fits), f"{field}.weights", ">= 0, one a value, not all 0", spec["weights"])
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _mixture(spec: Mapping[str, Any], num: int, field: str, generator: np.random.Generator) -> Ids:
    """A part for each value, in its share of the draws; drawn in order of the values."""
    require(len(spec["values"]) > 0, f"{field}.values", "at least one", spec["values"])
    part = generator.choice(len(spec["values"]), num, p=_shares(spec, field))
    drawn = np.empty(num, np.int32)
    for index, value in enumerate(spec["values"]):
        mine = part == index
        inner = value if isinstance(value, Mapping) else {"kind": "fixed", "value": value}
        where = f"{field}.values[{index}]"
        drawn[mine] = lengths(inner, int(mine.sum()), where, generator)
    return drawn
