"""The tables of the README and of docs/ that are made of records: each takes all records, oldest first, and returns
Markdown. A table is data for `_table`: a record, a choice of its rows, and cells, which are format strings of a row. A
row can be asked for what it says and for what follows from that (`_DERIVED`)."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from ..bench.models import RECORD, SIZES, model_name
from ..bench.rows import COMPILED, DENSE
from ..records import TOLD, Record, stale, told
from .bench_command import pairs

MANY = 16384  # tokens at once in tables that are about one number of them
_HEAVY, _GRAPH = "heavy rows: ", " (graph)"  # how works begin, and paths end
_LARGEST = f"{model_name(SIZES[-1])}, "
# A line, a column, and what stands there, as format strings of a row; and which rows say it: of a path, or `Row.of`.
Cell = tuple[str, str, str] | tuple[str, str, str, str | dict[str, Any]]
# What follows from a row, by name; KeyError where it lacks something.
_DERIVED: dict[str, Callable[[Row], Any]] = {
    # How many times as fast as the dense layer plain calls are, and compiled ones as its compiled ones.
    "walls": lambda row: row["dense_wall_ms"] / row["wall_ms"],
    "compiled walls": lambda row: row["compiled_wall_ms"] / row["wall_ms"],
    "at once": lambda row: f"{row['tokens']:,} token{'s' * (row['tokens'] > 1)}",
    "graph": lambda row: row["path"].endswith(_GRAPH),
    "name": lambda row: re.sub(r"^twell-lab: |^thresholds, |\bforced | \(graph\)$", "", row["path"]),
    "hot": lambda row: row["path"].split()[-1],
    "us": lambda row: 1e3 * row["ms"],
    "MiB": lambda row: row["peak_bytes"] / 2**20,
    "work": lambda row: row["workload"].split(", ", 1)[1],
    "before": lambda row: row["workload"].partition("decode step")[0],
    "excused": lambda row: sum(row[key] for key in row if key in ("excused_rows", "overflowed_rows", "rounded_rows")),
}


class Row(dict):
    """A row of a record, with what follows from it: `row["walls"]` is computed."""

    def __missing__(self, key: str) -> Any:
        return _DERIVED[key](self)

    def of(self, **where: Any) -> bool:
        """Return whether the row has these values, or meets these conditions; not where it lacks one."""
        try:
            return all(one(self[key]) if callable(one) else self[key] == one for key, one in where.items())
        except (LookupError, TypeError):
            return False


class _Texts(string.Formatter):
    """Formats with one more way: "~" writes three digits of a number."""

    def format_field(self, value: Any, how: str) -> str:
        return super().format_field(value, (",.0f" if value >= 100 else ".3g") if how == "~" else how)


_text = _Texts().vformat


def rows_of(recorded: list[Record], name: str, gpu: str = TOLD, **where: Any) -> tuple[Record | None, list[Row]]:
    """Return the newest record of that name, of such a GPU where there is one, with such rows (`Row.of`), and these;
    (None, []) where there is none."""
    for record in reversed(told(recorded, name, gpu)):
        if rows := [row for row in map(Row, record.rows) if row.of(**where)]:
            work = lambda row: (row.get("tokens"), row.get("nnz"))
            compiled = {work(row): row.get("wall_ms") for row in rows if row.get("path") == COMPILED}
            for row in rows:
                row["compiled_wall_ms"] = compiled.get(work(row))
            return record, rows
    return None, []


def _table(name: str, head: str, cells: Iterable[Cell], **where: Any) -> Callable[..., str]:
    """Return the table of the newest record of this name with rows of these values: a function of the records and, for
    another than most tables are of, the GPU. head: with "{where}"."""

    def table(recorded: list[Record], gpu: str = TOLD) -> str:
        record, rows = rows_of(recorded, name, gpu, **where)
        return _grid(head.format(where=_where(record)), _filled(rows, cells))

    return table


def _filled(rows: list[Row], cells: Iterable[Cell]) -> Iterator[tuple[str, str, str]]:
    """Yield the line, the column and the text of each cell that a row has."""
    for line, column, text, *which in cells:
        for row in rows:
            with suppress(LookupError, TypeError):  # of a row that does not say that, or says None
                if all(row.of(**({"path": one} if isinstance(one, str) else one)) for one in which):
                    yield _text(line, (), row), _text(column, (), row), _text(text, (), row)


def _grid(head: str, cells: Iterable[tuple[str, str, str]]) -> str:
    """Return cells as Markdown, lines and columns in the order in which they come; columns that begin with a number in
    its order, before the others. What comes for a place that has a text already is added in brackets."""
    lines: dict[str, dict[str, str]] = {}
    columns: dict[str, tuple[bool, float]] = {}
    for line, column, text in cells:
        beside = lines.setdefault(line, {})
        beside[column] = f"{beside[column]} ({text})" if column in beside else text
        number = re.match(r"\d[\d,.]*", column)
        columns[column] = number is None, float(number[0].replace(",", "")) if number else 0.0
    shown = sorted(columns, key=columns.__getitem__)
    table = [[head, *shown], *([name, *(line.get(column, "") for column in shown)] for name, line in lines.items())]
    table = table if lines else [["figures"], ["nothing is recorded yet"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (table[0], ["---"] * len(table[0]), *table[1:]))


def _where(record: Record | None) -> str:
    """Return the device, or the machine's, and day, and whether the code has changed since."""
    if record is None:
        return ""
    device = record.rows[0].get("device") or (record.machine.get("gpus") or [{"name": "a CPU"}])[0]["name"]
    return f"{device}, {record.date[:10]}" + "; stale: code has changed since" * stale(record)


