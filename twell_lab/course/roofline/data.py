"""The work of the Hopper kernels, as notebook 09 computes it: bytes and operations, the versions of the gate kernel,
tiles, the pool.

Nothing is drawn. Rows are those of the "inference" record (twell_lab.bench.forward) with `where`, as
`course.hopper.data.recorded` returns them.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import core
from ...core import read_json
from ...formats.twell import POOL_WORDS, TILE, WORDS
from ...simulator import H100
from ..recorded import GRAPH, LOGNORMAL, select

SLOTS = WORDS - 1
VALUE = 2  # bytes of a 16-bit value


# ---- the work, and the least time for it ----


class Rates(NamedTuple):
    """What a GPU reaches: operations a second in its tensor cores, bytes a second from memory and from the L2 cache."""

    tensor: float
    memory: float
    l2: float
    source: str


def rates(rows: list[dict]) -> Rates:
    """The rates that were reached: by torch's fastest gate GEMM of these rows, a large copy, reads from the L2."""
    gemms = select(rows, "gate", path="gate GEMM (torch)", tokens=16384)
    best = min(gemms, key=lambda row: row["ms"])
    tensor = 2 * best["tokens"] * best["d_model"] * best["d_ff"] / best["ms"] * 1e3
    return Rates(tensor, H100.memory_bytes_per_s, H100.l2_bytes_per_s, best["where"])


def peaks(name: str = "H100 SXM") -> Rates:
    """The rates that nothing on this GPU can exceed, by its datasheet: notebook 09's one floor. That of the L2 cache is
    in no datasheet: it is what reads that the L2 serves have reached."""
    gpu = datasheet(name)
    return Rates(1e12 * gpu["tensor_tflops"], 1e9 * gpu["bandwidth_gb_s"], H100.l2_bytes_per_s, gpu["source"])


def work(tokens: int = 16384, d_model: int = 2048, d_ff: int = 5632, nnz: float = 29) -> list[dict]:
    """The work of a gated layer: operations, bytes from and to memory, bytes through the L2 cache.

    Rows: the dense layer as a whole, then the two steps of the sparse one. Memory counts every array once. The L2
    counts what the multiprocessors ask for; it is None for a GEMM, whose multiprocessors share tiles.
    """
    x, weights, row = VALUE * tokens * d_model, VALUE * d_ff * d_model, VALUE * d_model
    words = 4 * tokens * (-(-d_ff // TILE) + nnz)
    touched = min(tokens * nnz, d_ff) * row  # of up, and as much of down
    return [
        {"step": "dense layer", "operations": 6 * tokens * d_model * d_ff, "memory": 2 * x + 3 * weights, "l2": None},
        {"step": "gate, packed", "operations": 2 * tokens * d_model * d_ff, "memory": x + weights + words, "l2": None},
        {
            "step": "up and down where it fires",
            "operations": 4 * tokens * nnz * d_model,
            "memory": 2 * x + words + 2 * touched,
            "l2": 2 * tokens * nnz * row + 2 * x,
        },
    ]


def floors(steps: list[dict], reached: Rates) -> list[dict]:
    """The steps with their floor_ms (the least time of the part of the GPU that needs longest), limit and intensity.

    limit: the name of that part. intensity: operations for each byte of memory.
    """
    found = []
    for step in steps:
        times = {"tensor cores": step["operations"] / reached.tensor, "memory": step["memory"] / reached.memory}
        if step["l2"] is not None:
            times["L2 cache"] = step["l2"] / reached.l2
            del times["tensor cores"]  # a warp multiplies in its ordinary units: one row against one token
        limit = max(times, key=times.__getitem__)
        found.append(
            {**step, "floor_ms": 1e3 * times[limit], "limit": limit, "intensity": step["operations"] / step["memory"]}
        )
    return found


def datasheet(name: str = "H100 SXM") -> dict:
    """The vendor's figures for a GPU (data/gpus.json)."""
    gpus = read_json(core.data_dir() / "gpus.json", "datasheet")["gpus"]
    return next(gpu for gpu in gpus if gpu["name"] == name)


# ---- versions of the gate GEMM ----

BEFORE = "gate GEMM (torch), then pack"  # what version 1 is compared with


def versions(rows: list[dict], nnz: float = 29, tokens: int = 16384) -> list[dict]:
    """The rows of kind "gate" at this nnz and number of tokens, slowest first."""
    return sorted(select(rows, "gate", nnz, tokens=tokens, workload=LOGNORMAL), key=lambda row: -row["ms"])


# ---- the roofline ----


def points(rows: list[dict], nnz: float = 29) -> list[dict]:
    """Points of a roofline: name, group, intensity (operations a byte of memory), rate (10^12 operations a second), ms,
    where. The versions of the gate kernel at 16,384 tokens, and whole layers with one token."""
    found = []

    def point(row: dict, name: str, group: str, operations: float, moved: float) -> None:
        said = {"name": name, "group": group, "ms": row["ms"], "where": row["where"]}
        found.append(said | {"intensity": operations / moved, "rate": operations / row["ms"] / 1e9})

    for row in versions(rows, nnz):
        _, gate, _ = work(row["tokens"], row["d_model"], row["d_ff"], nnz)
        dense_gate = VALUE * row["tokens"] * row["d_ff"]
        words = 4 * row["tokens"] * (-(-row["d_ff"] // TILE) + nnz)
        extra = {"gate GEMM (torch)": dense_gate - words, BEFORE: 2 * dense_gate}.get(row["path"], 0)
        point(row, row["path"], "the gate, 16,384 tokens", gate["operations"], gate["memory"] + extra)
    for name, path in (("torch's dense layer", "dense eager"), ("TwELL", "forced twell")):
        for row in select(rows, nnz=nnz, tokens=1, workload=LOGNORMAL, path=path + GRAPH)[:1]:
            dense, *sparse = work(1, row["d_model"], row["d_ff"], row["nnz"])
            steps = sparse if name == "TwELL" else [dense]
            operations, moved = (sum(step[key] for step in steps) for key in ("operations", "memory"))
            point(row, name, "whole layer, 1 token", operations, moved)
    return found


# ---- overflow: the pool ----


def pool_table(counts: list[int]) -> list[dict]:
    """Where the values of a group of rows lie in one tile. counts: how many values each row keeps there.

    Rows: row, count, words (values in the tile's own words), excess, start and end of the excess in the pool, lost.
    """
    rows, start = [], 0
    for i, count in enumerate(counts):
        excess = max(0, count - SLOTS)
        row = {"row": i, "count": count, "words": count - excess, "excess": excess, "start": None, "end": None}
        rows.append(row | {"lost": excess > 0 and start + excess > POOL_WORDS})
        if excess:
            rows[-1] |= {"start": start, "end": start + excess}
        start += excess
    return rows
