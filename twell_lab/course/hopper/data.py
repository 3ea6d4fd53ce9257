"""Times for notebook 09: read from the records, and measured on the reader's GPU.

Data in, data out, nothing drawn. Rows are those of the "inference" record (twell_lab.bench.inference), each with
`where`: "recorded on <device>, <day>", or "yours, now, on <device>".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

from torch import Tensor

from ... import records
from ...ops import measure
from ..recorded import (
    GRAPH,
    LEAST,
    LOGNORMAL,
    device_and_day,
    extremes,
    newest,
    rows_of,
    same,
    select,
    sources,
    timed_here,
)
from ..roofline.data import Rates, floors, work

UNIFORM = "independent, uniform"
NAME = "inference"  # how the names of the records begin
COMMAND = "twell-lab record inference"
MISSING = f"No such run is recorded in this checkout; `{COMMAND}` makes one."
STACK = " (graph of "  # in a path: a layer's share of the time of a graph of several layers
# What the record of the portable kernels calls a path -> what it is called here.
SAME = {"dense eager": "dense eager", "dense compiled": "dense compiled", "twell": "forced twell"}
SHOWN = ("planned", "forced twell", "forced hot_cold", "forced dense", "forced portable", "forced mma.sync")
FEW = 256  # up to so many tokens a layer takes about as long as its launches, so graph replays are compared


# ---- what is recorded, and what is measured here ----


def recorded(device: str = "H100") -> list[dict]:
    """Every row of "inference" records made on a GPU with `device` in its name; of equal measurements the newest."""
    found = newest(NAME, device, lambda row: "kind" in row)
    return found + _portable(device, set(map(same, found)))


def _portable(device: str, taken: set[tuple]) -> list[dict]:
    """The rows of the newest record of the portable kernels, with the names of paths that are used here.

    taken: `same` of rows that there are already; torch's layers that measure the same are left out.
    """
    record = next(
        (
            r
            for r in reversed(records.load_all())
            if r.name == "portable" and any(device in row.get("device", "") for row in r.rows)
        ),
        None,
    )
    found = []
    for row in record.rows if record else ():
        how, graph = row.get("path", "").removesuffix(GRAPH), row.get("path", "").endswith(GRAPH)
        if row.get("kind") != "ffn_forward" or how not in (*SAME, "portable", "mma.sync", "part: gate GEMM"):
            continue
        where = f"recorded on {device_and_day(row['device'], record.date, records.stale(record))}"
        named = {**row, "kind": "inference", "gated": True, "path": SAME.get(how, f"forced {how}") + GRAPH * graph}
        if how == "part: gate GEMM":
            tflops = 2e-9 * row["tokens"] * row["d_model"] * row["d_ff"] / row["ms"]
            named |= {"kind": "gate", "path": "gate GEMM (torch)", "tflops": round(tflops, 1)}
        if how in ("portable", "mma.sync") or same(named) not in taken:
            found.append({**named, "where": where})
    return found


def ways(rows: list[dict], tokens: int = 16384) -> str:
    """A table by nnz: TwELL layers on each set of kernels, in ms and as times as fast as dense in the same run.

    nnz and the dense times are those of the newest run. nnz of two runs count as equal if they agree to two digits.
    """
    here = select(rows, tokens=tokens, workload=LOGNORMAL, d_model=2048, d_ff=5632)
    lines: dict[float, dict] = {}
    for row in here:
        line = lines.setdefault(float(f"{row['nnz']:.2g}"), {"nnz": row["nnz"]})
        line.setdefault(row["path"], row["ms"])
        line.setdefault(f"{row['path']} x", row["x_dense"])
    columns = {"nnz": "mean nnz", "dense eager": "dense ms", "dense compiled": "compiled"}
    for path, name in (("forced portable", "portable"), ("forced mma.sync", "mma.sync"), ("forced twell", "Hopper")):
        columns |= {path: f"TwELL, {name} ms", f"{path} x": "x dense"}
    shown = [line for _, line in sorted(lines.items()) if "forced twell" in line]
    return records.table(shown, columns) if shown else MISSING


def about(rows: list[dict]) -> str:
    """Where rows come from, in a sentence; if there are none, which command makes them."""
    if not rows:
        return f"No inference run is recorded in this checkout. On a machine with a Hopper GPU, `{COMMAND}` makes one."
    return f"{len(rows):,} times, {sources(rows)}."


def yours(nnzs: Iterable[float] = (8, 29, 120), tokens: int = 16384) -> list[dict]:
    """Rows as in the record, checked and then timed on this machine's GPU: dense eager, planned and TwELL layers.

    [] without a GPU, and, with a printed reason, if the GPU cannot do it.
    """
    from ...bench import inference

    def rows(nnz: float) -> list[dict]:
        layer, inputs, seen = inference.drawn(tokens, inference.D_MODEL, inference.D_FF, nnz)
        return layer_rows(layer, inputs, inference.plan_for(layer, seen), nnz)

    return timed_here(lambda: [row for nnz in nnzs for row in rows(nnz)])


def layer_rows(layer, inputs: list[Tensor], plan, nnz: float, clock: Callable = measure.time_cuda) -> list[dict]:
    """One gated layer, dense, planned and on the TwELL path, checked and then timed: rows as in the record.

    inputs: [tokens, d_model] each. clock: takes calls by name and gives the milliseconds of each, as
    ops.measure.time_cuda does.
    """
    from ...bench import inference
    from ...layers.choice import Choice, LayerPlan
    from ...layers.sparse_ffn import SparseFFN
    from ...models.swap import sparsify

    tokens, (d_ff, d_model) = len(inputs[0]), layer.gate_proj.weight.shape
    choice = plan.layers[0].choice(tokens)
    calls = {
        "dense eager": layer,
        "planned": sparsify(copy.deepcopy(layer), plan, memory=math.inf),
        "forced twell": SparseFFN.from_module(
            copy.deepcopy(layer), plan=LayerPlan.forced(plan.layers[0], Choice("twell"))
        ),
    }
    for name, call in calls.items():
        if name != "dense eager":
            inference.check(layer, call, inputs)
    samples = clock({name: lambda turn, call=call: call(inputs[turn % len(inputs)]) for name, call in calls.items()})
    rows = rows_of(samples, "inference", tokens, d_model, d_ff, nnz)
    return [row | {"choice": str(choice)} if row["path"] == "planned" else row for row in rows]


# ---- the result: times as fast as dense ----


def headline(rows: list[dict], tokens: int = 16384, workload: str = LOGNORMAL) -> list[dict]:
    """For each nnz, a row with the planned layer beside the dense one, both eager and both compiled."""
    here = select(rows, tokens=tokens, workload=workload, d_model=2048, d_ff=5632)
    shown = []
    for planned in sorted((row for row in here if row["path"] == "planned"), key=lambda row: row["nnz"]):
        beside = {row["path"]: row for row in here if row["nnz"] == planned["nnz"] and row["where"] == planned["where"]}
        compiled = beside.get("planned compiled", {})
        line = {key: planned.get(key) for key in ("nnz", "choice", "dense_ms", "ms", "x_dense", "where")}
        line |= {"compiled_dense_ms": beside.get("dense compiled", {}).get("ms")}
        shown.append(line | {"compiled_ms": compiled.get("ms"), "x_compiled": compiled.get("x_compiled")})
    return shown


def estimates(rows: list[dict], reached: Rates, nnzs: Iterable[float] = (8, 29, 60, 120, 300)) -> str:
    """A table for 16,384 tokens: the least times of TwELL and dense by `floors`, beside their recorded times."""
    shown = []
    for nnz in nnzs:
        dense, gate, sparse = (step["floor_ms"] for step in floors(work(nnz=nnz), reached))
        here = {
            row["path"]: row["ms"]
            for row in select(rows, nnz=nnz, tokens=16384, workload=LOGNORMAL, d_model=2048, d_ff=5632)
        }
        line = {
            "nnz": nnz,
            "gate": gate,
            "sparse": sparse,
            "twell": gate + sparse,
            "dense": dense,
            "x": dense / (gate + sparse),
        }
        shown.append({**line, "twell_ms": here.get("forced twell"), "dense_ms": here.get("dense eager")})
    columns = {
        "nnz": "nnz",
        "gate": "gate",
        "sparse": "+ rest",
        "twell": "= TwELL, ms",
        "twell_ms": "recorded",
        "dense": "dense, ms",
        "dense_ms": "recorded",
        "x": "dense / TwELL, estimated",
    }
    return records.table(shown, columns)


def headline_table(shown: list[dict]) -> str:
    """The rows of `headline` as a table."""
    columns = {
        "nnz": "mean nnz",
        "choice": "planned path",
        "dense_ms": "dense ms",
        "ms": "planned ms",
        "x_dense": "times as fast",
        "compiled_dense_ms": "compiled: dense ms",
        "compiled_ms": "planned ms",
        "x_compiled": "times as fast",
    }
    return (
        records.table(shown, columns)
        if shown
        else f"No planned layer is recorded in this checkout. On a machine with a Hopper GPU, `{COMMAND}` does it."
    )


# ---- the planner, judged ----


def plan_points(rows: list[dict]) -> list[dict]:
    """The rows of kind "plan": predicted and measured times of the planner's own trials."""
    return [row for row in rows if row["kind"] == "plan" and row.get("predicted_ms")]


