"""Times for notebook 09: recorded, and measured on the reader's GPU. Nothing is drawn.

Rows are those of the "inference" record (twell_lab.bench.forward), each with `where`: "recorded on <device>, <day>", or
"yours, now, on <device>". The notebook's roofline is in course/roofline, the tile that is stepped through in `tile`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ops.clock import dtype_for
from ..charts import groups
from ..recorded import GRAPH, LOGNORMAL, newest, select, timed_here
from ..roofline.data import floors, peaks, work

NAME = "inference"  # how the names of the records begin
TORCH, FUSED, TWELL, PLANNED = "dense eager", "forced dense", "forced twell", "planned"
SHOWN = (PLANNED, TWELL, "forced hot_cold", FUSED)  # in the map, beside "planned compiled"
FEW = 256  # up to so many tokens a layer takes about as long as its launches, so graph replays are compared
D_MODEL, D_FF = 2048, 5632  # of the layer that all of the notebook is about


# ---- what is recorded, and what is measured here ----


def recorded(device: str = "H100") -> list[dict]:
    """The rows of "inference" records made on a GPU with `device` in its name; of equal measurements the newest."""
    return newest(NAME, device, lambda row: "kind" in row)


def yours(nnzs: Iterable[float] = (8, 29, 120), tokens: int = 16384) -> list[dict]:
    """Rows as in the record, checked and then timed on this machine's GPU in its own 16-bit type.

    [] without a GPU, and, with a printed reason, if the GPU cannot do it.
    """
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
    """The cells of the map: tokens, nnz, path (without its hot size), x, choice, where.

    x: times as fast as the dense layer run the same way. For up to FEW tokens the times are those of graph replays."""
    found = []
    for row in select(rows, workload=LOGNORMAL, d_model=D_MODEL, d_ff=D_FF):
        path = row["path"].removesuffix(GRAPH).rstrip(" 0123456789")
        cell = {key: row.get(key) for key in ("tokens", "nnz", "choice", "where")} | {"path": path}
        if path == "planned compiled" and row.get("x_compiled"):
            found.append(cell | {"x": row["x_compiled"]})
        elif path in SHOWN and row["path"].endswith(GRAPH) == (row["tokens"] <= FEW):
            found.append(cell | {"x": row["x_dense"]})
    return found
