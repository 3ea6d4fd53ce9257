"""What a kernel can do wrong, as exceptions that say what happened, where, and by which threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import TwellError

if TYPE_CHECKING:
    from .symbols import Line
    from .trace import Trace


class Unsupported(TwellError, RuntimeError):
    """The source uses something that only a GPU has; the message names it and where it stands."""


class Fault(TwellError, RuntimeError):
    """A kernel did something undefined. The launch was stopped there; if it was watched, no array was changed.

    kernel, block, thread: the numbers of both; path: the calls that lead there from the kernel, outermost first, and
    line, the last of them, None if the compiler kept no trace. Of two threads also other_thread, other_block and
    other_line. array, element: where it is one. trace: the steps of the block up to the fault, if they were kept."""

    trace: Trace | None = None
    kernel: str
    block: int
    thread: int
    path: list[Line]
    array: str | None = None
    element: int | None = None
    other_thread: int | None = None
    other_block: int | None = None
    other_line: Line | None = None

    def __init__(self, message: str, **facts) -> None:
        super().__init__(message)
        vars(self).update(facts)
        self.line = self.path[-1] if self.path else None


class OutOfBounds(Fault):
    """An access that lies in no array that the kernel was given (without `watch`: in no memory of this process)."""


class Misaligned(Fault):
    """An access of 2, 4, 8 or 16 bytes at an address that is no multiple of it; a GPU refuses it."""


class ConstantWrite(Fault):
    """A write to a __constant__ variable."""


class MismatchedBarrier(Fault):
    """Threads wait for each other at different places: on a GPU the kernel would hang, or the wrong ones would meet."""


class SharedRace(Fault):
    """Two threads use the same bytes of shared memory, at least one writes, and no barrier (nor a fence and a flag)
    between them. An atomic is such an access, too, beside all that is none."""


class GlobalRace(Fault):
    """The same of an array or a __device__ variable, also between blocks."""


class UninitialisedRead(Fault):
    """A read of shared memory that no thread of the block has written."""


class WarpFault(Fault):
    """A warp-wide operation whose lanes do not meet: by its mask, its place, a shuffle's lane or its width."""


class AssertionFault(Fault):
    """An assert() or __trap() of the kernel."""


class DivisionByZero(Fault):
    """A whole number divided by zero; on a GPU the result is undefined."""


class StackOverflow(Fault):
    """The arrays and calls of one thread need more memory than a thread has (on a GPU at most 512 KiB)."""


class BrokenHeap(Fault):
    """Memory freed twice, memory freed that malloc or new never gave, or a heap that the C library found damaged."""


class ProcessEnd(Fault):
    """A call of exit(), abort() or the like, which would end this whole process; a GPU's code has none of them."""


class TooLong(Fault):
    """The launch took longer than it was allowed; most often a loop that never ends."""
