"""The tables of the README and of docs/ that are made of records: each a function from all records, oldest first, to
Markdown. A table is data for `_table`: a record, a choice of its rows, a heading, and what these rows say, cell by
cell: the name of a line, that of a column, and a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ..bench.comparison import TILED, leading
from ..bench.methods import REMOVED
from ..bench.rows import COMPILED, DENSE
from ..bench.whole import RECORD, RUN, SIZES, TWIN, model_name
from ..records import Record, stale, told

MANY = 16384  # tokens at once in tables that are about one number of them
LITTLE = 16  # MiB: a table of a whole model shows no peak below that
Cells = Iterator[tuple[str, str, str]]  # of a line, a column, and what stands there
Which = Callable[[dict], object]  # which rows
_HEAVY, _STEP, _PART, _GRAPH = "heavy rows: ", "whole step, ", "part: ", " (graph)"  # how works and paths begin or end


# ---- which rows, and how they are laid out ----


def rows_of(recorded: list[Record], name: str, which: Which) -> tuple[Record | None, list[dict]]:
    """Return the newest record of that name with such rows, and these rows; (None, []) where there is none."""
    for record in reversed(told(recorded, name)):
        if rows := [row for row in record.rows if which(row)]:
            return record, rows
    return None, []


def calls_of_a_layer(recorded: list[Record], name: str, which: Which) -> tuple[Record | None, list]:
    """`rows_of` such rows among plain calls of a gated layer of 2,048 x 5,632."""
    layer = {"kind": name, "gated": True, "d_model": 2048, "d_ff": 5632}

    def is_call(row: dict) -> object:
        return layer.items() <= row.items() and "wall_ms" in row and _GRAPH not in row["path"] and which(row)

    return rows_of(recorded, name, is_call)


def is_drawn(row: dict) -> bool:
    """Return whether each neuron of the workload fires by itself, some far more often than others."""
    return row["workload"] == "independent, lognormal"


def _fires_29(row: dict) -> bool:
    return is_drawn(row) and 25 < row["nnz"] < 33


def _at_once(row: dict) -> bool:
    return is_drawn(row) and row["tokens"] == MANY


def _of(*kinds: str) -> Which:
    return lambda row: row.get("kind") in kinds


def _table(name: str, which: Which, head: str, cells: Callable[[list[dict]], Cells], find: Callable = rows_of):
    """Return the table of the newest record of this name with such rows. head: with "{where}"."""

    def table(recorded: list[Record]) -> str:
        record, rows = find(recorded, name, which)
        return _grid(head.format(where=_where(rows[0].get("device"), record)), cells(rows)) if record else _grid("", ())

    return table


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


def _each(line: Callable[[dict], str], cells: Callable[[dict], dict[str, str]]) -> Callable[[list[dict]], Cells]:
    """Return the cells of rows each of which says, in its line, the texts of some columns."""
    return lambda rows: ((line(row), *cell) for row in rows for cell in cells(row).items())


def _lines(column: Callable[[dict], str], lines: Iterable[tuple[str, str, Callable[[dict, dict], str]]]):
    """Return the cells of lines: the name of each, the path of its rows, and what a cell says of a row, given all rows
    of its column by path."""

    def cells(rows: list[dict]) -> Cells:
        columns: dict[str, dict[str, dict]] = {}
        for row in rows:
            columns.setdefault(column(row), {})[re.sub(r" \d+$", "", row["path"])] = row
        for name, path, cell in lines:
            yield from ((name, text, cell(at[path], at)) for text, at in columns.items() if path in at)

    return cells


# ---- what cells say ----


def _where(device: str | None, record: Record) -> str:
    """Return device, or the machine's, and day, and whether the code has changed since."""
    device = device or (record.machine.get("gpus") or [{"name": "a CPU"}])[0]["name"]
    return f"{device}, {record.date[:10]}" + "; stale: code has changed since" * stale(record)


