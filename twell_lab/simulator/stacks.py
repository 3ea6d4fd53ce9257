"""What every library of the process shares: memory for the threads of blocks, and the handlers of their crashes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stacks:
    """Stacks for the threads of blocks, one address a worker, that every library of this process uses in turn.

    On Linux before 6.13 the closed end of each thread's stack splits the memory in 2048 pieces, of which a process may
    have 65,530: only the first workers get them.
    """

    CLOSED = 8

    def __init__(self) -> None:
        self._free: list[int] = []
        self._made = 0
        self._lock = threading.Lock()

    def take(self, count: int, make) -> list[int]:
        with self._lock:
            while len(self._free) < count:
                address = make(self._made < self.CLOSED)
                if not address:
                    raise MemoryError("no memory for the stacks of a block's threads")
                self._made += 1
                self._free.append(address)
            return [self._free.pop() for _ in range(count)]

    def give(self, stacks: list[int]) -> None:
        with self._lock:
            self._free += reversed(stacks)


class Guard:
    """The signal handlers under which kernels run (guard.cpp): those of the first library that was launched serve
    all."""

    def __init__(self) -> None:
        self._library: Any = None  # a ctypes.CDLL, whose functions have no annotations
        self._lock = threading.Lock()

    @contextmanager
    def held(self, library) -> Iterator[int | None]:
        """The handlers stand inside it. Gives what a launch takes as `guard`."""
        with self._lock:
            self._library = self._library or library
        guard = self._library.sim_guard_begin()
        try:
            yield guard
        finally:
            if guard:
                self._library.sim_guard_end()


STACKS, GUARD = Stacks(), Guard()
