"""The tables of the README and of docs/ that are made of records: each a function from all records, oldest first, to
Markdown. Where that does, a table is data for `_pivot`: a record, a choice of its rows, a column for each value of a
key, and a text of lines, each with the rows that it takes and what its cells say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ..bench.comparison import TILED, begins, leading, quantile
from ..bench.methods import REMOVED, WHOLE, proportions
from ..bench.profiling import PROFILING
from ..bench.rows import COMPILED, DENSE
from ..bench.sizes import RECORD, SIZES, model_name
from ..bench.trained import RUN, TWIN
from ..records import Record, newest, stale, told
from .bench_command import pairs
from .walk import code_hash, with_code

LITTLE = 16  # MiB: `sizes` shows no peak below that
RIVALS = {DENSE: "eager", COMPILED: "compiled", "dense max-autotune": "max-autotune"}  # of torch's dense layer
Lines = list[list[str]]
Table = Callable[[list[Record]], str]
LayOut = Callable[[list[dict], str], Lines]  # of rows, and of where they were recorded
_MODEL_KINDS = ("model_forward", "model_decode")
_HEAVY = "heavy rows: "
_STEP = "whole step, "
_LARGEST = f"{model_name(SIZES[-1])}, "


# ---- which rows, and how they are laid out ----


def rows_of(recorded: list[Record], name: str, which: Callable[[dict], object]) -> tuple[Record | None, list[dict]]:
    """Return the newest record of that name with such rows, and these rows; (None, []) where there is none."""
    for record in reversed(told(recorded, name)):
        if rows := [row for row in record.rows if which(row)]:
            return record, rows
    return None, []


def calls_of_a_layer(recorded: list[Record], name: str, which: Callable[[dict], bool]) -> tuple[Record | None, list]:
    """`rows_of` such rows among plain calls of a gated layer of 2,048 x 5,632."""

    def is_call(row: dict) -> bool:
        return row.get("kind") == name and row["gated"] and "wall_ms" in row and "(graph)" not in row["path"]

    sizes = 2048, 5632
    return rows_of(recorded, name, lambda row: is_call(row) and (row["d_model"], row["d_ff"]) == sizes and which(row))


def is_drawn(row: dict) -> bool:
    """Return whether each neuron of the workload fires by itself, some far more often than others."""
    return row["workload"] == "independent, lognormal"


def _fires_29(row: dict) -> bool:
    return is_drawn(row) and 25 < row["nnz"] < 33


def _at_once(row: dict) -> bool:
    return is_drawn(row) and row["tokens"] == 16384


def _of(*kinds: str) -> Callable[[dict], bool]:
    return lambda row: row.get("kind") in kinds


def _table(name: str, which: Callable[[dict], object], lay_out: LayOut, find: Callable = rows_of) -> Table:
    """Return the table of the newest record of this name with such rows."""

    def table(recorded: list[Record]) -> str:
        record, rows = find(recorded, name, which)
        return _markdown(lay_out(rows, _where(rows[0]["device"], record)) if record else [])

    return table


def _pivot(
    head: str,
    column: str,
    lines: str | Callable[[list[dict]], str],
    line_of: Callable[[dict], str] = lambda row: row["path"],
    among: str | None = None,
) -> LayOut:
    """Return a table's layout. head: what stands over the names of the lines, with "{where}". column: the key of a row
    that says its column. lines: a text, or of the rows one, each of whose lines is a line's name, the one that its rows
    have by `line_of`, and what a cell says (_CELLS). among: the line whose rows alone say which columns there are."""

    def lay_out(rows: list[dict], where: str) -> Lines:
        columns: dict = {}
        for row in rows:
            columns.setdefault(row[column], {})[line_of(row)] = row
        heads = {value: beside for value, beside in columns.items() if among is None or among in beside}
        heads = heads if column == "workload" else dict(sorted(heads.items()))
        says = {"tokens": _tokens, "nnz": "{:.0f}".format}.get(column, str)
        table = [[head.format(where=where), *map(says, heads)]]
        for spec in (lines(rows) if callable(lines) else lines).strip().splitlines():
            name, line, cell = map(str.strip, spec.split("|"))
            table.append(
                [name, *(_cell(cell, beside[line], beside) if line in beside else "" for beside in heads.values())]
            )
        return table

    return lay_out


def _cell(cell: str, row: dict, beside: dict) -> str:
    """Return what a cell says of a row, given the rows of its column by line: one of _CELLS; how many times as fast it
    is as the fastest of some lines, by the wall time ("over A, B") or by both times ("beside A")."""
    if cell.startswith("over "):
        walls = [beside[line]["wall_ms"] for line in cell.removeprefix("over ").split(", ") if line in beside]
        return f"{min(walls) / row['wall_ms']:.2f}"
    return _times(row, beside[cell.removeprefix("beside ")]) if cell.startswith("beside ") else _CELLS[cell](row)


def _markdown(lines: Lines) -> str:
    lines = lines if len(lines) > 1 else [["figures"], ["nothing is recorded yet"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def _index(rows: Iterable[dict], *keys: str) -> dict:
    """Return the last row for each value of these keys; a single key is no tuple."""
    return {row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys): row for row in rows}


# ---- what cells say ----


def _where(device: str, record: Record) -> str:
    """Return device and day, and whether the code has changed since."""
    return f"{device}, {record.date[:10]}" + "; stale: code has changed since" * stale(record)


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count > 1)}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _times(row: dict, dense: dict | None = None) -> str:
    """Return how many times as fast as the dense layer, by the device's time and, in brackets, by the wall's."""
    ms, wall = (row["dense_ms"], row["dense_wall_ms"]) if dense is None else (dense["ms"], dense["wall_ms"])
    return f"{ms / row['ms']:.2f} ({wall / row['wall_ms']:.2f})"


_CELLS: dict[str, Callable[[dict], str]] = {
    "ms": lambda row: _ms(row["ms"]),
    "wall": lambda row: _ms(row["wall_ms"]),
    "times": _times,
    "MiB": lambda row: f"{row['peak_bytes'] / 2**20:,.0f}",
    "path": lambda row: {"twell": "TwELL", "hot_cold": "hot/cold"}.get(choice := row["choice"].split()[0], choice),
    "hot": lambda row: row["path"].split()[-1],
    "1": lambda row: "1",
}


# ---- a layer ----

# Of plain calls of a planned layer of whose 5,632 neurons 29 fire.
_CALL = partial(_table, "inference", _fires_29, find=calls_of_a_layer)
_WALLS = """
torch's dense layer | dense eager | wall
planned | planned | wall
it takes | planned | path
times as fast | planned | over dense eager
times as fast, both under torch.compile | planned compiled | over dense compiled
"""
calls = _CALL(_pivot("milliseconds a call, {where}", "tokens", _WALLS, among="planned"))


def _headline(rows: list[dict], where: str) -> Lines:
    rivals = [path for path in RIVALS if any(row["path"] == path for row in rows)]
    head = f"times as fast as torch's dense layer, the fastest of {', '.join(RIVALS[path] for path in rivals)}; {where}"
    return _pivot(head, "tokens", f"a plain call | planned | over {', '.join(rivals)}", among="planned")(rows, where)


headline = _CALL(_headline)
_FIRING = "neurons firing for a token, mean; {where}"
_LAYER = """
TwELL | forced twell | times
hot/cold: the neurons that fire most densely, the others packed | forced hot_cold | times
dense, with gate and up in one product | forced dense | times
dense, under torch.compile | dense compiled | times
of 5,632 neurons, those that hot/cold computes densely | forced hot_cold | hot
"""
_TRAINING = """
it takes | planned | path
times as fast as torch's layer | planned | times
both under torch.compile | planned compiled | beside dense compiled
its peak memory beyond inputs and weights, MiB | planned | MiB
torch's peak memory beyond inputs and weights, MiB | dense eager | MiB
torch's compiled peak memory beyond inputs and weights, MiB | dense compiled | MiB
"""


def _split(row: dict) -> str:
    return "forced hot_cold" if row["path"].startswith("forced hot_cold") else row["path"]


layer = _table("inference", _at_once, _pivot(_FIRING, "nnz", _LAYER, _split, "forced twell"), calls_of_a_layer)
training = _table("training", _at_once, _pivot(_FIRING, "nnz", _TRAINING, among="planned"), calls_of_a_layer)


def heavy(recorded: list[Record]) -> str:
    """Of the newest records that have it: how much longer the TwELL path takes, forward and in training, if for some of
    16,384 tokens 1,500 neurons fire, or all."""
    lines: Lines = []
    for name, says in (("inference", "forward"), ("training", "training step")):
        record, _ = calls_of_a_layer(recorded, name, lambda row: row["workload"] == f"{_HEAVY}512")
        if record is None:
            continue
        rows = [row for row in record.rows if row["workload"].startswith(_HEAVY) and row["path"] == "forced twell"]
        times = {row["workload"].removeprefix(_HEAVY): row["ms"] for row in rows}
        counts = [count for count in times if count.isdigit() and count != "0"]
        lines = lines or [["longer by", *(_tokens(int(count)) for count in counts)]]
        for kind, more in (("1,500 neurons", ""), ("all 5,632", ", all neurons")):
            cells = [f"{times[count + more] / times['0'] - 1:+.0%}" for count in counts]
            lines.append([f"{says}, {kind}; {_where(rows[0]['device'], record)}", *cells])
    return _markdown(lines)


def _of_work(row: dict) -> str:
    return f"{row['workload']}: {row['path']}"


def _host(rows: list[dict]) -> str:
    lines = """
{0}: torch's dense layer | {0}: dense eager | wall
{0}: TwELL | {0}: twell | wall
of that, until the call returns | {0}: twell | ms
times as fast | {0}: twell | over {0}: dense eager"""
    return "".join(lines.format(work) for work in _index(rows, "workload"))


def _operands(rows: list[dict]) -> str:
    return "\n".join(f"{line} | {line} | ms" for line in dict.fromkeys(map(_of_work, rows)))


_MS = "milliseconds, {where}"
host = _table("host-time", _of("host"), _pivot(_MS, "tokens", _host, _of_work))
operands = _table("experiments", _of("dropout", "two_four_training"), _pivot(_MS, "tokens", _operands, _of_work))


# ---- whole models ----


def _model(rows: list[dict], where: str) -> Lines:
    """Plain calls of the paper's 2B model and CUDA graphs, dense and planned; in brackets the distance between the
    quartiles of the samples; and what the plan takes."""
    at = _index(rows, "workload", "path")
    graph, compiled = "planned for graphs (graph)", "planned for graphs compiled"
    ways = (
        ("", DENSE, ("planned",)),
        (", as a CUDA graph", f"{DENSE} (graph)", (graph,)),
        (", compiled", COMPILED, ("planned compiled", compiled)),
        (", compiled, as a CUDA graph", f"{COMPILED} (graph)", (f"{compiled} (graph)",)),
    )
    lines = [[f"milliseconds, {where}", "dense", "planned", "times as fast"]]
    for workload in dict.fromkeys(workload for workload, _ in at):
        name = workload.removeprefix(_LARGEST)
        for how, dense, planned in ways:
            there = [at[workload, path] for path in (dense, *planned) if (workload, path) in at][:2]
            if len(there) == 2:
                cells = [f"{_ms(row['wall_ms'])} ({_ms(row['wall_spread'])})" for row in there]
                lines.append([f"{name}{how}", *cells, f"{there[0]['wall_ms'] / there[1]['wall_ms']:.2f}"])
        for path in ("plan", "plan for graphs"):
            if (workload, path) in at:
                lines.append([name.replace("plan", path, 1), "", _ms(at[workload, path]["ms"]), ""])
    return lines


def _of_largest(row: dict) -> bool:
    return row.get("head", True) and row.get("workload", "").startswith(_LARGEST)


model = _table(RECORD, _of_largest, _model)


def _model_paths(rows: list[dict], where: str) -> Lines:
    """Of each model and path how many times as fast as the dense model it is, in brackets as a CUDA graph; how far the
    results of the first forward and of its layers are off; and the loss of the last forward, which has most tokens."""
    at = {(*row["workload"].split(", ", 1), row["path"]): row for row in rows}
    works = [*dict.fromkeys(work for _, work, _ in at)]
    forwards = [row["workload"].partition(", ")[2] for row in rows if row["kind"] == "model_forward"]
    lines = [[f"times as fast as dense, {where}", *works, "error", "of a layer", "loss"]]
    for about, path in dict.fromkeys((about, path) for about, _, path in at):
        if path == DENSE or path.endswith("(graph)"):
            continue
        cells = []
        for work in works:
            times = []
            for how in ("", " (graph)"):
                mine, dense = (at.get((about, work, name + how)) for name in (path, DENSE))
                times += [f"{dense['wall_ms'] / mine['wall_ms']:.2f}"] if mine and dense else []
            cells.append(" (".join(times) + ")" * (len(times) > 1))
        both = [[at.get((about, work, name), {}) for name in (path, DENSE)] for work in forwards]
        error = layer = loss = ""
        for mine, dense in [pair for pair in both if all("error" in row for row in pair)][:1]:
            error = f"{_percent(mine['error'])} (dense {_percent(dense['error'])})"
            layer = _percent(mine["layer_error"]) if "layer_error" in mine else ""
        for mine, dense in [pair for pair in both if all("loss" in row for row in pair)][-1:]:
            loss = f"{mine['loss']:.4f} (dense {dense['loss']:.4f})"
        lines.append([f"{about}: {path.removeprefix('forced ')}", *cells, error, layer, loss])
    return lines


model_paths = _table("model-paths", _of(*_MODEL_KINDS), _model_paths)


def sizes(recorded: list[Record]) -> str:
    """Of all records of drawn models of the paper's sizes, each of which may hold a part: of each workload, and each
    way to run it, the newest: how many times as fast planned layers make it, with both rates; what they save of energy
    and, of calls that hold more than LITTLE MiB, of peak memory."""
    units: dict[str, dict[str, dict[str, str]]] = {}  # by unit and by line, of each size
    heads: dict[str, str] = {}
    for record in told(recorded, RECORD):
        for size in SIZES:
            rows = [row for row in record.rows if row.get("workload", "").startswith(f"{model_name(size)}, ")]
            for pair in pairs([row for row in rows if row["path"].startswith(("dense", "planned"))]):
                # A graph of the model that is planned for graphs follows that of the other one, whose place it takes.
                how = pair["how"].removesuffix(", planned for it")
                what = f"{pair['what']}{' without the LM head' * (pair['head'] == 'without')}, {how}"
                said = {pair["unit"]: (f"{pair['times']:.2f}", pair["dense"], pair["sparse"])}
                for key, unit in (("mj", "mJ a token"), ("peak", "peak MiB")):
                    both = [pair[f"{side}_{key}"] for side in ("dense", "sparse")]
                    if None not in both:
                        dense, sparse = (float(str(value).partition(" ")[0]) for value in both)
                        if key == "mj" or dense > LITTLE:
                            said[unit] = f"{sparse / dense - 1:+.0%}", dense, sparse
                for unit, (change, dense, sparse) in said.items():
                    cells = units.setdefault(unit, {}).setdefault(what, {})
                    cells[size] = f"{change} ({_ms(dense)} to {_ms(sparse)})"
                heads[size] = f"{size}; {_where(rows[0]['device'], record)}"
    shown = [size for size in SIZES if size in heads]
    lines = [["times as fast, or by how much mJ and MiB change (dense to planned)", *(heads[size] for size in shown)]]
    for unit in ("tokens/ms", "tokens/s", "mJ a token", "peak MiB"):
        for what, cells in units.get(unit, {}).items():
            lines.append([f"{what}, {unit}", *(cells.get(size, "") for size in shown)])
    return _markdown(lines)


def _trained(rows: list[dict], where: str) -> Lines:
    """Return steps, speed, firing and loss of a trained model and its dense twin."""
    at = {row["path"].startswith(TWIN): row for row in rows}
    lines: tuple[tuple[str, Callable[[dict], str]], ...] = (
        (f"steps of {rows[0]['tokens']:,} tokens", lambda row: f"{row['steps']:,}"),
        ("milliseconds a step, at the end", lambda row: _ms(row["ms"])),
        ("seconds, all in all", lambda row: f"{row['total_seconds']:,.0f}"),
        ("neurons firing for a token", lambda row: f"{row['mean_nnz']:.3g} of {row['d_ff']:,}"),
        ("moved over the last fifth by", lambda row: f"{row['nnz_moved']:+.1%}"),
        ("bits a byte of held-out text", lambda row: f"{row['validation_bits_per_byte']:.4f}"),
    )
    grid = [[name, *(cell(at[twin]) if twin in at else "" for twin in (False, True))] for name, cell in lines]
    return [[where, "with L1", TWIN], *grid]


trained = _table("trained", _of(RUN), _trained)


def _trained_speed(rows: list[dict], where: str) -> Lines:
    """The wall time of the model's workloads, dense and swapped, and of its dense twin; with the energy of a token,
    peak memory beyond what was there, and the loss, where a call has them."""
    works: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        about, work = row["workload"].split(", ", 1)
        path, graph, _ = row["path"].partition(" (graph)")
        name = path if about != TWIN else f"{TWIN}{'' if path == DENSE else ', planned'}"
        if path != "planned for graphs" or graph:  # as what it was planned for
            works.setdefault((work, ", as a CUDA graph" * bool(graph)), {})[name.removesuffix(" for graphs")] = row
    columns = {DENSE: "dense", "forced twell": "every layer on TwELL"}
    order = (DENSE, "planned", "forced twell", TWIN, f"{TWIN}, planned")
    shown = [path for path in order if any(path in at for at in works.values())]
    lines = [[where, *(columns.get(path, path) for path in shown)]]
    for (work, how), at in works.items():
        cells = []
        for path in shown:
            times = f" ({at[DENSE]['wall_ms'] / at[path]['wall_ms']:.2f}x)" if {DENSE, path} <= at.keys() else ""
            cells.append(_ms(at[path]["wall_ms"]) + times * (path != DENSE) if path in at else "")
        lines.append([f"{work}{how}, ms", *cells])
        for key, head, unit in (("mj_per_token", "mJ a token", 1), ("peak_bytes", "peak MiB", 2**20)):
            cells = [_ms(at[path][key] / unit) if key in at.get(path, {}) else "" for path in shown]
            lines += [[head, *cells]] if any(cells) else []
        losses = [f"{at[path]['loss']:.4f}" if "loss" in at.get(path, {}) else "" for path in shown]
        lines += [["loss, nats a byte", *losses]] if any(losses) and not how and "training" not in work else []
    return lines


trained_speed = _table("trained", _of(*_MODEL_KINDS, "model_training"), _trained_speed)


def steps(recorded: list[Record]) -> str:
    """Return what a training step of whole models takes, all under torch.compile: of the newest record of training that
    has the workload, dense beside planned, in one graph and layer by layer."""
    lines = [["milliseconds a step, compiled", "neurons firing", "dense", "planned", "times as fast", "layer by layer"]]
    rows = ((record, row) for record in recorded for row in record.rows if row.get("kind") == "training")
    latest = {row["workload"]: record for record, row in rows if row["workload"].startswith(_STEP)}
    for workload, record in latest.items():
        at = _index((row for row in record.rows if row["workload"] == workload), "nnz", "path")
        for nnz in sorted({nnz for nnz, _ in at}, reverse=True):
            paths = COMPILED, "planned compiled", "planned, compiled by layer"
            dense, planned, by_layer = (at[nnz, path]["ms"] for path in paths)
            row = at[nnz, COMPILED]
            where = f"{row['d_model']} wide; {_where(row['device'], record)}"
            cells = [_ms(dense), _ms(planned), f"{dense / planned:.2f}", _ms(by_layer)]
            lines.append([f"{workload.removeprefix(_STEP)}, {where}", f"{nnz:.0f}", *cells])
    return _markdown(lines)


def _profiling(rows: list[dict], where: str) -> Lines:
    plain, counted = rows
    more = f"{counted['extra_bytes'] / 2**20:,.0f}" if "extra_bytes" in counted else ""
    what = f"{plain['layers']} layers of {plain['d_model']:,} x {plain['d_ff']:,}, {plain['tokens']:,} tokens"
    return [
        [where, "plain forward, ms", "profile, ms", "times as long", "MiB more at the peak"],
        [what, *(_ms(row["ms"]) for row in rows), f"{counted['times_plain']:.2f}", more],
    ]


profiling = _table("profiling", _of(PROFILING), _profiling)


# ---- other methods ----


def _pruning(rows: list[dict], where: str) -> Lines:
    """Of each way to prune bits a byte of held-out text before and after the model was trained on, for each seed, and
    how much more that is than the dense model's, trained on as long."""
    at, seeds = _index(rows, "path", "seed"), sorted({row["seed"] for row in rows})
    named = f"seed{'s' * (len(seeds) > 1)} {' and '.join(map(str, seeds))}"
    lines = [[f"bits a byte, {where}, {named}", "zeros", "pruned", "and trained on", "more than dense"]]
    for path in dict.fromkeys(path for path, _ in at):
        there = [at[path, seed] for seed in seeds if (path, seed) in at]
        more = [row["bits_after"] - at["dense", row["seed"]]["bits_after"] for row in there]
        cells = (
            dict.fromkeys(f"{row['sparsity']:.0%}" for row in there),
            [f"{row['bits_before']:.3f}" for row in there],
            [f"{row['bits_after']:.3f}" for row in there],
            [f"{change:+.3f}" for change in more],
        )
        lines.append([path, *map(", ".join, cells)])
    return lines


