"""What token ids add to a text: their bytes, their names, and decoders that take one at a time."""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import pre_tokenizers

REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no character (yet)
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
PROMPT_TAIL = 8  # tokens of the prompt that a window starts with: one would do but for bytes
WINDOW_HELD = 16  # tokens a window holds for a character to complete; no character takes more
CHARACTER_BYTES = 4  # at most

ToBytes = Callable[[str], bytes]


class Decoder(Protocol):
    """Token ids to text, one at a time: never half a character, never a lost or added space."""

    @property
    def pending(self) -> bool:
        """Whether tokens taken so far have begun a character that is not out."""

    @property
    def added(self) -> bytes:
        """What the latest token added to the text, UTF-8, perhaps part of a character."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly empty."""

    def flush(self) -> str:
        """What is pending, an unfinished character as one replacement character. Call it last."""


class TokenTable:
    """A tokenizer's ids as bytes, filled as ids are met. Make one for each tokenizer.

    tokenizer: a transformers tokenizer, or one of the tokenizers library. Byte-level BPE and
    sentencepiece with byte fallback have bytes for each token that join to the text; for any other
    decoder the text of a token is found by decoding it behind others.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None and hasattr(tokenizer, "get_added_tokens_decoder"):
            self._backend = tokenizer
        self._special = _special_ids(tokenizer, self._backend)
        self._to_bytes, self._strip = _byte_rule(self._backend)
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """What a token adds to a text that goes on, UTF-8, perhaps part of a character. Empty for
        special tokens that are skipped, and for ids without a token."""
        if skip_special_tokens and token_id in self._special:
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        r"""A token's own string for log-probabilities: `bytes:\xf0\x9f` where it is no whole number
        of characters (as OpenAI's completions have it), a special token's name, `token_id:7` for an
        id without a token."""
        data = self.token_bytes(token_id, skip_special_tokens=False)
        if not data:
            return self._name(token_id) or f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decoder(self, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> Decoder:
        """A decoder for text that goes on where `prompt_ids` end."""
        if self._to_bytes is not None:
            return _ByteDecoder(self, self._strip, skip_special_tokens, prompt_ids)
        skipped = self._special if skip_special_tokens else frozenset()
        return _WindowDecoder(self._decode, skipped, prompt_ids)

    def _find_bytes(self, token_id: int) -> bytes:
        name = self._name(token_id)
        if name is None:
            return b""
        if self._to_bytes is not None:
            return self._to_bytes(name)
        if found := BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(found[1])
        once = self._decode([token_id])  # a text's first token may lose its space, the second not
        return self._decode([token_id, token_id])[len(once) :].encode(errors="replace")

    def _name(self, token_id: int) -> str | None:
        if self._backend is not None:
            return self._backend.id_to_token(token_id)  # type: ignore[no-any-return]
        return self._tokenizer.convert_ids_to_tokens(token_id)  # type: ignore[no-any-return]

    def _decode(self, ids: Sequence[int]) -> str:
        # Never cleaned up: that moves spaces of text that is out.
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options))


class _ByteDecoder:
    def __init__(
        self, table: TokenTable, strip: int, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._token_bytes = table.token_bytes
        self._skip = skip_special_tokens
        self._strip = strip  # spaces that a text loses at its start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.added = b""
        self._start(prompt_ids)

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        self.added = self._stripped(self._token_bytes(token_id, self._skip))
        return self._utf8.decode(self.added)

    def flush(self) -> str:
        return self._utf8.decode(b"", True)

    def _stripped(self, data: bytes) -> bytes:
        while self._strip and data:
            if not data.startswith(b" "):
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return data

    def _start(self, prompt_ids: Sequence[int]) -> None:
        for token_id in prompt_ids:
            if not self._strip:
                break
            self._stripped(self._token_bytes(token_id, self._skip))
        tail = b""  # a character that the prompt ends within goes on
        for token_id in reversed(prompt_ids):
            tail = self._token_bytes(token_id, self._skip) + tail
            if len(tail) >= 3:
                break
        self._utf8.decode(tail)


class _WindowDecoder:
    """Decodes a window of tokens without and with the new one; the difference is the new text. It
    cannot tell broken bytes from characters U+FFFD: at the end all of them count as one."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped: frozenset[int],
        prompt_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        prompt = [int(token_id) for token_id in prompt_ids if token_id not in skipped]
        self._window = prompt[-PROMPT_TAIL:]
        self._shown = len(self._window)  # tokens of the window whose text is out
        self._text = decode(self._window).rstrip(REPLACEMENT)  # their text
        self.added = b""

    @property
    def pending(self) -> bool:
        return len(self._window) > self._shown

    def push(self, token_id: int) -> str:
        self.added = b""
        if token_id in self._skipped:
            return ""
        self._window.append(int(token_id))
        text = self._decode(self._window)
        held = 0
        if text.endswith(REPLACEMENT) or len(text) <= len(self._text):
            if len(self._window) - self._shown < WINDOW_HELD:
                return ""
            text, held = self._cut()
        piece = text[len(self._text) :]
        self._window = self._window[self._shown :]
        self._shown = len(self._window) - held
        self._text = self._decode(self._window[: self._shown])
        self.added = piece.encode(errors="replace")
        return piece

    def _cut(self) -> tuple[str, int]:
        """The text of a full window, and how many tokens at its end may have begun a character and
        are left out. Of bytes that are cut within one, all that come before count as broken, too,
        or it counts as one: in both cases the text without these tokens is shorter."""
        ends = range(CHARACTER_BYTES)
        texts = [self._decode(self._window[: len(self._window) - end]) for end in ends]
        lens = [len(text) for text in texts]
        held = min(ends, key=lambda end: (lens[end] < len(self._text), lens[end] + (end > 0), -end))
        return texts[held], held

    def flush(self) -> str:
        held = self._decode(self._window)[len(self._text) :]
        settled = held.rstrip(REPLACEMENT)
        return held if settled == held else settled + REPLACEMENT


def _special_ids(tokenizer: Any, backend: Any) -> frozenset[int]:
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_rule(backend: Any) -> tuple[ToBytes | None, int]:
    """How a token's name becomes the bytes that it adds, None if that depends on its neighbours;
    and how many spaces the start of a text loses."""
    if backend is None or backend.decoder is None:
        return None, 0
    steps = json.loads(backend.decoder.__getstate__())
    steps = steps["decoders"] if steps["type"] == "Sequence" else [steps]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level(), 0
    replaced = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replaced.append((step["pattern"]["String"], step["content"]))
    types = [step["type"] for step in steps]
    if types == ["ByteFallback", "Fuse"]:
        return _byte_fallback(replaced), 0
    if types == ["ByteFallback", "Fuse", "Strip"]:
        strip = steps[2]
        if strip["content"] == " " and strip["stop"] == 0:
            return _byte_fallback(replaced), strip["start"]
    return None, 0


def _byte_level() -> ToBytes:
    byte_of = _byte_of_character()

    def to_bytes(name: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in name])
        except KeyError:  # an added token with characters outside the alphabet stands as it is
            return name.encode()

    return to_bytes


def _byte_fallback(replaced: Sequence[tuple[str, str]]) -> ToBytes:
    def to_bytes(name: str) -> bytes:
        for pattern, content in replaced:
            name = name.replace(pattern, content)
        found = BYTE_TOKEN.fullmatch(name)
        return bytes.fromhex(found[1]) if found else name.encode()

    return to_bytes


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    rest = iter(range(256, 512))
    return {(chr(byte) if chr(byte) in alphabet else chr(next(rest))): byte for byte in range(256)}
