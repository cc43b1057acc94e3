"""Tokenizers of the kinds that decoders differ by, small and built here."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from plugins.shared.tokens import TokenTable

BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "walking"]


def bytes_alone() -> Tokenizer:
    """One token a byte, its id in the order of the alphabet's characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _byte_level({character: index for index, character in enumerate(alphabet)}, [])


def byte_level() -> Tokenizer:
    """Merges that cut characters in two, a special token, added ones outside the alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("ðŁ", "ĳ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ì", "ķ"), ("Ċ", "Ċ"), ("Ġ", "x")]
    vocab = dict.fromkeys([*alphabet, *("".join(merge) for merge in merges)])
    tokenizer = _byte_level({name: index for index, name in enumerate(vocab)}, merges)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(
        [AddedToken("두 words", normalized=False), AddedToken("é", normalized=False)]
    )
    return tokenizer


def llama(strip: int = 1) -> Tokenizer:
    """Words that carry their space, other characters as bytes; a text's first space is dropped."""
    pieces = ["<s>", "</s>", *BYTE_NAMES, *"▁abcdehlorwtx.", *(f"▁{word}" for word in WORDS)]
    pieces += ["▁▁", "▁▁▁▁", "▁He", "llo", "..."]
    tokenizer = Tokenizer(models.Unigram([(piece, -2.0) for piece in pieces], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always" if strip else "never"
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", strip, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """T5's decoder: what a token adds depends on its place, so texts are decoded in a window."""
    tokenizer = llama()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.model = models.Unigram(
        [(piece, -2.0) for piece in ["<s>", "</s>", *"▁abcdehlorwtx.é한👩", "▁He", "llo", "..."]], 0
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's decoder, which puts spaces between words and takes them from before full stops."""
    names = ["[UNK]", "[SEP]", *WORDS, "##ing", "##ed", ".", "walk", "'", "s", "한"]
    tokenizer = Tokenizer(
        models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def byte_ids(data: bytes) -> list[int]:
    """Tokens of `bytes_alone` for any bytes, whether or not they are a text."""
    table = TokenTable(bytes_alone())
    id_of = {table.token_bytes(token_id): token_id for token_id in range(256)}
    return [id_of[bytes([byte])] for byte in data]


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
