"""The tables of the README and of docs/ that are made of records: each a function from all records, oldest first, to
Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..bench.comparison import (
    REMOVED,
    TILED,
    Crossing,
    crossing,
    crossings,
    leading,
    of_experts,
    proportions,
    quantile,
)
from ..bench.profiling import PROFILING
from ..bench.rows import DENSE
from ..bench.sizes import RECORD, SIZES, model_name
from ..bench.trained import QUALITY, RUN, TWIN
from ..records import Record, newest, stale, told
from .bench_command import pairs
from .walk import code_hash, with_code


def attacks(recorded: list[Record]) -> str:
    """The newest attack on a GPU and the newest without one, of these records (oldest first), as a Markdown table. Of
    one that was interrupted it says after how many layers."""
    last = {
        "gpus" in record.machine and bool(record.machine["gpus"]): record
        for record in recorded
        if record.name == "attack"
    }
    lines = [
        "| attacked | cases | rows of results | rows excused | worst error, of what is allowed | recorded on |",
        "|---|---|---|---|---|---|",
    ]
    for gpu, record in sorted(last.items(), reverse=True):
        where = _where(record.machine["gpus"][0]["name"] if gpu else "a CPU", record)
        for row in record.rows:
            if "attack" in row:
                excused = row["excused_rows"] + row["overflowed_rows"] + row["rounded_rows"] if "rows" in row else None
                numbers = [row["cases"], row.get("rows"), excused]
                shown = ["" if number is None else f"{number:,}" for number in numbers]
                cut = row["attack"] in record.notes.get("left_out", {})
                name = f"{row['attack']} (cut short after {row['layers']:,} layers)" if cut else row["attack"]
                lines.append(f"| {name} | {' | '.join(shown)} | {row.get('worst_ratio', '')} | {where} |")
    return "\n".join(lines if last else [*lines, "| nothing is recorded yet | | | | | |"])


def host(recorded: list[Record]) -> str:
    """The newest record of host times, of these records (oldest first), as a Markdown table: for each number of tokens
    milliseconds on the wall of a plain call of torch's dense layer and of TwELL, and how long TwELL's took to return.
    """
    record = newest(recorded, "host-time")
    if record is None:
        return _nothing("milliseconds of a plain call")
    rows = {(row["workload"], row["path"], row["tokens"]): row for row in record.rows if row.get("kind") == "host"}
    counts = sorted({tokens for *_, tokens in rows})
    device = next(iter(rows.values()))["device"]
    lines = [[f"milliseconds, {_where(device, record)}", *map(_tokens, counts)]]
    for workload in dict.fromkeys(workload for workload, *_ in rows):
        dense, ours = ([rows[workload, path, count] for count in counts] for path in ("dense eager", "twell"))
        lines += [
            [f"{workload}: torch's dense layer", *(_ms(row["wall_ms"]) for row in dense)],
            [f"{workload}: TwELL", *(_ms(row["wall_ms"]) for row in ours)],
            ["of that, until the call returns", *(_ms(row["ms"]) for row in ours)],
            ["times as fast", *(f"{a['wall_ms'] / b['wall_ms']:.2f}" for a, b in zip(dense, ours))],
        ]
    return _markdown(lines)


def calls(recorded: list[Record]) -> str:
    """Of the newest record of inference: what a plain call of a planned layer takes, for each number of tokens, beside
    the dense layer's, and what the plan takes; 29 of 5,632 neurons fire."""
    record, rows = layer_rows(recorded, "inference", lambda row: is_drawn(row) and 25 < row["nnz"] < 33)
    if record is None:
        return _nothing("milliseconds a call")
    found = {(row["path"], row["tokens"]): row for row in rows}
    counts = sorted({tokens for path, tokens in found if path == "planned"})
    wall = lambda path: [found[path, count]["wall_ms"] for count in counts]  # noqa: E731
    times = lambda dense, ours: [f"{a / b:.2f}" for a, b in zip(wall(dense), wall(ours))]  # noqa: E731
    dense, planned = wall("dense eager"), wall("planned")
    return _markdown(
        [
            [f"milliseconds a call, {_where(rows[0]['device'], record)}", *map(_tokens, counts)],
            ["torch's dense layer", *(_ms(each) for each in dense)],
            ["planned", *(_ms(each) for each in planned)],
            ["it takes", *(_path(found["planned", count]) for count in counts)],
            ["times as fast", *times("dense eager", "planned")],
            ["times as fast, both under torch.compile", *times("dense compiled", "planned compiled")],
        ]
    )