# ---- a layer ----

SHAPE: dict[str, Any] = {"gated": True, "d_model": 2048, "d_ff": 5632}
DRAWN = SHAPE | {"workload": "independent, lognormal"}  # each neuron fires by itself, some far more often than others
PLAIN = {"graph": False, "wall_ms": bool}  # plain calls
FIRES_29 = {"nnz": lambda nnz: 25 < nnz < 33}
_BOTH = "{x_dense:.2f} ({walls:.2f})"
_MS, _FIRING = "milliseconds, {where}", "neurons firing for a token, mean; {where}"
_HOT, _CODE = {"path": lambda path: path.startswith("forced hot_cold")}, "planned compiled"

_CALLS = (
    ("torch's dense layer", "{at once}", "{wall_ms:~}", DENSE),
    ("planned", "{at once}", "{wall_ms:~}", "planned"),
    ("it takes", "{at once}", "{choice}", "planned"),
    ("times as fast", "{at once}", "{walls:.2f}", "planned"),
    ("times as fast, both under torch.compile", "{at once}", "{compiled walls:.2f}", _CODE),
)
calls = _table("inference", "milliseconds a call, {where}", _CALLS, kind="inference", **DRAWN | PLAIN | FIRES_29)
_LAYER = (
    ("TwELL", "{nnz:.0f}", _BOTH, "forced twell"),
    ("hot/cold: the neurons that fire most densely, the others packed", "{nnz:.0f}", _BOTH, _HOT),
    ("dense, with gate and up in one product", "{nnz:.0f}", _BOTH, "forced dense"),
    ("dense, under torch.compile", "{nnz:.0f}", _BOTH, COMPILED),
    ("of 5,632 neurons, those that hot/cold computes densely", "{nnz:.0f}", "{hot}", _HOT),
)
_TRAINING = (
    ("it takes", "{nnz:.0f}", "{choice}", "planned"),
    ("times as fast as torch's layer", "{nnz:.0f}", _BOTH, "planned"),
    ("both under torch.compile", "{nnz:.0f}", "{x_compiled:.2f} ({compiled walls:.2f})", _CODE),
    ("its peak memory beyond inputs and weights, MiB", "{nnz:.0f}", "{MiB:,.0f}", "planned"),
    ("torch's peak memory beyond inputs and weights, MiB", "{nnz:.0f}", "{MiB:,.0f}", DENSE),
    ("torch's compiled peak memory beyond inputs and weights, MiB", "{nnz:.0f}", "{MiB:,.0f}", COMPILED),
)
MANY_TOKENS: dict[str, Any] = DRAWN | PLAIN | {"tokens": MANY}
layer = _table("inference", _FIRING, _LAYER, kind="inference", **MANY_TOKENS)
training = _table("training", _FIRING, _TRAINING, kind="training", **MANY_TOKENS)
_HOST = [
    (f"{work}: {line}", "{at once}", text, {"workload": work, "path": path})
    for work in ("forward", "forward and backward")
    for line, text, path in (
        ("torch's dense layer", "{wall_ms:~}", DENSE),
        ("TwELL", "{wall_ms:~}", "twell"),
        ("TwELL, until the call returns", "{ms:~}", "twell"),
        ("times as fast", "{walls:.2f}", "twell"),
    )
]
host = _table("host-time", _MS, _HOST, kind="host")


