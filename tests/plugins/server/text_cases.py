"""What the tests of text share: tokenizers by name, texts to split, a choice driven to its end."""

import itertools
from functools import cache

import transformers
from hypothesis import strategies as st
from tokenizers import Tokenizer

from plugins.model.smollm2_files import model_folder
from plugins.server.text import ChoiceText, Piece, TokenText
from plugins.shared.tokens import TokenTable
from tests.plugins.server import text_tokenizers as built

KINDS = {
    "bytes": built.bytes_alone,
    "byte_level": built.byte_level,
    "llama": built.llama,
    "gemma": lambda: built.llama(strip=0),
    "metaspace": built.metaspace,
    "word_piece": built.word_piece,
}
EMOJI = [
    "👨‍👩‍👧",
    "🇩🇪",
    "👩‍🚀",
    "안녕하세요",
    "한",
    "日本語",
    "e\u0301",
    "o\u0302\u0323",
    "é",
    "²",
    "\ufffd",
]
WORDS = [" ", "  ", "    ", "\n", "\n\n", "\t", "...", "Hello", " the", " walking", "x", ".", "'s"]
FRAGMENTS = [*EMOJI, *WORDS, "두 words", "a", "b"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "smollm2":
        return transformers.AutoTokenizer.from_pretrained(model_folder(False)).backend_tokenizer
    return KINDS[kind]()


@cache
def table(kind: str) -> TokenTable:
    return TokenTable(tokenizer(kind))


def table_id(kind: str, name: str) -> int:
    found = tokenizer(kind).token_to_id(name)
    assert found is not None
    return found


def run(choice: ChoiceText, ids: list[int], calls: list[int] | None = None) -> list[Piece]:
    """Pieces of `ids` pushed in calls of these sizes in turn, one by one if not given."""
    sizes, pieces, start = itertools.cycle(calls or [1]), [], 0
    while start < len(ids):
        size = next(sizes)
        pieces.append(choice.push(ids[start : start + size]))
        start += size
    return [*pieces, choice.finish()]


def texts(choice: ChoiceText, ids: list[int]) -> list[str]:
    return [piece.text for piece in run(choice, ids)]


def joined(pieces: list[Piece]) -> tuple[str, list[TokenText]]:
    return "".join(piece.text for piece in pieces), [t for piece in pieces for t in piece.tokens]
