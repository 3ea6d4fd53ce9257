"""Times for notebook 09: recorded, and measured on the reader's GPU. Nothing is drawn.

Rows are those of the "inference" record (twell_lab.bench.forward), each with `where`: "recorded on <device>, <day>", or
"yours, now, on <device>". The notebook's roofline is in course/roofline, the tile that is stepped through in `tile`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...ops import clock as clocks
from ...ops import dispatch
from ...ops.clock import dtype_for
from ..charts import groups
from ..recorded import GRAPH, LOGNORMAL, newest, rows_of, select, timed_here
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
    """Rows as in the record, checked and then timed on this machine's GPU in its own 16-bit type: torch's dense layer,
    the planned one, and each path that a plan may take, forced.

    [] without a GPU, and, with a printed reason, if the GPU cannot do it.
    """
    from ...analysis import costs, planner
    from ...analysis.profile import profile

    def rows(nnz: float) -> list[dict]:
        dtype = dtype_for("cuda")
        layer, seen = clocks.workload(tokens, D_MODEL, D_FF, nnz, "lognormal", dtype, "cuda")
        inputs = [torch.randn_like(x) for x in seen]  # others than those that are planned on
        for x in inputs:
            x[:, 0] = seen[0][0, 0]
        rates = costs.measure_rates("cuda", dtype)
        plan = planner.plan(profile(layer, seen[:1]), layer, tokens=(tokens,), batches=seen[1:], rates=rates)
        return layer_rows(layer, inputs, plan, nnz)

    return timed_here(lambda: [row for nnz in nnzs for row in rows(nnz)])


def layer_rows(layer, inputs: list[Tensor], plan, nnz: float, clock: Callable = clocks.time_cuda) -> list[dict]:
    """One gated layer, as torch computes it, planned, and on the dense and the TwELL path, checked and then timed: rows
    as in the record.

    inputs: [tokens, d_model] each. clock: takes calls by name and gives the milliseconds of each, as
    ops.clock.time_cuda does. The row of the dense path says by `fuses` whether this GPU has the kernels for it.
    """
    from ...bench.rows import check
    from ...layers.choice import Choice, LayerPlan
    from ...layers.sparse_ffn import SparseFFN
    from ...models.swap import sparsify

    tokens, (d_ff, d_model) = len(inputs[0]), layer.gate_proj.weight.shape
    choice = plan.layers[0].choice(tokens)

    def forced(path: str) -> SparseFFN:
        only = LayerPlan.forced(plan.layers[0], Choice(path))
        return SparseFFN.from_module(copy.deepcopy(layer), plan=only)

    calls = {
        TORCH: layer,
        PLANNED: sparsify(copy.deepcopy(layer), plan),
        FUSED: forced("dense"),
        TWELL: forced("twell"),
    }
    for name, call in calls.items():
        if name != TORCH:
            check(layer, call, inputs)
    samples = clock({name: lambda turn, call=call: call(inputs[turn % len(inputs)]) for name, call in calls.items()})
    rows = rows_of(samples, NAME, tokens, d_model, d_ff, nnz)
    dtype = str(layer.gate_proj.weight.dtype).removeprefix("torch.")
    more = {PLANNED: {"choice": str(choice)}, FUSED: {"fuses": dispatch.fuses(layer.gate_proj.weight)}}
    return [row | {"dtype": dtype} | more.get(row["path"], {}) for row in rows]


# ---- parts, by nnz, and by the number of tokens ----


def by_nnz(rows: list[dict], tokens: int = 16384) -> list[dict]:
    """The rows of the layer as torch computes it, fused, by TwELL and planned, at this number of tokens, by nnz."""
    here = select(rows, tokens=tokens, workload=LOGNORMAL, d_model=D_MODEL, d_ff=D_FF)
    return sorted((row for row in here if row["path"] in (TORCH, FUSED, TWELL, PLANNED)), key=lambda row: row["nnz"])


def parts(rows: list[dict]) -> list[dict]:
    """By mean nnz: ms of torch's dense layer, of the fused dense layer and of the planned one, as torch, fused and
    planned; choice; where; fuses, False where the dense path of the reader's GPU fuses nothing."""
    found = []
    for here in groups(by_nnz(rows), lambda row: (row["nnz"], row["where"])).values():
        by_path = {row["path"]: row for row in here}
        if {TORCH, FUSED, PLANNED} <= by_path.keys():
            ms = {
                name: by_path[path]["ms"] for name, path in (("torch", TORCH), ("fused", FUSED), ("planned", PLANNED))
            }
            said = {key: by_path[PLANNED].get(key) for key in ("nnz", "choice", "where")}
            found.append(said | ms | {"fuses": by_path[FUSED].get("fuses", True)})
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