def _tokens(row: dict) -> str:
    return f"{row['tokens']:,} token{'s' * (row['tokens'] > 1)}"


def _nnz(row: dict) -> str:
    return f"{row['nnz']:.0f}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _peak(row: dict, beside: dict | None = None) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f}"


def _times(row: dict, beside: dict | None = None, dense: str = "") -> str:
    """Return how many times as fast as the dense layer, by the device's time and, in brackets, by the wall's. beside,
    dense: rows by path, and another dense layer among them."""
    other = beside[dense] if beside and dense else {"ms": row["dense_ms"], "wall_ms": row["dense_wall_ms"]}
    return f"{other['ms'] / row['ms']:.2f} ({other['wall_ms'] / row['wall_ms']:.2f})"


def _walls(row: dict) -> str:
    """Return how many times as fast as the dense layer, by the wall time."""
    return f"{row['dense_wall_ms'] / row['wall_ms']:.2f}"


def _wall(row: dict, beside: dict) -> str:
    return _ms(row["wall_ms"])


def _path(row: dict, beside: dict) -> str:
    choice = row["choice"].split()[0]
    return {"twell": "TwELL", "hot_cold": "hot/cold"}.get(choice, choice)


def _over(*dense: str) -> Callable[[dict, dict], str]:
    """Return what says how many times as fast a row is as the fastest of these, by the wall time."""
    return lambda row, at: f"{min(at[path]['wall_ms'] for path in dense if path in at) / row['wall_ms']:.2f}"


# ---- a layer ----

# Of plain calls of a planned layer of whose 5,632 neurons 29 fire.
_CALL = partial(_table, "inference", _fires_29, find=calls_of_a_layer)
_WALLS = (
    ("torch's dense layer", DENSE, _wall),
    ("planned", "planned", _wall),
    ("it takes", "planned", _path),
    ("times as fast", "planned", _over(DENSE)),
    ("times as fast, both under torch.compile", "planned compiled", _over(COMPILED)),
)
calls = _CALL("milliseconds a call, {where}", _lines(_tokens, _WALLS))


_HOT = "forced hot_cold"
_LAYER = (
    ("TwELL", "forced twell", _times),
    ("hot/cold: the neurons that fire most densely, the others packed", _HOT, _times),
    ("dense, with gate and up in one product", "forced dense", _times),
    ("dense, under torch.compile", COMPILED, _times),
    ("of 5,632 neurons, those that hot/cold computes densely", _HOT, lambda row, at: row["path"].split()[-1]),
)
_TRAINING = (
    ("it takes", "planned", _path),
    ("times as fast as torch's layer", "planned", _times),
    ("both under torch.compile", "planned compiled", partial(_times, dense=COMPILED)),
    ("its peak memory beyond inputs and weights, MiB", "planned", _peak),
    ("torch's peak memory beyond inputs and weights, MiB", DENSE, _peak),
    ("torch's compiled peak memory beyond inputs and weights, MiB", COMPILED, _peak),
)
_FIRING = "neurons firing for a token, mean; {where}"
layer = _table("inference", _at_once, _FIRING, _lines(_nnz, _LAYER), calls_of_a_layer)
training = _table("training", _at_once, _FIRING, _lines(_nnz, _TRAINING), calls_of_a_layer)


def heavy(recorded: list[Record]) -> str:
    """Of the newest records that have it: how much longer the TwELL path takes, forward and in training, if for some of
    16,384 tokens 1,500 neurons fire, or all."""

    def cells() -> Cells:
        for name, says in (("inference", "forward"), ("training", "training step")):
            record, _ = calls_of_a_layer(recorded, name, lambda row: row["workload"] == f"{_HEAVY}512")
            if record is None:
                continue
            rows = [row for row in record.rows if row["path"] == "forced twell"]
            light = {row["workload"]: row["ms"] for row in rows}.get(f"{_HEAVY}0")
            for row in rows:
                count, _, every = row["workload"].removeprefix(_HEAVY).partition(", ")
                if row["workload"].startswith(_HEAVY) and count != "0":
                    line = f"{says}, {'all 5,632' if every else '1,500 neurons'}; {_where(row['device'], record)}"
                    yield line, _tokens({"tokens": int(count)}), f"{row['ms'] / light - 1:+.0%}"

    return _grid("longer by", cells())


