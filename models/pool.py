"""How much of a card CuPy's memory pool holds, for a given order of allocations.

A request takes the smallest free chunk that it fits in, and leaves the rest of it free; without
one, the pool takes new memory from the card, just as much as was asked for. A chunk that is given
back joins its free neighbours of the same piece of memory. The pool keeps what it took, so that it
holds more than ever lived at a time: a half more when small arrays take the place of a large one.

The driver gives pages, whole ones to each piece that is not small. With this, what eight training
steps took of an H200 (driver 580) is explained to 0.02 GiB; without it, 0.4 GiB were missing where
hundreds of weights end within a page.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

PAGE = 2 << 20  # bytes


def taken(size: int) -> int:
    """Bytes of a card that an allocation takes: pages, which those below half of one share."""
    return size if size < PAGE // 2 else -(-size // PAGE) * PAGE


class Event:
    """An allocation, or its end where ``size`` is None. Keys are of the caller's choice."""

    __slots__ = ("key", "size")

    def __init__(self, key: str, size: int | None) -> None:
        self.key, self.size = key, size


@dataclass(slots=True, eq=False)
class _Chunk:
    """A stretch of a piece of memory, and its neighbours there."""

    size: int
    before: "_Chunk | None" = None
    after: "_Chunk | None" = None
    free: bool = False


class Pool:
    """A pool in numbers: ``held`` is what it took from the card, in bytes."""

    def __init__(self) -> None:
        self.held = 0
        self._used: dict[str, _Chunk] = {}
        self._free: dict[int, list[_Chunk]] = {}
        self._sizes: list[int] = []  # of free chunks, ascending, each once

    def run(self, events: Iterable[Event]) -> None:
        """Plays allocations and frees."""
        for event in events:
            if event.size is None:
                self.free(event.key)
            else:
                self.allocate(event.key, event.size)

    def allocate(self, key: str, size: int) -> None:
        """``size`` is a multiple of the pool's unit and above 0."""
        index = bisect.bisect_left(self._sizes, size)
        if index == len(self._sizes):
            self.held += taken(size)
            self._used[key] = _Chunk(size)
            return
        chunk = self._free[self._sizes[index]][-1]
        self._unlist(chunk)
        if chunk.size > size:
            rest = _Chunk(chunk.size - size, before=chunk, after=chunk.after)
            if rest.after is not None:
                rest.after.before = rest
            chunk.size, chunk.after = size, rest
            self._list(rest)
        self._used[key] = chunk

    def free(self, key: str) -> None:
        """Gives an allocation back to the pool."""
        chunk = self._used.pop(key)
        if chunk.before is not None and chunk.before.free:
            self._unlist(chunk.before)
            chunk = self._join(chunk.before, chunk)
        if chunk.after is not None and chunk.after.free:
            self._unlist(chunk.after)
            chunk = self._join(chunk, chunk.after)
        self._list(chunk)

    @staticmethod
    def _join(left: _Chunk, right: _Chunk) -> _Chunk:
        left.size += right.size
        left.after = right.after
        if left.after is not None:
            left.after.before = left
        return left

    def _list(self, chunk: _Chunk) -> None:
        chunk.free = True
        if chunk.size not in self._free:
            bisect.insort(self._sizes, chunk.size)
        self._free.setdefault(chunk.size, []).append(chunk)

    def _unlist(self, chunk: _Chunk) -> None:
        chunk.free = False
        same = self._free[chunk.size]
        same.remove(chunk)
        if not same:
            del self._free[chunk.size]
            self._sizes.remove(chunk.size)
