"""Exact rounding to a binary float format of what two doubles say together: nothing in here rounds before it has to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MODES = ("rn", "rz", "ru", "rd")


@dataclass(frozen=True)
class Format:
    name: str
    fraction: int  # bits
    exponent: int

    def __str__(self) -> str:
        return self.name

    @property
    def infinity(self) -> int:
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

    def of(self, value: np.ndarray, rest: np.ndarray | float = 0.0, mode: str = "rn") -> np.ndarray:
        """The bits of value + rest, rounded once. rest: less than half of the last place of a double `value`. The sign
        of a zero is that of `value`."""
        value = np.asarray(value, np.float64)
        negative, size = np.signbit(value), np.abs(value)
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isfinite(value), np.where(negative, -1.0, 1.0) * rest, 0.0)
        least = 2 - (1 << self.exponent - 1)  # the exponent of the smallest normal value
        size = np.where(np.isfinite(size), size, 1.0)
        place = np.where(size > 0, np.maximum(np.frexp(size)[1].astype(np.int64) - 1, least), least)
        scaled = np.ldexp(size, self.fraction - place)
        below = np.floor(scaled).astype(np.int64)
        part, below = scaled - below, below + (place - least) * self.step
        borrowed = (part == 0) & (rest < 0)
        part, below = np.where(borrowed, 1.0, part), below - borrowed
        if mode == "rn":
            up = (part > 0.5) | ((part == 0.5) & ((rest > 0) | ((rest == 0) & (below % 2 == 1))))
            away = np.ones_like(negative)
        else:
            away = negative if mode == "rd" else ~negative if mode == "ru" else np.zeros_like(negative)
            up = away & ((part > 0) | (rest > 0))
        bits = np.where(below >= self.infinity, self.infinity - 1 + away, below + up) | np.where(negative, self.sign, 0)
        special = np.where(np.isnan(value), self.nan, np.where(negative, self.sign, 0) | self.infinity)
        return np.where(np.isfinite(value), bits, special)

    def of_integers(self, given: np.ndarray, mode: str) -> np.ndarray:
        """The bits of whole numbers of up to 64 bits, rounded."""
        whole = [(float(number), number) for number in given.tolist()]
        return self.of([near for near, _ in whole], [float(number - int(near)) for near, number in whole], mode)


HALF, BFLOAT16, FLOAT32 = Format("half", 10, 5), Format("bfloat16", 7, 8), Format("float32", 23, 8)


def exact_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum of doubles, and what its rounding lost (Knuth's TwoSum)."""
    with np.errstate(all="ignore"):
        total = a + b
        of_b = total - a
        lost = (a - (total - of_b)) + (b - of_b)
    return total, np.where(np.isfinite(total), lost, 0.0)


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