pruning = _table("pruning", _of("pruning"), _pruning)


def _decoding_one(recorded: list[Record]) -> Iterator[tuple[str, list[tuple[str, dict, dict, dict, dict]]]]:
    """Yield for each model of predictors and of thresholds its heading, and what chosen neurons were computed: name,
    row and dense row of plain calls, and both as CUDA graphs, where there are any."""
    for name in ("predictors", "thresholds"):
        record = newest(recorded, name)
        rows = [row for row in record.rows if row.get("tokens") == 1] if record else []
        at, ways = _index(rows, "workload", "path"), []
        for (work, path), row in at.items():
            if path == DENSE or path.endswith("(graph)"):
                continue
            way = path.removeprefix("lossy: ").removeprefix("thresholds, ")
            if name == "thresholds":
                way = f"{work.partition(', ')[0]}, {'computed densely' if way == 'dense' else way}"
            graphs = (at.get((work, f"{line} (graph)"), at[work, line]) for line in (path, DENSE))
            ways.append((way, row, at[work, DENSE], *graphs))
        if record and rows:
            yield f"{rows[0]['workload'].rpartition(', ')[2]}, {_where(rows[0]['device'], record)}", ways


def chosen(recorded: list[Record]) -> str:
    """Of the newest records of predictors and of thresholds: what a step of decoding one token gains and loses where
    chosen neurons alone are computed, as a CUDA graph (on a CPU there are none) and, in brackets, as plain calls."""
    lines = [["decoding one token", "zeros", "loss", "more than dense", "times as fast as dense"]]
    for model, ways in _decoding_one(recorded):
        loss = next(dense.get("loss", row.get("dense_loss")) for _, row, dense, *_ in ways)
        lines.append([f"**{model}**", "", f"{loss:.4f}", "", ""])
        for name, row, dense, graph, dense_graph in ways:
            low, middle, high = row["loss_change"]
            times = f"{dense['wall_ms'] / row['wall_ms']:.2f}"
            if graph is not row:
                times = f"{dense_graph['ms'] / graph['ms']:.2f} ({times})"
            change = f"{middle:+.4f} ({low:+.4f} to {high:+.4f})"
            lines.append([name, f"{row['sparsity']:.0%}", f"{row['loss']:.4f}", change, times])
    return _markdown(lines)


