"""From timed steps to the coefficients of a step's time."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.mode.calibrate_traffic import Ran
from plugins.shared.calibration import FORMS, TERMS, Form, form_of
from plugins.shared.launch_sizes import KINDS, LaunchSizes
from plugins.shared.least_squares import non_negative

Float = NDArray[np.float64]
WAITING = ("chunk", "mixed", "eager")
"""Kinds of launches that may take the host longer than the device, in steps of a grid."""
WORTH = 0.9
"""A kind has such steps if that leaves at most this share of the squared error."""
ROUNDS = 30
LEAST_ALIKE = 5  # steps of a run, for a median
ROWS_ALIKE = 8
CLEAR = 0.9  # of a step's seconds: the host took less
APART = 1.4
"""A node of a base has at least so many times the tokens of the one before."""
OWN_TERMS = {
    "decode": ("near", "kv_token", "repeat"),
    "graphed": ("row", "near", "kv_token", "repeat", "pair", "depth"),
    "other": ("row", "kv_token", "repeat", "pair", "depth"),
}
"""Of a form; rows of a decode are its tokens, and a start is nothing beside a long launch."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Facts of steps as a calibration counts them, padding included, float64 [n] each; the kind of
    launch, index into KINDS, int64 [n]; how long they took; and how many launches each stands for,
    of which that is the median."""

    num_rows: Float
    num_tokens: Float
    kv_tokens: Float
    attended: Float
    repeated: Float
    kind: NDArray[np.int64]
    seconds: Float
    launches: Float

    def __len__(self) -> int:
        return len(self.seconds)

    def part(self, chosen: NDArray[np.bool_]) -> "Steps":
        """Those chosen; bool [n]."""
        return Steps(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def __add__(self, others: "Steps") -> "Steps":
        """These, then others."""
        pairs = {name: (getattr(self, name), getattr(others, name)) for name in self.__slots__}
        return Steps(**{name: np.concatenate(pair) for name, pair in pairs.items()})


@dataclass(frozen=True, slots=True)
class Fit:
    """forms: see plugins/shared/calibration.py. launch_s: seconds that a step of a kind lasts at
    least, for kinds that have such steps."""

    forms: Mapping[str, Form]
    launch_s: Mapping[str, float]

    def seconds(self, steps: Steps) -> Float:
        """Of steps, one launched as soon as there is room for it."""
        return np.maximum(self.device_s(steps), of_kinds(self.launch_s, steps))

    def device_s(self, steps: Steps) -> Float:
        """Of the device alone."""
        seconds = np.empty(len(steps))
        for name, chosen in by_form(steps):
            own, form = steps.part(chosen), self.forms.get(name, self.forms["other"])
            seconds[chosen] = form.seconds(*_facts(own))
        return seconds


Fact = Sequence[Any]


def steps_of(rows: Iterable[Fact], sizes: LaunchSizes | None = None, launches: int = 1) -> Steps:
    """Steps from (one-token rows, rows, tokens, kv_tokens, attended, seconds) of each, and (longest
    and pairs of LaunchSizes.padded, repeated context) if they have that; each stands for so many
    launches."""
    padding = sizes or LaunchSizes()
    facts = []
    for decodes, num_rows, num_tokens, kv_tokens, attended, seconds, *more in rows:
        *padded, kind = padding.padded(decodes, num_rows, num_tokens, *more[:2])
        repeated = more[2] if len(more) > 2 else 0
        facts.append((*padded, kv_tokens, attended, repeated, KINDS.index(kind), seconds))
    columns = np.array(facts, np.float64).reshape(-1, 7).T
    rows_n, tokens_n, kv_n, pairs, again_n, kinds, took_s = columns
    each = np.full(len(facts), float(launches))
    return Steps(rows_n, tokens_n, kv_n, pairs, again_n, kinds.astype(np.int64), took_s, each)


def _facts(steps: Steps) -> tuple[Float, Float, Float, Float, Float]:
    """As Form.seconds takes them."""
    return steps.num_rows, steps.num_tokens, steps.kv_tokens, steps.attended, steps.repeated


def by_form(steps: Steps) -> list[tuple[str, NDArray[np.bool_]]]:
    """The forms that steps have, and which steps."""
    names = np.array([FORMS.index(form_of(kind)) for kind in KINDS])[steps.kind]
    return [(name, names == at) for at, name in enumerate(FORMS) if (names == at).any()]


def fit(steps: Steps, host_waits: bool = True) -> Fit:
    """Each form's coefficients of least squared relative error, none below 0. host_waits: steps of
    a kind may last as long as it takes the host to launch them."""
    forms: dict[str, Form] = {}
    launch_s: Mapping[str, float] = {}
    for name, chosen in by_form(steps):
        own = steps.part(chosen)
        if name != "other":
            forms[name] = _fit_form(own, name)
            continue
        found = _with_waits(own) if host_waits else _settled(own, {})[0]
        forms |= found.forms
        launch_s = found.launch_s
    # A launch of a kind that no step had is taken for the largest of what there was.
    forms.setdefault("other", forms.get("graphed", next(iter(forms.values()))))
    return Fit(forms, launch_s)


def typical(steps: Steps, host_s: Float) -> Steps:
    """Steps of a run as they are fitted: of those alike the median, since the host sees some late.
    Without those that may have waited for the host, which took `host_s` for each, and without few
    alike."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    context = np.log2(np.maximum(steps.kv_tokens / steps.num_rows, 1))
    keys = steps.kind, steps.num_tokens, steps.num_rows // ROWS_ALIKE, context
    clear = (host_s < CLEAR * steps.seconds) & (steps.kind != KINDS.index("eager"))
    for at in np.flatnonzero(clear).tolist():
        alike[tuple(int(key[at]) for key in keys)].append(at)
    found = [chosen for chosen in alike.values() if len(chosen) >= LEAST_ALIKE]
    columns = {
        name: np.array([np.median(getattr(steps, name)[chosen]) for chosen in found])
        for name in Steps.__slots__
    }
    kinds = columns["kind"].astype(np.int64)
    launches = np.array([float(len(chosen)) for chosen in found])
    return Steps(**columns | {"kind": kinds, "launches": launches})


