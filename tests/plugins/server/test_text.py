"""plugins/server/text.py: stop strings, and tokens for log-probabilities in step with the text.

D01 to D15 and M15 are rows of the collected cases of other servers' bugs."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugins.server.text import ChoiceText, Piece, TokenText
from tests.plugins.server.text_cases import (
    FRAGMENTS,
    KINDS,
    TEXTS,
    joined,
    run,
    table,
    table_id,
    texts,
    tokenizer,
)
from tests.plugins.server.text_tokenizers import byte_ids

STOPS = st.one_of(st.sampled_from(FRAGMENTS), TEXTS, st.text("ab .", max_size=4)).filter(bool)


def cut(text: str, stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """What `text` is before the stop string that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
def test_echo_and_answer_join_to_the_text_of_both(kind):
    @settings(max_examples=50, deadline=None)
    @given(TEXTS, st.integers(0, 12))
    def check(text, at):
        ids = tokenizer(kind).encode(text).ids
        choice = ChoiceText(table(kind), ["a"], logprobs=True)
        first = choice.echo(ids[:at])
        found, tokens = joined([first, *run(choice, ids[at:])])
        whole = tokenizer(kind).decode(ids)
        assert whole.startswith(found)
        assert (len(found) == len(whole)) == (choice.stopped is None)
        assert choice.num_tokens <= len(ids[at:])
        assert len(tokens) == len(ids[:at]) + choice.num_tokens

    check()


@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace", "smollm2"])
def test_stop_strings_cut_as_in_the_whole_text_however_it_is_split(kind):
    @settings(max_examples=100, deadline=None)
    @given(
        TEXTS,
        st.lists(STOPS, min_size=1, max_size=4),
        st.booleans(),
        st.lists(st.integers(1, 5), min_size=1),
    )
    @example("xab", ["b", "ab"], False, [1])
    @example("aab", ["ab"], False, [1])
    @example("end...", [".."], False, [1])  # D06
    def check(text, stops, include, calls):
        ids = tokenizer(kind).encode(text).ids
        choice = ChoiceText(table(kind), stops, include_stop=include, logprobs=True)
        found, tokens = joined(run(choice, ids, calls))
        whole = tokenizer(kind).decode(ids)
        assert (found, choice.stopped) == cut(whole, stops, include)
        # The tokens reported are those up to the one that completes the stop string.
        assert len(tokens) == choice.num_tokens
        if choice.stopped is None:
            assert choice.num_tokens == len(ids)
        else:
            end = len(found) + (0 if include else len(choice.stopped))
            counts = (c for c in range(len(ids)) if len(settled(kind, ids[:c])) >= end)
            assert choice.num_tokens == next(counts, len(ids))

    check()


def settled(kind: str, ids: list[int]) -> str:
    choice = ChoiceText(table(kind))
    return "".join(choice.push([token_id]).text for token_id in ids)


@settings(max_examples=100, deadline=None)
@given(st.text("ab. ", max_size=30), st.lists(st.text("ab. ", min_size=1, max_size=8), min_size=1))
def test_only_what_may_become_a_stop_string_is_held(text, stops):  # D04
    choice = ChoiceText(table("bytes"), stops)
    out = ""
    for index, token_id in enumerate(byte_ids(text.encode()), 1):
        out += choice.push([token_id]).text
        if choice.stopped is not None:
            break
        prefixes = {stop[:length] for stop in stops for length in range(len(stop) + 1)}
        held = max(len(prefix) for prefix in prefixes if text[:index].endswith(prefix))
        assert out == text[: index - held]


def test_no_character_of_a_stop_string_gets_out():  # D01
    ids = tokenizer("smollm2").encode("A red boat sails north").ids
    choice = ChoiceText(table("smollm2"), ["at sa"])
    found = texts(choice, ids)
    assert "".join(found) == "A red bo"
    assert choice.stopped == "at sa"
    assert choice.push(ids) == Piece()