def _host(rows: list[dict]) -> Cells:
    for row in rows:
        work, tokens = row["workload"], _tokens(row)
        if row["path"] == DENSE:
            yield f"{work}: torch's dense layer", tokens, _ms(row["wall_ms"])
        elif row["path"] == "twell":
            yield f"{work}: TwELL", tokens, _ms(row["wall_ms"])
            yield f"{work}: TwELL, until the call returns", tokens, _ms(row["ms"])
            yield f"{work}: times as fast", tokens, _walls(row)


_MS = "milliseconds, {where}"
_operands = _each(lambda row: f"{row['workload']}: {row['path']}", lambda row: {_tokens(row): _ms(row["ms"])})
host = _table("host-time", _of("host"), _MS, _host)
operands = _table("experiments", _of("dropout", "two_four_training"), _MS, _operands)


# ---- whole models ----


def _whole(rows: list[dict]) -> Cells:
    """Of each call of a model, plain, compiled or as a CUDA graph, and each way to run it: its wall time, the distance
    between the quartiles of its samples, and how many times as fast as the dense model that is; then energy, peak
    memory and loss, where the call has them."""
    columns = {DENSE: "dense", "planned for graphs": "planned", "forced twell": "every layer on TwELL"}
    calls: dict[str, dict[str, dict]] = {}
    for row in rows:
        about, work = row["workload"].split(", ", 1)
        path, graph, _ = row["path"].partition(_GRAPH)
        path, compiled, _ = path.partition(" compiled")
        if path == "planned for graphs" and not graph and not compiled:
            continue  # as what it was planned for, alone
        column = columns.get(path, path)
        if about == TWIN:
            column = TWIN if column == "dense" else f"{TWIN}, {column}"
        call = work + ", compiled" * bool(compiled) + ", as a CUDA graph" * bool(graph)
        calls.setdefault(call + ", without the LM head" * (not row.get("head", True)), {})[column] = row
    for call, ways in calls.items():
        dense = ways.get("dense", {})
        for column, row in ways.items():
            times = f", {dense['wall_ms'] / row['wall_ms']:.2f}x" if dense and row is not dense else ""
            yield call, column, f"{_ms(row['wall_ms'])} ({_ms(row['wall_spread'])}){times}"
        for column, row in ways.items():
            if "mj_per_token" in row:
                yield f"{call}: mJ a token", column, _ms(row["mj_per_token"])
            if dense.get("peak_bytes", 0) > LITTLE * 2**20:
                yield f"{call}: peak MiB", column, _peak(row)
            if "loss" in row and row["kind"] == "model_forward" and not call.endswith("graph"):
                yield f"{call}: loss, nats", column, f"{row['loss']:.4f}"


_LARGEST = f"{model_name(SIZES[-1])}, "
_MODEL_KINDS = _of("model_forward", "model_decode", "model_training")
model = _table(RECORD, lambda row: row.get("workload", "").startswith(_LARGEST) and "wall_ms" in row, _MS, _whole)
trained_speed = _table("trained", _MODEL_KINDS, _MS, _whole)