def plan_sentences(found: list[dict]) -> str:
    """In lines: how near the predictions are, and how often the candidate predicted fastest was fastest."""
    if not found:
        return "No planner's trial is recorded."
    lines = [f"{len(found)} candidates were timed."]
    for which, few in ((f"up to {FEW} tokens", True), ("more tokens", False)):
        ratios = sorted(row["ms"] / row["predicted_ms"] for row in found if (row["tokens"] <= FEW) == few)
        if ratios:
            near = sum(1 / 1.25 <= ratio <= 1.25 for ratio in ratios)
            lines.append(
                f"{which}: {near} of {len(ratios)} within a factor of 1.25 of the prediction; measured / predicted: "
                f"median {ratios[len(ratios) // 2]:.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}."
            )
    layers: dict[tuple, list[dict]] = {}
    for row in found:
        layers.setdefault((*same(row), row["nnz"]), []).append(row)
    several = [group for group in layers.values() if len(group) > 1]
    first = sum(
        min(group, key=lambda row: row["predicted_ms"]) is min(group, key=lambda row: row["ms"]) for group in several
    )
    lines.append(
        f"In {first} of {len(several)} layers with several candidates, the one predicted fastest was also measured "
        "fastest: that is what the timing is for."
    )
    return "\n".join(lines)