def layer(recorded: list[Record]) -> str:
    """Of the newest record of inference that has it: how many times as fast as torch's dense layer each path is, by how
    many neurons fire, for 16,384 tokens at once: by the device's time and, in brackets, by the wall time of plain
    calls."""
    record, rows = layer_rows(recorded, "inference", lambda row: is_drawn(row) and row["tokens"] == 16384)
    if record is None:
        return _nothing("times as fast")
    split = "forced hot_cold"
    found = {(row["path"] if not row["path"].startswith(split) else split, row["nnz"]): row for row in rows}
    fired = sorted({nnz for path, nnz in found if path == "forced twell"})
    hot = [found[split, nnz]["path"].removeprefix(split).strip() for nnz in fired]
    ways = {
        "forced twell": "TwELL",
        split: "hot/cold: the neurons that fire most densely, the others packed",
        "forced dense": "dense, with gate and up in one product",
        "dense compiled": "dense, under torch.compile",
    }
    lines = [[f"neurons firing for a token, mean; {_where(rows[0]['device'], record)}", *(f"{n:.0f}" for n in fired)]]
    lines += [[name, *(_times(found[path, nnz]) for nnz in fired)] for path, name in ways.items()]
    return _markdown([*lines, ["of 5,632 neurons, those that hot/cold computes densely", *hot]])


def training(recorded: list[Record]) -> str:
    """Of the newest record of training that has it: how many times as fast a training step of a layer is, on the path
    that switching takes, and what memory it takes; by how many neurons fire, for 16,384 tokens at once."""
    record, rows = layer_rows(recorded, "training", lambda row: is_drawn(row) and row["tokens"] == 16384)
    if record is None:
        return _nothing("times as fast")
    found = {(row["path"], row["nnz"]): row for row in rows}
    fired = sorted({nnz for path, nnz in found if path == "planned"})
    lines = [[f"neurons firing for a token, mean; {_where(rows[0]['device'], record)}", *(f"{n:.0f}" for n in fired)]]
    lines += [
        ["it takes", *(_path(found["planned", nnz]) for nnz in fired)],
        ["times as fast as torch's layer", *(_times(found["planned", nnz]) for nnz in fired)],
        [
            "both under torch.compile",
            *(_times(found["planned compiled", nnz], found["dense compiled", nnz]) for nnz in fired),
        ],
    ]
    for path, name in (("planned", "its"), ("dense eager", "torch's"), ("dense compiled", "torch's compiled")):
        peaks = [found[path, nnz]["peak_bytes"] / 2**20 for nnz in fired]
        lines.append([f"{name} peak memory beyond inputs and weights, MiB", *(f"{peak:,.0f}" for peak in peaks)])
    return _markdown(lines)


def heavy(recorded: list[Record]) -> str:
    """Of the newest records that have it: how much longer the TwELL path takes, forward and in training, if for some of
    16,384 tokens 1,500 neurons fire, or all."""
    lines: list[list[str]] = []
    for name, says in (("inference", "forward"), ("training", "training step")):
        record, _ = layer_rows(recorded, name, lambda row: row["workload"] == f"{_HEAVY}512")
        if record is None:
            continue
        rows = [row for row in record.rows if row["workload"].startswith(_HEAVY)]
        times = {row["workload"].removeprefix(_HEAVY): row["ms"] for row in rows if row["path"] == "forced twell"}
        counts = [count for count in times if count.isdigit() and count != "0"]
        if not lines:
            lines.append(["longer by", *(f"{count} token{'s' * (count != '1')}" for count in counts)])
        for kind, more in (("1,500 neurons", ""), ("all 5,632", ", all neurons")):
            shown = [times[count + more] / times["0"] - 1 for count in counts]
            cells = [f"{share:+.0%}" for share in shown]
            lines.append([f"{says}, {kind}; {_where(rows[0]['device'], record)}", *cells])
    return _markdown(lines) if lines else _nothing("longer by")


def headline(recorded: list[Record]) -> str:
    """One row of `calls`: how many times as fast as torch's dense layer a planned one is, for each number of tokens."""
    lines = calls(recorded).splitlines()
    if len(lines) < 6:  # nothing is recorded
        return lines[0].replace("milliseconds a call", "times as fast as torch's layer") + "\n" + "\n".join(lines[1:])
    names = lines[0].partition(",")[2]
    return "\n".join(
        [f"| times as fast as torch's layer,{names}", *lines[1:2], lines[5].replace("times as fast", "a plain call")]
    )


def model(recorded: list[Record]) -> str:
    """Of the newest record of a whole model: what a plain call takes, and a CUDA graph's replay, dense and planned, and
    in brackets the distance between the quartiles of the samples. What that record has left out for want of time is of
    an earlier one, in italics."""
    record, before = _and_before(recorded, "model")
    if record is None:
        return _nothing("milliseconds a call of the model")
    rows, earlier = (
        {(row["workload"], row["path"]): row for row in ([] if found is None else found.rows)}
        for found in (record, before)
    )
    where = _where(record.rows[0]["device"], record)
    ways = (
        ("", "dense eager", "planned"),
        (", as a CUDA graph", "dense eager (graph)", "planned for graphs (graph)"),
        (", compiled", "dense compiled", "planned compiled"),
        (", compiled, as a CUDA graph", "dense compiled (graph)", "planned for graphs compiled (graph)"),
    )
    lines, italics = [], False
    for workload in dict.fromkeys(workload for workload, _ in [*earlier, *rows]):
        for how, dense, planned in ways:
            # Where the dense model was measured, an earlier time of the planned one says nothing.
            of = rows if (workload, dense) in rows else earlier
            if (workload, planned) in of:
                both = [of[workload, path] for path in (dense, planned)]
                shown = [f"{_ms(each['wall_ms'])} ({_ms(each['wall_spread'])})" for each in both]
                shown.append(f"{both[0]['wall_ms'] / both[1]['wall_ms']:.2f}")
                italics |= of is earlier
                shown = [f"*{cell}*" for cell in shown] if of is earlier else shown
                lines.append([f"{workload.removeprefix('Llama, ')}{how}", *shown])
    where += f"; in italics: earlier, {_day(before)}" if before and italics else ""
    return _markdown([[f"milliseconds, {where}", "dense", "planned", "times as fast"], *lines])


