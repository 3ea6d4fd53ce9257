"""What is kept of earlier calls, so that checks and choices need not be repeated: a bounded dictionary for any number
of threads.

A call's key holds all that checks and the choice of kernels depend on: of each weight its address, shape, strides, type
and device. A weight that is replaced, moved, cast or resized therefore has another key, and no weight is kept alive.
The values of a weight are not part of the key: kernels read them anew on each call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor

MOST = 4096  # entries; then the least recently used one is dropped


class Kept:
    """At most `most` entries by their keys, for any number of threads; the least recently used one is dropped."""

    def __init__(self, most: int = MOST):
        self.most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Any:
        """The entry of this key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, made: Any) -> None:
        with self._lock:
            self._kept[key] = made
            self._kept.move_to_end(key)
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def place(t: Tensor | None) -> Hashable:
    """A tensor's part of a key: its address, shape, strides, type and device; None for None."""
    return None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
