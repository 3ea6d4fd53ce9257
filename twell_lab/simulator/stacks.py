"""What all built libraries of a process share: stacks for the threads of a block, and handlers for their crashes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stacks:
    """Stacks for the threads of a block, which the libraries of this process use in turn: one address for each worker.

    A stack's lower end is closed, so that a thread that needs too much memory is stopped. On Linux before 6.13 that
    splits the memory of one worker into 2,048 mappings, and a process may have 65,530 of them. There, only the first
    CLOSED workers get closed ends.
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
    """The signal handlers under which kernels run (guard.cpp).

    The handlers of the library that was launched first serve all.
    """

    def __init__(self) -> None:
        self._library: Any = None  # a ctypes.CDLL, whose functions have no annotations
        self._lock = threading.Lock()

    @contextmanager
    def held(self, library) -> Iterator[int | None]:
        """A context in which the handlers are installed. Yields what a launch takes as `guard`."""
        with self._lock:
            self._library = self._library or library
        guard = self._library.sim_guard_begin()
        try:
            yield guard
        finally:
            if guard:
                self._library.sim_guard_end()


STACKS, GUARD = Stacks(), Guard()