def _and_before(recorded: list[Record], name: str) -> tuple[Record | None, Record | None]:
    """The newest record of this name, and, where that left something out, the newest of those that have a row of what
    it has not."""
    record, of = newest(recorded, name), lambda record: {(row["workload"], row["path"]) for row in record.rows}
    if record is None or not record.notes.get("left_out"):
        return record, None
    others = [each for each in told(recorded, name) if each is not record]
    return record, next((each for each in reversed(others) if of(each) - of(record)), None)


def model_paths(recorded: list[Record]) -> str:
    """Of the newest record of whole models on each path: for each model and path how many times as fast as the dense
    model it is in each workload, as plain calls and, in brackets, as replays of a CUDA graph; of the first forward how
    far results are from a float32 run, beside the dense model's, and how far a layer's output is off; and of the last
    one with a loss that, beside the dense model's. What that record has left out for want of time is of an earlier one,
    in italics."""
    record, before = _and_before(recorded, "model-paths")
    rows = [] if record is None else [row for row in record.rows if row["kind"] in _MODEL_KINDS]
    if record is None or not rows:
        return _nothing("times as fast as the dense model")
    of, earlier = (
        {(*row["workload"].split(", ", 1), row["path"]): row for row in found if row["kind"] in _MODEL_KINDS}
        for found in (rows, before.rows if before else [])
    )
    works = [*dict.fromkeys(work for _, work, _ in [*of, *earlier])]
    forwards = [row["workload"].partition(", ")[2] for row in rows if row["kind"] == "model_forward"]
    where = _where(rows[0]["device"], record)
    if before and earlier:
        where += f"; in italics: earlier, {_day(before)}"
    lines = [[f"times as fast as dense, {where}", *works, "error", "of a layer", "loss"]]
    for about, path in dict.fromkeys((about, path) for about, _, path in of):
        if path == DENSE or path.endswith("(graph)"):
            continue
        shown = []
        for work in works:
            cell = _times_as_fast(of, about, work, path)
            # Where the dense model was measured, a path without a time was refused, and an earlier time says nothing.
            left_out = _times_as_fast(earlier, about, work, path) if (about, work, DENSE) not in of else ""
            shown.append(cell or (f"*{left_out}*" if left_out else ""))
        first = next((work for work in forwards if (about, work, path) in of), None)
        both = [of[about, first, each] for each in (path, DENSE)] if first else []
        error, layer, loss = "", "", ""
        if both:
            error = f"{_percent(both[0]['error'])} (dense {_percent(both[1]['error'])})"
            layer = _percent(both[0]["layer_error"]) if "layer_error" in both[0] else ""
        for work in forwards:  # the last has the most tokens
            both = [of.get((about, work, each), {}) for each in (path, DENSE)]
            if all("loss" in each for each in both):
                loss = f"{both[0]['loss']:.4f} (dense {both[1]['loss']:.4f})"
        lines.append([f"{about}: {path.removeprefix('forced ')}", *shown, error, layer, loss])
    return _markdown(lines)


def _times_as_fast(of: dict[tuple[str, str, str], dict], about: str, work: str, path: str) -> str:
    """Return how many times as fast as the dense model, in brackets as a CUDA graph; nothing where that was not
    measured."""
    times = [
        f"{of[about, work, DENSE + how]['wall_ms'] / of[about, work, path + how]['wall_ms']:.2f}"
        if {(about, work, each + how) for each in (path, DENSE)} <= of.keys()
        else ""
        for how in ("", " (graph)")
    ]
    return times[0] + (f" ({times[1]})" if all(times) else "")


def sizes(recorded: list[Record]) -> str:
    """Of all records of drawn models of the paper's sizes, each of which may hold a part: of each workload, and each
    way to run it, the newest: how many times as fast planned layers make it, with both rates; what they save of energy
    and, of calls that hold more than LITTLE MiB, of peak memory."""
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    heads: dict[str, str] = {}
    for record in told(recorded, RECORD):
        for size in SIZES:
            rows = [row for row in record.rows if row.get("workload", "").startswith(f"{model_name(size)}, ")]
            for pair in pairs([row for row in rows if row["path"].startswith(("dense", "planned"))]):
                what = pair["what"] + " without the LM head" * (pair["head"] == "without")
                # A graph of the model that is planned for graphs follows that of the other one, whose place it takes.
                how = pair["how"].removesuffix(", planned for it")
                said = {pair["unit"]: (f"{pair['times']:.2f}", pair["dense"], pair["sparse"])}
                for key, unit in (("mj", "mJ a token"), ("peak", "peak MiB")):
                    both = [pair[f"{side}_{key}"] for side in ("dense", "sparse")]
                    if None not in both:
                        dense, sparse = (float(str(each).partition(" ")[0]) for each in both)
                        if key == "mj" or dense > LITTLE:
                            said[unit] = f"{sparse / dense - 1:+.0%}", dense, sparse
                for unit, (change, dense, sparse) in said.items():
                    lines.setdefault((what, how, unit), {})[size] = f"{change} ({_ms(dense)} to {_ms(sparse)})"
                heads[size] = f"{size}; {_where(rows[0]['device'], record)}"
    if not lines:
        return _nothing("times as fast as the dense model")
    shown = [size for size in SIZES if size in heads]
    table = [["times as fast, or by how much mJ and MiB change (dense to planned)", *(heads[size] for size in shown)]]
    for (what, how, unit), cells in sorted(lines.items(), key=lambda item: _SIZED.index(item[0][2])):
        table.append([f"{what}, {how}, {unit}", *(cells.get(size, "") for size in shown)])
    return _markdown(table)