# ---- where sparsity loses ----


def family(path: str) -> str:
    """A path without "(graph)" and without its hot size: "forced hot_cold 768 (graph)" -> "forced hot_cold"."""
    words = path.removesuffix(GRAPH).split(" ")
    return " ".join(words[:-1] if words[-1].isdigit() else words)


def cells(rows: list[dict], workload: str = LOGNORMAL, d_model: int = 2048, d_ff: int = 5632) -> list[dict]:
    """The cells of the map: tokens, nnz, path (see `family`), x, choice, ms, where, how ("eager", "graph", "compiled").

    x: times as fast as the dense layer run the same way. For up to FEW tokens the times are those of graph replays.
    """
    found = []
    for row in select(rows, workload=workload, d_model=d_model, d_ff=d_ff):
        graph = row["path"].endswith(GRAPH)
        few = row["tokens"] <= FEW
        name = family(row["path"])
        if name == "planned compiled" and row.get("x_compiled"):
            found.append({**_cell(row, name), "x": row["x_compiled"], "how": "compiled"})
        elif name in SHOWN and graph == few:
            found.append({**_cell(row, name), "x": row["x_dense"], "how": "graph" if graph else "eager"})
    return found


def _cell(row: dict, name: str) -> dict:
    return {**{key: row.get(key) for key in ("tokens", "nnz", "choice", "ms", "where")}, "path": name}


def losses(found: list[dict]) -> str:
    """A table of the paths of `cells`: in how many cells each is slower than dense, its lowest and highest figure."""
    lines = []
    for path in dict.fromkeys(cell["path"] for cell in found):
        here = sorted((cell for cell in found if cell["path"] == path), key=lambda cell: cell["x"])
        low, high = here[0], here[-1]
        below = sum(cell["x"] < LEAST for cell in here)
        line = {"path": path, "cells": len(here), "below": below, "low": f"{low['x']:.2f}x", "low_at": _at(low)}
        lines.append(line | {"high": f"{high['x']:.2f}x", "high_at": _at(high)})
    columns = {
        "path": "",
        "cells": "cells",
        "below": f"below {LEAST}x dense",
        "low": "lowest",
        "low_at": "at",
        "high": "highest",
        "high_at": "at",
    }
    return records.table(lines, columns) if lines else MISSING


