"""The tables of the README and of docs/ that are made of records: each a function from all records, oldest first, to
Markdown."""

from __future__ import annotations

from ..bench.comparison import crossings, leading
from ..bench.rows import DENSE
from ..records.record import Record, stale


def attacks(recorded: list[Record]) -> str:
    """The newest attack on a GPU and the newest without one, of these records (oldest first), as a Markdown table."""
    newest = {
        "gpus" in record.machine and bool(record.machine["gpus"]): record
        for record in recorded
        if record.name == "attack"
    }
    lines = [
        "| attacked | cases | rows of results | rows excused | worst error, of what is allowed | recorded on |",
        "|---|---|---|---|---|---|",
    ]
    for gpu, record in sorted(newest.items(), reverse=True):
        where = _where(record.machine["gpus"][0]["name"] if gpu else "a CPU", record)
        for row in record.rows:
            if "attack" in row:
                excused = row["excused_rows"] + row["overflowed_rows"] + row["rounded_rows"] if "rows" in row else None
                numbers = [row["cases"], row.get("rows"), excused]
                shown = ["" if number is None else f"{number:,}" for number in numbers]
                lines.append(f"| {row['attack']} | {' | '.join(shown)} | {row.get('worst_ratio', '')} | {where} |")
    return "\n".join(lines if newest else [*lines, "| nothing is recorded yet | | | | | |"])


def host(recorded: list[Record]) -> str:
    """The newest record of host times, of these records (oldest first), as a Markdown table: for each number of tokens
    milliseconds on the wall of a plain call of torch's dense layer and of TwELL, and how long TwELL's took to return.
    """
    record = _newest(recorded, "host-time")
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
    record = _newest(recorded, "inference")
    rows = [] if record is None else [row for row in record.rows if row["workload"] == _DRAWN and 25 < row["nnz"] < 33]
    rows = [row for row in rows if row["d_model"] == 2048 and row["d_ff"] == 5632 and "wall_ms" in row]
    if record is None or not rows:
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
    in brackets the distance between the quartiles of the samples."""
    record = _newest(recorded, "model")
    if record is None:
        return _nothing("milliseconds a call of the model")
    rows = {(row["workload"], row["path"]): row for row in record.rows}
    device = next(iter(rows.values()))["device"]
    lines = [[f"milliseconds, {_where(device, record)}", "dense", "planned", "times as fast"]]
    ways = (
        ("", "dense eager", "planned"),
        (", as a CUDA graph", "dense eager (graph)", "planned for graphs (graph)"),
        (", compiled", "dense compiled", "planned compiled"),
        (", compiled, as a CUDA graph", "dense compiled (graph)", "planned for graphs compiled (graph)"),
    )
    for workload in dict.fromkeys(workload for workload, _ in rows):
        for how, dense, planned in ways:
            if (workload, planned) in rows:
                both = [rows[workload, path] for path in (dense, planned)]
                shown = [f"{_ms(each['wall_ms'])} ({_ms(each['wall_spread'])})" for each in both]
                times = both[0]["wall_ms"] / both[1]["wall_ms"]
                lines.append([f"{workload.removeprefix('Llama, ')}{how}", *shown, f"{times:.2f}"])
    return _markdown(lines)


def model_paths(recorded: list[Record]) -> str:
    """Of the newest record of whole models on each path: for each model and path how many times as fast as the dense
    model it is in each workload, as plain calls and, in brackets, as replays of a CUDA graph; and of the first forward
    how far results are from a float32 run, and the loss, each beside the dense model's, and how far a layer's output is
    off."""
    record = _newest(recorded, "model-paths")
    rows = [] if record is None else [row for row in record.rows if row["kind"] in ("model_forward", "model_decode")]
    if record is None or not rows:
        return _nothing("times as fast as the dense model")
    of = {(*row["workload"].split(", ", 1), row["path"]): row for row in rows}
    works = [*dict.fromkeys(work for _, work, _ in of)]
    forwards = [row["workload"].partition(", ")[2] for row in rows if row["kind"] == "model_forward"]
    lines = [[f"times as fast as dense, {_where(rows[0]['device'], record)}", *works, "error", "of a layer", "loss"]]
    for about, path in dict.fromkeys((about, path) for about, _, path in of):
        if path == DENSE or path.endswith("(graph)"):
            continue
        shown = []
        for work in works:
            plain, graph = (
                of[about, work, DENSE + how]["wall_ms"] / of[about, work, path + how]["wall_ms"]
                if (about, work, path + how) in of
                else None
                for how in ("", " (graph)")
            )
            shown.append("" if plain is None else f"{plain:.2f}" + (f" ({graph:.2f})" if graph is not None else ""))
        first = next((work for work in forwards if (about, work, path) in of), None)
        both = [of[about, first, each] for each in (path, DENSE)] if first else []
        error, layer, loss = "", "", ""
        if both:
            error = f"{_percent(both[0]['error'])} (dense {_percent(both[1]['error'])})"
            layer = _percent(both[0]["layer_error"]) if "layer_error" in both[0] else ""
            loss = f"{both[0]['loss']:.4f} (dense {both[1]['loss']:.4f})" if "loss" in both[0] else ""
        lines.append([f"{about}: {path.removeprefix('forced ')}", *shown, error, layer, loss])
    return _markdown(lines)


def pruning(recorded: list[Record]) -> str:
    """Of the newest record of pruning: for each way bits a byte of held-out text before and after the model was trained
    on, for each seed, and how much more that is than the dense model's, trained on as long."""
    record = _newest(recorded, "pruning")
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


