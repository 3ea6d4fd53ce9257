"""The exceptions that the library raises on purpose.

Each also derives from the built-in class that one would expect, so `except ValueError` works too. A message names the
value that was refused and what would have been accepted.
"""

from __future__ import annotations


class TwellError(Exception):
    """Base class: `except TwellError` catches everything the library raises on purpose."""


class InputError(TwellError, ValueError):
    """A tensor or argument of the wrong dtype, shape, layout, device or range."""


class DeviceError(TwellError, RuntimeError):
    """The device cannot run what was asked, or the driver refused a call."""


class CompileError(TwellError, RuntimeError):
    """A kernel did not compile. The message holds the compiler's log."""


class StackError(TwellError, RuntimeError):
    """A package is missing, or two installed packages do not belong together."""


class TextError(TwellError, ValueError):
    """A text that cannot be read, is empty, or is too short for what was asked of it."""


class RecordError(TwellError, ValueError):
    """A record that cannot be read, lacks a field, or does not belong to these kernels."""
