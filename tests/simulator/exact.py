"""Exact rounding to a binary float format, by searching its values in whole numbers: nothing in here rounds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MODES = ("rn", "rz", "ru", "rd")
UNIT = 400  # values are counted in 2^-400: every finite one of the formats, and every product of two, is whole


@dataclass(frozen=True)
class Format:
    name: str
    fraction: int  # bits
    exponent: int

    def __str__(self) -> str:
        return self.name

    @property
    def infinity(self) -> int:
        """The bits of infinity; also the number of smaller values that are not negative."""
        return ((1 << self.exponent) - 1) << self.fraction

    @property
    def sign(self) -> int:
        return 1 << self.fraction + self.exponent

    @property
    def nan(self) -> int:
        """The NaN that a GPU computes."""
        return self.sign - 1

    @property
    def step(self) -> int:
        """What to add to a value's bits to double it; also the bits of the smallest normal value."""
        return 1 << self.fraction

    @property
    def one(self) -> int:
        return ((1 << self.exponent - 1) - 1) << self.fraction

    def size(self, bits: int) -> int:
        """The positive value of these bits, in 2^-UNIT; for infinity, the value that would follow the greatest."""
        place, digits = divmod(bits, self.step)
        return (digits + (self.step if place else 0)) << UNIT + max(place, 1) + 1 - (
            1 << self.exponent - 1
        ) - self.fraction

    def rounded(self, whole: int, rest: bool, negative: bool, mode: str = "rn") -> int:
        """The bits of a magnitude in units of 2^-UNIT: it is `whole` or, with `rest`, between that and one more."""
        below = bisect_right(range(self.infinity), whole, key=self.size) - 1
        twice, low, high = 2 * whole + rest, 2 * self.size(below), 2 * self.size(below + 1)
        if mode == "rn":
            up = 2 * twice > low + high or (2 * twice == low + high and below % 2 == 1)
        else:
            up = twice > low and mode == ("rd" if negative else "ru")
        return self.sign * negative | below + up

    def of_fraction(self, value: Fraction, mode: str = "rn") -> int:
        """The bits of a number, rounded; zero becomes +0."""
        whole, rest = divmod(abs(value.numerator) << UNIT, value.denominator)
        return self.rounded(whole, rest != 0, value < 0, mode) if value else 0

    def of(self, value: float, exactly: Callable[[], Fraction] | None = None, mode: str = "rn") -> int:
        """The bits of a result: `value` says if it is NaN, infinite or zero; else its value is `exactly()`."""
        if math.isnan(value):
            return self.nan
        if math.isinf(value):
            return self.sign * (value < 0) | self.infinity
        number = Fraction(value) if exactly is None else exactly()
        return self.of_fraction(number, mode) if number else self.sign * (math.copysign(1, value) < 0)


HALF, BFLOAT16, FLOAT32 = Format("half", 10, 5), Format("bfloat16", 7, 8), Format("float32", 23, 8)


def bits_of(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def same(got: np.ndarray, wanted: np.ndarray | list[int], *operands) -> None:
    """Asserts that the bits are those wanted (whole numbers); the message names operands for which they are not."""
    got = bits_of(got)
    wanted = np.asarray(wanted, np.uint64 if isinstance(wanted, list) else None).astype(got.dtype)
    wrong = np.flatnonzero(got != wanted)
    shown = [
        f"{', '.join(hex(bits_of(operand)[i]) for operand in operands)}: got {got[i]:#x}, wanted {wanted[i]:#x}"
        for i in wrong[:5]
    ]
    assert not shown, f"{wrong.size} of {got.size} differ: " + "; ".join(shown)


def to_integer(value: float, dtype: np.dtype, mode: str, of_double: bool = False) -> int:
    """Bits of the integer that a GPU converts a number to: rounded and clamped; NaN as the PTX manual says."""
    limits = np.iinfo(dtype)
    if math.isnan(value):
        return 1 << limits.bits - 1 if of_double or limits.bits == 64 else 0
    if math.isinf(value):
        whole = limits.max if value > 0 else limits.min
    else:
        whole = {"rn": round, "rz": math.trunc, "ru": math.ceil, "rd": math.floor}[mode](value)
    return int(max(limits.min, min(limits.max, whole))) & (1 << limits.bits) - 1
