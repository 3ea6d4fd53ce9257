"""What a plain call costs the host, for notebook 09: as recorded, on the reader's machine, and in a small model.

Data in, data out, nothing drawn. Rows are those of the "host-time" record (twell_lab.bench.host): `ms` is the time
until the call returns (the host's), `wall_ms` the time until its result is there. Each has `where`, as in `data`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ... import records
from ...bench import host
from ...layers.sparse_ffn import SparseFFN
from ...ops import measure
from ..notebook import dtype_for
from ..recorded import GRAPH, LOGNORMAL, extremes, newest, same, select, sources, timed_here

NAME, KIND = "host-time", "host"
COMMAND = f"twell-lab record {NAME}"
MISSING = f"No host times are recorded in this checkout. On a machine with a GPU, `{COMMAND}` makes the record."
FORWARD, TRAINING = "forward", "forward and backward"  # the workloads of the rows
DENSE, SPARSE = "dense eager", "twell"  # of their paths, those that tables and sentences compare
FEWEST = 1  # tokens in the table of all records
# From when on calls replay their launches (twell_lab.cuda.tape), start many of them as a CUDA graph (cuda.batch), and
# ask in one place whether anything changed (layers.again): the dates of the first commits that do.
LAUNCHES = {
    "2026-11-22T16:00:57Z": "replayed",
    "2026-11-22T22:26:00Z": "replayed, + backward as graphs",
    "2026-11-23T01:33:48Z": "the same, + fewer questions",
}
TINY = 8  # d_model and d_ff of a layer whose arithmetic takes no time to speak of
OPERATIONS = {"torch.nn.Linear": 3, "torch.relu": 2}  # of a dense gated layer; its product costs what a ReLU costs


# ---- what is recorded, and what is measured here ----


def recorded(device: str = "H100") -> list[dict]:
    """The rows of "host-time" records made on a GPU with `device` in its name; of equal measurements the newest."""
    return compared(newest(NAME, device, lambda row: row.get("kind") == KIND))


def yours(tokens: tuple[int, ...] = (1, 256, 2048)) -> list[dict]:
    """The same rows, measured on this machine's GPU; [] without one, or, with a printed reason, if it cannot do it."""
    found = timed_here(lambda: host.rows(tokens))
    return compared([{**row, "where": f"yours, now, on {row['device']}"} for row in found])


def compared(rows: list[dict]) -> list[dict]:
    """The rows with `most`, how many times as fast the call would be if its kernels took no time (wall / host); and
    `x`, how many times as fast as the dense layer's call it is, by wall time."""
    dense = {(same(row), row["where"]): row["wall_ms"] for row in rows if row["path"] == DENSE}
    beside = [(row, dense[same(row), row["where"]]) for row in rows if (same(row), row["where"]) in dense]
    return [
        {**row, "dense_wall_ms": wall, "most": row["wall_ms"] / row["ms"], "x": wall / row["wall_ms"]}
        for row, wall in beside
    ]


def crossing(rows: list[dict]) -> float | None:
    """The number of tokens from which the wait after the call's return is as long as the call: wall time is twice the
    host's. 0: at all of these counts; None: at none.

    rows: of one workload and path. Interpolated between two measured counts, both axes logarithmic."""
    before = None
    for row in sorted(rows, key=lambda row: row["tokens"]):
        ahead = math.log(row["most"] / 2)
        if ahead >= 0:
            if before is None:
                return 0.0
            tokens, behind = before
            return math.exp(math.log(tokens) + math.log(row["tokens"] / tokens) * -behind / (ahead - behind))
        before = row["tokens"], ahead
    return None


