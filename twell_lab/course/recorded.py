"""Rows of times, recorded or measured now, for several notebooks. `where` in each row says where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

from .. import records
from ..core import TwellError

LOGNORMAL = "independent, lognormal"
GRAPH = " (graph)"
LEAST = 0.97  # times as fast as dense: a lower figure counts as a loss; between it and 1 the difference may be noise


def device_and_day(device: str, date: str, earlier: str | None = None) -> str:
    """Return "NVIDIA H100, 2026-01-02" of a record, with the commit of its kernels where they have changed since."""
    return f"{device}, {date[:10]}" + (f", with earlier kernels of commit {earlier[:8]}" if earlier else "")


def ms(value: float) -> str:
    """Return milliseconds as text, in the unit that suits them."""
    if value < 0.1:
        return f"{1000 * value:.3g} us"
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def earlier_commit(record: records.Record) -> str | None:
    """Return the commit that a record was made at, if a kernel that ran for it has changed since; else None."""
    return (record.commit or "unknown") if records.stale(record) else None


def sourced(record: records.Record) -> list[dict]:
    """Return the rows of a record that name a device, each with `where`: "recorded on <device>, <day>"."""
    earlier, rows = earlier_commit(record), [row for row in record.rows if "device" in row]
    return [row | {"where": f"recorded on {device_and_day(row['device'], record.date, earlier)}"} for row in rows]


def same(row: dict) -> tuple:
    """Return what is equal in rows that measure the same: kind, workload, sizes, and the first two digits of nnz."""
    nnz = row.get("nnz")
    keys = ("kind", "workload", "tokens", "d_model", "d_ff", "gated", "layer", "l1")
    return (*map(row.get, keys), nnz and f"{nnz:.2g}")


def newest(name: str, device: str, wanted: Callable[[dict], bool]) -> list[dict]:
    """The wanted rows of records whose name begins with `name`, made on a GPU with `device` in its name, each with
    `where`, "recorded on <device>, <day>"; of those that measured the same thing (see `same`) the newest."""
    found: list[dict] = []
    taken: set[tuple] = set()
    for record in reversed(records.load_all()):
        if not record.name.startswith(name):
            continue
        rows = [row for row in sourced(record) if wanted(row) and device in row["device"] and same(row) not in taken]
        found += rows
        taken |= set(map(same, rows))
    return found


def select(rows: list[dict], kind: str = "inference", nnz: float | None = None, **equal) -> list[dict]:
    """The rows of this kind whose fields equal those given. nnz may be 8% off, since a drawn workload only comes near
    the mean that was asked for."""
    return [
        row
        for row in rows
        if row["kind"] == kind
        and all(row.get(key) == value for key, value in equal.items())
        and (nnz is None or abs(row["nnz"] - nnz) <= 0.08 * nnz)
    ]


def crossed(points: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the neighbouring nnz between which something stops being as fast as dense; None for nowhere. points: (nnz,
    times as fast)."""
    neighbours = pairwise(sorted(points))
    return next(((low, high) for (low, before), (high, after) in neighbours if before >= 1 > after), None)


def timed_here(measure: Callable[[], list[dict]]) -> list[dict]:
    """Return the rows that `measure` makes on this machine's GPU, with `where`; [] without one, and, with a printed
    reason, if it cannot do it."""
    if not torch.cuda.is_available():
        return []
    try:
        return [{"where": f"yours, now, on {torch.cuda.get_device_name()}"} | row for row in measure()]
    except (TwellError, RuntimeError) as error:  # too little memory is a RuntimeError
        print(f"Nothing was timed on {torch.cuda.get_device_name()}: {error}")
        return []