def heavy(recorded: list[Record]) -> str:
    """Return how much longer the TwELL path takes, forward and in training, if for some of 16,384 tokens 1,500 neurons
    fire, or all."""
    cells = []
    which: dict[str, Any] = {"path": "forced twell", "workload": lambda work: work.startswith(_HEAVY)}
    for name, says in (("inference", "forward"), ("training", "training step")):
        record, rows = rows_of(recorded, name, kind=name, **SHAPE, **which)
        times = {row["workload"].removeprefix(_HEAVY): row["ms"] for row in rows}
        without = times.pop("0", 0.0)
        for work, ms in times.items():
            count, _, all_ = work.partition(", ")
            line = f"{says}, {'all 5,632' if all_ else '1,500 neurons'}; {_where(record)}"
            cells.append((line, Row(tokens=int(count))["at once"], f"{ms / without - 1:+.0%}"))
    return _grid("longer by", cells)


# ---- whole models ----


_PAIR = (
    ("{what}", "dense", "{dense:~}"),
    ("{what}", "planned", "{sparse:~}"),
    ("{what}", "times as fast", "{times:.2f}"),
    ("{what}", "middle half", "{half}"),
    ("{what}", "mJ a token", "{mJ/token}"),
    ("{what}", "peak MiB", "{peak MiB}"),
    ("{what}", "loss, nats", "{loss}"),
)


def model(recorded: list[Record]) -> str:
    """Return what the largest drawn model takes, dense beside planned."""
    record, rows = rows_of(recorded, RECORD, workload=lambda work: work.startswith(_LARGEST))
    return _grid(_MS.format(where=_where(record)), _filled([*map(Row, pairs(rows))], _PAIR))


_GENERATION = (
    ("{path}, batch {batch}", "tokens a second", "{tokens_per_s:,.0f}"),
    ("{path}, batch {batch}", "times as fast", "{x_dense:.2f}"),
    ("{path}, batch {batch}", "ms to the first token", "{first_ms:~}"),
    ("{path}, batch {batch}", "peak MiB beyond the weights", "{MiB:,.0f}"),
)
generations = _table("decoding", "whole generations, {where}", _GENERATION, kind="decoding")
large_generations = _table("decoding-8b", "an 8B shape with SiLU, {where}", _GENERATION, kind="decoding")
_SERVED = (
    ("{path}", "tokens a second", "{tokens_per_s:.0f}"),
    ("{path}", "s to the whole answer, median", "{p50_s:~}"),
    ("{path}", "s, 99th percentile", "{p99_s:~}"),
)
serving = _table("serving", "drawn 2B Llama, {where}", _SERVED, kind="serving")
_TUNED = (
    ("{path}", "nats a byte, before", "{loss_before:.4f}"),
    ("{path}", "after", "{loss:.4f}"),
    ("{path}", "neurons that fire", "{density:.1%}"),
    ("{path}", "times as fast", "{x_dense:.2f}"),
)
tuned = _table("fine-tuning", "4 layers of 2,048 x 5,632, {where}", _TUNED, kind="fine-tuning")
_STEP = (
    ("{path}, {work}", "neurons firing", "{nnz:.0f}"),
    ("{path}, {work}", "ms a step", "{ms:~}"),
    ("{path}, {work}", "times as fast", "{x_compiled:.2f}"),
)
steps = _table(
    "training",
    "layers of 2,048 x 5,632, {where}",
    _STEP,
    path=lambda path: "compiled" in path,
    workload=lambda work: work.startswith("whole step, "),
)