def of_ran(ran: Ran, sizes: LaunchSizes) -> Steps:
    """The steps of a run: each lasts from its start, or the end of the one before if that is later,
    until its tokens are there."""
    seconds = ran.end_s - np.maximum(ran.start_s, np.concatenate(([-np.inf], ran.end_s[:-1])))
    columns = ran.decode_tokens, ran.num_rows, ran.num_tokens, ran.kv_tokens, ran.attended, seconds
    none = np.zeros(len(ran))  # a record does not tell what its rows share
    lists = [column.tolist() for column in (*columns, none, _pairs(ran), none)]
    return steps_of(zip(*lists, strict=True), sizes)


def _pairs(ran: Ran) -> Float:
    """About the pairs of LaunchSizes.padded: as if all chunks of a step were alike."""
    chunks = np.maximum(ran.num_rows - ran.decode_tokens, 1)
    each = ran.prefill_tokens / chunks
    beyond = ran.attended - ran.kv_tokens
    return beyond * each / np.maximum(each - 1, 1) + ran.prefill_tokens * each / 2


def of_kinds(launch_s: Mapping[str, float], steps: Steps) -> Float:
    """Each step's value by its kind, 0 where there is none."""
    return np.array([launch_s.get(kind, 0.0) for kind in KINDS])[steps.kind]


def _with_waits(steps: Steps) -> Fit:
    """A fit in which steps of those kinds wait for the host that explain most by it, one after the
    other."""
    found, least = _settled(steps, {})
    while True:
        kinds = [kind for kind in WAITING if kind not in found.launch_s]
        tried = [
            _settled(steps, {**found.launch_s, kind: float(np.percentile(lasts_s, 10))})
            for kind in kinds
            if len(lasts_s := steps.seconds[steps.kind == KINDS.index(kind)])
        ]
        best, cost = min(tried, key=lambda one: one[1], default=(found, least))
        if not cost < WORTH * least:
            return found
        found, least = best, cost


def _settled(steps: Steps, launch_s: Mapping[str, float]) -> tuple[Fit, float]:
    """A fit of the device to the steps that it takes longer for than the host, and of the host to
    the others, in turn until neither moves; and its squared error."""
    on_device = np.ones(len(steps), np.bool_)
    for _ in range(ROUNDS):
        form = _fit_form(steps.part(on_device), "other")
        found = Fit({"other": form}, launch_s)
        if not launch_s:
            break
        waits = found.device_s(steps) < of_kinds(launch_s, steps)
        launch_s = {kind: _mean(steps, kind, waits, was) for kind, was in launch_s.items()}
        found = Fit({"other": form}, launch_s)
        if (waits == ~on_device).all() or waits.all():
            break
        on_device = ~waits
    return found, float(steps.launches @ np.square(found.seconds(steps) / steps.seconds - 1))


def _mean(steps: Steps, kind: str, waits: NDArray[np.bool_], before: float) -> float:
    """The value of least squared relative error to those of a kind that wait."""
    own = 1 / steps.seconds[waits & (steps.kind == KINDS.index(kind))]
    return float(own.sum() / np.square(own).sum()) if len(own) else before


def _fit_form(steps: Steps, name: str) -> Form:
    """The form of that name. The base of decodes is free, since kernels divide their work in other
    ways from one number of rows to the next; others never fall, so that one stands where the host
    hides it."""
    alone, shares = name == "decode", bool(steps.repeated.any())
    own = [term for term in OWN_TERMS[name] if shares or term != "repeat"]
    nodes, facts = _nodes(steps.num_tokens), _facts(steps)
    zero, zeros = dict.fromkeys(TERMS, 0.0), [0.0] * len(nodes)
    units = [Form(nodes, one, zero) for one in np.eye(len(nodes)).tolist()]
    units += [Form(nodes, zeros, zero | {term: 1.0}) for term in own]
    columns = np.stack([unit.seconds(*facts) for unit in units], axis=1) / steps.seconds[:, None]
    base = np.eye(len(nodes)) if alone else np.tri(len(nodes))
    columns = np.hstack([columns[:, : len(nodes)] @ base, columns[:, len(nodes) :]])
    counts = np.sqrt(steps.launches)
    costs = non_negative(columns * counts[:, None], counts)
    base_s, terms = (base @ costs[: len(nodes)]).tolist(), costs[len(nodes) :].tolist()
    found = zero | dict(zip(own, terms, strict=True))
    if not shares:
        found["repeat"] = found["kv_token"]  # as far as is known
    return Form(nodes, base_s, found)


def _nodes(tokens: Float) -> list[int]:
    """Numbers of tokens that steps have, ascending, the first and the last among them."""
    every: list[int] = np.unique(tokens).astype(int).tolist()
    found = every[:1]
    for count in every[1:]:
        if count >= APART * found[-1]:
            found.append(count)
    if found[-1] != every[-1]:
        if every[-1] < 1.25 * found[-1]:
            found.pop()
        found.append(every[-1])
    return found
