"""plugins/shared/tokens.py: whole characters, no space lost or added, strings of tokens.

D07 to D15 are rows of the collected cases of other servers' bugs."""

import json

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugins.server.text import ChoiceText
from plugins.shared.tokens import REPLACEMENT, TokenTable
from tests.plugins.server import text_tokenizers as built
from tests.plugins.server.text_cases import KINDS, TEXTS, table, table_id, texts, tokenizer
from tests.plugins.server.text_tokenizers import byte_ids


class Slow:
    """A tokenizer with decode alone, such as one of mistral-common; counts the tokens decoded."""

    all_special_ids = (0, 1)

    def __init__(self, kind: str) -> None:
        self._tokenizer = tokenizer(kind)
        self.num_decoded = 0

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert clean_up_tokenization_spaces is False
        self.num_decoded += len(ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id):
        return self._tokenizer.id_to_token(token_id)


@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
def test_joined_pieces_are_the_decoded_tokens(kind):
    @settings(max_examples=80, deadline=None)
    @given(TEXTS, st.booleans())
    @example("Hello world  two  spaces", True)
    def check(text, skip):
        ids = tokenizer(kind).encode(text).ids
        found = texts(ChoiceText(table(kind), skip_special_tokens=skip), ids)
        assert "".join(found) == tokenizer(kind).decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "metaspace", "word_piece", "smollm2"])
def test_joined_pieces_are_the_decoded_tokens_of_any_ids(kind):
    size = tokenizer(kind).get_vocab_size()
    low = 258 if kind == "gemma" else 0  # its bytes that are no text count one by one there

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.integers(low, size - 1), max_size=12), st.booleans())
    def check(ids, skip):
        found = texts(ChoiceText(table(kind), skip_special_tokens=skip), ids)
        assert "".join(found) == tokenizer(kind).decode(ids, skip_special_tokens=skip)

    check()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes_decode_as_the_tokenizer_decodes_them(data):
    ids = byte_ids(data)
    assert "".join(texts(ChoiceText(table("bytes")), ids)) == tokenizer("bytes").decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "llama", "smollm2"])
def test_split_characters_never_show_in_halves(kind):  # D07
    text = "👨‍👩‍👧 family 🇩🇪 👩‍🚀 한국어 日本語"
    ids = tokenizer(kind).encode(text).ids
    found = texts(ChoiceText(table(kind)), ids)
    assert "".join(found) == text
    assert len(ids) > len(text) / 2
    assert not any(REPLACEMENT in piece for piece in found)


def test_text_goes_on_after_a_split_character():  # D09
    found = texts(ChoiceText(table("bytes")), byte_ids("é".encode() + b"a" * 50))
    assert found == ["", "é", *"a" * 50, ""]


def test_half_a_character_settles_with_the_next_or_at_the_end():  # D11
    half = "🙂".encode()[:3]
    assert texts(ChoiceText(table("bytes")), byte_ids(half + b" x"))[3:] == ["\ufffd ", "x", ""]
    assert texts(ChoiceText(table("bytes")), byte_ids(b"a" + half)) == ["a", "", "", "", "\ufffd"]
    llama = [table_id("llama", "▁He"), *(table_id("llama", f"<0x{byte:02X}>") for byte in half)]
    assert texts(ChoiceText(table("llama")), llama) == ["He", "", "", "", "\ufffd"]
    assert "".join(texts(ChoiceText(table("llama")), [*llama, llama[0]])) == "He\ufffd He"


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_the_first_space_stays_where_a_text_goes_on(kind):  # D12
    ids = [table_id(kind, "▁He"), table_id(kind, "llo")]
    assert texts(ChoiceText(table(kind)), ids) == ["He", "llo", ""]
    assert texts(ChoiceText(table(kind), prompt_ids=ids), ids) == [" He", "llo", ""]
    start = [tokenizer(kind).token_to_id("<s>")]  # no text before: still the first
    assert texts(ChoiceText(table(kind), prompt_ids=start), ids) == ["He", "llo", ""]


@pytest.mark.parametrize("cut_at", [1, 2])
@pytest.mark.parametrize("kind", ["bytes", "llama", "window"])
def test_a_character_cut_by_the_prompt_is_completed(kind, cut_at):
    used = TokenTable(Slow("bytes")) if kind == "window" else table(kind)
    ids = tokenizer("bytes" if kind == "window" else kind).encode("a" * 20 + "한b").ids
    prompt, rest = ids[: -4 + cut_at], ids[-4 + cut_at :]
    assert "".join(texts(ChoiceText(used, prompt_ids=prompt), rest)) == "한b"


@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
def test_every_id_has_a_string_that_json_can_hold(kind):  # D15
    size = tokenizer(kind).get_vocab_size()
    for token_id in range(size + 3):
        text = table(kind).token_text(token_id)
        assert text
        assert json.loads(json.dumps(text).encode("utf-8", "strict")) == text
    assert table(kind).token_text(size) == f"token_id:{size}"
    assert table(kind).token_bytes(size) == b""


def test_strings_of_tokens_keep_their_space_whatever_the_decoder_does_with_the_first():
    assert table("llama").token_text(table_id("llama", "▁He")) == " He"
    assert table("metaspace").token_text(table_id("metaspace", "▁He")) == " He"
    assert table("word_piece").token_text(table_id("word_piece", "walk")) == " walk"
    assert table("word_piece").token_text(table_id("word_piece", "##ing")) == "ing"
    assert table("llama").token_bytes(table_id("llama", "<0xE2>")) == b"\xe2"


def test_a_transformers_tokenizer_gives_the_same_table_as_its_backend():
    wrapped = TokenTable(transformers.PreTrainedTokenizerFast(tokenizer_object=built.llama()))
    ids = tokenizer("llama").encode("Hello 👩‍🚀 the  end").ids
    assert texts(ChoiceText(wrapped), ids) == texts(ChoiceText(table("llama")), ids)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
@example(5 * REPLACEMENT + "👨‍👩‍👧")  # a window is full within a character
@example(11 * REPLACEMENT + "é")
@example(20 * REPLACEMENT)
def test_a_tokenizer_without_a_backend_is_decoded_in_a_window(text):
    ids = tokenizer("llama").encode(text).ids
    found = "".join(texts(ChoiceText(TokenTable(Slow("llama"))), ids))
    whole = tokenizer("llama").decode(ids)
    settled = whole.rstrip(REPLACEMENT)
    assert found.startswith(settled)
    # At the end not told from a cut character: some of them count as one.
    rest = len(whole) - len(settled)
    assert found[len(settled) :] in [REPLACEMENT * count for count in range(min(rest, 1), rest + 1)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=20), TEXTS.map(str.encode)), max_size=4))
@example([b"\x80" * 15, "é".encode()])  # a window is full within a character, whose bytes
@example([b"\x80" * 13, "😀".encode()])  # count as one
def test_a_window_loses_no_character_after_bytes_that_are_none(parts):
    data, slow = b"".join(parts), Slow("bytes")
    slow.all_special_ids = ()
    found = "".join(texts(ChoiceText(TokenTable(slow)), byte_ids(data)))
    whole = data.decode(errors="replace")
    assert found.replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")


@pytest.mark.parametrize("name", ["▁He", "<0xF0>", "</s>", "▁"])
def test_a_window_stays_small_whatever_comes(name):
    slow = Slow("llama")
    choice = ChoiceText(TokenTable(slow))
    ids = [table_id("llama", "▁He"), *[table_id("llama", name)] * 1000]
    assert "".join(texts(choice, ids)).startswith("He")
    assert slow.num_decoded < 40 * len(ids)