def _at(cell: dict) -> str:
    return f"{cell['tokens']:,} token{'s' * (cell['tokens'] > 1)}, nnz {cell['nnz']:.0f}"


def trained(rows: list[dict]) -> list[dict]:
    """Layers of trained models, by L1 and layer: l1, layer, nnz, tokens, path, x, ms, choice, where, bits, curve.

    bits: the model's bits per byte of validation text; curve: [step, neurons firing for a token] during its training.
    """
    paths = ("planned", "forced twell", "forced hot_cold", "forced dense")
    found = []
    for row in rows:
        if (
            row["kind"] == "inference"
            and "l1" in row
            and family(row["path"]) in paths
            and not row["path"].endswith(GRAPH)
        ):
            cell = _cell(row, family(row["path"])) | {"x": row["x_dense"], "l1": row["l1"], "layer": row["layer"]}
            found.append(cell | {"bits": row.get("validation_bits_per_byte"), "curve": row.get("nnz_curve")})
    return sorted(found, key=lambda cell: (cell["l1"], cell["layer"]))


def trained_sentences(found: list[dict]) -> str:
    """How well the models predict and how their nnz fell; then a table of their planned layers beside the fastest
    path."""
    models, lines = [], []
    for l1, layer in dict.fromkeys((cell["l1"], cell["layer"]) for cell in found):
        here = {cell["path"]: cell for cell in found if (cell["l1"], cell["layer"]) == (l1, layer)}
        planned = here.get("planned") or next(iter(here.values()))
        if planned["curve"] and not any(line.startswith(f"L1 {l1:g}:") for line in models):
            (before, some), (after, last) = planned["curve"][-2:] if len(planned["curve"]) > 1 else planned["curve"] * 2
            models.append(
                f"L1 {l1:g}: {planned['bits']:.3f} bits per byte of validation text; nnz {some:.0f} at step "
                f"{before:,}, {last:.0f} at step {after:,}"
            )
        best = min(here.values(), key=lambda cell: cell["ms"])
        fastest = "the choice" if planned["ms"] <= 1.02 * best["ms"] else best["path"]
        lines.append({**planned, "l1": f"{l1:g}", "best": fastest, "cost": planned["ms"] / best["ms"]})
    columns = {
        "l1": "L1",
        "layer": "layer",
        "nnz": "mean nnz",
        "choice": "planned path",
        "x": "times dense",
        "best": "fastest (within 2%)",
        "cost": "choice / fastest",
    }
    return "\n".join([*models, records.table(lines, columns)]) if lines else "No trained layer is recorded."


# ---- overflow, recorded ----


def overflow_rows(rows: list[dict]) -> list[dict]:
    """The recorded overflow workloads: forced TwELL beside the first of them, which has no overflow, and beside dense;
    the planned layer beside dense."""
    found, base = [], None
    for workload in dict.fromkeys(row["workload"] for row in rows if str(row.get("workload")).startswith("overflow: ")):
        here = {row["path"]: row for row in select(rows, workload=workload)}
        twell, planned, dense = (here.get(path, {}) for path in ("forced twell", "planned", "dense eager"))
        base = base or twell.get("ms")
        found.append(
            {
                "workload": workload.removeprefix("overflow: "),
                "nnz": dense.get("nnz"),
                "dense": dense.get("ms"),
                "twell": twell.get("ms"),
                "times_base": twell["ms"] / base if twell and base else None,
                "times_dense": twell["ms"] / dense["ms"] if twell else None,
                "planned": planned.get("ms"),
                "choice": planned.get("choice"),
                "planned_dense": planned["ms"] / dense["ms"] if planned else None,
            }
        )
    return found


def overflow_table(found: list[dict]) -> str:
    """The rows of `overflow_rows` as a table."""
    columns = {
        "workload": "",
        "nnz": "mean nnz",
        "dense": "dense ms",
        "twell": "TwELL ms",
        "times_base": "of none",
        "times_dense": "of dense",
        "planned": "planned ms",
        "choice": "path",
        "planned_dense": "of dense",
    }
    return records.table(found, columns) if found else MISSING