def trained(recorded: list[Record]) -> str:
    """Of the newest record of a model that was trained from its first step: what became of it and of its dense twin,
    and what swapping its layers does to loss and answers."""
    record, rows = _of_kinds(recorded, "trained", RUN, QUALITY)
    if record is None:
        return _nothing("trained with L1, and its dense twin")
    runs = {TWIN if row["path"].startswith(TWIN) else DENSE: row for row in rows if row["kind"] == RUN}
    quality = {row["path"]: row for row in rows if row["kind"] == QUALITY}
    columns = {DENSE: "with L1", "planned": "planned", "forced twell": "every layer on TwELL", TWIN: "dense twin"}
    paths = [path for path in columns if path in quality or path in runs]

    def line(head: str, of: Callable[[dict], str], rows_of: dict[str, dict]) -> None:
        cells = [of(rows_of[path]) if path in rows_of else "" for path in paths]
        lines.extend([[head, *cells]] if any(cells) else [])

    lines = [[_where(rows[0]["device"], record), *(columns[path] for path in paths)]]
    steps = lambda row: f"{row['steps']:,}{' (cut short)' if 'cut' in row else ''}"  # noqa: E731
    line(f"steps of {rows[0]['tokens']:,} tokens", steps, runs)
    line("milliseconds a step, at the end", lambda row: _ms(row["ms"]), runs)
    line("seconds, all in all", lambda row: f"{row['total_seconds']:,.0f}", runs)
    line("neurons firing for a token", lambda row: f"{row['mean_nnz']:.3g} of {row['d_ff']:,}", runs)
    line("moved over the last fifth by", lambda row: f"{row['nnz_moved']:+.1%}", runs)
    line("bits a byte of held-out text", lambda row: f"{row['bits_per_byte']:.4f}", quality)
    share = lambda row: f"{row['accuracy']:.1%} ({row['accuracy_low']:.1%} to {row['accuracy_high']:.1%})"  # noqa: E731
    for first in list(quality.values())[:1]:
        line(f"right of {first['questions']:,} answers (95% interval; by chance {first['chance']:.0%})", share, quality)
    line("answered otherwise than by the one with L1", lambda row: f"{row['answers_changed']:,}", quality)
    return _markdown(lines)


def trained_speed(recorded: list[Record]) -> str:
    """Of the same record: the wall time of the model's workloads, dense and swapped, and of its dense twin; with the
    energy of a token and peak memory beyond what was there, where they were read."""
    record, rows = _of_kinds(recorded, "trained", "model_forward", "model_decode", "model_training")
    if record is None:
        return _nothing("milliseconds, of a trained model")
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        about, work = row["workload"].split(", ", 1)
        path, graph, _ = row["path"].partition(" (graph)")
        own = path if about != TWIN else f"{TWIN}{'' if path == DENSE else ', planned'}"
        if path != "planned for graphs" or graph:  # as what it was planned for
            found.setdefault((work, ", as a CUDA graph" * bool(graph)), {})[own.removesuffix(" for graphs")] = row
    columns = (DENSE, "planned", "forced twell", TWIN, f"{TWIN}, planned")
    shown = [path for path in columns if any(path in row for row in found.values())]
    named = {DENSE: "dense", "forced twell": "every layer on TwELL"}
    lines = [[_where(rows[0]["device"], record), *(named.get(path, path) for path in shown)]]
    for (work, how), by in found.items():
        walls = {path: row["wall_ms"] for path, row in by.items()}
        dense = walls.get(DENSE)
        times = {path: f" ({dense / ms:.2f}x)" if dense and path != DENSE else "" for path, ms in walls.items()}
        lines.append([f"{work}{how}, ms", *(_ms(walls[path]) + times[path] if path in walls else "" for path in shown)])
        for key, head, scale in (("mj_per_token", "mJ a token", 1), ("peak_bytes", "peak MiB", 2**20)):
            if any(key in row for row in by.values()):
                cells = [_ms(by[path][key] / scale) if key in by.get(path, {}) else "" for path in shown]
                lines.append([head, *cells])
    return _markdown(lines)


