"""Random matrices through every format and back, bit for bit, and TwELL's words against a packer in a few lines of
Python."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import torch
from torch import Tensor

from twell_lab import ops
from twell_lab.core import InputError
from twell_lab.formats import COO, CSR, ELL, Hybrid, TwELL, join_words, split_words

PATTERNS = ("any bits", "sparse", "half", "full", "nothing", "special", "one row", "one column", "full tiles")
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(_BITS[t.element_size()])


def check(r: Random, counts: Counter) -> None:
    """One matrix in every format."""
    dtype = r.choice((torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.float64))
    tile = r.choice((256, 256, 64, 32, 100, 8, 7, 3, 2, 1, 300, 65536))
    words = r.choice((2, tile + 1, r.randint(2, tile + 1), min(32, tile + 1), min(32, tile + 1)))
    columns = r.choice(
        (1, r.randint(1, 40), r.randint(1, 700), max(1, min(tile, 700) * r.randint(1, 2) + r.randint(-1, 1)))
    )
    columns = min(columns, 60 * tile)
    rows = r.choice((0, 1, 1, 2, r.randint(1, 8)))
    pattern = r.choice(PATTERNS)
    x = _view(_matrix(r, pattern, rows, columns, dtype, min(tile, 700), words), r)
    counts.update([pattern, str(dtype)[6:]])

    wanted = torch.where(x == 0, torch.zeros_like(x), x)  # a negative zero comes back as +0
    limit = r.choice((0, 1, 5, 128, columns))
    made = [COO.from_dense(x), CSR.from_dense(x), ELL.from_dense(x), Hybrid.from_dense(x, limit)]
    for each in made:
        _same(type(each).__name__, each, wanted, counts)
    light = (x != 0).sum(1) <= limit
    assert torch.equal(made[3].light, light.nonzero()[:, 0]) and torch.equal(made[3].heavy, (~light).nonzero()[:, 0])
    if dtype == torch.float64:
        try:
            TwELL.from_dense(x, tile, words)
        except InputError as error:
            assert "float64" in str(error)
            return
        raise AssertionError("TwELL took float64")
    relu = torch.where(x <= 0, torch.zeros_like(x), x)
    for way, packed, kept in (
        ("TwELL.from_dense", TwELL.from_dense(x, tile, words), wanted),
        ("TwELL.from_gate", TwELL.from_gate(x, tile, words), relu),
        ("pack", ops.pack(x, tile, words), relu),
    ):
        _same(way, packed, kept, counts)
        _check_words(packed, x, (x != 0) if way == "TwELL.from_dense" else ~(x <= 0), tile, words)
    value = x.reshape(-1)[:50]
    column = torch.randint(0, 1 << 16, value.shape)
    back, where = split_words(join_words(value, column), dtype)
    assert torch.equal(bits(back), bits(value)) and torch.equal(where, column)
    counts["checked"] += 1


def _same(name: str, packed, wanted: Tensor, counts: Counter) -> None:
    got = packed.to_dense()
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, f"{name} gives {got.dtype} {list(got.shape)}"
    assert torch.equal(bits(got), bits(wanted)), f"{name}: {int((bits(got) != bits(wanted)).sum())} values are others"
    assert packed.nnz == int((wanted != 0).sum()), f"{name}: nnz is {packed.nnz}"
    assert packed.nbytes >= packed.nnz * wanted.element_size() and tuple(packed.shape) == tuple(wanted.shape)
    counts["checked"] += 1


def _check_words(packed: TwELL, x: Tensor, keep: Tensor, tile: int, words: int) -> None:
    """Compare words and tail with what the layout's description asks for, one value after the other."""
    raw, shift = bits(x).tolist(), 16 if x.element_size() == 2 else 32
    mask = (1 << shift) - 1
    stored, tail = packed.packed.tolist(), list(zip(packed.tail_column.tolist(), bits(packed.tail_value).tolist()))
    expected_tail, pointer = [], [0]
    for row, kept in enumerate(keep.tolist()):
        for part in range(-(-x.shape[1] // tile)):
            columns = [c for c in range(part * tile, min((part + 1) * tile, x.shape[1])) if kept[c]]
            cells = stored[row][part]
            assert cells[0] == len(columns), f"row {row}, tile {part}: count {cells[0]}, {len(columns)} kept"
            for cell, c in zip(cells[1:], columns):
                assert cell & mask == c - part * tile and (cell >> shift) == raw[row][c], (
                    f"row {row}, column {c}: word {cell:#x}"
                )
            expected_tail += [(c, raw[row][c]) for c in columns[words - 1 :]]
        pointer.append(len(expected_tail))
    assert tail == expected_tail and packed.tail_pointer.tolist() == pointer


def _matrix(r: Random, pattern: str, rows: int, columns: int, dtype: torch.dtype, tile: int, words: int) -> Tensor:
    g = torch.Generator().manual_seed(r.getrandbits(62))
    whole = _BITS[dtype.itemsize]
    anything = torch.randint(-(2**62), 2**62, (rows, columns), generator=g).to(whole).view(dtype)
    if pattern == "any bits":
        return anything
    noise = torch.rand(rows, columns, generator=g)
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)[
        torch.randint(0, len(SPECIAL), (rows, columns), generator=g)
    ]
    value = torch.where(noise > 0.98, anything, torch.randn(rows, columns, generator=g).to(dtype))
    if pattern == "special":
        return torch.where(noise < 0.5, special, value)
    at = torch.arange(columns) % tile
    keep = {
        "sparse": noise < 0.03,
        "half": noise < 0.5,
        "full": noise >= 0,
        "nothing": noise < 0,
        "one row": (torch.arange(rows) == r.randrange(max(1, rows)))[:, None].expand(rows, columns),
        "one column": (torch.arange(columns) == r.randrange(columns)).expand(rows, columns),
        "full tiles": (at < words - r.randint(0, 2)).expand(rows, columns),
    }[pattern]
    zero = torch.where(noise < 0.2, -torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype))
    return torch.where(keep, value, -value.abs() if r.random() < 0.3 else zero)


def _view(x: Tensor, r: Random) -> Tensor:
    """The same values with other strides, or with a gradient asked for."""
    way = r.randrange(6)
    if way == 0:
        return x.t().contiguous().t()
    if way == 1:
        wide = x.new_full((x.shape[0], 2 * x.shape[1] + 1), math.nan)
        wide[:, 1::2] = x
        return wide[:, 1::2]
    if way == 2 and x.shape[0]:
        return x[:1].expand(x.shape[0], -1)
    return x