_GRAPHED, _FORWARD = {"path": "planned (graph)"}, {"head": True, "kind": "model_forward"}
# What is done, twice: by a layer, then by a whole model; the record, which row of it, and what that says.
DONE: tuple[tuple[str, str, dict, str], ...] = (
    ("write a text, `tl.generate`", "inference", {"tokens": 1} | _GRAPHED, "x_dense"),
    ("write a text, `tl.generate`", "decoding", {"batch": 1, "path": "tl.generate, planned"}, "x_dense"),
    ("write 16 texts, `tl.generate`", "inference", {"tokens": 16} | _GRAPHED, "x_dense"),
    ("write 16 texts, `tl.generate`", "decoding", {"batch": 16, "path": "tl.generate, planned"}, "x_dense"),
    ("read 2,048 tokens, a CUDA graph", "inference", {"tokens": 2048} | _GRAPHED, "x_dense"),
    ("read 2,048 tokens, a CUDA graph", RECORD, _FORWARD | {"tokens": 2048} | _GRAPHED, "walls"),
    ("read 64 x 2,048 tokens, plain calls", "inference", {"tokens": 131072, "path": "planned"}, "walls"),
    ("read 64 x 2,048 tokens, plain calls", RECORD, _FORWARD | {"tokens": 131072, "path": "planned"}, "walls"),
    ("train on 16,384 tokens, compiled", "training", {"tokens": MANY, "path": _CODE}, "x_compiled"),
    ("train on 16,384 tokens, compiled", "training", {"workload": "whole step, 8 layers", "path": _CODE}, "x_compiled"),
    ("write a text, plain `generate`", "inference", {"tokens": 1, "path": "planned"}, "walls"),
    ("write a text, plain `generate`", "decoding", {"batch": 1, "path": "generate, planned"}, "x_dense"),
)


def beside_layer(recorded: list[Record]) -> tuple[str, dict[str, list[float]]]:
    """Return how many times as fast as torch's own a layer and a whole model are at what is done, where both are
    recorded; and on which devices and days that was."""
    used: list[Record] = []
    done: dict[str, list[float]] = {}
    for number, (what, name, which, key) in enumerate(DONE):
        shape: dict[str, Any] = {"workload": lambda work: work.startswith(_LARGEST)} if name == RECORD else {}
        record, rows = rows_of(recorded, name, **(shape if number % 2 else DRAWN | FIRES_29), **which)
        if record:
            used.append(record)
            done.setdefault(what, []).append(rows[0][key])
    devices, days = (sorted({*seen}) for seen in ((r.rows[0]["device"] for r in used), (r.date[:10] for r in used)))
    where = f"{' and '.join(devices)}, {' to '.join(dict.fromkeys((days[0], days[-1])))}" if used else ""
    where += "; stale: code has changed since" * any(map(stale, used))
    return where, {what: both for what, both in done.items() if len(both) == 2}


def whole_beside_layer(recorded: list[Record]) -> str:
    """Return the table of `beside_layer`."""
    where, done = beside_layer(recorded)
    cells = [(name, what, f"{x:.2f}") for name, pair in done.items() for what, x in zip(("a layer", "a model"), pair)]
    return _grid(f"times as fast as torch's own; {where}", cells)


# ---- other methods ----

_ARENA = [("{name}", "{work}", "{us:.1f}")]
arena = _table("arena", "us a layer, {where}", _ARENA, kind="arena")
# What thresholds cost, and how fast they are in plain calls and, in brackets, as CUDA graphs.
_LOST = "{loss_change[1]:+.4f} ({loss_change[0]:+.4f} to {loss_change[2]:+.4f})"
_COSTS = (
    ("{before}{name}", "zeros", "{sparsity:.0%}", {"graph": False}),
    ("{before}{name}", "loss", "{loss:.4f}", {"graph": False}),
    ("{before}{name}", "more than dense", _LOST, {"graph": False}),
    ("{before}{name}", "times as fast as dense", "{walls:.2f}", {"graph": False}),
    ("{before}{name}", "times as fast as dense", "{x_dense:.2f}", {"graph": True}),
)
thresholds = _table("thresholds", "decoding one token, {where}", _COSTS, tokens=1, loss_change=bool)
_PRUNING = (
    ("{path}", "zeros", "{sparsity:.0%}"),
    ("{path}", "pruned", "{bits_before:.3f}"),
    ("{path}", "and trained on", "{bits_after:.3f}"),
)
pruning = _table("pruning", "bits a byte, {where}", _PRUNING, kind="pruning")
_ATTACKED = (
    ("{attack}", "cases", "{cases:,}"),
    ("{attack}", "rows of results", "{rows:,}"),
    ("{attack}", "rows excused", "{excused:,}", {"rows": bool}),
    ("{attack}", "worst error, of what is allowed", "{worst_ratio}"),
)
gpu_attacks = _table("attack", "attacked; {where}", _ATTACKED, attack=lambda name: "on a GPU" in name)
attacks = _table("attack", "attacked; {where}", _ATTACKED, attack=lambda name: "on a GPU" not in name)
