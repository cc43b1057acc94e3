"""Requests that are built when they are asked for: a million of them need no memory."""

from collections.abc import Callable, Sequence
from typing import overload

from core.request import Request


class LazyRequests(Sequence[Request]):
    """`num` requests; `build(i)` makes number i, equal each time that it is asked."""

    def __init__(self, num: int, build: Callable[[int], Request]) -> None:
        self._num = num
        self._build = build

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [self._build(number) for number in range(*index.indices(self._num))]
        if not -self._num <= index < self._num:
            raise IndexError(f"request {index} of {self._num}")
        return self._build(index % self._num)