def chosen_from(recorded: list[Record]) -> str:
    """Of the same records as `chosen`: from how many zeros on a step of decoding one token is faster than the dense
    one, as a CUDA graph where there are any."""
    points: dict[str, list[tuple[float, dict, dict]]] = {}
    for model, ways in _decoding_one(recorded):
        for name, row, _, graph, dense_graph in ways:
            method = re.sub(r",? (recall )?[0-9]+%", "", name)  # whatever share it is asked for
            method = f"{model.partition(' trained')[0]}: {method}"
            points.setdefault(method, []).append((1 - row["sparsity"], graph, dense_graph))
    lines = [[name, begins(some)] for name, some in points.items() if len(some) > 1]
    return _markdown([["decoding one token", "faster from"], *lines])


def _adapters(rows: list[dict], where: str) -> Lines:
    lines = [[f"milliseconds, {where}", "GPU", "wall", "MB written", "weights off by"]]
    for row in rows:
        written, off = f"{row['written_bytes'] / 1e6:,.0f}", f"{row['worst_error']:.2g}"
        lines.append([f"{row['path']}, {row['workload']}", _ms(row["ms"]), _ms(row["wall_ms"]), written, off])
    return lines


adapters = _table("experiments", _of("adapters"), _adapters)


def _comparison(rows: list[dict], where: str) -> Lines:
    """Return how many times as fast as torch's dense product each method is on each pattern, and from how many zeros on
    it is faster, by the device's time. A kernel's other versions are left out."""
    rows = leading(rows)
    at = {(row["pattern"], row["path"], row["workload"].partition(", ")[2]): row for row in rows}
    shares = sorted({zeros for *_, zeros in at}, key=lambda zeros: float(zeros.partition("%")[0]))
    lines = [[f"times as fast as dense, {where}", *(zeros.removesuffix(" zeros") for zeros in shares), "faster from"]]
    for pattern, path in dict.fromkeys((pattern, path) for pattern, path, _ in at):
        if path == DENSE or path.startswith("part: "):
            continue
        pairs = [(at.get((pattern, path, zeros)), at.get((pattern, DENSE, zeros))) for zeros in shares]
        cells = [_times(row, dense) if row else "" for row, dense in pairs]
        points = [(row["density"], row, dense) for row, dense in pairs if row and dense]
        lines.append([f"{pattern}: {path}", *cells, begins(points)])
    return lines


