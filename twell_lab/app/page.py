"""The tour's page: one small HTML file that opens without a network, made of a tour's record, and of sentences that the
shipped models read when it is drawn (course.sentence), whose script is the page's only one. Its text is in
page.html.jinja; this file picks rows, and makes charts, and the sentences that depend on how numbers compare."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import jinja2

from .. import records
from ..course.sentence import web
from ..plots import decode, layer_names, percentiles, share
from .terminal import said_fast, verdict

WITHOUT, WITH = "without L1", "with L1"  # the two trainings in a tour's record
_ALIKE = ("label", "device", "dtype", "tokens", "nnz")
_FIRING, _SHORT = "neurons firing for a token, %", "{:.3g}".format
_FIRE = (8, 29, 60, 120, 300)  # of the neurons of a drawn layer, about
_TIMES = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)


def render(record: records.Record, recorded: Iterable[records.Record] = ()) -> str:
    """Return the page of a tour's record as HTML text. recorded: records to show a part of beside it (`comparable`)."""
    tour, large = record.notes["tour"], [row for row in record.rows if not row.get("label")]
    layers, packed = tour["profile"]["layers"], tour["packing"]["layers"]
    names = layer_names([layer["layer"] for layer in layers])
    densities = {name: layer["density"] for name, layer in zip(names, layers, strict=True)}
    busiest = max(densities, key=densities.__getitem__)
    frequency = sorted(layers[names.index(busiest)]["neuron_frequency"], reverse=True)
    fired = [*accumulate(frequency)]
    cpu = record.machine.get("cpu") or "an unnamed CPU"
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(number=format, share=share, json=json.dumps)
    functions = see_speed, see_recorded, draw_training, draw_frequency, draw_speeds, tile_cells, said_fast
    pages.globals |= {made.__name__: made for made in functions}
    return pages.get_template("page.html.jinja").render(
        record=record,
        tour=tour,
        sentence=web.fragment(),
        rows=layer_table(tour),
        names=names,
        densities=sorted(densities.items(), key=lambda item: item[1]),
        busiest=busiest,
        frequency=frequency,
        busy=bisect_left(fired, 0.8 * fired[-1]) + 1 if fired[-1] else 0,  # who do 80% of the firing
        bytes={kind: sum(layer["bytes"][kind] for layer in packed) for kind in packed[0]["bytes"]},
        own=[row for row in record.rows if row.get("label") and not _how(row)],
        large=large,
        beside=comparable(recorded),
        devices=sorted({cpu if records.is_cpu(row["device"]) else row["device"] for row in record.rows}),
    )


def comparable(recorded: Iterable[records.Record]) -> list[dict]:
    """Return the recorded times to draw beside those of the tour's large layer: of the newest record of inference that
    is current, plain calls on a GPU of a gated layer of 2,048 x 5,632, planned and dense."""
    current = [record for record in records.told(recorded, "inference") if not records.stale(record)]
    wanted = {"kind": "inference", "d_model": 2048, "d_ff": 5632, "gated": True, "workload": "independent, lognormal"}
    paths = ("planned", "dense eager", "dense compiled")
    rows = [{**row, "date": record.date} for record in current[-1:] for row in record.rows if row["path"] in paths]
    return [row for row in rows if wanted.items() <= row.items() and not records.is_cpu(row["device"])]


# ---- what is drawn ----


def draw_training(runs: dict) -> list[dict]:
    """Draw loss on held-out text, and firing, against steps: a line for each run."""
    losses, firing = {}, {}
    for label, run in runs.items():
        history, width = run["history"], run["config"]["d_ff"]
        seen = [(row["step"], row.get("val_bits_per_byte")) for row in history]
        losses[label] = [point for point in seen if point[1] is not None]
        firing[label] = [(row["step"], 100 * row["nnz"] / width) for row in history]
    step, loss, fires = Axis("training step"), Axis("bits per byte", show=_SHORT), Axis(_FIRING, show=_SHORT)
    return [chart("Loss on held-out text", losses, step, loss), chart("Firing", firing, step, fires)]


def draw_frequency(name: str, frequency: list[float]) -> dict | None:
    """Draw on which share of the tokens each neuron of a layer fires, most used first; None if none does."""
    alive = [(place, 100 * value) for place, value in enumerate(frequency, start=1) if value > 0]
    up = Axis("tokens it fires for, % (each line 10 times the one below)", log=True, show=_SHORT)
    title = f"How often each neuron of {name} fires"
    return chart(title, {"neurons": alive}, Axis("neuron, most used first"), up) if alive else None


