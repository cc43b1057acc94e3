"""One choice of a call: its tokens as text and log-probabilities, and how it ended."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.launch import TokenLogprobs
from core.request import FinishReason
from plugins.server.client import Token
from plugins.server.text import ChoiceText, Piece, TokenText
from plugins.shared.tokens import TokenTable


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probabilities; a prompt's first has none."""

    token_id: int
    text: TokenText
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Delta:
    """What one token brought a choice, or several. index: in the HTTP call. scored: empty unless
    log-probabilities were asked for. finish_reason: with the choice's last delta."""

    index: int
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, later: "Delta") -> None:
        """Append what the same choice brought next."""
        self.text += later.text
        self.scored += later.scored
        self.finish_reason = later.finish_reason

    @property
    def empty(self) -> bool:
        """Nothing that a client would see."""
        return not (self.text or self.scored or self.finish_reason)


class Choice:
    """index: in the HTTP call. logprobs: fill Delta.scored. end_hidden: an end token has no text
    (one of stop_token_ids may have some), like a stop string. num_tokens: up to the one that ends
    it or completes a stop string. finish_reason: None while it goes on. cut: a stop string was met,
    which the engine does not know of."""

    __slots__ = (
        *("_end_hidden", "_entries", "_length", "_logprobs", "_table", "_text"),
        *("cut", "finish_reason", "index", "num_tokens"),
    )

    def __init__(
        self, index: int, text: ChoiceText, table: TokenTable, logprobs: bool, end_hidden: bool
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.cut = False
        self._text = text
        self._table = table
        self._logprobs = logprobs
        self._end_hidden = end_hidden
        self._length = 0  # characters out
        self._entries: deque[tuple[int, TokenLogprobs | None]] = deque()

    def echo(self, prompt: Sequence[int]) -> Delta:
        """The prompt, before any token; its log-probabilities are not known yet."""
        if self._logprobs:
            self._entries.extend((token_id, None) for token_id in prompt)
        return self._delta(self._text.echo(prompt))

    def take(self, token: Token) -> Delta:
        """The next token; none may come after the choice has finished."""
        self.num_tokens += 1
        if self._logprobs:
            self._entries.append((token.token_id, token.logprobs))
        ended = token.finish_reason
        if ended == FinishReason.stop.value and self._end_hidden:
            return self._hide(token.token_id)
        delta = self._delta(self._text.push((token.token_id,)))
        if self._text.stopped is None and not ended:
            return delta
        self.cut = not ended
        delta.add(self.finish(ended))
        return delta

    def finish(self, reason: str) -> Delta:
        """No more tokens come: what is still held."""
        delta = self._delta(self._text.finish())
        if self._text.stopped is not None:
            reason = FinishReason.stop.value
        self.finish_reason = delta.finish_reason = reason
        return delta

    def _hide(self, token_id: int) -> Delta:
        entry = self._entries.pop() if self._logprobs else None
        delta = self.finish(FinishReason.stop.value)
        if entry and self._text.stopped is None:
            text = TokenText(self._table.token_text(token_id), [], self._length)
            delta.scored.append(Scored(token_id, text, entry[1]))
        return delta

    def _delta(self, piece: Piece) -> Delta:
        self._length += len(piece.text)
        scored = []
        for text in piece.tokens:
            token_id, entry = self._entries.popleft()
            scored.append(Scored(token_id, text, entry))
        return Delta(self.index, piece.text, scored)