comparison = _table("comparison", _of("comparison"), _comparison)


def _activations(rows: list[dict], where: str) -> Lines:
    """The down projection of trained layers by each method, as many times as fast as the dense product; what finding
    the micro-tiles takes, and how fast they are with that."""
    paths = [path for path in _index(rows, "path") if path != DENSE and not path.startswith("part: ")]
    head = [f"times as fast as dense, {where}", "zeros", "tiles of 32 x 1 with a value", "dense, ms"]
    lines = [[*head, *paths, "finding the tiles, ms", "found and multiplied"]]
    for work in _index(rows, "workload"):
        at = _index((row for row in rows if row["workload"] == work), "path")
        dense, tiled, search = at[DENSE], at.get(TILED), at.get(f"part: {TILED}, conversion")
        both = ["", ""]
        if tiled and search:
            both = [_ms(search["ms"]), f"{dense['ms'] / (search['ms'] + tiled['ms']):.2f}"]
        sizes = f"{dense['tokens']:,} x {dense['d_ff']:,}, times {dense['d_ff']:,} x {dense['d_model']:,}"
        times = [_times(at[path], dense) if path in at else "" for path in paths]
        shares = [f"{1 - dense['density']:.2%}", f"{dense['occupied']:.1%}"]
        lines.append([f"{work.partition(',')[0]}: {sizes}", *shares, _ms(dense["ms"]), *times, *both])
    return lines