def lines(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """The rows by workload and path, in their order, each list by the number of tokens."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        found.setdefault((row["workload"], row["path"]), []).append(row)
    order = {FORWARD: 0, TRAINING: 1}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0][0], 2)))


# ---- tables ----


def gpu_table(rows: list[dict], cells: list[dict]) -> str:
    """A table by tokens: microseconds of the GPU, and of a plain call, of the dense layer and of TwELL, without
    gradients. cells: `data.cells` of the inference record, which has the GPU's times."""
    shown, used = [], []
    for row in lines(rows).get((FORWARD, SPARSE), ()):
        line = {"tokens": row["tokens"], "call_dense": 1e3 * row["dense_wall_ms"], "call": 1e3 * row["wall_ms"]}
        near = [
            cell
            for cell in cells
            if (cell["path"], cell["tokens"]) == ("forced twell", row["tokens"])
            and abs(cell["nnz"] - row["nnz"]) <= 0.08 * row["nnz"]
        ]
        for cell in near[:1]:
            used.append(cell)
            line |= {"gpu_dense": 1e3 * cell["ms"] * cell["x"], "gpu": 1e3 * cell["ms"], "gpu_x": cell["x"]}
        shown.append(line | {"x": row["x"]})
    columns = {
        "tokens": "tokens",
        "gpu_dense": "GPU: dense us",
        "gpu": "TwELL us",
        "gpu_x": "times as fast",
        "call_dense": "plain call: dense us",
        "call": "TwELL us",
        "x": "times as fast",
    }
    if not shown:
        return MISSING
    where = f"GPU: {sources(used) or 'nothing is recorded'}\nplain calls: {sources(rows)}"
    return f"{where}\n{records.table(shown, columns)}"


def bounds_table(rows: list[dict]) -> str:
    """A table of workloads and paths: how many times as fast each call would be if its kernels took no time, and from
    how many tokens on the wait is longer than the call (`crossing`)."""
    shown = []
    for (workload, path), mine in lines(rows).items():
        line = {"workload": workload, "path": path, "from": tokens_text(crossing(mine))}
        shown.append(line | {row["tokens"]: f"{row['most']:.2f}x" for row in mine})
    counts = {row["tokens"]: f"{row['tokens']:,}" for row in sorted(rows, key=lambda row: row["tokens"])}
    columns = {"workload": "", "path": "tokens:", **counts, "from": "wait is longer from"}
    return f"{sources(rows)}\n{records.table(shown, columns)}" if shown else MISSING


def tokens_text(tokens: float | None) -> str:
    """What `crossing` found, as text, with two digits: "about 2,000 tokens"."""
    if tokens is None:
        return "nowhere here"
    return f"about {float(f'{tokens:.2g}'):,.0f} tokens" if tokens else "the fewest tokens on"


def replayed_table() -> str:
    """A table of all "host-time" records, the oldest first: the time until a call with FEWEST tokens returns, of the
    dense layer and of TwELL in the same run; and what TwELL's calls did by then (LAUNCHES)."""
    shown, replays = [], False
    for record in records.load_all():
        rows = [row for row in record.rows if row.get("kind") == KIND and row["tokens"] == FEWEST]
        if record.name != NAME or not rows:
            continue
        since = [what for date, what in LAUNCHES.items() if record.date >= date]
        replays |= bool(since)
        launches = since[-1] if since else "prepared anew"
        line = {"date": record.date, "launches": launches, "device": rows[0]["device"]}
        for workload in (FORWARD, TRAINING):
            us = {row["path"]: 1e3 * row["ms"] for row in rows if row["workload"] == workload}
            if DENSE in us and SPARSE in us:
                line |= {f"{workload} {path}": us[path] for path in (DENSE, SPARSE)}
                line[f"{workload} x"] = us[SPARSE] / us[DENSE]
        shown.append(line)
    columns = {"date": "recorded", "launches": "launches"}
    for workload, name in ((FORWARD, "forward"), (TRAINING, "+ backward")):
        columns |= {f"{workload} {DENSE}": f"{name}: dense us", f"{workload} {SPARSE}": "TwELL us"}
        columns[f"{workload} x"] = "of dense"
    columns["device"] = "on"
    if not shown:
        return MISSING
    return records.table(shown, columns) + "\nNo record here has replayed launches yet." * (not replays)


def graphs_table(rows: list[dict], nnz: float = host.NNZ) -> str:
    """A table by tokens and path: microseconds of the host and on the wall, of a plain call and of a replayed CUDA
    graph, calls one right after the other. rows: of the inference record; an older one has no wall times, which is
    said."""
    shown = []
    for row in select(rows, workload=LOGNORMAL, d_model=host.D_MODEL, d_ff=host.D_FF):
        plain = row["path"].removesuffix(GRAPH)
        if not row["path"].endswith(GRAPH) or plain not in (DENSE, "forced twell") or abs(row["nnz"] - nnz) > 0.4 * nnz:
            continue
        beside = [
            each for each in rows if each["path"] == plain and (same(each), each["where"]) == (same(row), row["where"])
        ]
        if not beside or row.get("wall_ms") is None or beside[0].get("wall_ms") is None:
            continue
        line = {
            "where": row["where"],
            "tokens": row["tokens"],
            "path": plain,
            "host": beside[0]["host_us"],
            "wall": 1e3 * beside[0]["wall_ms"],
        }
        shown.append(line | {"graph_host": row["host_us"], "graph_wall": 1e3 * row["wall_ms"]})
    columns = {
        "tokens": "tokens",
        "path": "",
        "host": "plain call: host us",
        "wall": "wall us",
        "graph_host": "graph: host us",
        "graph_wall": "wall us",
    }
    if shown:
        return f"{sources(shown)}\n{records.table(sorted(shown, key=lambda line: line['tokens']), columns)}"
    return (
        "No wall times of graphs are recorded in this checkout; `twell-lab record inference` on a machine with a GPU "
        "records them."
    )


def summary(rows: list[dict]) -> str:
    """What the rows say of TwELL's plain calls, in sentences; "" for no rows."""
    told = []
    for (workload, path), mine in lines(rows).items():
        if path != SPARSE:
            continue
        at = lambda row: f"{row['tokens']:,} token{'s' * (row['tokens'] > 1)}"  # noqa: E731
        told.append(extremes(f"Plain calls of TwELL, {workload}", mine, at, "token counts"))
        late = [f"{row['tokens']:,}" for row in mine if row["ms"] >= row["dense_wall_ms"]]
        if late:
            where = " and ".join(filter(None, [", ".join(late[:-1]), late[-1]])) + " token" + "s" * (late != ["1"])
            told.append(
                f"  At {where} the host alone takes longer than the dense layer's whole call: no kernel could be fast "
                "enough there."
            )
        else:
            told.append("  Nowhere does the host alone take longer than the dense layer's whole call.")
    return "\n".join(told)


# ---- in the small: a model of a call, and calls that compute nothing ----


def timeline(launch: float, kernels: Sequence[float]) -> tuple[float, float]:
    """When a call returns, and when its result is there, in microseconds from its start.

    launch: how long the host takes for each launch. kernels: how long each takes on the GPU; one starts when it has
    been launched and the one before it has ended."""
    done: float = 0
    for number, kernel in enumerate(kernels, 1):
        done = max(done, number * launch) + kernel
    return len(kernels) * launch, done


def small(device: str, rounds: int = 300) -> list[dict]:
    """Calls that compute next to nothing, on this machine, and last that of a whole dense layer with one token.

    Returns:
        For each a dict: call (its name), host_us (until it returns), wall_us (until its result is there); medians of
        `rounds` calls, and of a tenth as many of the whole layer.
    """
    dtype = dtype_for(device)
    layer, (x, *_) = measure.workload(1, TINY, TINY, 2, "lognormal", dtype, device)
    large, (one, *_) = measure.workload(1, host.D_MODEL, host.D_FF, host.NNZ, "lognormal", dtype, device)
    sparse = SparseFFN.from_module(layer)
    tiny = {
        "torch.relu": lambda turn: torch.relu(x),
        "torch.nn.Linear": lambda turn: layer.gate_proj(x),
        "dense layer": lambda turn: layer(x),
        "SparseFFN": lambda turn: sparse(x),
    }
    whole = {f"dense layer, {host.D_MODEL:,} x {host.D_FF:,}": lambda turn: large(one)}
    found = []
    with torch.inference_mode():
        for calls, times in ((tiny, rounds), (whole, max(2, rounds // 10))):
            returned, done = (
                {name: 1e3 * measure.quartiles(each)[0] for name, each in part.items()}
                for part in host.clock(calls, times)
            )
            done = done if device == "cuda" else returned  # a CPU has the result when the call returns
            found += [{"call": name, "host_us": returned[name], "wall_us": done[name]} for name in calls]
    return found


def small_text(found: list[dict], rows: list[dict]) -> str:
    """The calls of `small` as a table; what a dense layer's call is made of; and how much of the time of the large
    layer's call passes before it returns, in the rows recorded.

    rows: `recorded`."""
    *tiny, whole = found
    us = {each["call"]: each["host_us"] for each in tiny}
    shown = [{**each, "call": f"{each['call']}, {TINY} wide"} for each in tiny] + [whole]
    columns = {"call": "one token", "host_us": "returns after us", "wall_us": "result after us"}
    told = [
        records.table(shown, columns),
        f"Three linear layers, a ReLU and a product: {sum(us[name] * n for name, n in OPERATIONS.items()):.3g} us; the "
        f"dense layer {TINY} wide: {us['dense layer']:.3g} us.",
        f"That is {us['dense layer'] / whole['wall_us']:.1%} of the time of the large layer here.",
    ]
    for row in lines(rows).get((FORWARD, DENSE), ())[:1]:
        told.append(f"On a GPU {row['ms'] / row['wall_ms']:.0%} of it passes before the call returns: {row['where']}.")
    return "\n".join(told)