def _model_paths(rows: list[dict]) -> Cells:
    """Yield of each model and path how many times as fast as the dense model it is, in brackets as a CUDA graph; how
    far the results of the first forward and of its layers are off; and the loss of the last, with most tokens."""
    ends: dict[tuple[str, str], str] = {}
    for row in rows:
        about, work = row["workload"].split(", ", 1)
        path, graph, _ = row["path"].partition(_GRAPH)
        line = f"{about}: {path.removeprefix('forced ')}"
        yield line, work, _walls(row)
        if row["kind"] == "model_forward" and not graph:
            for column, key in (("error", "error"), ("of a layer", "layer_error")):
                if key in row:
                    ends.setdefault((line, column), f"{100 * row[key]:.2g}%")
            if "loss" in row:
                ends[line, "loss"] = f"{row['loss']:.4f}"
    yield from ((*place, text) for place, text in ends.items())


model_paths = _table("model-paths", _MODEL_KINDS, "times as fast as dense, {where}", _model_paths)
_generation = _each(
    lambda row: f"{row['path']}, batch {row['batch']}",
    lambda row: {
        "tokens a second": f"{row['tokens_per_s']:,.0f}"
        + (f", {row['x_dense']:.2f}x" if row["x_dense"] not in (None, 1.0) else ""),
        "ms to the first token": _ms(row["first_ms"]),
        "peak MiB beyond the weights": _peak(row) if "peak_bytes" in row else "",
    },
)
generations = _table("decoding", _of("decoding"), "whole generations, {where}", _generation)
large_generations = _table("decoding-8b", _of("decoding"), "an 8B shape with SiLU, {where}", _generation)


def _arena(rows: list[dict]) -> Cells:
    """Yield of each contender and layer the us that a layer takes in plain calls, in brackets in a CUDA graph."""
    for row in rows:
        path, layer = row["path"].removesuffix(_GRAPH), row["workload"].split(" layers, ", 1)[1]
        yield path.removeprefix("twell-lab: "), layer, f"{1e3 * row['ms']:.1f}"


arena = _table("arena", _of("arena"), "us a layer, {where}", _arena)


def _layer(tokens: int, paths: tuple[str, str], time: str = "ms", kind: str = "inference") -> tuple:
    drawn = {"workload": "independent, lognormal", "gated": True, "d_model": 2048, "d_ff": 5632}
    return kind, drawn | {"tokens": tokens}, paths, time


def _model(tokens: str, paths: tuple[str, str]) -> tuple:
    return RECORD, {"head": True, "workload": f"{_LARGEST}{tokens} tokens"}, paths, "wall_ms"


def _loop(batch: int, name: str = "tl.generate") -> tuple:
    return "decoding", {"batch": batch}, (f"{name}, dense", f"{name}, planned"), "ms"


_PLAIN, _GRAPHS, _CODE = (
    (dense, f"planned{way}") for dense, way in ((DENSE, ""), (DENSE + _GRAPH, _GRAPH), (COMPILED, " compiled"))
)
# What is done, and which rows say how fast a layer is at it, and a whole model: the record's name, what they have in
# common, the paths of dense and planned, and which of their times counts.
DONE = {
    "write a text, `tl.generate`": (_layer(1, _GRAPHS), _loop(1)),
    "write 16 texts, `tl.generate`": (_layer(16, _GRAPHS), _loop(16)),
    "read 2,048 tokens, a CUDA graph": (_layer(2048, _GRAPHS), _model("1 x 2,048", _GRAPHS)),
    "read 64 x 2,048 tokens, plain calls": (_layer(131072, _PLAIN, "wall_ms"), _model("64 x 2,048", _PLAIN)),
    "train on 16,384 tokens, compiled": (
        _layer(MANY, _CODE, kind="training"),
        ("training", {"workload": f"{_STEP}8 layers"}, _CODE, "ms"),
    ),
    "write a text, plain `generate`": (_layer(1, _PLAIN, "wall_ms"), _loop(1, "generate")),
}