activations = _table("comparison", _of("activations"), _activations)


def _padding(rows: list[dict], where: str) -> Lines:
    """Return what removing the padding of a batch saves dense layers, by how many follow each other; how far the times
    are from proportional ones, and how far those of as many tokens without padding are."""
    at = {(row.get("layers", 1), row["real"] / row["tokens"], row["path"]): row for row in rows}
    shares = sorted({share for _, share, _ in at})
    named = [f"{share:.0%} of the tokens real" for share in shares]
    off = ["off a proportional time", "off dense's share", "of that, tokens alone"]
    lines = [[f"times as fast as dense; {where}", *named, *off]]
    for line in proportions(rows):
        there = [at.get((line.layers, share, REMOVED)) for share in shares]
        times = [_times(row, at[line.layers, share, DENSE]) if row else "" for row, share in zip(there, shares)]
        name = f"padding removed once for {line.layers} layer{'s' * (line.layers > 1)}"
        own = "not recorded" if line.own is None else f"{line.own:+.1%}"
        lines.append([name, *times, f"{line.fitted:.1%}", f"{line.beside_dense:+.1%}", own])
    return lines


padding = _table("comparison", _of("padding"), _padding)


def _experts(rows: list[dict], where: str) -> Lines:
    """A mixture of experts by each way beside a loop of dense layers; and from which share of neurons that a token does
    without on each is faster than one dense layer of all, where that was recorded."""
    at = _index(rows, "path", "workload")
    points: dict[str, list[tuple[float, dict, dict]]] = {}
    for (path, work), row in at.items():
        if path != WHOLE and (WHOLE, work) in at:
            points.setdefault(path, []).append((row["density"], row, at[WHOLE, work]))
    lines = [f"{path} | {path} | beside {DENSE}" for path in _index(rows, "path") if path != DENSE]
    lines = [f"the loop | {DENSE} | 1"] * bool(points) + lines
    head, *grid = _pivot("times as fast as the loop; {where}", "workload", "\n".join(lines))(rows, where)
    if not points:
        return [head, *grid]
    paths = [DENSE if name == "the loop" else name for name, *_ in grid]
    ends = [begins(points[path]) if path in points else "" for path in paths]
    head = [*head, "faster than all neurons where a token does without"]
    return [head, *([*line, end] for line, end in zip(grid, ends))]


