"""Text for an engine without a tokenizer: a token's text is its id and a space."""

from collections.abc import Sequence

from plugins.shared.tokens import Decoder, TokenTable


class IdTable(TokenTable):
    """A table whose names are numbers, so that such an engine can be driven over HTTP too."""

    def __init__(self) -> None:
        """There is no tokenizer to ask."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The id in decimal and a space."""
        return b"%d " % token_id

    def token_text(self, token_id: int) -> str:
        """Likewise."""
        return f"{token_id} "

    def decoder(self, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> Decoder:
        """One that has nothing to wait for."""
        return _IdDecoder()


class _IdDecoder:
    pending = False

    def __init__(self) -> None:
        self.added = b""

    def push(self, token_id: int) -> str:
        self.added = b"%d " % token_id
        return self.added.decode()

    def flush(self) -> str:
        return ""
