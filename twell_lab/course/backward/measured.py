"""Training steps for notebook 11: the recorded ones, and the reader's own beside them.

Data in, data out, nothing drawn. Rows are those of kind "training" (twell_lab.bench.training): path ("dense eager",
"dense compiled", "forced dense", "forced twell", "planned", "planned compiled"; of whole models also "planned, compiled
by layer" and "forced twell compiled"), nnz, ms, x_dense, x_compiled, peak_bytes. Here each gets `where`: "recorded on
<device>, <day>", or "yours, now, on <device>".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor

from ... import records
from ...ops import measure, train_rows
from ..notebook import sixteen_bits
from ..recorded import GRAPH, LOGNORMAL, extremes, newest, rows_of, same, sources, timed_here

NAME, KIND = "training", "training"
COMMAND = "twell-lab record training"
MISSING = (
    f"No training step is recorded in this checkout. On a machine with a Hopper GPU, `{COMMAND}` makes the record."
)
TOKENS, D_MODEL, D_FF = 16384, 2048, 5632
SPARSE = "forced twell"
WHOLE = "whole step"
BY_LAYER = "planned, compiled by layer"
OURS = {
    "planned": "x_dense",
    "planned compiled": "x_compiled",
    BY_LAYER: "x_compiled",
    SPARSE: "x_dense",
    f"{SPARSE} compiled": "x_compiled",
}  # path -> the field that compares it with the dense layer run the same way
KINDS = {
    LOGNORMAL: "a few neurons fire often",
    "independent, uniform": "all fire equally often",
    "overflow": "rows with a full tile",
    "trained": "layers of a trained model",
}  # how a workload's name begins -> what it is called in figures


def recorded(device: str = "H100") -> list[dict]:
    """Every step of a layer on TOKENS tokens and of a whole model, eager or compiled, that was recorded on a GPU with
    `device` in its name; of equal measurements the newest."""

    def wanted(row: dict) -> bool:
        if row.get("kind") != KIND or row.get("nnz") is None or row["path"].endswith(GRAPH):
            return False
        return row["tokens"] == TOKENS or row["workload"].startswith(WHOLE)

    return newest(NAME, device, wanted)


def steps(rows: list[dict], workload: str = LOGNORMAL) -> list[dict]:
    """The rows of one layer of TOKENS, D_MODEL and D_FF, by nnz; each gets `column`, its nnz rounded, as text."""
    here = [
        row
        for row in rows
        if row.get("workload") == workload and (row["tokens"], row["d_model"], row["d_ff"]) == (TOKENS, D_MODEL, D_FF)
    ]
    return sorted(({**row, "column": f"{row['nnz']:.0f}"} for row in here), key=lambda row: row["nnz"])


def _lines(rows: list[dict]) -> list[dict]:
    """One line for the rows of a workload and nnz: workload, nnz, choice, and the ms, x and MiB of each path."""
    lines: dict[tuple, dict] = {}
    for row in rows:
        line = lines.setdefault((same(row), row["where"]), {key: row.get(key) for key in ("workload", "nnz", "choice")})
        peak = row.get("peak_bytes")
        line |= {
            row["path"]: row["ms"],
            f"{row['path']} x": row.get(OURS.get(row["path"], "x_dense")),
            f"{row['path']} mib": peak and peak / 2**20,
            "choice": row.get("choice") or line["choice"],
        }
    return list(lines.values())


def table(rows: list[dict]) -> str:
    """A line for each nnz: the dense, the sparse and the planned step, eager and compiled, and their memory."""
    lines = _lines(steps(rows))
    columns = {
        "nnz": "mean nnz",
        "dense eager": "dense ms",
        SPARSE: "sparse ms",
        f"{SPARSE} x": "x dense",
        "choice": "planned",
        "planned": "planned ms",
        "planned x": "x dense",
        "dense compiled": "compiled: dense ms",
        "planned compiled": "planned ms",
        "planned compiled x": "x dense",
        "dense eager mib": "MiB: dense",
        f"{SPARSE} mib": "sparse",
    }
    return records.table(lines, columns) if lines else MISSING


def whole_step(rows: list[dict]) -> str:
    """The training step of whole models with dense, planned and sparse layers: ms, times as fast, MiB."""
    said = []
    for line in _lines([row for row in rows if row["workload"].startswith(WHOLE)]):
        row = next(row for row in rows if row["workload"] == line["workload"])
        planned = f", planned: {line['choice']}" if line["choice"] else ""
        said.append(
            f"{row['layers']} layers of {row['d_model']} x {row['d_ff']}, {row['parameters'] / 1e6:.0f} million "
            f"parameters, nnz {line['nnz']:.1f}{planned}"
        )
        shown = [
            {
                "how": how,
                "dense": line[dense],
                "ours": line[ours],
                "x": line[f"{ours} x"],
                "dense mib": line[f"{dense} mib"],
                "mib": line[f"{ours} mib"],
            }
            for how, dense, ours in (
                ("planned", "dense eager", "planned"),
                ("planned, compiled", "dense compiled", "planned compiled"),
                (BY_LAYER, "dense compiled", BY_LAYER),
                ("sparse, compiled", "dense compiled", f"{SPARSE} compiled"),
            )
            if ours in line
        ]
        said.append(
            records.table(
                shown,
                {
                    "how": "",
                    "dense": "dense ms",
                    "ours": "ours ms",
                    "x": "x dense",
                    "dense mib": "MiB: dense",
                    "mib": "ours",
                },
            )
        )
        if (row["d_model"], row["d_ff"]) != (D_MODEL, D_FF):
            continue
        alone = min(_lines(steps(rows)), key=lambda other: abs(other["nnz"] - line["nnz"]), default={})
        if {"dense compiled", "planned compiled"} <= set(alone):
            saved = alone["dense compiled"] - alone["planned compiled"]
            said.append(
                f"Compiled, the step saves {line['dense compiled'] - line['planned compiled']:.1f} ms; "
                f"{row['layers']} single layers at "
                f"nnz {alone['nnz']:.0f} save {row['layers']} x {saved:.2f} = {row['layers'] * saved:.1f}."
            )
    return "\n".join(said) or "No whole step is recorded."


def series(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of one gated layer of TOKENS, D_MODEL and D_FF by kind of workload, as KINDS names it; by nnz."""
    here = [
        row
        for row in rows
        if (row["tokens"], row["d_model"], row["d_ff"]) == (TOKENS, D_MODEL, D_FF) and row.get("gated", True)
    ]
    found = {
        name: sorted(
            (row for row in here if row["workload"] == kind or row["workload"].split(":")[0].split(",")[0] == kind),
            key=lambda row: row["nnz"],
        )
        for kind, name in KINDS.items()
    }
    return {name: each for name, each in found.items() if each}