experts = _table("comparison", _of("experts"), _experts)


def _few_bits(rows: list[dict], where: str) -> Lines:
    """A gated layer with weights of few bits beside the dense one (CUDA graphs where there are any); the error of its
    output; and at how many tokens it is faster by more than the quartiles of the samples. Then parts of it."""
    at, surely = _index(rows, "path", "tokens"), dict[str, list[str]]()
    counts = sorted({row["tokens"] for row in rows})
    paths = [path for path in _index(rows, "path") if path != DENSE and not path.endswith("(graph)")]
    lines = [[f"times as fast as dense; {where}", *map(_tokens, counts), "error", "surely faster at"]]

    def cell(path: str, tokens: int) -> str:
        if (row := at.get((path, tokens))) is None:
            return ""
        if path.startswith("part: "):
            return f"{_ms(row['ms'])} ms"
        dense = at[DENSE, tokens]
        mine, other = (at.get((f"{line['path']} (graph)", tokens), line) for line in (row, dense))
        faster = quantile(other["samples"], 0.25) > quantile(mine["samples"], 0.75)
        surely.setdefault(path, []).extend([f"{tokens:,}"] * faster)
        return f"{other['ms'] / mine['ms']:.2f} ({dense['wall_ms'] / row['wall_ms']:.2f})"

    errors = {row["path"]: f"{row['error']:.1%}" for row in rows if "error" in row}
    for path in paths:
        cells = [cell(path, tokens) for tokens in counts]
        sure = ", ".join(surely[path]) or "none measured" if path in surely else ""
        lines.append([path.removeprefix("part: ").removeprefix("forced "), *cells, errors.get(path, ""), sure])
    return lines


