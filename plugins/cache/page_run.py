"""The content of consecutive pages as bytes: compared by memcmp, cut and joined in one copy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.protocols import Keys

Tokens = NDArray[np.int32]
KEY_BYTES = 8
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class PageRun:
    """keys: uint64 a page; tokens: page_size int32 a page, None where only keys are known."""

    keys: bytes
    tokens: bytes | None
    page_size: int

    def __len__(self) -> int:
        """Pages."""
        return len(self.keys) // KEY_BYTES

    def part(self, start: int, stop: int) -> "PageRun":
        """Pages start .. stop - 1, as a copy."""
        size = TOKEN_BYTES * self.page_size
        tokens = None if self.tokens is None else self.tokens[start * size : stop * size]
        return PageRun(self.keys[start * KEY_BYTES : stop * KEY_BYTES], tokens, self.page_size)

    def followed_by(self, other: "PageRun") -> "PageRun":
        """Both runs as one; they agree on having tokens."""
        both = self.tokens is not None and other.tokens is not None
        tokens = (self.tokens or b"") + (other.tokens or b"") if both else None
        return PageRun(self.keys + other.keys, tokens, self.page_size)

    def page_keys(self, count: int) -> Keys:
        """Keys of the first `count` pages, read-only."""
        return np.frombuffer(self.keys, np.uint64, count)

    def key(self, page: int) -> int:
        """Key of one page."""
        key: int = np.frombuffer(self.keys, np.uint64, 1, page * KEY_BYTES).item()
        return key

    def is_at(self, asked: "PageRun", start: int) -> bool:
        """Whether this whole run stands in `asked` from page `start` on: same keys, same tokens."""
        if not asked.keys.startswith(self.keys, start * KEY_BYTES):
            return False
        if self.tokens is None or asked.tokens is None:
            return True
        return asked.tokens.startswith(self.tokens, start * TOKEN_BYTES * self.page_size)

    def common_pages(self, asked: "PageRun", start: int, count: int) -> int:
        """How many of the first `count` pages equal those of `asked` from page `start` on; neither
        may have fewer."""
        mine = self.page_keys(count)
        theirs = np.frombuffer(asked.keys, np.uint64, count, start * KEY_BYTES)
        same = _common_head(mine, theirs)
        if self.tokens is None or asked.tokens is None:
            return same
        offset = start * TOKEN_BYTES * self.page_size
        my_tokens = np.frombuffer(self.tokens, np.int32, count * self.page_size)
        their_tokens = np.frombuffer(asked.tokens, np.int32, count * self.page_size, offset)
        return min(same, _common_head(my_tokens, their_tokens) // self.page_size)


def page_run(keys: Keys, tokens: Tokens | None, page_size: int) -> PageRun:
    """A copy of keys uint64 [n] and tokens int32 [n * page_size]. ValueError for other shapes."""
    if keys.dtype != np.uint64:
        raise ValueError(f"keys must be uint64, got {keys.dtype}")
    if tokens is None:
        return PageRun(keys.tobytes(), None, page_size)
    if tokens.dtype != np.int32 or len(tokens) != len(keys) * page_size:
        raise ValueError(
            f"tokens must be int32 [{len(keys)} keys * {page_size}],"
            f" got {tokens.dtype} [{len(tokens)}]"
        )
    return PageRun(keys.tobytes(), tokens.tobytes(), page_size)


def _common_head(left: NDArray[np.generic], right: NDArray[np.generic]) -> int:
    differ = left != right
    return int(differ.argmax()) if differ.any() else len(left)