def profiling(recorded: list[Record]) -> str:
    """A profile of the paper's 2B shape beside a plain forward of the same tokens, of the newest record of it."""
    record, rows = _of_kinds(recorded, "profiling", PROFILING)
    if record is None:
        return _nothing("a profile beside a plain forward")
    plain, counted = rows
    more = f"{counted['extra_bytes'] / 2**20:,.0f}" if "extra_bytes" in counted else ""
    lines = [
        [_where(plain["device"], record), "plain forward, ms", "profile, ms", "times as long", "MiB more at the peak"],
        [
            f"{plain['layers']} layers of {plain['d_model']:,} x {plain['d_ff']:,}, {plain['tokens']:,} tokens",
            *(_ms(row["ms"]) for row in rows),
            f"{counted['times_plain']:.2f}",
            more,
        ],
    ]
    return _markdown(lines)


def pruning(recorded: list[Record]) -> str:
    """Of the newest record of pruning: for each way bits a byte of held-out text before and after the model was trained
    on, for each seed, and how much more that is than the dense model's, trained on as long."""
    record = newest(recorded, "pruning")
    rows = [] if record is None else [row for row in record.rows if row.get("kind") == "pruning"]
    if record is None or not rows:
        return _nothing("bits a byte")
    seeds = sorted({row["seed"] for row in rows})
    by = {(row["path"], row["seed"]): row for row in rows}
    named = f"seed{'s' * (len(seeds) > 1)} {' and '.join(map(str, seeds))}"
    where = f"bits a byte, {rows[0]['device']}, {record.date[:10]}, {named}"
    lines = [[where, "zeros", "pruned", "and trained on", "more than dense"]]
    for path in dict.fromkeys(row["path"] for row in rows):
        there = [by[path, seed] for seed in seeds if (path, seed) in by]
        more = [row["bits_after"] - by["dense", row["seed"]]["bits_after"] for row in there]
        lines.append(
            [
                path,
                ", ".join(dict.fromkeys(f"{row['sparsity']:.0%}" for row in there)),
                ", ".join(f"{row['bits_before']:.3f}" for row in there),
                ", ".join(f"{row['bits_after']:.3f}" for row in there),
                ", ".join(f"{each:+.3f}" for each in more),
            ]
        )
    return _markdown(lines)


def chosen(recorded: list[Record]) -> str:
    """Of the newest records of predictors and of thresholds: what a step of decoding one token gains and loses where
    chosen neurons alone are computed, as a CUDA graph (on a CPU there are none) and, in brackets, as plain calls."""
    lines = [["decoding one token", "zeros", "loss", "more than dense", "times as fast as dense"]]
    for record in (newest(recorded, name) for name in ("predictors", "thresholds")):
        rows = [] if record is None else [row for row in record.rows if row.get("tokens") == 1]
        of = {(row["workload"], row["path"]): row for row in rows}
        if record is None or not rows:
            continue
        model = f"{rows[0]['workload'].rpartition(', ')[2]}, {_where(rows[0]['device'], record)}"
        loss = next(row.get("dense_loss", row.get("loss")) for row in rows if "loss" in row)
        lines.append([f"**{model}**", "", f"{loss:.4f}", "", ""])
        for (work, path), row in of.items():
            if path == DENSE or path.endswith("(graph)"):
                continue
            low, middle, high = row["loss_change"]
            times = f"{of[work, DENSE]['wall_ms'] / row['wall_ms']:.2f}"
            if (work, f"{path} (graph)") in of:
                dense, graph = (of[work, f"{each} (graph)"]["ms"] for each in (DENSE, path))
                times = f"{dense / graph:.2f} ({times})"
            name = path.removeprefix("lossy: ").removeprefix("thresholds, ")
            if record.name == "thresholds":
                name = f"{work.partition(', ')[0]}, {'computed densely' if name == 'dense' else name}"
            change = f"{middle:+.4f} ({low:+.4f} to {high:+.4f})"
            lines.append([name, f"{row['sparsity']:.0%}", f"{row['loss']:.4f}", change, times])
    return _markdown(lines if len(lines) > 1 else [*lines, ["nothing is recorded yet", *[""] * 4]])


def chosen_from(recorded: list[Record]) -> str:
    """Of the same records as `chosen`: from how many zeros on a step of decoding one token is faster than the dense
    one, as a CUDA graph where there are any."""
    lines = [["decoding one token", "faster from"]]
    for record in (newest(recorded, name) for name in ("predictors", "thresholds")):
        rows = [] if record is None else [row for row in record.rows if row.get("tokens") == 1]
        of = {(row["workload"], row["path"]): row for row in rows}
        ways: dict[str, list[tuple[float, dict, dict]]] = {}
        for (work, path), row in of.items():
            if record is None or path == DENSE or path.endswith("(graph)"):
                continue
            mine, beside = (of.get((work, f"{each} (graph)"), of[work, each]) for each in (path, DENSE))
            name = path.removeprefix("lossy: ").removeprefix("thresholds, ")
            if record.name == "thresholds":
                name = f"{work.partition(', ')[0]}, {'computed densely' if name == 'dense' else name}"
            model = work.rpartition(", ")[2].partition(" trained")[0]
            method = f"{model}: {re.sub(r',? (recall )?[0-9]+%', '', name)}"  # whatever share it is asked for
            ways.setdefault(method, []).append((1 - row["sparsity"], mine, beside))
        lines += [[name, _begins(crossing(name, "", points))] for name, points in ways.items() if len(points) > 1]
    return _markdown(lines if len(lines) > 1 else [*lines, ["nothing is recorded yet", ""]])


