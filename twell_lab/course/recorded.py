"""Times as several notebooks read them: rows of the records, or measured now, each with `where` they are from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import records
from ..core.errors import TwellError
from ..ops import measure

LOGNORMAL = "independent, lognormal"
GRAPH = " (graph)"


def device_and_day(device: str, date: str, stale: bool = False) -> str:
    """On what and when, as figures and tables name it: "NVIDIA H100, 2026-01-02", and that it is stale where it is."""
    return f"{device}, {date[:10]}" + "; stale: code has changed since" * stale


def same(row: dict) -> tuple:
    """What two rows share that measure the same thing: kind, workload, sizes, and the first two digits of nnz."""
    nnz = row.get("nnz")
    keys = ("kind", "workload", "tokens", "d_model", "d_ff", "gated", "layer", "l1")
    return (*map(row.get, keys), nnz and f"{nnz:.2g}")


def newest(name: str, device: str, wanted: Callable[[dict], bool]) -> list[dict]:
    """The wanted rows of records whose name begins with this, made on a GPU with `device` in its name.

    Each has `where`: "recorded on <device>, <day>". Of rows of different records that measure the same thing
    (see `same`), only those of the newest record are there.
    """
    found: list[dict] = []
    taken: set[tuple] = set()
    for record in reversed(records.load_all()):
        if not record.name.startswith(name):
            continue
        rows = [row for row in record.rows if wanted(row) and device in row["device"] and same(row) not in taken]
        old = bool(rows) and records.stale(record)
        found += [{**row, "where": f"recorded on {device_and_day(row['device'], record.date, old)}"} for row in rows]
        taken |= set(map(same, rows))
    return found


def select(rows: list[dict], kind: str = "inference", nnz: float | None = None, **equal) -> list[dict]:
    """The rows of this kind whose fields equal those given; nnz within 8%, as a drawn workload meets it only
    roughly."""
    return [
        row
        for row in rows
        if row["kind"] == kind
        and all(row.get(key) == value for key, value in equal.items())
        and (nnz is None or abs(row["nnz"] - nnz) <= 0.08 * nnz)
    ]


def timed_here(measure: Callable[[], list[dict]]) -> list[dict]:
    """What `measure` finds on this machine's GPU; empty where there is none, or none that can do it (which is said)."""
    if not torch.cuda.is_available():
        return []
    try:
        return measure()
    except (TwellError, RuntimeError) as error:  # too little memory is a RuntimeError
        print(f"Nothing was timed on {torch.cuda.get_device_name()}: {error}")
        return []


def rows_of(samples: dict[str, list[float]], kind: str, tokens: int, d_model: int, d_ff: int, nnz: float) -> list[dict]:
    """Milliseconds of calls on this machine's GPU as rows of a record, a row a path; "dense eager" is one of them."""
    device, (dense, _) = torch.cuda.get_device_name(), measure.quartiles(samples["dense eager"])
    shared = {
        "kind": kind,
        "device": device,
        "where": f"yours, now, on {device}",
        "tokens": tokens,
        "d_model": d_model,
        "d_ff": d_ff,
        "gated": True,
        "nnz": nnz,
        "workload": LOGNORMAL,
        "dtype": "bfloat16",
        "dense_ms": dense,
    }
    return [
        {**shared, "path": path, "ms": ms, "spread": spread, "x_dense": dense / ms}
        for path, values in samples.items()
        for ms, spread in [measure.quartiles(values)]
    ]
