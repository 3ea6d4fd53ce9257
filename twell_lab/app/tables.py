"""The tables of the README and of docs/ that are made of records: each a function from all records, oldest first, to
Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import wraps

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
Lines = list[list[str]]
Table = Callable[[list[Record]], str]
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


def _table(
    name: str,
    *kinds: str,
    nothing: str = "times as fast",
    which: Callable[[dict], object] | None = None,
    find: Callable = rows_of,
) -> Callable[[Callable[[list[dict], str], Lines]], Table]:
    """Make a table of a function from rows, and where they were recorded, to lines of cells: of the newest record of
    this name with rows of these kinds, or such `which` picks. Without one the table has the heading `nothing`."""

    def of(lay_out: Callable[[list[dict], str], Lines]) -> Table:
        @wraps(lay_out)
        def table(recorded: list[Record]) -> str:
            record, rows = find(recorded, name, which or (lambda row: row.get("kind") in kinds))
            if record is None:
                return _markdown([], [nothing])
            return _markdown(lay_out(rows, _where(rows[0]["device"], record)))

        return table

    return of


def _index(rows: Iterable[dict], *keys: str) -> dict:
    """The last row for each value of these keys; a single key is no tuple."""
    return {row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys): row for row in rows}


def _grid(head: str, at: dict, columns: dict, lines: Iterable[tuple[str, Hashable, Callable[[dict], str]]]) -> Lines:
    """Return the heading, and a line for each (its name, the first part of its rows' keys, what a row says); where
    there is no row, the cell is empty. at: rows by (line, column). columns: their headings by the second part."""
    return [
        [head, *columns.values()],
        *([name, *(cell(at[key, c]) if (key, c) in at else "" for c in columns)] for name, key, cell in lines),
    ]


def _markdown(lines: Lines, nothing: list[str] | None = None) -> str:
    if nothing:
        lines = lines or [nothing, ["nothing is recorded yet", *[""] * (len(nothing) - 1)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def _where(device: str, record: Record) -> str:
    """Device and day, and whether the code has changed since."""
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


def _path(row: dict) -> str:
    name = row["choice"].split()[0]
    return {"twell": "TwELL", "hot_cold": "hot/cold"}.get(name, name)


# ---- a layer ----


def _wall(row: dict) -> str:
    return _ms(row["wall_ms"])


def _faster_than(dense: str, at: dict, key: str) -> Callable[[dict], str]:
    """Return what says how many times as fast a row is as that of the path `dense`, by the wall time of plain calls."""
    return lambda row: f"{at[dense, row[key]]['wall_ms'] / row['wall_ms']:.2f}"


def _by_tokens(rows: Iterable[dict]) -> dict[int, str]:
    """Columns for these numbers of tokens."""
    return {count: _tokens(count) for count in sorted({row["tokens"] for row in rows})}


def _calls(rows: list[dict], where: str) -> Lines:
    at = _index(rows, "path", "tokens")
    lines = (
        ("torch's dense layer", DENSE, _wall),
        ("planned", "planned", _wall),
        ("it takes", "planned", _path),
        ("times as fast", "planned", _faster_than(DENSE, at, "tokens")),
        ("times as fast, both under torch.compile", "planned compiled", _faster_than(COMPILED, at, "tokens")),
    )
    columns = _by_tokens(row for row in rows if row["path"] == "planned")
    return _grid(f"milliseconds a call, {where}", at, columns, lines)


def _fires_29(row: dict) -> bool:
    return is_drawn(row) and 25 < row["nnz"] < 33


def _at_once(row: dict) -> bool:
    return is_drawn(row) and row["tokens"] == 16384


@_table("inference", nothing="milliseconds a call", which=_fires_29, find=calls_of_a_layer)
def calls(rows: list[dict], where: str) -> Lines:
    """Tabulate what a plain call of a planned layer takes, for each number of tokens, beside the dense layer's, and
    what the plan takes; 29 of 5,632 neurons fire."""
    return _calls(rows, where)


@_table("inference", nothing="times as fast as torch's layer", which=_fires_29, find=calls_of_a_layer)
def headline(rows: list[dict], where: str) -> Lines:
    """One row of `calls`: how many times as fast as torch's dense layer a planned one is, for each number of tokens."""
    (_, *counts), _, _, _, (_, *times), _ = _calls(rows, where)
    return [[f"times as fast as torch's layer, {where}", *counts], ["a plain call", *times]]


@_table("inference", which=_at_once, find=calls_of_a_layer)
def layer(rows: list[dict], where: str) -> Lines:
    """Tabulate how many times as fast as torch's dense layer each path is, by how many neurons fire, for 16,384
    tokens."""
    split = "forced hot_cold"
    at = {(split if row["path"].startswith(split) else row["path"], row["nnz"]): row for row in rows}
    lines = (
        ("TwELL", "forced twell", _times),
        ("hot/cold: the neurons that fire most densely, the others packed", split, _times),
        ("dense, with gate and up in one product", "forced dense", _times),
        ("dense, under torch.compile", COMPILED, _times),
        ("of 5,632 neurons, those that hot/cold computes densely", split, lambda row: row["path"].split()[-1]),
    )
    return _grid(f"neurons firing for a token, mean; {where}", at, _by_firing(rows, "forced twell"), lines)


def _by_firing(rows: list[dict], path: str) -> dict[float, str]:
    """Columns for the mean numbers of firing neurons that a path has."""
    return {nnz: f"{nnz:.0f}" for nnz in sorted(row["nnz"] for row in rows if row["path"] == path)}


@_table("training", which=_at_once, find=calls_of_a_layer)
def training(rows: list[dict], where: str) -> Lines:
    """Tabulate how many times as fast a training step of a layer is, and what memory it takes, by how many neurons
    fire."""
    at = _index(rows, "path", "nnz")
    names = {"planned": "its", DENSE: "torch's", COMPILED: "torch's compiled"}
    lines = [
        ("it takes", "planned", _path),
        ("times as fast as torch's layer", "planned", _times),
        ("both under torch.compile", "planned compiled", lambda row: _times(row, at[COMPILED, row["nnz"]])),
        *((f"{name} peak memory beyond inputs and weights, MiB", path, _peak) for path, name in names.items()),
    ]
    return _grid(f"neurons firing for a token, mean; {where}", at, _by_firing(rows, "planned"), lines)


def _peak(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f}"


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
    return _markdown(lines, ["longer by"])


@_table("host-time", "host", nothing="milliseconds of a plain call")
def host(rows: list[dict], where: str) -> Lines:
    """Tabulate milliseconds on the wall of a plain call of torch's dense layer and of TwELL, for each number of tokens,
    and how long TwELL's took to return."""
    at = {(f"{row['workload']}: {row['path']}", row["tokens"]): row for row in rows}
    lines: list = []
    for work in _index(rows, "workload"):
        dense, ours = f"{work}: {DENSE}", f"{work}: twell"
        lines += [
            (f"{work}: torch's dense layer", dense, _wall),
            (f"{work}: TwELL", ours, _wall),
            ("of that, until the call returns", ours, lambda row: _ms(row["ms"])),
            ("times as fast", ours, _faster_than(dense, at, "tokens")),
        ]
    return _grid(f"milliseconds, {where}", at, _by_tokens(rows), lines)


# ---- whole models ----


@_table(RECORD, which=lambda row: row.get("workload", "").startswith(_LARGEST), nothing="milliseconds of the model")
def model(rows: list[dict], where: str) -> Lines:
    """Tabulate what a plain call of the paper's 2B model takes, and a CUDA graph's replay, dense and planned, and in
    brackets the distance between the quartiles of the samples; and what the plan takes."""
    ours = (row for row in rows if row.get("head", True) and row["workload"].startswith(_LARGEST))
    at = _index(ours, "workload", "path")
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


@_table("model-paths", *_MODEL_KINDS, nothing="times as fast as the dense model")
def model_paths(rows: list[dict], where: str) -> Lines:
    """Tabulate for each model and path how many times as fast as the dense model it is, in brackets as a CUDA graph;
    how far the results of the first forward and of its layers are off; and the loss of the last forward that has
    one."""
    at = {(*row["workload"].split(", ", 1), row["path"]): row for row in rows}
    works = [*dict.fromkeys(work for _, work, _ in at)]
    forwards = [row["workload"].partition(", ")[2] for row in rows if row["kind"] == "model_forward"]
    lines = [[f"times as fast as dense, {where}", *works, "error", "of a layer", "loss"]]
    for about, path in dict.fromkeys((about, path) for about, _, path in at):
        if path == DENSE or path.endswith("(graph)"):
            continue

        def times(work: str, how: str = "") -> str:
            mine, dense = (at.get((about, work, name + how)) for name in (path, DENSE))
            return f"{dense['wall_ms'] / mine['wall_ms']:.2f}" if mine and dense else ""

        cells = []
        for work in works:
            graph = times(work, " (graph)")
            cells.append(times(work) + (f" ({graph})" if graph and times(work) else ""))
        pairs_of = [[at.get((about, work, name), {}) for name in (path, DENSE)] for work in forwards]
        errors = [pair for pair in pairs_of if all("error" in row for row in pair)]
        losses = [pair for pair in pairs_of if all("loss" in row for row in pair)]  # the last has the most tokens
        error = layer = loss = ""
        if errors:
            mine, dense = errors[0]
            error = f"{_percent(mine['error'])} (dense {_percent(dense['error'])})"
            layer = _percent(mine["layer_error"]) if "layer_error" in mine else ""
        if losses:
            loss = f"{losses[-1][0]['loss']:.4f} (dense {losses[-1][1]['loss']:.4f})"
        lines.append([f"{about}: {path.removeprefix('forced ')}", *cells, error, layer, loss])
    return lines


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
                    if None in both:
                        continue
                    dense, sparse = (float(str(value).partition(" ")[0]) for value in both)
                    if key == "mj" or dense > LITTLE:
                        said[unit] = f"{sparse / dense - 1:+.0%}", dense, sparse
                for unit, (change, dense, sparse) in said.items():
                    cells = units.setdefault(unit, {}).setdefault(what, {})
                    cells[size] = f"{change} ({_ms(dense)} to {_ms(sparse)})"
                heads[size] = f"{size}; {_where(rows[0]['device'], record)}"
    heads = {size: heads[size] for size in SIZES if size in heads}
    lines = [["times as fast, or by how much mJ and MiB change (dense to planned)", *heads.values()]]
    for unit in ("tokens/ms", "tokens/s", "mJ a token", "peak MiB"):
        for what, cells in units.get(unit, {}).items():
            lines.append([f"{what}, {unit}", *(cells.get(size, "") for size in heads)])
    return _markdown(lines if heads else [], ["times as fast as the dense model"])


@_table("trained", RUN, nothing="trained with L1, and its dense twin")
def trained(rows: list[dict], where: str) -> Lines:
    """Tabulate what became of a trained model and its dense twin."""
    at = {(row["kind"], TWIN if row["path"].startswith(TWIN) else DENSE): row for row in rows}
    lines = (
        (f"steps of {rows[0]['tokens']:,} tokens", RUN, lambda row: f"{row['steps']:,}"),
        ("milliseconds a step, at the end", RUN, lambda row: _ms(row["ms"])),
        ("seconds, all in all", RUN, lambda row: f"{row['total_seconds']:,.0f}"),
        ("neurons firing for a token", RUN, lambda row: f"{row['mean_nnz']:.3g} of {row['d_ff']:,}"),
        ("moved over the last fifth by", RUN, lambda row: f"{row['nnz_moved']:+.1%}"),
        ("bits a byte of held-out text", RUN, lambda row: f"{row['validation_bits_per_byte']:.4f}"),
    )
    return _grid(where, at, {DENSE: "with L1", TWIN: TWIN}, lines)


@_table("trained", *_MODEL_KINDS, "model_training", nothing="milliseconds, of a trained model")
def trained_speed(rows: list[dict], where: str) -> Lines:
    """Of the same record: the wall time of the model's workloads, dense and swapped, and of its dense twin; with the
    energy of a token, peak memory beyond what was there, and the loss, where a call has them."""
    works: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        about, work = row["workload"].split(", ", 1)
        path, graph, _ = row["path"].partition(" (graph)")
        name = path if about != TWIN else f"{TWIN}{'' if path == DENSE else ', planned'}"
        if path != "planned for graphs" or graph:  # as what it was planned for
            works.setdefault((work, ", as a CUDA graph" * bool(graph)), {})[name.removesuffix(" for graphs")] = row
    columns = {DENSE: "dense", "planned": "planned", "forced twell": "every layer on TwELL", TWIN: TWIN}
    columns |= {f"{TWIN}, planned": f"{TWIN}, planned"}
    shown = [path for path in columns if any(path in at for at in works.values())]
    lines = [[where, *(columns[path] for path in shown)]]
    for (work, how), at in works.items():

        def wall(path: str, at: dict[str, dict] = at) -> str:
            times = f" ({at[DENSE]['wall_ms'] / at[path]['wall_ms']:.2f}x)" if DENSE in at and path != DENSE else ""
            return _ms(at[path]["wall_ms"]) + times

        lines.append([f"{work}{how}, ms", *(wall(path) if path in at else "" for path in shown)])
        for key, head, unit in (("mj_per_token", "mJ a token", 1), ("peak_bytes", "peak MiB", 2**20)):
            cells = [_ms(at[path][key] / unit) if key in at.get(path, {}) else "" for path in shown]
            lines += [[head, *cells]] if any(cells) else []
        losses = [f"{at[path]['loss']:.4f}" if "loss" in at.get(path, {}) else "" for path in shown]
        lines += [["loss, nats a byte", *losses]] if any(losses) and not how and "training" not in work else []
    return lines


def steps(recorded: list[Record]) -> str:
    """Return what a training step of whole models takes, all under torch.compile: of the newest record of training that
    has the workload, dense beside planned, in one graph and layer by layer."""
    latest = {row["workload"]: record for record in recorded for row in record.rows if _is_step(row)}
    lines = []
    for workload, record in latest.items():
        at = _index((row for row in record.rows if row["workload"] == workload), "nnz", "path")
        for nnz in sorted({nnz for nnz, _ in at}, reverse=True):
            paths = COMPILED, "planned compiled", "planned, compiled by layer"
            dense, planned, by_layer = (at[nnz, path]["ms"] for path in paths)
            row = at[nnz, COMPILED]
            where = f"{row['d_model']} wide; {_where(row['device'], record)}"
            cells = [_ms(dense), _ms(planned), f"{dense / planned:.2f}", _ms(by_layer)]
            lines.append([f"{workload.removeprefix(_STEP)}, {where}", f"{nnz:.0f}", *cells])
    head = ["milliseconds a step, compiled", "neurons firing", "dense", "planned", "times as fast", "layer by layer"]
    return _markdown([head, *lines] if lines else [], head)


def _is_step(row: dict) -> bool:
    return row.get("kind") == "training" and row["workload"].startswith(_STEP)


@_table("profiling", PROFILING, nothing="a profile beside a plain forward")
def profiling(rows: list[dict], where: str) -> Lines:
    """A profile of the paper's 2B shape beside a plain forward of the same tokens."""
    plain, counted = rows
    more = f"{counted['extra_bytes'] / 2**20:,.0f}" if "extra_bytes" in counted else ""
    what = f"{plain['layers']} layers of {plain['d_model']:,} x {plain['d_ff']:,}, {plain['tokens']:,} tokens"
    return [
        [where, "plain forward, ms", "profile, ms", "times as long", "MiB more at the peak"],
        [what, *(_ms(row["ms"]) for row in rows), f"{counted['times_plain']:.2f}", more],
    ]


# ---- other methods ----


@_table("pruning", "pruning", nothing="bits a byte")
def pruning(rows: list[dict], where: str) -> Lines:
    """Tabulate for each way to prune bits a byte of held-out text before and after the model was trained on, for each
    seed, and how much more that is than the dense model's, trained on as long."""
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
            graphs = (at.get((work, f"{each} (graph)"), at[work, each]) for each in (path, DENSE))
            ways.append((way, row, at[work, DENSE], *graphs))
        if record and rows:
            yield f"{rows[0]['workload'].rpartition(', ')[2]}, {_where(rows[0]['device'], record)}", ways


def chosen(recorded: list[Record]) -> str:
    """Of the newest records of predictors and of thresholds: what a step of decoding one token gains and loses where
    chosen neurons alone are computed, as a CUDA graph (on a CPU there are none) and, in brackets, as plain calls."""
    lines = []
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
    head = ["decoding one token", "zeros", "loss", "more than dense", "times as fast as dense"]
    return _markdown([head, *lines] if lines else [], head)


def chosen_from(recorded: list[Record]) -> str:
    """Of the same records as `chosen`: from how many zeros on a step of decoding one token is faster than the dense
    one, as a CUDA graph where there are any."""
    points: dict[str, list[tuple[float, dict, dict]]] = {}
    for model, ways in _decoding_one(recorded):
        for name, row, _, graph, dense_graph in ways:
            method = re.sub(r",? (recall )?[0-9]+%", "", name)  # whatever share it is asked for
            method = f"{model.partition(' trained')[0]}: {method}"
            points.setdefault(method, []).append((1 - row["sparsity"], graph, dense_graph))
    head = ["decoding one token", "faster from"]
    lines = [[name, begins(some)] for name, some in points.items() if len(some) > 1]
    return _markdown([head, *lines] if lines else [], head)


@_table("experiments", "dropout", "two_four_training", nothing="milliseconds")
def operands(rows: list[dict], where: str) -> Lines:
    """Tabulate what making an operand 2:4 anew in every call costs and gains, in milliseconds: of a product whose input
    is dropped out so, and of steps of training."""
    at = {(f"{row['workload']}: {row['path']}", row["tokens"]): row for row in rows}
    lines = ((name, name, lambda row: _ms(row["ms"])) for name in dict.fromkeys(name for name, _ in at))
    return _grid(f"milliseconds, {where}", at, _by_tokens(rows), lines)


@_table("experiments", "adapters", nothing="milliseconds")
def adapters(rows: list[dict], where: str) -> Lines:
    """Switching a sparse adapter on and off in place beside fusing a LoRA of as many parameters into the weights and
    taking it out."""
    lines = [[f"milliseconds, {where}", "GPU", "wall", "MB written", "weights off by"]]
    for row in rows:
        written, off = f"{row['written_bytes'] / 1e6:,.0f}", f"{row['worst_error']:.2g}"
        lines.append([f"{row['path']}, {row['workload']}", _ms(row["ms"]), _ms(row["wall_ms"]), written, off])
    return lines


@_table("comparison", "comparison", nothing="times as fast as dense")
def comparison(rows: list[dict], where: str) -> Lines:
    """Tabulate how many times as fast as torch's dense product each method is on each pattern, and from how many zeros
    on it is faster, by the device's time. A kernel's other versions are left out."""
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


@_table("comparison", "activations", nothing="times as fast as dense")
def activations(rows: list[dict], where: str) -> Lines:
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


@_table("comparison", "padding")
def padding(rows: list[dict], where: str) -> Lines:
    """Tabulate what removing the padding of a batch saves dense layers, by how many follow each other; how far the
    times are from proportional ones, and how far those of as many tokens without padding are."""
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


@_table("comparison", "experts")
def experts(rows: list[dict], where: str) -> Lines:
    """A mixture of experts by each way beside a loop of dense layers; and from which share of neurons that a token does
    without on each is faster than one dense layer of all, where that was recorded."""
    at, works = _index(rows, "path", "workload"), {work: work for work in _index(rows, "workload")}
    points: dict[str, list[tuple[float, dict, dict]]] = {}
    for (path, work), row in at.items():
        if path != WHOLE and (WHOLE, work) in at:
            points.setdefault(path, []).append((row["density"], row, at[WHOLE, work]))

    def times(row: dict) -> str:
        return _times(row, at[DENSE, row["workload"]])

    lines = [(path, path, times) for path in _index(rows, "path") if path != DENSE]
    lines = [("the loop", DENSE, lambda row: "1")] * bool(points) + lines
    grid = _grid(f"times as fast as the loop; {where}", at, works, lines)
    if points:
        last = ["faster than all neurons where a token does without", begins(points[DENSE])]
        last += [begins(points[path]) if path in points else "" for path, *_ in grid[2:]]
        grid = [[*line, end] for line, end in zip(grid, last)]
    return grid


@_table("comparison", "few bits")
def few_bits(rows: list[dict], where: str) -> Lines:
    """A gated layer with weights of few bits, by number of tokens, beside the dense one (CUDA graphs where there are
    any); the error of its output; and at how many tokens it is faster by more than the quartiles of the samples. Then
    one product of INT8 rows, scaled within and by operations of its own."""
    at = _index(rows, "path", "tokens")
    surely: dict[str, list[str]] = {}

    def cell(row: dict) -> str:
        path, tokens = row["path"], row["tokens"]
        if path.startswith("part: "):
            return f"{_ms(row['ms'])} ms"
        dense = at[DENSE, tokens]
        mine, beside = (at.get((f"{line['path']} (graph)", tokens), line) for line in (row, dense))
        faster = quantile(beside["samples"], 0.25) > quantile(mine["samples"], 0.75)
        surely.setdefault(path, []).extend([f"{tokens:,}"] * faster)
        return f"{beside['ms'] / mine['ms']:.2f} ({dense['wall_ms'] / row['wall_ms']:.2f})"

    paths = [path for path in _index(rows, "path") if path != DENSE and not path.endswith("(graph)")]
    names = (path.removeprefix("part: ").removeprefix("forced ") for path in paths)
    head, *lines = _grid(
        f"times as fast as dense; {where}",
        at,
        _by_tokens(rows),
        ((name, path, cell) for name, path in zip(names, paths)),
    )
    errors = {row["path"]: f"{row['error']:.1%}" for row in rows if "error" in row}
    ends = {path: ", ".join(counts) or "none measured" for path, counts in surely.items()}
    last = [["error", "surely faster at"], *([errors.get(path, ""), ends.get(path, "")] for path in paths)]
    return [[*line, *more] for line, more in zip([head, *lines], last)]


# ---- what was checked ----


def attacks(recorded: list[Record]) -> str:
    """The newest attack on a GPU and the newest without one. Of one that was interrupted it says after how many
    layers."""
    last = {bool(record.machine.get("gpus")): record for record in recorded if record.name == "attack"}
    lines = []
    for gpu, record in sorted(last.items(), reverse=True):
        where = _where(record.machine["gpus"][0]["name"] if gpu else "a CPU", record)
        for row in record.rows:
            if "attack" in row:
                excused = sum(row[key] for key in ("excused_rows", "overflowed_rows", "rounded_rows") if key in row)
                counts = [row["cases"], row.get("rows"), excused if "rows" in row else None]
                cut = row["attack"] in record.notes.get("left_out", {})
                name = f"{row['attack']} (cut short after {row['layers']:,} layers)" if cut else row["attack"]
                cells = ["" if count is None else f"{count:,}" for count in counts]
                lines.append([name, *cells, str(row.get("worst_ratio", "")), where])
    head = ["attacked", "cases", "rows of results", "rows excused", "worst error, of what is allowed", "recorded on"]
    return _markdown([head, *lines] if last else [], head)


def course(recorded: list[Record]) -> str:
    """The newest walk through the course on each device: seconds of each notebook, and whether its code has changed
    since."""
    last = {row["device"]: record for record in recorded if record.name == "course" for row in record.rows}
    head, walks = ["seconds, all cells of a notebook"], [_index(record.rows, "path") for record in last.values()]
    for device, record in last.items():
        at_once = record.notes.get("notebooks at once", 1)
        head.append(f"{device}, {record.date[:10]}{f', {at_once} at once' * (at_once > 1)}")
    lines = [head] if last else []
    for path in with_code() if last else []:
        rows = [walk.get(path.name) for walk in walks]
        changed = [row is not None and row["code"] != code_hash(path) for row in rows]
        cells = [f"{row['ms'] / 1e3:.0f}{', changed since' * new}" if row else "" for row, new in zip(rows, changed)]
        lines.append([path.stem, *cells])
    if last:
        lines.append(["together", *(f"{sum(row['ms'] for row in walk.values()) / 1e3:.0f}" for walk in walks)])
    return _markdown(lines, head)