def operands(recorded: list[Record]) -> str:
    """Of the newest experiments: what making an operand 2:4 anew in every call costs and gains, in milliseconds: of a
    product whose input is dropped out so, and of steps of training."""
    record = newest(recorded, "experiments")
    kinds = ("dropout", "two_four_training")
    rows = [] if record is None else [row for row in record.rows if row.get("kind") in kinds]
    if record is None or not rows:
        return _nothing("milliseconds")
    tokens = sorted({row["tokens"] for row in rows})
    of = {(row["workload"], row["path"], row["tokens"]): row for row in rows}
    lines = [[f"milliseconds, {_where(rows[0]['device'], record)}", *(_tokens(count) for count in tokens)]]
    for work, path in dict.fromkeys((work, path) for work, path, _ in of):
        there = [of.get((work, path, count)) for count in tokens]
        lines.append([f"{work}: {path}", *("" if row is None else _ms(row["ms"]) for row in there)])
    return _markdown(lines)


def adapters(recorded: list[Record]) -> str:
    """Of the newest experiments: switching a sparse adapter on and off in place beside fusing a LoRA of as many
    parameters into the weights and taking it out."""
    record = newest(recorded, "experiments")
    rows = [] if record is None else [row for row in record.rows if row.get("kind") == "adapters"]
    if record is None or not rows:
        return _nothing("milliseconds")
    lines = [[f"milliseconds, {_where(rows[0]['device'], record)}", "GPU", "wall", "MB written", "weights off by"]]
    for row in rows:
        written, off = f"{row['written_bytes'] / 1e6:,.0f}", f"{row['worst_error']:.2g}"
        lines.append([f"{row['path']}, {row['workload']}", _ms(row["ms"]), _ms(row["wall_ms"]), written, off])
    return _markdown(lines)


def comparison(recorded: list[Record]) -> str:
    """Of the newest comparison: how many times as fast as torch's dense product each method is on each pattern, by the
    device's time and, in brackets, by the wall time of plain calls; and from how many zeros on it is faster, by the
    device's time, with what the quartiles of the samples make of that, or that it is nowhere, or everywhere.
    A kernel's other versions are left out."""
    record = newest(recorded, "comparison")
    rows = [] if record is None else leading(row for row in record.rows if row.get("kind") == "comparison")
    if record is None or not rows:
        return _nothing("times as fast as dense")
    of = {(row["pattern"], row["path"], row["workload"].partition(", ")[2]): row for row in rows}
    zeros = sorted({share for *_, share in of}, key=lambda share: float(share.partition("%")[0]))
    found = {(each.pattern, each.path): each for each in crossings(rows)}
    where = f"times as fast as dense, {_where(rows[0]['device'], record)}"
    lines = [[where, *(share.removesuffix(" zeros") for share in zeros), "faster from"]]
    for (pattern, path), begins in found.items():
        there = [of.get((pattern, path, share)) for share in zeros]
        dense = [of.get((pattern, DENSE, share)) for share in zeros]
        shown = [
            f"{row['x_dense']:.2f} ({beside['wall_ms'] / row['wall_ms']:.2f})" if row and beside else ""
            for row, beside in zip(there, dense)
        ]
        lines.append([f"{pattern}: {path}", *shown, _begins(begins)])
    return _markdown(lines)


def _begins(crossing: Crossing) -> str:
    """From how many zeros on a method is faster than dense, with the spread of that; a quartile that is slower, or
    faster, everywhere has the ends of what was measured for its bound."""
    density, low, high = crossing.density, crossing.low, crossing.high
    if density is not None:
        return f"{1 - density:.2%} ({_share(high, 'less')} to {_share(low, 'more')})"
    if crossing.least >= 1:
        return f"{1 - crossing.densest:.1%}, the fewest measured"
    return "nowhere measured" if crossing.best < 1 else "in between"


def _share(density: float | None, beyond: str) -> str:
    return f"{beyond} than was measured" if density is None else f"{1 - density:.2%}"


def steps(recorded: list[Record]) -> str:
    """Return what a training step of whole models takes, all under torch.compile: of the newest record of training that
    has the workload, dense beside planned, in one graph and layer by layer."""
    lines = [["milliseconds a step, compiled", "neurons firing", "dense", "planned", "times as fast", "layer by layer"]]
    for workload in dict.fromkeys(row["workload"] for record in recorded for row in record.rows if _is_step(row)):
        record = next(r for r in reversed(recorded) if any(row.get("workload") == workload for row in r.rows))
        rows = {(row["nnz"], row["path"]): row for row in record.rows if row["workload"] == workload}
        device = next(iter(rows.values()))["device"]
        for nnz in sorted({nnz for nnz, _ in rows}, reverse=True):
            dense, planned, by_layer = (rows[nnz, path]["ms"] for path in _STEPS)
            d_model = rows[nnz, _STEPS[0]]["d_model"]
            lines.append(
                [
                    f"{workload.removeprefix('whole step, ')}, {d_model} wide; {_where(device, record)}",
                    f"{nnz:.0f}",
                    *(_ms(ms) for ms in (dense, planned)),
                    f"{dense / planned:.2f}",
                    _ms(by_layer),
                ]
            )
    return _markdown(lines if len(lines) > 1 else [*lines, ["nothing is recorded yet", *[""] * 5]])


