"""Checks of the exercises on zeros and formats, for course.exercises."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from ...formats import matrix
from ...formats.classic import COO, ELL
from ..verdicts import NotYet, close, near, same, same_list, skipping, written


def _matrix(rows: int, columns: int, share: float) -> torch.Tensor:
    """Random values, an empty row in the middle, and a value that is not zero in the first one."""
    made = torch.randn(rows, columns) * (torch.rand(rows, columns) < share)
    made[rows // 2], made[0, -1] = 0, 1.5
    return made


def _to_coo(answer) -> str:
    for rows, columns, share in ((3, 4, 0.4), (6, 5, 0.1), (5, 7, 1.0)):
        whole = (4 * _matrix(rows, columns, share)).round() / 4 + 0.0  # few digits, and no signs, in a message
        whole[rows // 2, 0] = -0.0  # a zero, too
        own = COO.from_dense(whole)
        want = [own.row.tolist(), own.column.tolist(), own.value.tolist()]
        got = written(answer(whole.clone()))
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise NotYet(f"to_coo should give three lists; yours gave a {type(got).__name__}.")
        for name, each, kind in zip(("rows", "columns", "values"), got, (int, int, float), strict=True):
            if not isinstance(each, list):
                raise NotYet(f"{name} should be a list; yours is a {type(each).__name__}.")
            if (off := next((one for one in each if type(one) is not kind), None)) is not None:
                raise NotYet(f"{name} should hold numbers of kind {kind.__name__}; yours has {off!r:.60}.")
        same_list(got, want, f"to_coo(torch.tensor({whole.tolist()}))")
    return "a row, a column and a value for each that is not zero, row after row."


def _plain(given) -> list:
    return (
        given.tolist()
        if isinstance(given, torch.Tensor)
        else [getattr(each, "item", lambda e=each: e)() for each in given]
    )


def _row_pointers(answer) -> str:
    cases = [([0, 2, 2, 2], 3), ([], 4), ([3, 3], 5), ([0, 0, 1], 2)]
    cases += [(sorted(random.choices(range(9), k=random.randint(1, 20))), 9) for _ in range(3)]
    for rows, count in cases:
        want = matrix.row_pointers(torch.tensor(rows, dtype=torch.long).bincount(minlength=count)).tolist()
        same_list(answer(list(rows), count), want, f"row_pointers({rows}, {count})", _plain)
    return "row i owns what lies from pointer i up to pointer i + 1, and an empty row has two that are equal."


def _csr_pays(answer) -> str:
    for rows, columns, size in ((256, 2048, 4), (1, 10, 2), (4096, 4096, 2), (7, 100, 4)):
        want = (rows * columns * size - 8 * (rows + 1)) / (rows * columns * (4 + size))
        near(answer(rows, columns, size), want, f"csr_pays(rows={rows}, columns={columns}, value_bytes={size})")
    return "with 16-bit values an index is twice as large as its value: CSR pays only below a third."


def _ell_bytes(answer) -> str:
    for counts in ([20] * 8, [20, 0, 3], [0, 0], [1, 2, 300], [random.randint(0, 40) for _ in range(9)]):
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.stack([(torch.arange(300) < count).to(dtype) for count in counts])
            want, size = ELL.from_dense(whole).nbytes, dtype.itemsize
            same(answer(list(counts), size), want, f"ell_bytes(counts={counts}, value_bytes={size})")
    return "every row takes as many slots as the fullest, used or not."


def _ell_times_dense(answer) -> str:
    for share in (0.3, 0.05, 0.0):
        whole, b = _matrix(12, 30, share), torch.randn(30, 9)
        ell = ELL.from_dense(whole)
        unused = torch.arange(ell.slots) >= ell.count[:, None]
        ell.column[unused], ell.value[unused] = 7, 5.0  # what a slot holds that is not used means nothing
        asked = f"ell_times_dense at {share:.0%} density"
        close(skipping(answer, (ell, b), 2 * 12 * ell.slots * 9, asked), whole.double() @ b.double(), asked)
    return "a row of b for each slot that is used, and what the others hold is never trusted."


def _break_even_density(answer) -> str:
    for dense, rate, conversion in (
        (10.0, 4.0, 0.0),
        (10.0, 4.0, 2.0),
        (1.0, 100.0, 0.0),
        (5.0, 20.0, 9.0),
        (3.0, 0.5, 0.0),
    ):
        want = min(1.0, max(0.0, 1 - conversion / dense) / rate)
        got = answer(dense, rate, conversion)
        asked = f"break_even_density(dense_ms={dense}, slower={rate}, conversion_ms={conversion})"
        if want == 0.0 and got == 0:
            continue
        near(got, want, asked)
    return "the slower each multiplication, the fewer of them you can afford; and a conversion can eat all of it."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "to_coo": _to_coo,
    "row_pointers": _row_pointers,
    "csr_pays": _csr_pays,
    "ell_bytes": _ell_bytes,
    "ell_times_dense": _ell_times_dense,
    "break_even_density": _break_even_density,
}
