"""A client's request as the router keeps it: enough to go on with it elsewhere."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from core.pack import request_seed
from core.records import ChoiceRecord, RequestRecord
from core.request import Request
from plugins.mode.replicas.messages import Ask
from plugins.shared.routing import Ticket

MOST_BLAMES = 2  # deaths in a row without a token between, before a request runs alone


@dataclass(slots=True, eq=False)
class Stream:
    """request: as it came, times those of time.perf_counter(), its draws settled. record: its
    timeline, as the client sees it; choices hold the output so far.

    key, ticket: where it is now, None = nowhere. blames: see `blame`. alone: it runs, or ran, with
    nobody beside it. aborted: nobody wants it any more."""

    request: Request
    record: RequestRecord
    predicted: float
    key: int = 0
    ticket: Ticket | None = None
    blames: int = 0
    blamed_at: int = 0
    alone: bool = False
    aborted: bool = False

    @property
    def request_id(self) -> str:
        """The client's."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Output so far, of all choices."""
        return sum([len(choice.token_ids) for choice in self.record.choices])

    def open_choices(self) -> Iterator[tuple[int, ChoiceRecord]]:
        """Those that have not ended."""
        for index, choice in enumerate(self.record.choices):
            if not choice.finish_reason:
                yield index, choice

    def blame(self) -> bool:
        """Its replica died. That counts against it unless a token of it came since the death that
        last counted, which clears it; whether it must run alone from now on."""
        if self.num_tokens > self.blamed_at:
            self.blames, self.alone = 0, False
        else:
            self.blames += 1
        self.blamed_at = self.num_tokens
        return self.blames >= MOST_BLAMES

    def ask(self) -> Ask:
        """What the replica gets that it was given to: the request, with the output there is."""
        assert self.ticket is not None, "it was routed"
        return Ask(self.key, self.ticket.number, self.resumed())

    def resumed(self) -> Request:
        """The request as it goes on."""
        ended = any(choice.finish_reason for choice in self.record.choices)
        if not ended and not self.num_tokens:
            return self.request
        made = {
            index: np.array(choice.token_ids, np.int32) for index, choice in self.open_choices()
        }
        return replace(self.request, resumed=made)


def stream_of(request: Request, seed: int, predicted: float, arrival_s: float) -> Stream:
    """A request that came in. seed: the run's; what the request draws no longer depends on it.
    arrival_s: by the run's clock."""
    params = replace(request.params, seed=request_seed(seed, request))
    facts = request.request_id, request.client, arrival_s, len(request.prompt)
    record = RequestRecord(*facts, predicted_output=predicted)
    record.choices = [ChoiceRecord() for _ in range(params.n)]
    return Stream(replace(request, params=params), record, predicted)