def course(recorded: list[Record]) -> str:
    """The newest walk through the course on each device: seconds of each notebook, and whether its code has changed
    since."""
    last = {row["device"]: record for record in recorded if record.name == "course" for row in record.rows}
    if not last:
        return _nothing("seconds, all cells of a notebook")
    shown = {device: {row["path"]: row for row in record.rows} for device, record in last.items()}
    beside = {device: record.notes.get("notebooks at once", 1) for device, record in last.items()}
    where = [
        f"{device}, {record.date[:10]}{f', {beside[device]} at once' * (beside[device] > 1)}"
        for device, record in last.items()
    ]
    lines = [["seconds, all cells of a notebook", *where]]
    for path in with_code():
        there = [rows.get(path.name) for rows in shown.values()]
        changed = [row is not None and row["code"] != code_hash(path) for row in there]
        cells = [f"{row['ms'] / 1e3:.0f}{', changed since' * new}" if row else "" for row, new in zip(there, changed)]
        lines.append([path.stem, *cells])
    return _markdown(
        [*lines, ["together", *(f"{sum(r['ms'] for r in rows.values()) / 1e3:.0f}" for rows in shown.values())]]
    )


def activations(recorded: list[Record]) -> str:
    """Of the newest comparison: the down projection of layers of trained models, its product by each method as many
    times as fast as the dense one, by the device's time and, in brackets, by the wall time of plain calls; what finding
    the micro-tiles takes, and how fast they are with that."""
    record, rows = _of_kinds(recorded, "comparison", "activations")
    if record is None:
        return _nothing("times as fast as dense")
    of: dict[str, dict[str, dict]] = {}
    for row in rows:
        of.setdefault(row["workload"], {})[row["path"]] = row
    paths = [
        path for path in dict.fromkeys(row["path"] for row in rows) if path != DENSE and not path.startswith("part: ")
    ]
    head = [
        f"times as fast as dense, {_where(rows[0]['device'], record)}",
        "zeros",
        "tiles of 32 x 1 with a value",
    ]
    lines = [[*head, "dense, ms", *paths, "finding the tiles, ms", "found and multiplied"]]
    for work, there in of.items():
        dense, tiled = there[DENSE], there.get(TILED)
        found = there.get(f"part: {TILED}, conversion")
        both = [_ms(found["ms"]), f"{dense['ms'] / (found['ms'] + tiled['ms']):.2f}"] if tiled and found else ["", ""]
        sizes = f"{dense['tokens']:,} x {dense['d_ff']:,}, times {dense['d_ff']:,} x {dense['d_model']:,}"
        times = [_times(there[path], dense) if path in there else "" for path in paths]
        shares = [f"{1 - dense['density']:.2%}", f"{dense['occupied']:.1%}"]
        lines.append([f"{work.partition(',')[0]}: {sizes}", *shares, _ms(dense["ms"]), *times, *both])
    return _markdown(lines)


def padding(recorded: list[Record]) -> str:
    """Of the newest comparison: what removing the padding of a batch saves dense layers, by how many follow each other;
    how far the times are from a proportional one, the best through them, and the dense layers' own; and how far from
    the latter the same layers are there on as many tokens that had no padding, where that was recorded."""
    record = newest(recorded, "comparison")
    rows = [] if record is None else [row for row in record.rows if row.get("kind") == "padding"]
    if record is None or not rows:
        return _nothing("times as fast")
    found = {(row.get("layers", 1), row["real"] / row["tokens"], row["path"]): row for row in rows}
    shares = sorted({share for _, share, _ in found})
    where = f"times as fast as dense; {_where(rows[0]['device'], record)}"
    named = [f"{share:.0%} of the tokens real" for share in shares]
    lines = [[where, *named, "off a proportional time", "off dense's share", "of that, tokens alone"]]
    for each in proportions(rows):
        there = [found.get((each.layers, share, REMOVED)) for share in shares]
        times = [_times(row, found[each.layers, share, DENSE]) if row else "" for row, share in zip(there, shares)]
        name = f"padding removed once for {each.layers} layer{'s' * (each.layers > 1)}"
        own = "not recorded" if each.own is None else f"{each.own:+.1%}"
        lines.append([name, *times, f"{each.fitted:.1%}", f"{each.beside_dense:+.1%}", own])
    return _markdown(lines)


