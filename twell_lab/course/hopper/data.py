"""Times for notebook 09: read from one record, and measured on the reader's GPU.

Data in, data out, nothing drawn. Rows are those of the "inference" record (twell_lab.bench.forward), each with
`where`: "recorded on <device>, <day>", or "yours, now, on <device>". The notebook's roofline is in course/roofline,
what a call costs the host in `calls`, the tile that is stepped through in `tile`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ... import records
from ...ops import clock as clocks
from ...ops import dispatch
from ...ops.clock import dtype_for
from ..recorded import GRAPH, LEAST, LOGNORMAL, device_and_day, rows_of, select, sources, timed_here
from ..roofline.data import floors, peaks, work

NAME = "inference"  # how the names of the records begin
COMMAND = "twell-lab record inference"
MISSING = f"No layer is recorded in this checkout. On a machine with a Hopper GPU, `{COMMAND}` records some."
TORCH, COMPILED, FUSED, TWELL, PLANNED = "dense eager", "dense compiled", "forced dense", "forced twell", "planned"
SHOWN = (PLANNED, "planned compiled", TWELL, "forced hot_cold", FUSED)  # in the map
FEW = 256  # up to so many tokens a layer takes about as long as its launches, so graph replays are compared
D_MODEL, D_FF = 2048, 5632  # of the layer that all of the notebook is about


# ---- what is recorded, and what is measured here ----


def recorded(device: str = "H100") -> list[dict]:
    """The rows of the newest "inference" record made on a GPU with `device` in its name that timed the gate's versions;
    [] if there is none. One record, so that its times can be compared."""
    for record in reversed(records.load_all()):
        rows = [row for row in record.rows if "kind" in row and device in row["device"]]
        if record.name.startswith(NAME) and any(row["kind"] == "gate" for row in rows):
            old = records.stale(record)
            return [{**row, "where": f"recorded on {device_and_day(row['device'], record.date, old)}"} for row in rows]
    return []


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


# ---- what the fused dense layer gives, and what sparsity ----


def parts(rows: list[dict], tokens: int = 16384) -> list[dict]:
    """By mean nnz: ms of torch's dense layer, of the fused dense layer and of the planned one; `fused` and `sparsity`,
    how many times as fast each step is as the one before; choice; where; fuses, False where the dense path of the
    reader's GPU fuses nothing."""
    here = select(rows, tokens=tokens, workload=LOGNORMAL, d_model=D_MODEL, d_ff=D_FF)
    found = []
    for planned in sorted((row for row in here if row["path"] == PLANNED), key=lambda row: row["nnz"]):
        beside = {row["path"]: row for row in here if (row["nnz"], row["where"]) == _one_run(planned)}
        if TORCH in beside and FUSED in beside:
            torch_ms, fused_ms = beside[TORCH]["ms"], beside[FUSED]["ms"]
            found.append(
                {key: planned.get(key) for key in ("nnz", "choice", "where")}
                | {"torch_ms": torch_ms, "fused_ms": fused_ms, "planned_ms": planned["ms"]}
                | {"fused": torch_ms / fused_ms, "sparsity": fused_ms / planned["ms"]}
                | {"fuses": beside[FUSED].get("fuses", True)}
            )
    return found


def _one_run(row: dict) -> tuple:
    return row["nnz"], row["where"]


def parts_sentence(found: list[dict], nnz: int = 29) -> str:
    """The row of `parts` of this nnz, in words."""
    row = next((row for row in found if round(row["nnz"]) == nnz), None)
    if row is None:
        return MISSING
    return f"fused {row['fused']:.2f} x sparsity {row['sparsity']:.2f} = {row['torch_ms'] / row['planned_ms']:.2f}"


# ---- by how many neurons fire ----


def by_nnz(rows: list[dict], tokens: int = 16384) -> dict[str, list[tuple[float, float]]]:
    """Path -> (mean nnz, ms) at this number of tokens, ascending: TORCH, FUSED, TWELL and PLANNED."""
    here = select(rows, tokens=tokens, workload=LOGNORMAL, d_model=D_MODEL, d_ff=D_FF)
    found = {
        path: sorted((row["nnz"], row["ms"]) for row in here if row["path"] == path)
        for path in (TORCH, FUSED, TWELL, PLANNED)
    }
    return {path: points for path, points in found.items() if points}


def estimate(nnz: float, tokens: int = 16384) -> tuple[float, float]:
    """(dense, TwELL) ms: the floor of the dense layer; that of TwELL's gate, and what its rows take through the L2."""
    dense, gate, sparse = (step["floor_ms"] for step in floors(work(tokens, D_MODEL, D_FF, nnz), peaks()))
    return dense, gate + sparse


def crossing(found: dict[str, list[tuple[float, float]]], other: str = FUSED) -> tuple[float, float] | None:
    """The two neighbouring nnz of `by_nnz` between which TwELL becomes slower than `other`; None where it is between no
    two of them."""
    both = [
        (nnz, ms - dict(found[other])[nnz]) for nnz, ms in found.get(TWELL, ()) if nnz in dict(found.get(other, ()))
    ]
    for (left, below), (right, above) in zip(both, both[1:]):
        if below <= 0 < above:
            return left, right
    return None


def crossing_sentence(found: dict[str, list[tuple[float, float]]]) -> str:
    """Between which measured nnz both dense layers become faster than TwELL alone, in words."""
    if TWELL not in found:
        return MISSING
    ends = {path: crossing(found, other=path) for path in (FUSED, TORCH)}
    said = [f"from between {met[0]:.0f} and {met[1]:.0f}" if met else "nowhere" for met in ends.values()]
    return f"by nnz: fused wins {said[0]}, torch's {said[1]}"


# ---- where sparsity loses ----


def family(path: str) -> str:
    """A path without "(graph)" and without its hot size: "forced hot_cold 768 (graph)" -> "forced hot_cold"."""
    words = path.removesuffix(GRAPH).split(" ")
    return " ".join(words[:-1] if words[-1].isdigit() else words)


def cells(rows: list[dict], workload: str = LOGNORMAL) -> list[dict]:
    """The cells of the map: tokens, nnz, path (see `family`), x, choice, ms, where, how ("eager", "graph", "compiled").

    x: times as fast as the dense layer run the same way. For up to FEW tokens the times are those of graph replays.
    """
    found = []
    for row in select(rows, workload=workload, d_model=D_MODEL, d_ff=D_FF):
        graph = row["path"].endswith(GRAPH)
        name = family(row["path"])
        cell = {key: row.get(key) for key in ("tokens", "nnz", "choice", "ms", "where")} | {"path": name}
        if name == "planned compiled" and row.get("x_compiled"):
            found.append({**cell, "x": row["x_compiled"], "how": "compiled"})
        elif name in SHOWN and graph == (row["tokens"] <= FEW):
            found.append({**cell, "x": row["x_dense"], "how": "graph" if graph else "eager"})
    return found


def losses(found: list[dict]) -> str:
    """In how many of the cells of the map each path is slower than the dense layer run the same way, in a line."""
    if not found:
        return MISSING
    said = []
    for path, name in ((PLANNED, "planned"), ("planned compiled", "compiled"), (TWELL, "TwELL")):
        here = [cell["x"] for cell in found if cell["path"] == path]
        said.append(f"{name} {sum(x < LEAST for x in here)} of {len(here)}")
    return f"Cells slower than torch's layer: {', '.join(said)}; {sources(found)}."