def beside_layer(recorded: list[Record]) -> tuple[str, dict[str, list[float]]]:
    """Return how many times as fast as torch's own a layer and a whole model are at what is done, where both are
    recorded; and on which device and days that was."""
    used, done = [], {}
    for name, both in DONE.items():
        times = []
        for kind, common, paths, time in both:
            which = lambda row: common.items() <= row.items() and 25 < row.get("nnz", 29) < 33  # noqa: B023, E731
            record, rows = rows_of(recorded, kind, which)
            took = {row["path"]: row[time] for row in rows if row["path"] in paths}
            if record and len(took) == 2:
                used.append(record)
                times.append(took[paths[0]] / took[paths[1]])
        if len(times) == 2:
            done[name] = times
    days = sorted({record.date[:10] for record in used})
    where = f"{used[0].rows[0]['device']}, {' to '.join(dict.fromkeys((days[0], days[-1])))}" if used else ""
    return where + "; stale: code has changed since" * any(map(stale, used)), done


def whole_beside_layer(recorded: list[Record]) -> str:
    """Return the table of `beside_layer`."""
    where, done = beside_layer(recorded)
    cells = (
        (name, f"a {what}", f"{x:.2f}") for name, pair in done.items() for what, x in zip(("layer", "model"), pair)
    )
    return _grid(f"times as fast as torch's own; {where}", cells)


def _trained(rows: list[dict]) -> Cells:
    """Yield steps, speed, firing and loss of a trained model and its dense twin."""
    for row in rows:
        column = TWIN if row["path"].startswith(TWIN) else "with L1"
        yield f"steps of {row['tokens']:,} tokens", column, f"{row['steps']:,}"
        yield "milliseconds a step, at the end", column, _ms(row["ms"])
        yield "seconds, all in all", column, f"{row['total_seconds']:,.0f}"
        yield "neurons firing for a token", column, f"{row['mean_nnz']:.3g} of {row['d_ff']:,}"
        yield "moved over the last fifth by", column, f"{row['nnz_moved']:+.1%}"
        yield "bits a byte of held-out text", column, f"{row['validation_bits_per_byte']:.4f}"


trained = _table("trained", _of(RUN), "{where}", _trained)
_steps = _each(
    lambda row: f"{row['workload'].removeprefix(_STEP)}, {row['d_model']} wide, {_nnz(row)} neurons firing",
    lambda row: {row["path"]: _ms(row["ms"]) + f", {row['x_compiled']:.2f}x" * (row["path"] != COMPILED)},
)
_COMPILED_STEP = lambda row: "compiled" in row["path"] and row["workload"].startswith(_STEP)  # noqa: E731
steps = _table("training", _COMPILED_STEP, "milliseconds a step, {where}", _steps)

# ---- other methods ----


def _costs(row: dict) -> dict[str, str]:
    """Return what chosen neurons cost, and how fast they are in plain calls and, in brackets, as CUDA graphs."""
    if row["path"].endswith(_GRAPH):
        return {"times as fast as dense": f"{row['x_dense']:.2f}"}
    low, middle, high = row["loss_change"]
    costs = {"zeros": f"{row['sparsity']:.0%}", "loss": f"{row['loss']:.4f}"}
    costs["more than dense"] = f"{middle:+.4f} ({low:+.4f} to {high:+.4f})"
    return costs | {"times as fast as dense": _walls(row)}


def _way(row: dict) -> str:
    path = row["path"].removesuffix(_GRAPH).removeprefix("lossy: ").removeprefix("thresholds, ")
    return row["workload"].partition("decode step")[0] + path.replace("forced ", "")


def _is_chosen(row: dict) -> bool:
    return row.get("tokens") == 1 and "loss_change" in row and not row["path"].startswith(DENSE)


