"""Numbers of all live sequences in one structure of arrays, and read-only views for policies.

An id is `serial << SLOT_BITS | slot`: unique for the whole run; `id & SLOT_MASK` is the index."""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from core.errors import InvariantError
from core.recent import RecentTokens
from core.request import SLOT_BITS, SLOT_MASK, Request, Sequence

if TYPE_CHECKING:
    from core.records import ChoiceRecord

Slots = NDArray[np.int64]


def some(mask: NDArray[np.bool_]) -> bool:
    """Whether an entry of a mask is true: of a few faster than np.any, of many as fast."""
    return b"\1" in mask.tobytes()


class State:
    """Where a sequence stands. DONE slots are free for reuse. DRAINING: its last token is in
    flight, pages are released, its row is not. Numbers: an IntEnum makes numpy ten times slower."""

    DONE, WAITING, RUNNING, DRAINING = range(4)


class EndTokens:
    """Which token ids stop a sequence: none, the model's, or a set of its own (stop_token_ids)."""

    NONE, MODEL, OWN = range(3)


FACTS: dict[str, type[np.generic]] = {  # what policies may see
    "id": np.int64,
    "arrival_s": np.float64,
    "arrival_order": np.int64,  # tie-break: the order of submission
    "prompt": np.int32,  # prompt tokens
    "known": np.int32,  # prompt + committed generated tokens
    "computed": np.int32,  # tokens whose KV is stored or in a launched step
    "in_flight": np.int32,  # sampled tokens launched and not yet committed
    "max_output": np.int32,  # the client's max_tokens, at most what the model's length leaves
    "pages_held": np.int32,
    "pages_shared": np.int32,  # held pages that the prefix cache owns: a locked prefix
    "priority": np.int32,  # smaller is more urgent
    "client": np.int32,  # labels, numbered as they came
    "session": np.int32,
    "deadline_s": np.float64,  # inf = none
    "preemptions": np.int32,
    "forks": np.int32,  # choices that will start from its prompt's pages
    "admitted_order": np.int64,  # counts admissions; the last admitted has the highest
    "last_step": np.int64,  # last step that ran it; -1 = never
    "predicted_output": np.float64,  # the length predictor's answer at arrival
}
DERIVED: dict[str, Callable[["RequestTable"], NDArray[Any]]] = {  # and what follows from it
    "generated": lambda rows: rows.known - rows.prompt,  # committed output tokens
    "emitted": lambda rows: rows.known + rows.in_flight - rows.prompt,  # those in flight too
    # tokens to compute before the next sample: 1 for a decoding sequence
    "remaining": lambda rows: rows.known + rows.in_flight - rows.computed,
    # pages no cache owns; cached ones become evictable besides
    "pages_freed_if_preempted": lambda rows: rows.pages_held - rows.pages_shared,
    # output tokens still expected, float64: the prediction, >= 1, within the limit
    "predicted_remaining": lambda rows: np.minimum(
        np.maximum(rows.predicted_output - rows.emitted, 1.0),
        np.maximum(rows.max_output - rows.emitted, 0.0),
    ),
}
PRIVATE: dict[str, type[np.generic]] = {
    "state": np.int8,
    "length_limit": np.int32,  # known tokens at which it really ends: the truth, if forced
    "pages_published": np.int32,  # leading pages already offered to the cache
    "computed_max": np.int32,  # most tokens ever computed: below it, computing is recomputing
    "computed_total": np.int64,  # tokens computed so far, repeats included
    "recomputed_total": np.int64,  # of them those below computed_max at the time
    "row": np.int32,
    "last_token": np.int32,  # the latest known token
    "end_tokens": np.int8,  # which ids stop it: an EndTokens
}