def test_a_stop_inside_a_token_counts_the_token():  # D06
    ids = [table_id("llama", name) for name in ("e", "d", "...", "x")]
    choice = ChoiceText(table("llama"), [".."], logprobs=True)
    text, tokens = joined([choice.push(ids)])
    assert (text, choice.num_tokens) == ("ed", 3)
    assert tokens == [
        TokenText("e", [101], 0),
        TokenText("d", [100], 1),
        TokenText("...", [46] * 3, 2),
    ]


def test_an_unfinished_character_can_be_a_stop_string():
    choice = ChoiceText(table("bytes"), ["\ufffd"], logprobs=True)
    assert choice.push(byte_ids(b"a\xf0")) == Piece("a", [TokenText("a", [97], 0)])
    assert choice.finish() == Piece("", [TokenText(r"bytes:\xf0", [0xF0], 1)])
    assert choice.stopped == "\ufffd"


def test_empty_stop_strings_are_refused():  # D05
    with pytest.raises(ValueError, match="stop must hold strings of >= 1 character, got ''"):
        ChoiceText(table("bytes"), ["ok", ""])


def test_the_first_min_tokens_are_not_searched():
    choice = ChoiceText(table("bytes"), ["a"], min_tokens=2)
    assert texts(choice, byte_ids(b"aabaa")) == ["a", "a", "b", "", "", ""]
    assert choice.num_tokens == 4


@pytest.mark.parametrize("kind", [*KINDS, "smollm2"])
def test_tokens_do_not_depend_on_stops_or_calls_and_their_bytes_join_to_the_text(kind):  # D15, M15
    @settings(max_examples=100, deadline=None)
    @given(TEXTS, st.lists(STOPS, max_size=3), st.lists(st.integers(1, 5), min_size=1))
    def check(text, stops, calls):
        ids = tokenizer(kind).encode(text).ids
        whole, tokens = joined(run(ChoiceText(table(kind), logprobs=True), ids))
        json.dumps([token.token for token in tokens]).encode("utf-8", "strict")
        data = b"".join(bytes(token.utf8) for token in tokens)
        assert data.decode(errors="replace") == whole
        choice = ChoiceText(table(kind), stops, logprobs=True)
        plain = joined([choice.push(ids), choice.finish()])
        pieces = run(ChoiceText(table(kind), stops, logprobs=True), ids, calls)
        assert joined(pieces) == plain
        assert plain[1] == tokens[: choice.num_tokens]
        # An entry comes no earlier than its text, and no later.
        out = ""
        for piece in pieces:
            out += piece.text
            if choice.stopped is None:
                assert all(token.text_offset <= len(out) for token in piece.tokens)

    check()


def test_entries_wait_for_the_text_that_is_held():  # M15
    choice = ChoiceText(table("bytes"), ["abc"], logprobs=True)
    ids = byte_ids("xab한".encode())
    a, b = TokenText("a", [97], 1), TokenText("b", [98], 2)
    first, second, third = (TokenText(rf"bytes:\x{byte:02x}", [byte], 3) for byte in "한".encode())
    assert [choice.push([token_id]) for token_id in ids] == [
        Piece("x", [TokenText("x", [120], 0)]),
        Piece(),
        Piece(),
        Piece(),
        Piece(),
        Piece("ab한", [a, b, first, second, third]),
    ]


def test_special_tokens_have_a_name_and_no_text_where_they_are_skipped():
    end = table_id("byte_level", "<|end|>")
    choice = ChoiceText(table("byte_level"), logprobs=True)
    assert choice.push([end]) == Piece("", [TokenText("<|end|>", [], 0)])
    shown = ChoiceText(table("byte_level"), skip_special_tokens=False, logprobs=True)
    assert shown.push([end]) == Piece("<|end|>", [TokenText("<|end|>", list(b"<|end|>"), 0)])
