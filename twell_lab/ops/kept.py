"""What is kept of calls that were made before, so that the same call need not be looked at again: bounded, by its key.

A key says everything that a check or a choice of kernels depends on: where each weight lies, its shape, strides, type
and device. A weight that was replaced, moved, cast or resized therefore never meets what was prepared for another, and
no weight is held alive. What a weight holds may change: kernels read it anew on each call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import Tensor

MOST = 4096  # calls; whichever was not made for longest goes


class Kept:
    """At most `most` things by their keys, for any number of threads."""

    def __init__(self, most: int = MOST):
        self.most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> Any:
        """What was put under this key, or None."""
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
    """Where a tensor lies and how."""
    return None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
