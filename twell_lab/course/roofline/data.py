"""The work of the Hopper kernels, as notebook 09 computes it: bytes and operations, tiles and turns, the pool, hot and
cold neurons.

Data in, data out, nothing drawn. Rows are those of the "inference" record (twell_lab.bench.inference) with `where`, as
`course.hopper.recorded` returns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ... import records
from ...core import folders
from ...core.files import read_json
from ...formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS
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


def floors_table(found: list[dict]) -> str:
    """`floors` as text, with operations a byte."""
    shown = [
        {**row, "gop": row["operations"] / 1e9, "mb": row["memory"] / 1e6, "l2_mb": row["l2"] and row["l2"] / 1e6}
        for row in found
    ]
    return records.table(
        shown,
        {
            "step": "",
            "gop": "10^9 operations",
            "mb": "MB of memory",
            "l2_mb": "MB through L2",
            "intensity": "operations a byte",
            "limit": "limit",
            "floor_ms": "ms at that rate",
        },
    )


def datasheet(name: str = "H100 SXM") -> dict:
    """The vendor's figures for a GPU (data/gpus.json)."""
    gpus = read_json(folders.data_dir() / "gpus.json", "datasheet")["gpus"]
    return next(gpu for gpu in gpus if gpu["name"] == name)


# ---- versions of the gate GEMM ----

IDEAS = {
    "gate GEMM (torch)": "the dense gate, nothing packed",
    "gate GEMM (torch), then pack": "two kernels: the gate is written and read again",
    "sm80 gate_pack": "mma.sync, what an older GPU has",
    "sm90 gate_pack v1": "wgmma; each tile packed at its end",
    "sm90 gate_pack v2": "+ two blocks share the weights they fetch",
    "sm90 gate_pack v3": "+ packed during the next tile",
}


def versions(rows: list[dict], nnz: float = 29, tokens: int = 16384) -> list[dict]:
    """The rows of kind "gate" at this nnz and number of tokens, slowest first, each with `idea`."""
    found = select(rows, "gate", nnz, tokens=tokens, workload=LOGNORMAL)
    return [{**row, "idea": IDEAS.get(row["path"], "")} for row in sorted(found, key=lambda row: -row["ms"])]


def gained(found: list[dict]) -> str:
    """What each version of `versions` gained over the one before, a line each."""
    ms = {row["path"]: row["ms"] for row in found}
    steps = [
        ("gate GEMM (torch), then pack", "sm90 gate_pack v1", "one kernel instead of two"),
        ("sm90 gate_pack v1", "sm90 gate_pack v2", "two blocks that share their weights"),
        ("sm90 gate_pack v2", "sm90 gate_pack v3", "packing while the next tile multiplies"),
    ]
    lines = [
        f"{what}: {1e3 * ms[a]:.0f} -> {1e3 * ms[b]:.0f} us, {_change(ms[a], ms[b])}"
        for a, b, what in steps
        if a in ms and b in ms
    ]
    if "gate GEMM (torch)" in ms and "sm90 gate_pack v3" in ms:
        lines.append(
            f"v3 against torch's GEMM, which packs nothing: {_change(ms['gate GEMM (torch)'], ms['sm90 gate_pack v3'])}"
        )
    return (
        "\n".join(lines)
        or "No version of the packing kernel is recorded in this checkout; the file's own account has its times."
    )


def _change(before: float, after: float) -> str:
    change = 1 - after / before
    return "no difference" if abs(change) < 0.005 else f"{abs(change):.1%} {'less' if change > 0 else 'more'} time"


def packing_left(found: list[dict], tokens: int = 16384, d_ff: int = 5632) -> str:
    """How much longer v2 takes for a tile than v3, which hides the packing, in a sentence."""
    ms = {row["path"]: row["ms"] for row in found}
    if not {"sm90 gate_pack v2", "sm90 gate_pack v3"} <= set(ms):
        return "No version of the packing kernel is recorded in this checkout; the file's own account has its times."
    turns, _ = waves(tokens, d_ff)
    each = 1e6 * (ms["sm90 gate_pack v2"] - ms["sm90 gate_pack v3"]) / turns
    whole = 1e6 * ms["sm90 gate_pack v3"] / turns
    if each <= 0:
        return f"v3 was not faster than v2 in this run: {whole:,.0f} ns a tile, v2 {-each:,.0f} ns less."
    return (
        f"A tile takes v3 {whole:,.0f} ns; v2 takes {each:,.0f} ns longer, {each / whole:.1%} of it: the packing "
        "that v3 hides."
    )


