"""The work of the Hopper kernels, as notebook 09 computes it: bytes and operations, the versions of the gate kernel,
tiles and turns, the pool.

Data in, data out, nothing drawn. Rows are those of the "inference" record (twell_lab.bench.forward) with `where`, as
`course.hopper.recorded` returns them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import core, records
from ...core import InputError, read_json
from ...formats.twell import POOL_WORDS, TILE, WORDS
from ...simulator import H100
from ..recorded import GRAPH, LOGNORMAL, device_and_day, select

SLOTS = WORDS - 1
VALUE = 2  # bytes of a 16-bit value


# ---- the work, and the least time for it ----


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches: operations a second in its tensor cores, bytes a second from memory and from the L2 cache."""

    tensor: float
    memory: float
    l2: float
    source: str


def rates(rows: list[dict]) -> Rates:
    """The rates that were reached: by torch's fastest recorded gate GEMM, by a large copy, and by reads from the L2.

    The GEMM is that of rows or, if they have none, of any record of the portable kernels on an H100.
    """
    gemms = [
        row for row in rows if row["kind"] == "gate" and row["path"] == "gate GEMM (torch)" and row["tokens"] == 16384
    ]
    gemms = gemms or [
        {**row, "where": f"recorded on {device_and_day(row['device'], row['date'])}"}
        for row in records.flat_rows(records.load_all())
        if row["path"] == "part: gate GEMM" and row["tokens"] == 16384 and "H100" in row["device"]
    ]
    best = min(gemms, key=lambda row: row["ms"])
    tensor = 2 * best["tokens"] * best["d_model"] * best["d_ff"] / best["ms"] * 1e3
    return Rates(
        tensor,
        H100.memory_bytes_per_s,
        H100.l2_bytes_per_s,
        f"{tensor / 1e12:.0f} TFLOP/s by torch's gate GEMM ({best['where']}), {H100.memory_bytes_per_s / 1e12:g} TB/s "
        f"from memory by a large copy, {H100.l2_bytes_per_s / 1e12:g} TB/s from the L2 cache",
    )


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

MISSING = "No version of the packing kernel is recorded in this checkout."
BEFORE = "gate GEMM (torch), then pack"
STEPS = {  # each version, and what it is compared with
    "sm90 gate_pack v1": BEFORE,
    "sm90 gate_pack v2": "sm90 gate_pack v1",
    "sm90 gate_pack v3": "sm90 gate_pack v2",
}


def versions(rows: list[dict], nnz: float = 29, tokens: int = 16384) -> list[dict]:
    """The rows of kind "gate" at this nnz and number of tokens, slowest first."""
    return sorted(select(rows, "gate", nnz, tokens=tokens, workload=LOGNORMAL), key=lambda row: -row["ms"])


def gained(found: list[dict], version: int) -> str:
    """Return how much less time this version of gate_pack (1 to 3) takes than what came before. found: `versions`."""
    name = f"sm90 gate_pack v{version}"
    if name not in STEPS:
        raise InputError(f"version is {version!r}; 1, 2 and 3 are accepted")
    ms = {row["path"]: row["ms"] for row in found}
    if not {name, STEPS[name]} <= set(ms):
        return MISSING
    before, after = ms[STEPS[name]], ms[name]
    change = 1 - after / before
    return f"{abs(change):.1%} {'less' if change >= 0 else 'more'}"


def of_the_peak(found: list[dict], floor_ms: float) -> str:
    """Return how much of the tensor cores' peak the fastest of `versions` reaches, in words. floor_ms: at their
    peak."""
    if not found:
        return MISSING
    return f"{found[-1]['path'].removeprefix('sm90 ')}: {floor_ms / found[-1]['ms']:.0%} of the tensor cores' peak."


def waves(tokens: int, d_ff: int, pairs: int = 66, rows: int = 256, columns: int = TILE) -> tuple[int, float]:
    """(turns, the share of their places that is used) when tiles of rows x columns go to `pairs` pairs of blocks."""
    tiles = -(-tokens // rows) * -(-d_ff // columns)
    turns = -(-tiles // pairs)
    return turns, tiles / (turns * pairs)


# ---- the roofline ----


def points(rows: list[dict], nnz: float = 29) -> list[dict]:
    """Points of a roofline: name, group, operations, bytes (memory), seconds, where. The versions of the gate kernel at
    16,384 tokens, and whole layers with one token.

    rows: of `course.hopper`."""
    found = []
    for row in versions(rows, nnz):
        tokens, d_model, d_ff = row["tokens"], row["d_model"], row["d_ff"]
        _, gate, _ = work(tokens, d_model, d_ff, nnz)
        dense_gate = VALUE * tokens * d_ff
        words = 4 * tokens * (-(-d_ff // TILE) + nnz)
        extra = {"gate GEMM (torch)": dense_gate - words, BEFORE: 2 * dense_gate}.get(row["path"], 0)
        found.append(_point(row, "the gate, 16,384 tokens", gate["operations"], gate["memory"] + extra))
    for row in select(rows, nnz=nnz, tokens=1, workload=LOGNORMAL):
        dense, gate, sparse = work(1, row["d_model"], row["d_ff"], row["nnz"])
        parts = {f"dense eager{GRAPH}": [dense], f"forced twell{GRAPH}": [gate, sparse]}.get(row["path"], [])
        name = {"dense eager": "torch's dense layer", "forced twell": "TwELL"}.get(row["path"].removesuffix(GRAPH))
        if parts and all(point["name"] != name for point in found):
            totals = (sum(part[key] for part in parts) for key in ("operations", "memory"))
            found.append(_point({**row, "path": name}, "whole layer, 1 token", *totals))
    return found


def _point(row: dict, group: str, operations: float, moved: float) -> dict:
    return {
        "name": row["path"],
        "group": group,
        "operations": operations,
        "bytes": moved,
        "seconds": row["ms"] / 1e3,
        "where": row["where"],
    }


# ---- overflow: the pool ----


def pool_table(counts: list[int]) -> list[dict]:
    """Where the values of a group of rows lie in one tile. counts: how many values each row keeps there.

    Rows: row, count, words (values in the tile's own words), excess, start and end of the excess in the pool, lost.
    """
    rows, start = [], 0
    for i, count in enumerate(counts):
        excess = max(0, count - SLOTS)
        lost = excess > 0 and start + excess > POOL_WORDS
        first, last = (start, start + excess) if excess else (None, None)
        rows.append(
            {
                "row": i,
                "count": count,
                "words": count - excess,
                "excess": excess,
                "start": first,
                "end": last,
                "lost": lost,
            }
        )
        start += excess
    return rows