def _activations(row: dict) -> dict[str, str]:
    """Return what a row says of the down projection of a trained layer: of it as it is, by a method, or of finding the
    micro-tiles."""
    if row["path"] == DENSE:
        sizes = f"{row['tokens']:,} x {row['d_ff']:,}, times {row['d_ff']:,} x {row['d_model']:,}"
        shares = {"zeros": f"{1 - row['density']:.2%}", "tiles with a value": f"{row['occupied']:.1%}"}
        return {"sizes": sizes, **shares, "dense, ms": _ms(row["ms"])}
    if row["path"].startswith(_PART):
        return {"finding the tiles, ms": _ms(row["ms"])} if TILED in row["path"] else {}
    return {row["path"]: _times(row)}


def _few_bits(row: dict) -> dict[str, str]:
    """Return milliseconds of a part of a layer; or how many times as fast as dense it is, by the wall time and in
    brackets as a CUDA graph, and the error of its output."""
    if row["path"].startswith(_PART):
        return {_tokens(row): f"{_ms(row['ms'])} ms"}
    if row["path"].endswith(_GRAPH):
        return {_tokens(row): f"{row['x_dense']:.2f}"}
    return {_tokens(row): _walls(row)} | ({"error": f"{row['error']:.1%}"} if row["tokens"] == MANY else {})


def _padding(row: dict) -> dict[str, str]:
    return {f"{row['real'] / row['tokens']:.0%} of the tokens real": _times(row)}


_BESIDE, _ONE = "times as fast as dense, {where}", "decoding one token, {where}"
_COMPARED = partial(_table, "comparison")
predictors = _table("predictors", _is_chosen, _ONE, _each(_way, _costs))
thresholds = _table("thresholds", _is_chosen, _ONE, _each(_way, _costs))
_pruning = _each(
    lambda row: row["path"],
    lambda row: {
        "zeros": f"{row['sparsity']:.0%}",
        "pruned": f"{row['bits_before']:.3f}",
        "and trained on": f"{row['bits_after']:.3f}",
    },
)
pruning = _table("pruning", _of("pruning"), "bits a byte, {where}", _pruning)
_methods = _each(
    lambda row: f"{row['pattern']}: {row['path']}",
    lambda row: {row["workload"].split(", ")[1]: _times(row)} if row.get("dense_ms") and row["path"] != DENSE else {},
)
comparison = _COMPARED(_of("comparison"), _BESIDE, lambda rows: _methods(leading(rows)))
activations = _COMPARED(_of("activations"), _BESIDE, _each(lambda row: row["workload"].split(",")[0], _activations))
_layers = lambda row: f"{row.get('layers', 1)} layer{'s' * (row.get('layers', 1) > 1)}"  # noqa: E731
padding = _COMPARED(
    lambda row: row.get("kind") == "padding" and row["path"] == REMOVED,
    _BESIDE,
    _each(lambda row: f"padding removed once for {_layers(row)}", _padding),
)
_experts = _each(lambda row: row["path"], lambda row: {row["workload"]: _times(row)})
experts = _COMPARED(_of("experts"), "times as fast as the loop (dense eager), {where}", _experts)
few_bits = _COMPARED(
    lambda row: row.get("kind") == "few bits" and not row["path"].startswith(DENSE),
    _BESIDE,
    _each(lambda row: row["path"].removesuffix(_GRAPH).removeprefix(_PART).removeprefix("forced "), _few_bits),
)


def _attacked(row: dict) -> dict[str, str]:
    if "rows" not in row:
        return {"cases": f"{row['cases']:,}"}
    excused = sum(row.get(key, 0) for key in ("excused_rows", "overflowed_rows", "rounded_rows"))
    counts = {"cases": row["cases"], "rows of results": row["rows"], "rows excused": excused}
    texts = {column: f"{count:,}" for column, count in counts.items()}
    return texts | {"worst error, of what is allowed": str(row["worst_ratio"])}


_attacks = partial(_table, "attack", head="attacked; {where}", cells=_each(lambda row: row["attack"], _attacked))
gpu_attacks = _attacks(which=lambda row: "on a GPU" in row.get("attack", ""))
attacks = _attacks(which=lambda row: "attack" in row and "on a GPU" not in row["attack"])