def waves(tokens: int, d_ff: int, pairs: int = 66, rows: int = 256, columns: int = TILE) -> tuple[int, float]:
    """(turns, the share of their places that is used) when tiles of rows x columns go to `pairs` pairs of blocks."""
    tiles = -(-tokens // rows) * -(-d_ff // columns)
    turns = -(-tiles // pairs)
    return turns, tiles / (turns * pairs)


def story(file: str) -> str:
    """The comment at the top of a file of kernels/ and, in a checkout, its worklog in docs/kernels/."""
    lines = (folders.kernels_dir() / file).read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    told = "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines[:end])
    log = folders.kernels_dir().parent / "docs" / "kernels" / f"{Path(file).stem}.md"
    return f"{told}\n\n{log.read_text(encoding='utf-8')}" if log.is_file() else told


def other_tokens(rows: list[dict]) -> str:
    """Recorded times of trained layers, compared with the planner's trials of the same paths on other tokens."""
    timed = {
        (row["l1"], row["layer"], row["path"].removeprefix("forced ")): row["ms"]
        for row in rows
        if "l1" in row and row["path"].startswith("forced ")
    }
    ratios = []
    for row in rows:
        which = (row.get("l1"), row.get("layer"), row["path"].removeprefix("plan: "))
        if row["kind"] == "plan" and which in timed:
            ratios.append((row["ms"] / timed[which], f"{which[2]} in layer {which[1]}, L1 {which[0]:g}"))
    if not ratios:
        return "No trained layer is recorded."
    far = sorted((pair for pair in ratios if not 0.9 <= pair[0] <= 1.1), reverse=True)
    near = (
        f"In {len(ratios) - len(far)} of {len(ratios)} trials a path took within 10% of its time on the tokens "
        "timed here"
    )
    return "\n".join(
        [f"{near}{'; the others:' if far else '.'}", *(f"  {name}: {ratio:.2f} times that" for ratio, name in far)]
    )


# ---- the roofline ----


def points(rows: list[dict], fused: dict[str, dict], nnz: float = 29) -> list[dict]:
    """Points of a roofline: name, group, operations, bytes (memory), seconds, where.

    rows: of `course.hopper`; fused: `course.first_kernels.recorded(16384)`, for the versions of the fused up and down
    kernel.
    """
    found = []
    for row in versions(rows, nnz):
        tokens, d_model, d_ff = row["tokens"], row["d_model"], row["d_ff"]
        _, gate, _ = work(tokens, d_model, d_ff, nnz)
        dense_gate = VALUE * tokens * d_ff
        words = 4 * tokens * (-(-d_ff // TILE) + nnz)
        extra = {"gate GEMM (torch)": dense_gate - words, "gate GEMM (torch), then pack": 2 * dense_gate}.get(
            row["path"], 0
        )
        found.append(_point(row, "gate GEMM", gate["operations"], gate["memory"] + extra))
    _, _, sparse = work(nnz=nnz)
    found += [
        _point({**time, "path": name}, "fused up and down", sparse["operations"], sparse["memory"])
        for name, time in fused.items()
        if name in ("gated_v1", "gated_v2", "gated_v3")
    ]
    for row in select(rows, nnz=nnz, tokens=1, workload=LOGNORMAL):
        dense, gate, sparse = work(1, row["d_model"], row["d_ff"], row["nnz"])
        parts = {f"dense eager{GRAPH}": [dense], f"forced twell{GRAPH}": [gate, sparse]}.get(row["path"], [])
        name = row["path"].removesuffix(GRAPH).removeprefix("forced ") + ", 1 token"
        if parts and all(point["name"] != name for point in found):  # an older run may have it too
            found.append(
                _point(
                    {**row, "path": name},
                    "whole layer, 1 token",
                    *(sum(p[key] for p in parts) for key in ("operations", "memory")),
                )
            )
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


def of_the_roof(found: list[dict], gpu: dict) -> str:
    """A table of the points, with the share that each reaches of its roof, by the datasheet's peaks."""
    peak, bandwidth = 1e12 * gpu["tensor_tflops"], 1e9 * gpu["bandwidth_gb_s"]
    shown = []
    for p in found:
        intensity = p["operations"] / p["bytes"]
        roof = min(peak, bandwidth * intensity)
        shown.append(
            {
                "name": p["name"],
                "intensity": round(intensity, 1),
                "rate": p["operations"] / p["seconds"] / 1e12,
                "roof": "tensor cores" if roof == peak else "memory",
                "share": f"{p['operations'] / p['seconds'] / roof:.0%}",
            }
        )
    columns = {
        "name": "",
        "intensity": "operations a byte",
        "rate": "TFLOP/s",
        "roof": "under the roof of",
        "share": "reached",
    }
    return records.table(shown, columns) if shown else "No time is recorded."


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


def pool_text(rows: list[dict]) -> str:
    """The rows of `pool_table` that overflow, as text."""
    shown = [{**row, "is": "lost" if row["lost"] else "in the pool"} for row in rows if row["excess"]]
    columns = {
        "row": "row",
        "count": "fires",
        "words": "in its words",
        "excess": "beyond",
        "start": "pool from",
        "end": "to",
        "is": "",
    }
    return records.table(shown, columns)


def read_back(packed: Tensor, pool: Tensor, columns: int) -> tuple[Tensor, list[int]]:
    """(the gate, float32 [tokens, columns]; the lost rows), read from words and pool one word after the other.

    packed: [tokens, tiles, 32], pool: [groups, tiles, 64], of bfloat16 values, as twell_lab.formats.pool makes them.
    """
    tokens, tiles = packed.shape[:2]
    gate, lost = torch.zeros(tokens, columns), set()
    for tile in range(tiles):
        for first in range(0, tokens, POOL_ROWS):
            group = pool_table(packed[first : first + POOL_ROWS, tile, 0].tolist())
            for at in group:
                row = first + at["row"]
                words = packed[row, tile, 1 : 1 + at["words"]].tolist()
                if at["lost"]:
                    lost.add(row)
                elif at["excess"]:
                    words += pool[first // POOL_ROWS, tile, at["start"] : at["end"]].tolist()
                for word in words:
                    value = torch.tensor(word >> 16, dtype=torch.int16).view(torch.bfloat16)
                    gate[row, tile * TILE + (word & 0xFFFF)] = value.float()
    return gate, sorted(lost)


# ---- hot and cold ----


def break_even(reached: Rates) -> float:
    """The share of tokens above which a neuron is cheaper dense, at these rates.

    Dense, it costs 4 d_model operations at every token; sparse, 4 d_model bytes at each token where it fires.
    """
    return reached.l2 / reached.tensor


def split(
    frequency: Tensor, hots: Iterable[int], reached: Rates, tokens: int = 16384, d_model: int = 2048
) -> list[dict]:
    """Predicted ms of a layer that computes its `hot` most frequent neurons densely, for each of `hots`.

    0 hot neurons are TwELL, d_ff are a dense layer. frequency: [d_ff], the share of tokens at which each neuron fires.
    Rows: hot, gate, dense (up and down of the hot neurons), sparse, start (the sums of the hot part, float32, written
    and read again), ms (of all four), cold_nnz.
    """
    ordered = frequency.double().sort(descending=True).values
    d_ff, rows = len(ordered), []
    for hot in hots:
        cold = float(ordered[hot:].sum())
        parts = {
            "gate": 2 * d_ff / reached.tensor,
            "dense": 4 * hot / reached.tensor,
            "sparse": 4 * cold / reached.l2,
            "start": 8 / reached.memory * (0 < hot < d_ff),
        }
        parts = {name: 1e3 * tokens * d_model * seconds for name, seconds in parts.items()}
        rows.append({"hot": hot, **parts, "ms": sum(parts.values()), "cold_nnz": cold})
    return rows


def split_sentence(rows: list[dict]) -> str:
    """The fastest of the rows of `split`, beside TwELL and dense, in a sentence."""
    best = min(rows, key=lambda row: row["ms"])
    d_ff = max(row["hot"] for row in rows)
    twell, dense = (next(row["ms"] for row in rows if row["hot"] == hot) for hot in (0, d_ff))
    what = {0: "TwELL, nothing hot", d_ff: "dense, all hot"}.get(
        best["hot"], f"{best['hot']:,} neurons hot, {best['cold_nnz']:.0f} firing ones left"
    )
    return f"{what}: {best['ms']:.2f} ms; TwELL {twell:.2f}, dense {dense:.2f}"
