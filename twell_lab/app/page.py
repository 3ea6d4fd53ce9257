"""The tour's page: one small HTML file without scripts that opens without a network, made of a tour's record alone.

Every sentence with a number is made from the record's numbers, whatever they are; the text around them is in
page.html.jinja, and what draws lines and bars in charts.py. Needs neither torch nor plotly.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import jinja2
from markupsafe import Markup

from .. import records
from ..core import InputError, RecordError, write_atomically
from ..plots import alike, decode, layer_names, percentiles, picked, share
from . import charts

# The format of notes["tour"] in a tour's record, without which another version would misread it, and the names of the
# two trainings there.
FORMAT, WITHOUT, WITH = 1, "without L1", "with L1"

FORMATS = ("dense", "CSR", "ELL", "TwELL")
RECORDED_NNZ = (8, 29, 60, 120, 300)  # how many neurons fire, roughly, in the recorded times that are drawn
_HOW = {"graph)": "in a CUDA graph", "cold)": "weights cold"}
_TIMES = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)

_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters.update(number=format, share=share, json=json.dumps)
_PAGES.globals.update(bar=charts.bar)


def render(record: records.Record, recorded: list[dict] | None = None) -> str:
    """The page as HTML text.

    Args:
        record: what `tour.run` returned, or `records.load("tour.json")`.
        recorded: rows of `records.flat_rows` to show beside the tour's own. Those that `comparable` picks are drawn.

    Raises:
        RecordError: for a record that is not a tour's.
    """
    tour = record.notes.get("tour")
    if not isinstance(tour, dict) or tour.get("format") != FORMAT:
        raise RecordError(
            f"record {record.name!r} holds no tour that this version can draw: it needs "
            f"notes.tour.format {FORMAT}; twell-lab tour makes such a record"
        )
    try:
        return _page(record, tour, recorded or [])
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        InputError,
        jinja2.TemplateError,
    ) as error:
        raise RecordError(
            f"record {record.name!r}: notes.tour or a row is not as a tour writes it ({type(error).__name__}: {error})"
        ) from error


def _page(record: records.Record, tour: dict, recorded: list[dict]) -> str:
    own, large = split_rows(record.rows)
    beside = comparable(recorded, large)
    layers, packing, tile = tour["profile"]["layers"], tour["packing"], tour["tile"]
    without, sparse = tour["runs"][WITHOUT], tour["runs"][WITH]
    busiest = max(range(len(layers)), key=lambda i: layers[i]["density"])
    sizes = sorted({(row["d_model"], row["d_ff"]) for row in large})
    wide = " and ".join(f"{d_model:,} x {d_ff:,}" for d_model, d_ff in sizes) or "no size"
    alone = [row for row in own if not _how(row)]
    captions = {
        "training": see_training(without, sparse),
        "firing": see_firing(layers),
        "frequency": see_frequency(layers, busiest),
        "tile": see_tile(tile),
        "bytes": see_bytes(packing),
        "own": see_speed(alone) + see_size(alone),
        "large": see_speed(large),
        "recorded": see_recorded(beside),
    }
    return _PAGES.get_template("page.html.jinja").render(
        record=record,
        tour=tour,
        result=see_result(tour, large),
        layers=layer_table(tour),
        bytes=bytes_table(packing),
        tile=tile_cells(tile),
        times=own + large,
        wide=wide,
        about={
            "training": about_training(tour),
            "firing": about_firing(tour),
            "packing": about_packing(packing),
            "timing": about_timing(record),
            **({"texts": about_texts(tour["texts"]), "speed": see_spoken(tour["texts"])} if "texts" in tour else {}),
        },
        charts={
            "training": draw_training(tour["runs"]),
            "frequency": draw_frequency(layers, busiest),
            "own": draw_speeds("The trained model's own layers", alone),
            "large": draw_speeds(f"A layer of {wide}, weights drawn", large),
            "recorded": draw_speeds("Recorded: a layer of 2,048 x 5,632, weights drawn", beside),
        },
        captions=captions,
    )


def render_file(path: str | Path, folder: str | Path) -> Path:
    """Draw the page of a saved tour.json into a folder, with the project's records beside it. Returns its path."""
    text = render(records.load(path), records.flat_rows(records.load_all()))
    target = Path(folder) / "index.html"
    write_atomically(target, text)
    return target