def comparison(recorded: list[Record]) -> str:
    """Of the newest comparison: how many times as fast as torch's dense product each method is on each pattern, by the
    device's time and, in brackets, by the wall time of plain calls; and from how many zeros on it is faster, by the
    device's time, with what the quartiles of the samples make of that. A kernel's other versions are left out."""
    record = _newest(recorded, "comparison")
    rows = [] if record is None else leading(row for row in record.rows if row.get("kind") == "comparison")
    if record is None or not rows:
        return _nothing("times as fast as dense")
    of = {(row["pattern"], row["path"], row["workload"].partition(", ")[2]): row for row in rows}
    zeros = sorted({share for *_, share in of}, key=lambda share: float(share.partition("%")[0]))
    found = {(each.pattern, each.path): each for each in crossings(rows)}
    where = f"times as fast as dense, {_where(rows[0]['device'], record)}"
    lines = [[where, *(share.removesuffix(" zeros") for share in zeros), "faster from"]]
    for (pattern, path), crossing in found.items():
        there = [of.get((pattern, path, share)) for share in zeros]
        dense = [of.get((pattern, DENSE, share)) for share in zeros]
        shown = [
            f"{row['x_dense']:.2f} ({beside['wall_ms'] / row['wall_ms']:.2f})" if row and beside else ""
            for row, beside in zip(there, dense)
        ]
        density, low, high = crossing.density, crossing.low, crossing.high
        spread = f" ({1 - high:.2%} to {1 - low:.2%})" if low and high else ""
        lines.append([f"{pattern}: {path}", *shown, f"{1 - density:.2%}{spread}" if density else ""])
    return _markdown(lines)


_DRAWN = "independent, lognormal"  # the workload of the tables by numbers of tokens
_PATHS = {"dense": "dense", "twell": "TwELL", "hot_cold": "hot/cold"}


def _path(row: dict) -> str:
    name = row["choice"].split()[0]
    return _PATHS.get(name, name)


def _newest(recorded: list[Record], name: str) -> Record | None:
    return next((each for each in reversed(recorded) if each.name == name), None)


def _where(device: str, record: Record) -> str:
    """Device and day, and whether the code has changed since."""
    return f"{device}, {record.date[:10]}" + "; stale: code has changed since" * stale(record)


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