# ---- decode, and other shapes ----


def decode(rows: list[dict], reached: Rates, nnz: float = 29) -> list[dict]:
    """For each number of tokens up to 64: microseconds of graph replays with cold weights, and the least time that
    memory needs.

    stack_dense, stack_twell: a layer's share of a graph of several layers, each with weights of its own, as in a model.
    """
    found = []
    for tokens in sorted({row["tokens"] for row in rows if row["kind"] == "inference" and row["tokens"] <= 64}):
        here = [
            row
            for row in select(rows, tokens=tokens, workload=LOGNORMAL, d_model=2048, d_ff=5632)
            if abs(row["nnz"] - nnz) < 0.4 * nnz  # with few tokens a drawn mean varies
        ]
        alone = {row["path"].removesuffix(GRAPH): row for row in here if row["path"].endswith(GRAPH)}
        stack = {row["path"].partition(STACK)[0]: 1e3 * row["ms"] for row in here if STACK in row["path"]}
        planned = alone.get("planned") or alone.get("forced twell")  # the same kernels, where no plan is recorded
        if planned is None:
            continue
        dense, gate, sparse = work(tokens, 2048, 5632, planned["nnz"])
        found.append(
            {
                "tokens": tokens,
                "nnz": planned["nnz"],
                "choice": planned.get("choice"),
                "x": planned["x_dense"],
                "planned": 1e3 * planned["ms"],
                "dense": 1e3 * planned["dense_ms"],
                "stack_dense": stack.get("dense eager"),
                "stack_twell": stack.get("forced twell"),
                "dense_floor": 1e6 * dense["memory"] / reached.memory,
                "floor": 1e6 * (gate["memory"] + sparse["memory"]) / reached.memory,
            }
        )
    return found


def decode_table(found: list[dict]) -> str:
    """The rows of `decode` as a table."""
    columns = {
        "tokens": "tokens",
        "nnz": "mean nnz",
        "dense": "dense us",
        "dense_floor": "memory alone",
        "planned": "sparse us",
        "floor": "memory alone",
        "choice": "path",
        "x": "times as fast",
        "stack_dense": "in a stack: dense",
        "stack_twell": "TwELL",
    }
    return records.table(found, columns) if found else MISSING


def shapes(rows: list[dict]) -> list[dict]:
    """Every recorded shape but 2,048 x 5,632: times as fast as dense of its planned layer at each number of tokens.

    As in `cells`, the times for up to FEW tokens are those of graph replays.
    """
    found: dict[tuple, dict] = {}
    for row in select(rows, workload=LOGNORMAL):
        size = (row["d_model"], row["d_ff"], row["gated"])
        if (
            size[:2] == (2048, 5632)
            or family(row["path"]) != "planned"
            or row["path"].endswith(GRAPH) != (row["tokens"] <= FEW)
        ):
            continue
        line = found.setdefault(
            size,
            {
                "shape": f"{size[0]} x {size[1]}{'' if size[2] else ', plain'}",
                "nnz": row["nnz"],
                "size": math.prod(size[:2]),
            },
        )
        line[row["tokens"]] = row["x_dense"]
    return sorted(found.values(), key=lambda line: line["size"])


def shapes_table(found: list[dict]) -> str:
    """The rows of `shapes` as a table."""
    tokens = sorted({key for line in found for key in line if isinstance(key, int)})
    columns = {"shape": "d_model x d_ff", "nnz": "mean nnz", **{key: f"{key:,} tokens" for key in tokens}}
    return records.table(found, columns) if found else "No other shape is recorded."


def summary(rows: list[dict]) -> str:
    """The worst and the best figure of the planned layer over all cells, in a sentence; "" for no rows.

    Where no planned layer is recorded, it is about forced TwELL.
    """
    name, path = (
        ("The planned layer", "planned") if any(row["path"] == "planned" for row in rows) else ("TwELL", "forced twell")
    )
    planned = [cell for cell in cells(rows) if cell["path"] == path]
    return extremes(name, planned, _at, "cells") if planned else ""