def draw_speeds(title: str, rows: list[dict]) -> dict | None:
    """Draw times as fast as torch's eager dense layer, over tokens, a line for each layer, dtype, path and number of
    neurons that fire; None if nothing was timed."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("x_dense") is not None and not row["path"].startswith("dense eager"):
            # A drawn layer has its number only roughly.
            known = row.get("nnz") and not row.get("label") and is_sparse(row)
            fire = f"{min(_FIRE, key=lambda nnz: abs(nnz - row['nnz']))} firing" if known else ""
            name = ", ".join(filter(None, (row.get("label"), row["dtype"], row["path"], fire)))
            lines.setdefault(name, {})[row["tokens"]] = row["x_dense"]
    across = Axis("tokens at once", log=True, ticks=sorted({tokens for line in lines.values() for tokens in line}))
    up = Axis("times as fast as torch's dense layer (at 1x)", log=True, ticks=_TIMES, show="{:.3g}x".format)
    drawn = {name: sorted(line.items()) for name, line in lines.items()}
    return chart(title, drawn, across, up, level=1.0) if drawn else None


def layer_table(tour: dict) -> list[dict]:
    """Return what happened in each layer, a dict for each: name; for both trainings the share that fires and how many
    neurons are dead; span, the middle 90% of tokens; shares of slots used and rows overflowing; bytes a token."""
    without, sparse, layers = tour["runs"][WITHOUT], tour["runs"][WITH], tour["profile"]["layers"]
    names, rows = layer_names([layer["layer"] for layer in layers]), []
    for i, (layer, packed) in enumerate(zip(layers, tour["packing"]["layers"], strict=True)):
        runs = [(WITHOUT, without["density"][i], without["dead"][i]), (WITH, layer["density"], sparse["dead"][i])]
        row = {"layer": names[i], "runs": runs, "d_ff": layer["d_ff"]}
        row["span"] = "{:,} to {:,}".format(*percentiles(layer["nnz_histogram"]))
        row["used"] = share(packed["slots_used"] / packed["slots"])
        row["overflow"] = share(packed["overflow_rows"] / packed["tokens"])
        row["bytes"] = {kind: size / packed["tokens"] for kind, size in packed["bytes"].items()}
        rows.append(row)
    return rows


def tile_cells(tile: dict) -> dict:
    """Return one tile as it is drawn: shades (0 to 1, one for each column) and words (what each says)."""
    entries, tail = ([decode(word, tile["dtype"]) for word in words] for words in (tile["words"][1:], tile["tail"]))
    top = max([value for value, _ in entries + tail if math.isfinite(value)], default=1.0)
    shades = [0.0] * tile["width"]
    for value, column in entries + tail:
        shades[column] = 0.2 + 0.8 * min(1.0, value / top)
    words = [f"{column}: {value:.2g}" for value, column in entries]
    layer = layer_names([tile["layer"]])[0]
    return {"layer": layer, "shades": shades, "words": words, "unused": tile["slots"] - len(words)}


# ---- sentences that depend on how the numbers compare ----


def see_speed(rows: list[dict]) -> str:
    """Return where the sparse layer is faster than the dense one, and where slower; nothing of what lies within the
    spread of the samples."""
    ratios = []
    for row in filter(is_sparse, rows):
        dense = [other for other in rows if other["path"].startswith("dense eager") and _how(other) == _how(row)]
        dense = [other for other in dense if all(other.get(key) == row.get(key) for key in _ALIKE)]
        half = sum(timed.get("spread") or 0 for timed in [row, *dense[:1]]) / 2
        low, high = ((row["dense_ms"] + change) / row["ms"] for change in (-half, half))
        ratios.append((row["x_dense"], low, high, _at(row)))
    points = f"{len(ratios)} point{'s' * (len(ratios) > 1)}"
    said = f"Of {points} the sparse layer was, beside torch's dense one, {verdict(ratios)}."
    return said if ratios else "No sparse path was timed."


def see_recorded(rows: list[dict]) -> str:
    if not (timed := [*filter(is_sparse, rows)]):
        return "No measurement of such a layer on a GPU is recorded with the kernels as they are."
    where = f"{', '.join(sorted({row['device'] for row in timed}))} ({timed[0]['date'][:10]})"
    return f"Recorded on {where}, not here; the layer takes the path that a plan chose. {see_speed(rows)}"


def _how(row: dict) -> str:
    """Return how it was timed, if not by plain calls one after the other."""
    return row["path"].partition(" (")[2].removesuffix(")")


def is_sparse(row: dict) -> bool:
    return row.get("x_dense") is not None and not row["path"].startswith("dense")


def _at(row: dict) -> str:
    fire = f"{row['nnz']:.0f} neurons firing" if row.get("nnz") and not row.get("label") else ""
    where = f"{row['tokens']:,} token{'s' * (row['tokens'] != 1)} in {row['dtype']}"
    times = f"{row['ms']:.3g} ms, spread {row.get('spread') or 0:.2g}, against {row['dense_ms']:.3g} ms"
    return ", ".join(filter(None, (row.get("label"), where, fire, _how(row)))) + f": {times}"


# ---- charts: lines over a pair of axes, as places and texts that the template writes as SVG, for a screen reader, too

# In units of the SVG, which are pixels where the page shows it 400 wide.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400, 52, 374, 26, 210
LETTER = 7.5  # width of a digit
DOTS = 12  # a line of more points is drawn without marks
COLOURS = 6  # the style has --c0 to --c5
# One for each colour, around (0, 0): without colours the lines still differ.
_MARKS = ("M-4-4h8v8h-8z", "M0-5.5L5 4H-5z", "M0-5.5L5.5 0 0 5.5-5.5 0z", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z")


class Axis(NamedTuple):
    """What an axis shows, with its unit. ticks: where its figures may stand; round numbers if there are none."""

    title: str
    log: bool = False
    ticks: Sequence[float] = ()
    show: Callable[[float], str] = "{:,g}".format


def chart(
    title: str, drawn: Mapping[str, Sequence[tuple[float, float]]], x: Axis, y: Axis, level: float | None = None
) -> dict:
    """Return what the template draws of lines by name over one pair of axes, and `label`, which a screen reader says:
    where each line begins and ends. level: a horizontal line at this y."""
    points = [point for line in drawn.values() for point in line]
    across, ticks = _scale(x, [place for place, _ in points], LEFT, RIGHT)
    up, marks = _scale(y, [height for _, height in points] + ([] if level is None else [level]), BOTTOM, TOP)
    lines, said = [], []
    for number, (name, line) in enumerate(drawn.items()):
        places = [(f"{across(a):.1f}", f"{up(b):.1f}") for a, b in line]
        few, path = len(places) <= DOTS, "M" + "L".join(" ".join(place) for place in places)
        looks = {"style": f"c{number % COLOURS}", "mark": _MARKS[number % len(_MARKS)] if few else ""}
        lines.append({"name": name, "path": path, "marked": places * few, **looks})
        said.append(f"{name}: {', '.join(f'{y.show(b)} at {x.show(a)}' for a, b in (line[0], line[-1]))}")
    most = {at: WIDTH - LETTER * len(x.show(at)) / 2 for at in ticks}  # a figure stays inside at the right end
    return {
        "title": title,
        "label": f"{title}. {y.title}, over {x.title}. {'; '.join(said)}.",
        "level": None if level is None else f"{up(level):.1f}",
        "x": x.title,
        "y": y.title,
        "across": [(f"{across(at):.1f}", f"{min(across(at), most[at]):.1f}", x.show(at)) for at in ticks],
        "up": [(f"{up(at):.1f}", y.show(at)) for at in marks],
        "lines": lines,
    }


def _scale(axis: Axis, values: list[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Return what gives values their places along an axis, and at most six ticks. An axis has a margin at its ends; it
    begins at 0 if its values come near that."""
    low, high = min(values), max(values)
    if not axis.log and 0 < low < 0.7 * high:
        low = 0.0
    turned: Callable[[float], float] = math.log10 if axis.log else float
    first, last = turned(low), turned(high)
    margin = 0.04 * (last - first) or 0.5
    first, last = first - margin * (axis.log or low != 0), last + margin

    def place(value: float) -> float:
        return begin + (turned(value) - first) / (last - first) * (end - begin)

    step = 10 ** math.floor(math.log10((last - first) / 4))
    step *= max((many for many in (2, 5) if (last - first) / (step * many) >= 4), default=1)
    even = [round(step * i, 12) for i in range(math.ceil(first / step), math.floor(last / step) + 1)]
    round_ones = axis.ticks or ([10.0**n for n in range(-9, 10)] if axis.log else even)
    ticks = [tick for tick in round_ones if first <= turned(tick) <= last]
    return place, ticks[:: -max(1, math.ceil(len(ticks) / 6))]
