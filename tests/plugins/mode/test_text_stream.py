"""plugins/mode/text_stream.py on byte-level and sentencepiece-like tokenizers."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from plugins.mode.text_stream import REPLACEMENT, TextStream

TEXTS = [
    "👨‍👩‍👧 family 🇩🇪",
    "안녕하세요 세계",
    "日本語 テスト",
    "Hello world  two  spaces",
    " lead",
]


def byte_level() -> Tokenizer:
    """One token a byte, as byte-level BPE has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words that carry their space, everything else as bytes; the first space is dropped."""
    words = ["▁Hello", "▁world", "▁", "▁two", "▁spaces", "▁lead", "▁family", "x"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {word: index for index, word in enumerate([*names, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


Decode = Callable[[Sequence[int]], str]


def decode_of(tokenizer: Tokenizer) -> Decode:
    return lambda ids: tokenizer.decode(list(ids))


BYTES, PIECES = byte_level(), sentencepiece()


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    stream = TextStream(decode)
    return [*[stream.push(token) for token in ids], stream.flush()]


def byte_ids(data: bytes) -> list[int]:
    """Tokens of raw bytes, whether or not they are a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    names = dict(zip(printable, map(chr, printable), strict=True))
    names |= {byte: chr(256 + index) for index, byte in enumerate(rest)}
    return [BYTES.token_to_id(names[byte]) for byte in data]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_split_over_tokens_never_show_in_halves(text: str) -> None:
    found = pieces(decode_of(BYTES), byte_ids(text.encode()))
    assert "".join(found) == text
    assert not any(REPLACEMENT in piece for piece in found)


def test_spaces_survive_a_tokenizer_that_drops_the_first_one() -> None:
    names = ["▁Hello", "▁world", "▁", "▁two", "▁", "▁spaces"]
    ids = [PIECES.token_to_id(name) for name in names]
    assert pieces(decode_of(PIECES), ids) == ["Hello", " world", " ", " two", " ", " spaces", ""]


def test_text_goes_on_after_a_split_character() -> None:
    found = pieces(decode_of(BYTES), byte_ids("é".encode() + b"a" * 50))
    assert found[:3] == ["", "é", "a"]
    assert "".join(found) == "é" + "a" * 50


def test_pending_bytes_come_out_once_at_the_end() -> None:
    found = pieces(decode_of(BYTES), byte_ids(b"ab" + "é".encode()[:1]))
    assert found == ["a", "b", "", REPLACEMENT]


def test_broken_bytes_in_the_middle_settle_with_the_next_character() -> None:
    found = pieces(decode_of(BYTES), byte_ids("é".encode()[:1] + b" x"))
    assert found == ["", REPLACEMENT + " ", "x", ""]


def cut_bytes(text: str) -> str:
    """Bytes cut off at the end count as one replacement character."""
    settled = text.rstrip(REPLACEMENT)
    return text if settled == text else settled + REPLACEMENT


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_joined_pieces_equal_the_whole_for_any_bytes(data: bytes) -> None:
    ids = byte_ids(data)
    assert "".join(pieces(decode_of(BYTES), ids)) == cut_bytes(decode_of(BYTES)(ids))


WORDS = ["▁Hello", "▁world", "▁", "▁two", "▁spaces", "x"]
UNITS = st.one_of(
    st.sampled_from(WORDS).map(lambda word: [PIECES.token_to_id(word)]),
    st.sampled_from("a \né한🙂").map(lambda character: list(character.encode())),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(UNITS, max_size=20), st.integers(0, 3))
def test_joined_pieces_equal_the_whole_for_words_and_byte_fallback(
    units: list[list[int]], cut: int
) -> None:
    ids = [token for unit in units for token in unit]
    whole = decode_of(PIECES)(ids)
    assert "".join(pieces(decode_of(PIECES), ids)) == whole
    tail = list("🙂".encode())[:cut]  # cut off by the token limit
    assert "".join(pieces(decode_of(PIECES), ids + tail)) == whole + REPLACEMENT * bool(cut)