def split_rows(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """A tour's timings: (rows of the trained model's own layers, rows of the large layer)."""
    return [row for row in rows if row.get("label")], [row for row in rows if not row.get("label")]


def comparable(recorded: list[dict], large: list[dict]) -> list[dict]:
    """The recorded times to draw beside those of the tour's large layer: times on GPUs of a layer of 2,048 x 5,632 on
    the same workload, with few neurons firing and with many, near one of RECORDED_NNZ.

    Args:
        recorded: rows of `records.flat_rows`, oldest first. Of several rows for the same, the newest is taken.
        large: the tour's own rows.
    """
    workloads = {row["workload"] for row in large}
    latest = {}
    for row in recorded:
        if row["kind"] != "ffn_forward" or (row["d_model"], row["d_ff"]) != (2048, 5632):
            continue
        if row["workload"] not in workloads or not row["nnz"] or records.is_cpu(row["device"]):
            continue
        near = min(RECORDED_NNZ, key=lambda nnz: abs(math.log(row["nnz"] / nnz)))
        if near / 1.5 < row["nnz"] < near * 1.5:
            latest[row["device"], row["dtype"], row["path"], row["tokens"], near] = row
    return list(latest.values())


# ---- what is drawn ---------------------------------------------------------------------------------------


def draw_training(runs: dict) -> list[Markup]:
    """Loss, and firing, against steps: each run's line on held-out text, and a faint one on what it trained on."""
    losses, firing = [], []
    for label, run in runs.items():
        history, width = run["history"], run["config"]["d_ff"]
        seen = [(row["step"], row["val_bits_per_byte"]) for row in history if row.get("val_bits_per_byte") is not None]
        losses.append(charts.Line(label, seen))
        firing.append(charts.Line(label, [(row["step"], 100 * row["nnz"] / width) for row in history]))
    for i, (label, run) in enumerate(runs.items()):
        read = [(row["step"], row["ce"] / math.log(2)) for row in run["history"]]
        losses.append(charts.Line(f"{label}, on the text it trains on", read, behind=i))
    step = charts.Axis("training step")
    return [
        charts.lines("Loss on held-out text", losses, step, charts.Axis("bits per byte", show="{:.3g}".format)),
        charts.lines("Firing", firing, step, charts.Axis("neurons firing for a token, %", show="{:.3g}".format)),
    ]


def draw_frequency(layers: list[dict], index: int) -> Markup:
    """On which share of the tokens each neuron of a layer fires, most used first; "" if none does."""
    shares = sorted((100 * value for value in layers[index]["neuron_frequency"]), reverse=True)
    alive = [(place, value) for place, value in enumerate(shares, start=1) if value > 0]
    if not alive:
        return Markup("")
    name = layer_names([layer["name"] for layer in layers])[index]
    return charts.lines(
        f"How often each neuron of {name} fires",
        [charts.Line(f"{len(alive):,} of {len(shares):,} neurons", alive)],
        charts.Axis("neuron, most used first", end=len(shares)),
        charts.Axis("tokens it fires for, % (each line 10 times the one below)", log=True, show="{:.3g}".format),
    )


def draw_speeds(title: str, rows: list[dict]) -> Markup:
    """Times as fast as torch's eager dense layer, over tokens; "" if nothing was timed."""
    drawn = speed_lines(rows)
    if not drawn:
        return Markup("")
    return charts.lines(
        title,
        drawn,
        charts.Axis("tokens at once", log=True, ticks=sorted({x for line in drawn for x, _ in line.points})),
        charts.Axis("times as fast as torch's dense layer (at 1x)", log=True, ticks=_TIMES, show="{:.3g}x".format),
        level=1.0,
    )


def speed_lines(rows: list[dict]) -> list[charts.Line]:
    """A line for each layer, device, dtype and path, and number of neurons that fire; names say what differs."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row.get("x_dense") is not None and picked(row["path"]) and not row["path"].startswith("dense eager"):
            key = row.get("label"), row["device"], row["dtype"], row["path"]
            groups.setdefault(key, []).append(row)
    parts = [
        (key, points)
        for key, members in groups.items()
        for points in ([members] if key[0] or _is_dense(members[0]) else alike(members))
    ]
    devices, dtypes = ({key[i] for key in groups} for i in (1, 2))
    kernels = {key[3].partition(" (")[0] for key in groups if not key[3].startswith("dense")}
    mixed = len({bool(points[0].get("stale")) for _, points in parts}) > 1
    drawn = []
    for (label, device, dtype, path), points in parts:
        points = sorted({row["tokens"]: row for row in points}.values(), key=lambda row: row["tokens"])
        last = points[-1]
        kernel, _, how = path.partition(" (")
        said = [
            label,
            device if len(devices) > 1 else None,
            dtype if len(dtypes) > 1 else None,
            "torch.compile, dense" if _is_dense(last) else f"{last['nnz']:.0f} of {last['d_ff']:,} fire",
            kernel if len(kernels) > 1 and not _is_dense(last) else None,
            _HOW.get(how),
            "stale" if mixed and last.get("stale") else None,
        ]
        drawn.append(
            charts.Line(", ".join(part for part in said if part), [(row["tokens"], row["x_dense"]) for row in points])
        )
    return drawn


def layer_table(tour: dict) -> list[dict]:
    """Return what happened in each layer, a dict for each: name, and for both trainings the share that fires, its text,
    and how many neurons are dead; span, the middle 90% of tokens; slots used and rows overflowing, as texts."""
    without, sparse = tour["runs"][WITHOUT], tour["runs"][WITH]
    layers = tour["profile"]["layers"]
    rows = []
    for i, (layer, packed) in enumerate(zip(layers, tour["packing"]["layers"], strict=True)):
        low, high = percentiles(layer["nnz_histogram"])
        rows.append(
            {
                "layer": layer_names([each["name"] for each in layers])[i],
                "runs": [
                    (WITHOUT, without["density"][i], without["dead"][i]),
                    (WITH, layer["density"], sparse["dead"][i]),
                ],
                "span": f"{low:,} to {high:,}",
                "d_ff": layer["d_ff"],
                "used": share(packed["slots_used"] / packed["slots"]),
                "overflow": share(packed["overflow_rows"] / packed["tokens"]),
            }
        )
    return rows


def bytes_table(packing: dict) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """(layer, [(format, bytes a token, share of the dense bytes)]) for each layer."""
    names = layer_names([layer["layer"] for layer in packing["layers"]])
    return [
        (
            name,
            [
                (kind, layer["bytes"][kind] / layer["tokens"], layer["bytes"][kind] / layer["bytes"]["dense"])
                for kind in FORMATS
            ],
        )
        for name, layer in zip(names, packing["layers"], strict=True)
    ]


def tile_cells(tile: dict) -> dict:
    """One tile, as it is drawn: shades (0 to 1, one for each column) and words (what each says, None where unused)."""
    entries = [decode(word, tile["dtype"]) for word in tile["words"][1:]]
    everything = entries + [decode(word, tile["dtype"]) for word in tile["tail"]]
    top = max([value for value, _ in everything if math.isfinite(value)], default=1.0)
    shades = [0.0] * tile["width"]
    for value, column in everything:
        shades[column] = 0.2 + 0.8 * min(1.0, value / top)
    words = [f"{column}: {value:.2g}" for value, column in entries]
    return {"shades": shades, "words": words, "unused": tile["slots"] - len(words)}


# ---- sentences, made from the numbers --------------------------------------------------------------------


def see_result(tour: dict, large: list[dict]) -> list[str]:
    """The result in three sentences: how many neurons fire, what they take packed, and what time that saves."""
    without, sparse = tour["runs"][WITHOUT], tour["runs"][WITH]
    layers = tour["packing"]["layers"]
    packed, dense = (sum(layer["bytes"][kind] for layer in layers) for kind in ("TwELL", "dense"))
    return [
        f"Trained with a penalty on what fires, {sparse['mean_nnz']:.1f} of {sparse['config']['d_ff']:,} neurons "
        f"of a layer fired for a token; trained without, {without['mean_nnz']:.1f}.",
        f"Packed, that took {share(packed / dense)} of the bytes it takes with its zeros, and every value came back "
        "bit for bit.",
        see_wide(large),
    ]


def see_wide(rows: list[dict]) -> str:
    """The best and the worst point of the wide layer, in one sentence."""
    rows = sorted((row for row in rows if _is_sparse(row)), key=lambda row: row["x_dense"])
    if not rows:
        return "No layer of a large model's width was timed."
    worst, best = rows[0], rows[-1]
    text = (
        f"A layer of {best['d_model']:,} x {best['d_ff']:,}, its weights drawn at random so that "
        f"{_counts(rows)} neurons fire, ran at best {best['x_dense']:.2f} times as fast as torch's own ({_at(best)})"
    )
    return text + (f" and at worst {worst['x_dense']:.2f} times as fast ({_at(worst)})." if worst is not best else ".")


def _counts(rows: list[dict]) -> str:
    """Return how many neurons fire in these rows, roughly, in words."""
    groups = [max(group, key=lambda row: row["tokens"]) for group in alike(rows)]
    return "about " + " or ".join(f"{row['nnz']:.0f}" for row in groups)


def about_training(tour: dict) -> str:
    run = tour["runs"][WITH]
    config, text = run["config"], tour["text"]
    kind = "gated" if config["gated"] else "plain"
    return (
        f"A language model with {run['parameters']:,} parameters ({config['layers']} layers, d_model "
        f"{config['d_model']}, {kind} ReLU feed-forward layers of width {config['d_ff']}) read bytes of "
        f"{text['name']}: {run['tokens']:,} tokens in {config['steps']} steps, twice from the same seed, "
        f"once with an L1 penalty of {config['l1']:g} on the feed-forward activations."
    )


def see_training(without: dict, sparse: dict) -> str:
    before, after = without["mean_nnz"], sparse["mean_nnz"]
    d_ff = sparse["config"]["d_ff"]
    change = sparse["validation_bits_per_byte"] - without["validation_bits_per_byte"]
    loss = (
        f"{abs(change):.3f} bits per byte {'worse' if change > 0 else 'better'} than without it"
        if abs(change) >= 0.0005
        else "the same validation loss as without it"
    )
    verb = "fell" if after < before else "did not fall"
    return (
        f"With L1, the neurons that fire for a token {verb} from {before:.1f} to {after:.1f} of {d_ff} "
        f"({share(before / d_ff)} to {share(after / d_ff)}); on held-out text that model is {loss}. "
        "One seed and a short run: this shows the mechanism, not what L1 costs a real model."
    )


def about_firing(tour: dict) -> str:
    # As in the tables: counted at the end of the training, on the same tokens but in its dtype. The profile counted in
    # float32, in which a few neurons more or fewer fire.
    dead, neurons = sum(tour["runs"][WITH]["dead"]), sum(layer["d_ff"] for layer in tour["profile"]["layers"])
    return (
        f"Over {tour['profile']['tokens']:,} held-out tokens, {dead} of the {neurons} neurons of the "
        f"model trained with L1 ({share(dead / neurons)}) never fired."
    )


def see_firing(layers: list[dict]) -> str:
    names = layer_names([layer["name"] for layer in layers])
    most = max(range(len(layers)), key=lambda i: layers[i]["density"])
    least = min(range(len(layers)), key=lambda i: layers[i]["density"])
    high, low = layers[most]["density"], layers[least]["density"]
    text = f"{names[most]} fires most, {share(high)} of its neurons for a token, {names[least]} least, {share(low)}"
    text = text[0].upper() + text[1:]
    if high < 1.5 * low:
        return f"{text}: the layers are much alike here."
    return (
        text
        + (f": {high / low:.1f} times fewer." if low else ".")
        + " What pays for one layer need not pay for another."
    )


def see_frequency(layers: list[dict], index: int) -> str:
    shares = sorted(layers[index]["neuron_frequency"], reverse=True)
    total, seen, count = sum(shares), 0.0, 0
    while total and seen < 0.8 * total:
        seen, count = seen + shares[count], count + 1
    name = layer_names([layer["name"] for layer in layers])[index]
    if not total:
        return f"No neuron of {name} fired."
    part = share(count / len(shares))
    return f"In {name}, {count} of {len(shares)} neurons ({part}) do 80% of the firing."


def about_packing(packing: dict) -> str:
    layers = packing["layers"]
    used = sum(layer["slots_used"] for layer in layers) / sum(layer["slots"] for layer in layers)
    over, rows = sum(layer["overflow_rows"] for layer in layers), sum(layer["tokens"] for layer in layers)
    text = (
        f"The activations of all {len(layers)} layers on {packing['tokens']:,} tokens were packed in "
        f"{packing['dtype']}, tiles of {layers[0]['tile']} columns into {layers[0]['words']} words. "
        f"Unpacking gave relu(gate) back bit for bit. {share(used)} of the slots hold a value; "
    )
    if not over:
        return text + "no row had a tile with more values than slots."
    return text + (
        f"{over:,} of {rows:,} rows ({share(over / rows)}) had a tile with more values than "
        "slots, and what did not fit travelled in the tail."
    )


def see_tile(tile: dict) -> str:
    name = layer_names([tile["layer"]])[0]
    used, words = len(tile["words"]), tile["slots"] + 1
    text = f"One tile of {name}: {tile['count']} of {tile['width']} values are not zero, so "
    if tile["tail"]:
        return text + f"all {words} words are taken and {len(tile['tail'])} values are in the tail."
    return text + f"{used} of its {words} words are used; the others are never read."


def see_bytes(packing: dict) -> str:
    total = {kind: sum(layer["bytes"][kind] for layer in packing["layers"]) for kind in FORMATS}
    shares = ", ".join(f"{kind} {share(total[kind] / total['dense'])}" for kind in FORMATS[1:])
    tail, rows = (sum(layer[key] for layer in packing["layers"]) for key in ("tail", "tokens"))
    text = (
        f"Of the dense bytes, these layers take: {shares}; {min(total, key=lambda kind: total[kind])} is smallest here."
    )
    if total["ELL"] > total["dense"]:
        text += " ELL widens every row to the fullest one, which costs more here than storing the zeros."
    return (
        f"{text} TwELL's tiles have the same size whatever the data, so each one's place is known before "
        "anyone has counted: that is what lets a GPU pack while it multiplies. Its tail holds "
        f"{tail / rows:.3g} values a row here."
    )


def about_timing(record: records.Record) -> str:
    devices = sorted({row["device"] for row in record.rows})
    cpu = record.machine.get("cpu") or "an unnamed CPU"
    devices = [cpu if records.is_cpu(device) else device for device in devices]
    return (
        f"Measured on {', '.join(devices)}. Each sparse result was first checked against float64, then "
        "sparse and dense were timed in turn; a point is the ratio of the two medians."
    )


def see_speed(rows: list[dict]) -> str:
    """Where the sparse layer is faster than the dense one, and where it is slower."""
    rows = sorted((row for row in rows if _is_sparse(row)), key=lambda row: row["x_dense"])
    if not rows:
        return "No sparse path was timed."
    worst, best = rows[0], rows[-1]
    slower = sum(row["x_dense"] < 1 for row in rows)
    if slower == len(rows):
        return (
            f"The sparse layer was slower than torch's dense one at all {slower} points, by "
            f"{1 / best['x_dense']:.1f} to {1 / worst['x_dense']:.1f} times; closest: {_at(best)}."
        )
    text = (
        f"At {_at(best)} the sparse layer took {best['ms']:.3g} ms against {best['dense_ms']:.3g} ms "
        f"dense: {best['x_dense']:.2f} times as fast, the best of {len(rows)} points."
    )
    if not slower:
        return f"{text} None was slower than dense; the least gain, at {_at(worst)}: {worst['x_dense']:.2f}x."
    were = "was" if slower == 1 else "were"
    return (
        f"{text} {slower} of them {were} slower than dense, at worst {_at(worst)}: "
        f"{1 / worst['x_dense']:.2f} times the dense time."
    )


def see_size(rows: list[dict]) -> str:
    """Return why a small layer gains nothing, if most of these points were slower; else ""."""
    rows = [row for row in rows if _is_sparse(row)]
    slower = sum(row["x_dense"] < 1 for row in rows)
    if 2 * slower <= len(rows):
        return ""
    dense = min(row["dense_ms"] for row in rows)
    return (
        f" A dense layer this small takes as little as {1000 * dense:.0f} microseconds: finding the "
        "zeros costs more than skipping them saves."
    )


def see_recorded(rows: list[dict]) -> str:
    rows = [row for row in rows if _is_sparse(row)]
    if not rows:
        return "No GPU measurement of such a layer is recorded in this checkout yet, so none is drawn here."
    devices = sorted({row["device"] for row in rows})
    days = sorted({row["date"][:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    text = f"Recorded on {', '.join(devices)} ({when}), not here. {see_speed(rows)}"
    if all(row["stale"] for row in rows):
        return text + " All of it ran code that has changed since."
    if any(row["stale"] for row in rows):
        text += " Lines marked stale ran code that has changed since."
    return text


def about_texts(texts: dict) -> str:
    return (
        f"After the same {len(texts['prompt'])} characters of held-out text, each model went on, a byte at a time, "
        f"drawn at temperature {texts['temperature']:g}. They trained for a minute and are small: they have "
        "learned how the text looks, not what it says."
    )


def see_spoken(texts: dict) -> str:
    """Return what the sparse layers are worth where one token is computed at a time."""
    names = layer_names([row["layer"] for row in texts["layers"]])
    chosen = "; ".join(
        f"{name}: {row['choice']}" + (f", {row['x_dense']:.2f} times as fast as dense" if row["x_dense"] else "")
        for name, row in zip(names, texts["layers"], strict=True)
    )
    return f"With L1, and with layers as a plan for one token chooses them, not forced: {said_fast(texts)}. {chosen}."


def _is_dense(row: dict) -> bool:
    return row["path"].startswith("dense")


def _how(row: dict) -> str:
    """How it was timed, in words, if not by plain calls one after the other."""
    return _HOW.get(row["path"].partition(" (")[2], "")


def _is_sparse(row: dict) -> bool:
    return row.get("x_dense") is not None and not _is_dense(row) and picked(row["path"])


def _at(row: dict) -> str:
    what = f"{row['label']}, " if row.get("label") else ""
    how = f", {_how(row)}" if _how(row) else ""
    fire = f", {row['nnz']:.0f} neurons firing" if row.get("nnz") and not what else ""
    return f"{what}{row['tokens']:,} token{'s' * (row['tokens'] != 1)} in {row['dtype']}{fire}{how}"


def layer_rows(tour: dict) -> list[dict]:
    """Return what a tour found (notes["tour"] of its record), a row for each layer, ready to be printed.

    Each row: layer; before, after (share of neurons firing without and with L1); dead_before, dead_after;
    overflow (share of rows with a tile beyond its slots), used (share of slots that hold a value), and the
    bytes a token takes in each format.
    """
    without, sparse = tour["runs"][WITHOUT], tour["runs"][WITH]
    names = layer_names([layer["name"] for layer in tour["profile"]["layers"]])
    return [
        {
            "layer": name,
            "before": share(without["density"][i]),
            "after": share(sparse["density"][i]),
            "dead_before": without["dead"][i],
            "dead_after": sparse["dead"][i],
            "overflow": share(packed["overflow_rows"] / packed["tokens"]),
            "used": share(packed["slots_used"] / packed["slots"]),
            **{kind: round(size / packed["tokens"]) for kind, size in packed["bytes"].items()},
        }
        for i, (name, packed) in enumerate(zip(names, tour["packing"]["layers"], strict=True))
    ]


def said_fast(texts: dict) -> str:
    """How fast the model with L1 spoke on its planned layers, and on dense ones (notes["tour"]["texts"])."""
    same = "the same text" if texts["same"] else "not the same text, since sums differ in their last bits"
    return f"{texts['tokens_per_s']:,.0f} tokens a second, {texts['dense_tokens_per_s']:,.0f} with dense layers, {same}"
