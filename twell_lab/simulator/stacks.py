"""Memory for the threads of blocks, common to every library of the process."""

from __future__ import annotations

import threading


class Stacks:
    """Stacks for the threads of blocks, one address a worker, that every library of this process uses in turn.

    A closed page below each thread's stack splits the memory in 2048 pieces, of which Linux lets a process have 65,530:
    only the first workers get them.
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


STACKS = Stacks()
