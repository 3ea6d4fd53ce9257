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
from ...ops import clock as clocks
from ..notebook import sixteen_bits
from ..recorded import GRAPH, LOGNORMAL, device_and_day, rows_of, same, short, timed_here

NAME, KIND = "training", "training"
COMMAND = "twell-lab record training"
MISSING = (
    f"No training step is recorded in this checkout. On a machine with a Hopper GPU, `{COMMAND}` makes the record."
)
TOKENS, D_MODEL, D_FF = 16384, 2048, 5632
SIZE = 2**-6  # of what comes from above: with 1, weights' gradients would pass what float16 holds, on GPUs that need it
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
    """Steps of a layer on TOKENS tokens and of whole models that were recorded on a GPU with `device` in its name.

    Layers: each kind of workload (KINDS) of one record, so that its times can be compared: of those with the most rows
    of that kind to compare, the newest. Whole models: each compares with its own dense step, so that each is of the
    newest record that timed it. [] if there is none.
    """
    layers: dict[str, tuple[int, list[dict]]] = {}
    models: dict[tuple, list[dict]] = {}
    for record in reversed(records.load_all()):
        rows = [row for row in record.rows if _wanted(row) and device in row["device"]] if record.name == NAME else []
        where = rows and f"recorded on {device_and_day(rows[0]['device'], record.date, records.stale(record))}"
        kinds: dict[str, list[dict]] = {}
        here: dict[tuple, list[dict]] = {}
        for row in ({**row, "where": where} for row in rows):
            kind = _kind(row)
            if kind == WHOLE:
                here.setdefault(_which(row), []).append(row)
            elif kind:
                kinds.setdefault(kind, []).append(row)
        models = here | models
        for kind, of_it in kinds.items():
            covered = len(set(map(_which, of_it)))
            if covered > layers.get(kind, (0, []))[0]:
                layers[kind] = covered, of_it
    ordered = (layers[kind][1] for kind in KINDS.values() if kind in layers)
    return [row for rows in (*ordered, *models.values()) for row in rows]


def _which(row: dict) -> tuple[str, str]:
    """Return what was timed, on whatever path."""
    return row["workload"], f"{row['nnz']:.2g}"


def _wanted(row: dict) -> bool:
    if row.get("kind") != KIND or row.get("nnz") is None or row["path"].endswith(GRAPH):
        return False
    return row["tokens"] == TOKENS or row["workload"].startswith(WHOLE)


def _kind(row: dict) -> str | None:
    """Return what figures call the row's workload: of KINDS, or WHOLE; None for others."""
    if row["workload"].startswith(WHOLE):
        return WHOLE
    workload = row["workload"]
    return KINDS.get(workload) or KINDS.get(workload.split(":")[0].split(",")[0])


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


def wholes(rows: list[dict]) -> list[dict]:
    """{model, nnz, parameters, eager, compiled, choice, mib, dense_mib, where}: of each whole model, how many times as
    fast its planned step is as torch's, eager beside eager and compiled beside compiled, and the peak memory."""
    found = []
    whole = [row for row in rows if row["workload"].startswith(WHOLE)]
    for line in sorted(_lines(whole), key=lambda line: -line["nnz"]):
        row = next(row for row in whole if (row["workload"], row["nnz"]) == (line["workload"], line["nnz"]))
        found.append(
            {
                "model": f"{row['layers']} layers of {row['d_model']:,} x {row['d_ff']:,}",
                "nnz": line["nnz"],
                "parameters": row["parameters"],
                "eager": line["planned x"],
                "compiled": line["planned compiled x"],
                "choice": line["choice"],
                "mib": line["planned mib"],
                "dense_mib": line["dense eager mib"],
                "where": row["where"],
            }
        )
    return sorted(found, key=lambda each: (-each["parameters"], each["nnz"]))


