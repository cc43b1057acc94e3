"""Counts what a call does instead of timing it: lines of Python run, facts of nodes read,
comparisons of their values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Count:
    """Operations so far, while `running`."""

    total: int = 0
    running: bool = False


COUNT = Count()
"""Of the nodes and numbers below, which evictors compare and read without passing it on."""


class Number(int):
    """An integer that counts its comparisons."""

    def __lt__(self, other: Any) -> bool:
        COUNT.total += 1
        return int.__lt__(self, other)

    def __eq__(self, other: Any) -> bool:
        COUNT.total += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


class CountedNode:
    """A CacheNode that counts reads of its facts."""

    def __init__(self, serial: int, num_pages: int) -> None:
        self._facts = {
            "num_pages": Number(num_pages),
            "depth_pages": Number(num_pages),
            "last_used": Number(serial),
            "created": Number(serial),
            "hits": Number(0),
            "head_digest": Number(serial * 0x9E3779B97F4A7C15 % 2**64),
            "end_digest": Number(serial * 0xD1B54A32D192ED03 % 2**64),
        }
        self.memo: Any = None

    def use(self, serial: int) -> None:
        """A hit."""
        self._facts["last_used"] = Number(serial)
        self._facts["hits"] = Number(self._facts["hits"] + 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        COUNT.total += 1
        try:
            return self._facts[name]
        except KeyError:
            raise AttributeError(name) from None


@contextmanager
def counted() -> Iterator[Count]:
    """Operations of what is called meanwhile, lines of this folder's own code not counted."""
    outer = sys.gettrace()
    COUNT.total = 0

    def lines(frame: FrameType, event: str, argument: Any) -> Any:
        COUNT.total += event == "line"
        return lines

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        return None if "conformance" in frame.f_code.co_filename else lines

    sys.settrace(calls)
    try:
        yield COUNT
    finally:
        sys.settrace(outer)
