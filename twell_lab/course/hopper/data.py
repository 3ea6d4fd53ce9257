"""What notebook 09 computes of the Hopper kernels: bytes and operations, least times, the versions of the gate kernel,
the pool; and times of layers, recorded and measured on the reader's GPU, as rows of the "inference" record, each with
`where`. The tile that is stepped through is in `tile`."""

from __future__ import annotations

from collections.abc import Iterable

from ...analysis.costs import Rates
from ...analysis.predict import datasheets
from ...formats.twell import POOL_WORDS, TILE, WORDS
from ...ops.clock import dtype_for
from ...simulator import H100
from ..charts import groups
from ..recorded import GRAPH, LOGNORMAL, newest, select, timed_here

SLOTS = WORDS - 1
VALUE = 2  # bytes of a 16-bit value
NAME = "inference"  # how the names of the records begin
TORCH, FUSED, TWELL, PLANNED = "dense eager", "forced dense", "forced twell", "planned"
SHOWN = (PLANNED, TWELL, "forced hot_cold", FUSED)  # in the map, beside "planned compiled"
FEW = 256  # up to so many tokens a layer takes about as long as its launches, so graph replays are compared
D_MODEL, D_FF = 2048, 5632  # of the layer that all of the notebook is about

# ---- the work, and the least time for it ----


def rates(rows: list[dict]) -> Rates:
    """The rates that were reached: by torch's fastest gate GEMM of these rows, a large copy, reads from the L2."""
    best = min(select(rows, "gate", path="gate GEMM (torch)", tokens=16384), key=lambda row: row["ms"])
    return _rates(best["device"], 2 * best["tokens"] * best["d_model"] * best["d_ff"] / best["ms"] * 1e3)


def peaks() -> Rates:
    """The rates that nothing on an H100 can exceed, by its datasheet: notebook 09's one floor. That of the L2 cache is
    in no datasheet: it is what reads that the L2 serves have reached."""
    gpu = datasheet()
    return _rates(gpu["name"], 1e12 * gpu["tensor_tflops"], 1e9 * gpu["bandwidth_gb_s"])


def _rates(device: str, matmul: float, bandwidth: float = H100.memory_bytes_per_s) -> Rates:
    return Rates(device, "bfloat16", bandwidth=bandwidth, l2=H100.l2_bytes_per_s, matmul=matmul, launch=0.0)


def work(tokens: int = 16384, d_model: int = 2048, d_ff: int = 5632, nnz: float = 29) -> list[dict]:
    """The work of a gated layer: operations, bytes from and to memory (every array once), and what multiprocessors ask
    of the L2, None for a GEMM, in which they share tiles. Rows: the dense layer as a whole, then the two steps of the
    sparse one."""
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
    """The steps with their floor_ms: the least time of the part of the GPU that needs longest."""
    found = []
    for step in steps:
        # A warp multiplies one row with one token in its ordinary units: the L2 bounds that, not the tensor cores.
        passes = step["operations"] / reached.matmul if step["l2"] is None else step["l2"] / reached.l2
        found.append(step | {"floor_ms": 1e3 * max(passes, step["memory"] / reached.bandwidth)})
    return found


def datasheet() -> dict:
    """The vendor's figures for an H100 (data/gpus.json)."""
    return next(gpu for gpu in datasheets() if gpu["name"] == "H100 SXM")


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
    """Where the values of a group of rows lie in one tile, by how many each keeps: row, count, words (values in the
    tile's own words), excess, start and end of the excess in the pool, lost."""
    rows, start = [], 0
    for i, count in enumerate(counts):
        excess = max(0, count - SLOTS)
        row = {"row": i, "count": count, "words": count - excess, "excess": excess, "start": None, "end": None}
        rows.append(row | {"lost": excess > 0 and start + excess > POOL_WORDS})
        if excess:
            rows[-1] |= {"start": start, "end": start + excess}
        start += excess
    return rows


# ---- what is recorded, and what is measured here ----


def recorded(device: str = "H100") -> list[dict]:
    """The rows of "inference" records made on a GPU with `device` in its name; of equal measurements the newest."""
    return newest(NAME, device, lambda row: "kind" in row)


def yours(nnzs: Iterable[float] = (8, 29, 120), tokens: int = 16384) -> list[dict]:
    """Rows as in the record, checked and timed on this machine's GPU in its 16-bit type, as of `timed_here`."""
    from ...bench import forward

    case = lambda nnz: forward.Case(tokens, nnz, d_model=D_MODEL, d_ff=D_FF, dtype=dtype_for("cuda"))
    return timed_here(lambda: [row for nnz in nnzs for row in forward.inference_rows(case(nnz))])


# ---- parts, by nnz, and by the number of tokens ----


def by_nnz(rows: list[dict], tokens: int = 16384) -> list[dict]:
    """The rows of the layer as torch computes it, fused, by TwELL and planned, at this number of tokens, by nnz."""
    here = select(rows, tokens=tokens, workload=LOGNORMAL, d_model=D_MODEL, d_ff=D_FF)
    return sorted((row for row in here if row["path"] in (TORCH, FUSED, TWELL, PLANNED)), key=lambda row: row["nnz"])


def parts(rows: list[dict]) -> list[dict]:
    """By mean nnz: ms of torch's dense layer, of the fused dense layer and of the planned one, as torch, fused and
    planned; choice; where."""
    found, names = [], {"torch": TORCH, "fused": FUSED, "planned": PLANNED}
    for here in groups(by_nnz(rows), lambda row: (row["nnz"], row["where"])).values():
        by_path = {row["path"]: row for row in here}
        if {*names.values()} <= by_path.keys():
            ms = {name: by_path[path]["ms"] for name, path in names.items()}
            found.append({key: by_path[PLANNED].get(key) for key in ("nnz", "choice", "where")} | ms)
    return found


def estimate(nnz: float, tokens: int = 16384) -> tuple[float, float]:
    """(dense, TwELL) ms: the floor of the dense layer; that of TwELL's gate, and what its rows take through the L2."""
    dense, gate, sparse = (step["floor_ms"] for step in floors(work(tokens, D_MODEL, D_FF, nnz), peaks()))
    return dense, gate + sparse


def cells(rows: list[dict]) -> list[dict]:
    """The cells of the map: tokens, nnz, path (without its hot size), choice, where, and x, times as fast as the dense
    layer run the same way, for up to FEW tokens by graph replays."""
    found = []
    for row in select(rows, workload=LOGNORMAL, d_model=D_MODEL, d_ff=D_FF):
        path = row["path"].removesuffix(GRAPH).rstrip(" 0123456789")
        cell = {key: row.get(key) for key in ("tokens", "nnz", "choice", "where")} | {"path": path}
        if path == "planned compiled" and row.get("x_compiled"):
            found.append(cell | {"x": row["x_compiled"]})
        elif path in SHOWN and row["path"].endswith(GRAPH) == (row["tokens"] <= FEW):
            found.append(cell | {"x": row["x_dense"]})
    return found