def meets(rows: list[dict], path: str) -> float | None:
    """The nnz at which the sparse step takes as long as `path`, interpolated between two recorded nnz.

    rows: of one kind of workload. None if the lines do not cross between two of them.
    """
    sparse, dense = ({row["nnz"]: row["ms"] for row in rows if row["path"] == each} for each in (SPARSE, path))
    nnzs = sorted(set(sparse) & set(dense))
    for low, high in pairwise(nnzs):
        before, after = sparse[low] - dense[low], sparse[high] - dense[high]
        if before < 0 <= after:
            return low + (high - low) * before / (before - after)
    return None


def meetings(rows: list[dict]) -> str:
    """The nnz at which recorded sparse steps take as long as dense ones: a line for each drawn workload."""
    lines = []
    for name, each in series([row for row in rows if row["workload"].startswith("independent")]).items():
        found = {path: meets(each, path) for path in ("dense compiled", "dense eager")}
        shown = [f"{path.removeprefix('dense ')} at nnz {nnz:.0f}" for path, nnz in found.items() if nnz is not None]
        if shown:
            lines.append(f"Recorded, {name}: the sparse step takes as long as torch's {', '.join(shown)}.")
    return "\n".join(lines) or "Nothing recorded to set beside it."


def lost_cost(rows: list[dict]) -> str:
    """The time of a lost row beside that of a stored one, from the workload in which 1% of the rows is lost."""
    line = next(
        (
            line
            for line in _lines(rows)
            if line["workload"].startswith("overflow") and "tile of 200" in line["workload"]
        ),
        None,
    )
    drawn = sorted((row["nnz"], row["ms"]) for row in steps(rows) if row["path"] == SPARSE)
    around = next((pair for pair in pairwise(drawn) if line and pair[0][0] <= line["nnz"] <= pair[1][0]), None)
    if around is None:
        return "No workload with a known number of lost rows is recorded."
    (low, before), (high, after) = around
    without = before + (after - before) * (line["nnz"] - low) / (high - low)
    lost = 0.01 * TOKENS
    return (
        f"1% of {TOKENS:,} rows lost: {line[SPARSE]:.2f} ms instead of {without:.2f} (between the rows of the table), "
        "so a lost row costs about "
        f"{1e3 * (line[SPARSE] - without) / lost:.0f} us, a stored one {1e3 * without / TOKENS:.2f}."
    )


def no_room(rows: list[dict]) -> str:
    """A line for each recorded workload with more entries than the lists have room for: how much is lost, and the
    times."""
    lines = []
    for line in _lines([row for each in series(rows).values() for row in each]):
        room, entries = train_rows.capacity_for(TOKENS, D_FF), TOKENS * line["nnz"]
        if entries > room and SPARSE in line:
            lines.append(
                f"{line['workload']}: {entries:,.0f} entries, room for {room:,}. At least {1 - room / entries:.1%} of "
                f"them are in lost rows. Sparse {line[SPARSE]:.1f} ms, dense {line['dense eager']:.1f}, planned "
                f"({line['choice']}) {line['planned']:.1f}."
            )
    return "\n".join(lines) or "In no recorded layer do more neurons fire than the lists have room for."