def series(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of one gated layer of TOKENS, D_MODEL and D_FF by kind of workload, as KINDS names it; by nnz."""
    here = [
        row
        for row in rows
        if (row["tokens"], row["d_model"], row["d_ff"]) == (TOKENS, D_MODEL, D_FF) and row.get("gated", True)
    ]
    found = {
        name: sorted((row for row in here if _kind(row) == name), key=lambda row: row["nnz"]) for name in KINDS.values()
    }
    return {name: each for name, each in found.items() if each}


def between(rows: list[dict], path: str) -> tuple[float, float] | None:
    """The two neighbouring recorded nnz between which the sparse step stops being faster than `path`.

    rows: of one kind of workload. None if that happens between no two of them.
    """
    sparse, dense = ({row["nnz"]: row["ms"] for row in rows if row["path"] == each} for each in (SPARSE, path))
    for low, high in pairwise(sorted(set(sparse) & set(dense))):
        if sparse[low] < dense[low] and sparse[high] >= dense[high]:
            return low, high
    return None


def three_lines(rows: list[dict], sizes: dict[str, dict[str, int]]) -> list[str]:
    """Return what the notebook found, in three sentences made of its numbers: time and where it ends, memory, whole
    models.

    sizes: of the dense and of the sparse way, tensor -> bytes. Without a record the second alone, and MISSING.
    """
    dense, sparse = (sum(each.values()) / 2**20 for each in sizes.values())
    memory = f"Kept: {dense:.0f} MiB dense, {sparse:.0f} sparse."
    one = steps(rows)
    quick = max((row for row in one if row["path"] == SPARSE), key=lambda row: row["x_dense"], default=None)
    if quick is None:
        return [MISSING, memory]
    said = f"Sparse: {quick['x_dense']:.1f} times as fast at nnz {quick['column']}"
    if met := between(one, "dense compiled"):
        said += f"; overtaken by compiled dense between {met[0]:.0f} and {met[1]:.0f}"
    lines = [f"{said}; {short(quick['where'])}.", memory]
    if models := [each for each in wholes(rows) if each["compiled"]]:
        times = [each["compiled"] for each in models]
        days = [short(each["where"]).replace(f"{short(quick['where']).partition(', ')[0]}, ", "") for each in models]
        days = [*dict.fromkeys("there" if day in lines[0] else day for day in days)]
        days = ["there, too"] if days == ["there"] else sorted(days, key=lambda day: day != "there")
        span = " to ".join(dict.fromkeys(f"{each:.2f}" for each in (min(times), max(times))))
        lines.append(f"Whole model{'s' * (len(models) > 1)}, compiled: {span} times; {' and '.join(days)}.")
    return lines


def own_line(own: list[dict]) -> str:
    """Return what the reader's own steps (`yours`) come to, in a line."""
    times = [f"{row['x_dense']:.2f} at nnz {row['column']}" for row in steps(own) if row["path"] == SPARSE]
    return f"Sparse, {own[0]['where']}: {', '.join(times)} times as fast as torch's."


def yours(nnzs: Iterable[float] = (8, 29, 120), tokens: int = TOKENS) -> list[dict]:
    """The dense and the sparse step, eager, checked and then timed on this machine's GPU, as rows.

    [] without a GPU, and, with a printed reason, if the GPU cannot do it.
    """
    from ...bench import forward

    def rows(nnz: float) -> list[dict]:
        layer, inputs, _ = forward.Case(tokens, nnz, dtype=sixteen_bits("cuda")).draw()
        return step_rows(layer, inputs, nnz)

    return timed_here(lambda: [row for nnz in nnzs for row in rows(nnz)])


def step_rows(
    layer,
    inputs: list[Tensor],
    nnz: float,
    clock: Callable = clocks.time_cuda,
    peak_bytes: Callable = clocks.peak_bytes,
) -> list[dict]:
    """The training step of one gated layer, dense and sparse, checked and then timed: rows as in the record.

    inputs: [tokens, d_model] each. clock: takes calls by name and gives the milliseconds of each, as
    ops.clock.time_cuda does. peak_bytes: the peak memory of a call, as ops.clock.peak_bytes. Raises WrongResult if
    a gradient is off by 5% of its norm or more.
    """
    from ...bench import training as tables

    weights = tuple(each.weight.detach().requires_grad_() for each in (layer.gate_proj, layer.up_proj, layer.down_proj))
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) * SIZE for x in inputs]
    layers = {"dense eager": tables.dense_layer, SPARSE: tables.our_layer("twell")}
    calls = {path: tables.step_of(each, weights, inputs, grads) for path, each in layers.items()}
    for mine, theirs in zip(calls[SPARSE](0), calls["dense eager"](0), strict=True):
        mine, theirs = mine.detach().double(), theirs.detach().double()
        off = float((mine - theirs).norm() / theirs.norm())
        if not off < 0.05:
            raise clocks.WrongResult(f"a gradient is off by {off:.2g} of its norm: nothing was timed")
    peaks = {path: peak_bytes(call) for path, call in calls.items()}
    d_ff, d_model = layer.gate_proj.weight.shape
    rows = rows_of(clock(calls), KIND, len(inputs[0]), d_model, d_ff, nnz, layer.gate_proj.weight.dtype)
    return [row | {"peak_bytes": peaks[row["path"]]} for row in rows]