class SequenceTable:
    """Columns over slots, grown by doubling. The core alone writes.

    max_model_len bounds the output columns: a client may ask for more tokens than int32 holds."""

    def __init__(self, max_model_len: int, capacity: int = 64) -> None:
        self._max_model_len = max_model_len
        self.columns: dict[str, NDArray[Any]] = {}
        for name, dtype in (FACTS | PRIVATE).items():
            self._bind(name, np.zeros(capacity, dtype))
        self.sequences: list[Sequence | None] = [None] * capacity
        self.recent = RecentTokens(capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self._serial = 0
        self._labels: dict[str, int] = {}

    if TYPE_CHECKING:  # columns are attributes, rebound when the table grows

        def __getattr__(self, name: str) -> NDArray[Any]: ...

    def __len__(self) -> int:
        """Live sequences."""
        return len(self.sequences) - len(self._free)

    def add(
        self, request: Request, choice: int, record: "ChoiceRecord", predicted_output: float
    ) -> Sequence:
        """Enter one choice of a request as WAITING; O(known tokens)."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._serial += 1
        made = request.resumed.get(choice, request.prompt[:0])
        known = np.concatenate((request.prompt, made), dtype=np.int32)
        tokens, prompt = array("i", known.tobytes()), len(request.prompt)
        number, key = (self._serial << SLOT_BITS) | slot, (request.request_id, choice)
        sequence = Sequence(number, key, request, choice, record, tokens)
        room = self._max_model_len - prompt
        values = {
            "id": sequence.id,
            "state": State.WAITING,
            "arrival_s": request.arrival_s,
            "arrival_order": self._serial,
            "prompt": prompt,
            "known": len(tokens),
            "max_output": min(request.params.max_tokens, room),
            "length_limit": prompt + min(request.output_limit, room),
            "priority": request.priority,
            "client": self._labels.setdefault(request.client, len(self._labels)),
            "session": self._labels.setdefault(request.session, len(self._labels)),
            "deadline_s": np.inf if request.deadline_s is None else request.deadline_s,
            "last_step": -1,
            "predicted_output": predicted_output,
            "row": -1,
            "last_token": int(known[-1]),
            "end_tokens": _end_tokens(request),
        }
        for name, column in self.columns.items():
            column[slot] = values.get(name, 0)
        self.sequences[slot] = sequence
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Free the slot; the id never comes back."""
        if self.get(sequence.id) is not sequence:
            raise InvariantError(f"sequence {sequence.id} is not in the table")
        self.recent.write_out(sequence)
        slot = sequence.slot
        self.columns["state"][slot] = State.DONE
        self.columns["id"][slot] = 0
        self.sequences[slot] = None
        self._free.append(slot)

    def get(self, id: int) -> Sequence | None:
        """The live sequence of an id, or None."""
        slot = id & SLOT_MASK
        if slot >= len(self.sequences):
            return None
        sequence = self.sequences[slot]
        return sequence if sequence is not None and sequence.id == id else None

    def of(self, id: int) -> Sequence:
        """The live sequence of an id that is known to be live."""
        return self.at(id & SLOT_MASK)

    def at(self, slot: int) -> Sequence:
        """The live sequence in a slot."""
        sequence = self.sequences[slot]
        if sequence is None:
            raise InvariantError(f"slot {slot} is empty")
        return sequence

    def tokens(self, sequence: Sequence) -> "array[int]":
        """All known token ids; times and steps in its record are complete too."""
        self.recent.write_out(sequence)
        return sequence.tokens

    def token_array(
        self, sequence: Sequence, start: int = 0, stop: int | None = None
    ) -> NDArray[np.int32]:
        """A copy of them, or of a part."""
        return np.frombuffer(self.tokens(sequence)[start:stop], np.int32)

    def view(self, slots: Slots) -> "RequestTable":
        """Read-only columns of `slots`, each gathered on first use."""
        return RequestTable(self, slots)

    def _bind(self, name: str, column: NDArray[Any]) -> None:
        self.columns[name] = column
        setattr(self, name, column)

    def _grow(self) -> None:
        old = len(self.sequences)
        if old * 2 > SLOT_MASK + 1:
            raise InvariantError(f"more than {SLOT_MASK + 1} live sequences")
        for name, column in list(self.columns.items()):
            self._bind(name, np.concatenate([column, np.zeros(old, column.dtype)]))
        self.sequences.extend([None] * old)
        self.recent.double()
        self._free.extend(range(2 * old - 1, old - 1, -1))


class RequestTable:
    """What a policy sees of a set of sequences: FACTS and DERIVED as attributes, one numpy array
    each, all of one length. `generated` counts committed tokens only: use `emitted` where a
    decision must not depend on whether launches overlap."""

    def __init__(self, table: SequenceTable, slots: Slots) -> None:
        self._table = table
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __getattr__(self, name: str) -> NDArray[Any]:
        """A fact's column, read-only, gathered on first use."""
        if name in FACTS:
            column = self._table.columns[name][self._slots]
        elif name in DERIVED:
            column = DERIVED[name](self)
        else:
            raise AttributeError(f"no fact {name!r}; there are {', '.join([*FACTS, *DERIVED])}")
        column.setflags(write=False)
        self.__dict__[name] = column
        return column


def _end_tokens(request: Request) -> int:
    if request.forced_output is not None:
        return EndTokens.NONE
    if request.params.stop_token_ids:
        return EndTokens.OWN
    return EndTokens.NONE if request.params.ignore_eos else EndTokens.MODEL