def about(rows: list[dict]) -> str:
    """Where rows come from, in a sentence; if there are none, which command makes them."""
    return f"{len(rows)} times of training steps, {sources(rows)}." if rows else MISSING


def summary(rows: list[dict]) -> str:
    """The lowest and the highest figure of the planned step against dense, in a sentence; "" for no rows."""
    shown = [
        {**row, "x": row[OURS[row["path"]]]}
        for row in rows
        if row["path"].startswith("planned") and row.get(OURS[row["path"]])
    ]
    shown = shown or [{**row, "x": row["x_dense"]} for row in rows if row["path"] == SPARSE]
    return extremes("The training step", shown, _at, "rows") if shown else ""


def _at(row: dict) -> str:
    return f"{row['path']}, {row['workload']}, nnz {row['nnz']:.0f}"


def beside_floor(rows: list[dict], floors: dict[str, list[dict]]) -> str:
    """A line for each recorded sparse step, with the sum of its floors. floors: nnz as text -> data.floors."""
    lines = []
    for row in steps(rows):
        if row["path"] == SPARSE and row["column"] in floors:
            floor = sum(part["ms"] for part in floors[row["column"]])
            below = row["ms"] < 0.995 * floor
            lines.append(
                f"nnz {row['column']}: counted {floor:.2f} ms, recorded {row['ms']:.2f}, {row['ms'] / floor:.2f} "
                f"times that" + ": the caches delivered rows faster than the rate used here" * below
            )
    return "\n".join(dict.fromkeys(lines)) or "No recorded step to set beside them yet."


def dense_ms(rows: list[dict]) -> float | None:
    """Milliseconds of the recorded eager dense step, as the median over nnz, on which it does not depend; or None."""
    found = [row["ms"] for row in steps(rows) if row["path"] == "dense eager"]
    return measure.quartiles(found)[0] if found else None


def memory_sentence(rows: list[dict], nnz: float = 29) -> str:
    """The recorded peak memory that a dense and a sparse step add, at the nnz nearest to this one, in a sentence."""
    here = [row for row in steps(rows) if row.get("peak_bytes") and row["path"] in ("dense eager", SPARSE)]
    if not here:
        return "No peak is recorded yet."
    near = min((row["nnz"] for row in here), key=lambda each: abs(each - nnz))
    each = ", ".join(
        f"{row['peak_bytes'] / 2**20:.0f} MiB ({'sparse' if row['path'] == SPARSE else 'dense'})"
        for row in here
        if row["nnz"] == near
    )
    return (
        f"The most that a whole step adds at any time, output and gradients included, nnz {near:.0f}: {each}; "
        f"{here[0]['where']}."
    )


def yours(nnzs: Iterable[float] = (8, 29, 120), tokens: int = TOKENS) -> list[dict]:
    """The dense and the sparse step, eager, checked and then timed on this machine's GPU, as rows.

    [] without a GPU, and, with a printed reason, if the GPU cannot do it.
    """
    from ...bench import inference

    def rows(nnz: float) -> list[dict]:
        layer, inputs, _ = inference.drawn(tokens, D_MODEL, D_FF, nnz, dtype=sixteen_bits("cuda"))
        return step_rows(layer, inputs, nnz)

    return timed_here(lambda: [row for nnz in nnzs for row in rows(nnz)])


def step_rows(
    layer,
    inputs: list[Tensor],
    nnz: float,
    clock: Callable = measure.time_cuda,
    peak_bytes: Callable = measure.peak_bytes,
) -> list[dict]:
    """The training step of one gated layer, dense and sparse, checked and then timed: rows as in the record.

    inputs: [tokens, d_model] each. clock: takes calls by name and gives the milliseconds of each, as
    ops.measure.time_cuda does. peak_bytes: the peak memory of a call, as ops.measure.peak_bytes. Raises WrongResult if
    a gradient is off by 5% of its norm or more.
    """
    from ...bench import training as tables

    weights = tuple(each.weight.detach().requires_grad_() for each in (layer.gate_proj, layer.up_proj, layer.down_proj))
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) for x in inputs]
    layers = {"dense eager": tables.dense_layer, SPARSE: tables.our_layer("twell")}
    calls = {path: tables.step_of(each, weights, inputs, grads) for path, each in layers.items()}
    for mine, theirs in zip(calls[SPARSE](0), calls["dense eager"](0), strict=True):
        mine, theirs = mine.detach().double(), theirs.detach().double()
        off = float((mine - theirs).norm() / theirs.norm())
        if not off < 0.05:
            raise measure.WrongResult(f"a gradient is off by {off:.2g} of its norm: nothing was timed")
    peaks = {path: peak_bytes(call) for path, call in calls.items()}
    d_ff, d_model = layer.gate_proj.weight.shape
    rows = rows_of(clock(calls), KIND, len(inputs[0]), d_model, d_ff, nnz, layer.gate_proj.weight.dtype)
    return [row | {"peak_bytes": peaks[row["path"]]} for row in rows]