few_bits = _table("comparison", _of("few bits"), _few_bits)


# ---- what was checked ----


def attacks(recorded: list[Record]) -> str:
    """Return the newest attack on a GPU and the newest without one."""
    last = {bool(record.machine.get("gpus")): record for record in recorded if record.name == "attack"}
    lines = [["attacked", "cases", "rows of results", "rows excused", "worst error, of what is allowed", "recorded on"]]
    for gpu, record in sorted(last.items(), reverse=True):
        where = _where(record.machine["gpus"][0]["name"] if gpu else "a CPU", record)
        for row in record.rows:
            if "attack" in row:
                excused = sum(row.get(key, 0) for key in ("excused_rows", "overflowed_rows", "rounded_rows"))
                counts = [row["cases"], row.get("rows"), excused if "rows" in row else None]
                cells = ["" if count is None else f"{count:,}" for count in counts]
                lines.append([row["attack"], *cells, str(row.get("worst_ratio", "")), where])
    return _markdown(lines)


def course(recorded: list[Record]) -> str:
    """The newest walk through the course on each device: seconds of each notebook, and whether its code has changed
    since."""
    last = {row["device"]: record for record in recorded if record.name == "course" for row in record.rows}
    walks = [_index(record.rows, "path") for record in last.values()]
    lines = [["seconds, all cells of a notebook"]]
    for device, record in last.items():
        at_once = record.notes.get("notebooks at once", 1)
        lines[0].append(f"{device}, {record.date[:10]}{f', {at_once} at once' * (at_once > 1)}")
    for path in with_code() if last else []:
        rows = [walk.get(path.name) for walk in walks]
        changed = [row is not None and row["code"] != code_hash(path) for row in rows]
        cells = [f"{row['ms'] / 1e3:.0f}{', changed since' * new}" if row else "" for row, new in zip(rows, changed)]
        lines.append([path.stem, *cells])
    if last:
        lines.append(["together", *(f"{sum(row['ms'] for row in walk.values()) / 1e3:.0f}" for walk in walks)])
    return _markdown(lines)
