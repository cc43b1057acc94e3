"""Token ids to text, one token at a time: never half a character, never a lost space."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no complete character (yet)

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The pieces of `push` and the last one of `flush`, joined, are `decode` of all tokens; only
    bytes cut off at the end count as one replacement character, however many they are.

    A window of tokens is decoded twice, without and with the new token, and the difference is the
    new text: decoders treat the first token of a text specially (sentencepiece drops its space), so
    a token must not be decoded alone. Text that ends in a replacement character is held until more
    bytes settle it. Text that is out is never taken back, even by a decoder that turns good bytes
    into replacement characters when bad ones follow (byte fallback does). decode: ids -> text, for
    example `lambda ids: tokenizer.decode(ids, skip_special_tokens=True)`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text is out
        self._text = ""  # their text

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._text):
            return ""
        piece = text[len(self._text) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self._text = self._decode(self._window)
        return piece

    def flush(self) -> str:
        """What is still held. Call it once, after the last token."""
        held = self._decode(self._window)[len(self._text) :]
        settled = held.rstrip(REPLACEMENT)
        return held if settled == held else settled + REPLACEMENT
