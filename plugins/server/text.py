"""The text of one choice as its tokens come: stop strings cut, log-probability tokens in step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from plugins.shared.tokens import TokenTable


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token for log-probabilities. token: its own string, TokenTable.token_text. utf8: the bytes
    that it adds to the text, [] for a skipped special token; those of all tokens join to the text
    (before a stop cuts it). text_offset: characters of the choice's text before it."""

    token: str
    utf8: list[int]
    text_offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is out for good, and the tokens whose text is now out to the end, in order. A
    token's entry comes with the piece that brings its last character; a stop brings all."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)


class ChoiceText:
    """The text of one choice. The pieces of `echo`, `push` and `finish`, joined, are the text that
    a plain answer has: both are made here, and neither depends on how tokens come in calls.

    stop: the text ends before the first stop string to become complete; of several that end at one
    character the longest counts. What could still become one is held back, and no more. The token
    that completes it is the last one counted and reported; later ones are ignored, as in vLLM.
    include_stop: leave the stop string in the text. prompt_ids: what the text goes on from (its
    first token keeps the space that would be lost at the start of a text); leave them out to `echo`
    them. min_tokens: text of the first ones is not searched. logprobs: fill Piece.tokens.

    stopped: the stop string that was met. num_tokens: those pushed, up to the one that completes
    it. Raises ValueError for an empty stop string.
    """

    def __init__(
        self,
        table: TokenTable,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
        logprobs: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._table = table
        self._decoder = table.decoder(skip_special_tokens, prompt_ids)
        self._finder = _StopFinder(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._held = ""  # decoded, not out
        self._length = 0  # characters decoded
        self._waiting: deque[tuple[int, TokenText]] = deque()  # with the length that frees it

    def echo(self, prompt_ids: Sequence[int]) -> Piece:
        """The prompt as text, before any `push`; it is not searched and not counted."""
        return self._piece([self._decode(token_id) for token_id in prompt_ids])

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next tokens."""
        texts: list[str] = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            text = self._decode(token_id)
            if self._finder is not None and self.num_tokens > self._min_tokens:
                text = self._search(self._finder, text)
            texts.append(text)
        return self._piece(texts)

    def finish(self) -> Piece:
        """What is still held, after the last token; nothing after a stop."""
        if self.stopped is not None:
            return Piece()
        text = self._decoder.flush()
        self._length += len(text)
        if self._finder is not None:
            text = self._search(self._finder, text)
        text, self._held = text + self._held, ""
        return self._piece([text], last=True)

    def _decode(self, token_id: int) -> str:
        start = self._length
        text = self._decoder.push(token_id)
        self._length += len(text)
        if self._logprobs:
            token = TokenText(self._table.token_text(token_id), list(self._decoder.added), start)
            self._waiting.append((self._length + self._decoder.pending, token))
        return text

    def _search(self, finder: "_StopFinder", text: str) -> str:
        """The text that is out with this one. Sets `stopped`."""
        found = finder.push(text)
        text = self._held + text
        if found is None:
            cut = len(text) - finder.held
            self._held = text[cut:]
            return text[:cut]
        self.stopped, past = found
        self._held = ""
        cut = len(text) - past
        return text[: cut if self._include_stop else cut - len(self.stopped)]

    def _piece(self, texts: list[str], last: bool = False) -> Piece:
        tokens: list[TokenText] = []
        out = self._length - len(self._held)
        last = last or self.stopped is not None
        while self._waiting and (last or self._waiting[0][0] <= out):
            tokens.append(self._waiting.popleft()[1])
        return Piece("".join(texts), tokens)


class _StopFinder:
    """Looks for all stop strings at once, a character at a time (Aho and Corasick, 1975).

    State i stands for a prefix of a stop string: the longest that the text ends with. held: its
    length, the characters that may still become a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._length = [0]
        self._match: list[str | None] = [None]  # the longest stop string that the prefix ends with
        self._state = 0
        for word in stop:
            if not word:
                raise ValueError("stop must hold strings of >= 1 character, got ''")
            self._match[self._add(word)] = word
        self._shorter = [0] * len(self._next)  # the next longest prefix that this one ends with
        self._link()

    @property
    def held(self) -> int:
        return self._length[self._state]

    def push(self, text: str) -> tuple[str, int] | None:
        """The stop string that becomes complete first, and the characters of `text` behind it."""
        for index, character in enumerate(text):
            self._state = self._step(self._state, character)
            word = self._match[self._state]
            if word is not None:
                return word, len(text) - index - 1
        return None

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _add(self, word: str) -> int:
        state = 0
        for character in word:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._length.append(self._length[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        return state

    def _link(self) -> None:
        states = deque(self._next[0].values())  # breadth first: shorter prefixes are linked before
        while states:
            state = states.popleft()
            for character, longer in self._next[state].items():
                self._shorter[longer] = self._step(self._shorter[state], character)
                if self._match[longer] is None:
                    self._match[longer] = self._match[self._shorter[longer]]
                states.append(longer)