def experts(recorded: list[Record]) -> str:
    """Of the newest comparison: a mixture of experts as one product of groups, and filled up to equal lengths, beside a
    loop of dense layers; and from which share of neurons that a token does without on each is faster than one dense
    layer of all neurons, where that was recorded."""
    record, rows = _of_kinds(recorded, "comparison", "experts")
    if record is None:
        return _nothing("times as fast")
    found = {(row["workload"], row["path"]): row for row in rows}
    works, paths = dict.fromkeys(w for w, _ in found), dict.fromkeys(path for _, path in found if path != DENSE)
    begins = {each.path: _begins(each) for each in of_experts(rows)}
    more = ["faster than all neurons where a token does without"] if begins else []
    lines = [[f"times as fast as the loop; {_where(rows[0]['device'], record)}", *works, *more]]
    if begins:
        lines.append(["the loop", *("1" for _ in works), begins[DENSE]])
    for path in paths:
        times = [_times(found[work, path], found[work, DENSE]) for work in works]
        lines.append([path, *times, *([begins.get(path, "")] if begins else [])])
    return _markdown(lines)


def few_bits(recorded: list[Record]) -> str:
    """Of the newest comparison: a gated layer with weights of few bits, by number of tokens, as many times as fast as
    the dense one by the device's time (CUDA graphs where there are any) and, in brackets, by the wall time of plain
    calls; the error of its output; and at how many tokens it is faster by more than the quartiles of the samples. Then
    one product of INT8 rows, scaled within and by operations of its own."""
    record, rows = _of_kinds(recorded, "comparison", "few bits")
    if record is None:
        return _nothing("times as fast")
    found = {(row["path"], row["tokens"]): row for row in rows}
    counts = sorted({tokens for _, tokens in found})
    head = [f"times as fast as dense; {_where(rows[0]['device'], record)}", *map(_tokens, counts)]
    lines = [[*head, "error", "surely faster at"]]
    for path in dict.fromkeys(path for path, _ in found if not path.endswith("(graph)")):
        if path == DENSE:
            continue
        part = path.startswith("part: ")
        shown, faster, off = [], [], ""
        for tokens in counts:
            row, dense = found.get((path, tokens)), found[DENSE, tokens]
            if row is None:
                shown.append("")
                continue
            off = f"{row['error']:.1%}" if "error" in row else off
            if part:
                shown.append(f"{_ms(row['ms'])} ms")
                continue
            mine, beside = (found.get((f"{name} (graph)", tokens), found[name, tokens]) for name in (path, DENSE))
            shown.append(f"{beside['ms'] / mine['ms']:.2f} ({dense['wall_ms'] / row['wall_ms']:.2f})")
            if quantile(beside, 0.25) > quantile(mine, 0.75):
                faster.append(f"{tokens:,}")
        ends = "" if part else ", ".join(faster) or "none measured"
        lines.append([path.removeprefix("part: ").removeprefix("forced "), *shown, off, ends])
    return _markdown(lines)


_HEAVY = "heavy rows: "
_MODEL_KINDS = ("model_forward", "model_decode")
_SIZED = ("tokens/ms", "tokens/s", "mJ a token", "peak MiB")  # what `sizes` shows of a model, in this order
LITTLE = 16  # MiB: `sizes` shows no peak below that
_STEPS = ("dense compiled", "planned compiled", "planned, compiled by layer")
_PATHS = {"dense": "dense", "twell": "TwELL", "hot_cold": "hot/cold"}


def _path(row: dict) -> str:
    name = row["choice"].split()[0]
    return _PATHS.get(name, name)


def _of_kinds(recorded: list[Record], name: str, *kinds: str) -> tuple[Record | None, list[dict]]:
    """The newest record of that name and its rows of these kinds; None where it has none."""
    record = newest(recorded, name)
    rows = [] if record is None else [row for row in record.rows if row.get("kind") in kinds]
    return (record if rows else None), rows


def layer_rows(recorded: list[Record], name: str, which: Callable[[dict], bool]) -> tuple[Record | None, list[dict]]:
    """The newest record of that name with such rows, and these: plain calls of a gated layer of 2,048 x 5,632."""
    for record in reversed(told(recorded, name)):
        rows = [row for row in record.rows if row.get("kind") == name and row["gated"] and "wall_ms" in row]
        rows = [row for row in rows if "(graph)" not in row["path"]]
        rows = [row for row in rows if row["d_model"] == 2048 and row["d_ff"] == 5632 and which(row)]
        if rows:
            return record, rows
    return None, []


def is_drawn(row: dict) -> bool:
    return row["workload"] == "independent, lognormal"


def _is_step(row: dict) -> bool:
    return row.get("kind") == "training" and row["workload"].startswith("whole step, ")


def _times(row: dict, dense: dict | None = None) -> str:
    """Return how many times as fast as the dense layer, by the device's time and, in brackets, by the wall's."""
    ms, wall = (row["dense_ms"], row["dense_wall_ms"]) if dense is None else (dense["ms"], dense["wall_ms"])
    return f"{ms / row['ms']:.2f} ({wall / row['wall_ms']:.2f})"


def _where(device: str, record: Record) -> str:
    """Device and day, and whether the code has changed since."""
    return f"{device}, {_day(record)}"


def _day(record: Record) -> str:
    return record.date[:10] + "; stale: code has changed since" * stale(record)


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count > 1)}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _nothing(head: str) -> str:
    return _markdown([[head], ["nothing is recorded yet"]])


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]))
