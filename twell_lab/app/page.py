"""The tour's page: one HTML file that opens without a network, drawn from nothing but a tour's record.

Every sentence with a number is made from the record's numbers, whatever they are; the text around them is in
page.html.jinja. Needs plotly, whose script is written into the page, but not torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
from markupsafe import Markup

from .. import records
from ..core.errors import RecordError
from ..core.files import write_atomically
from ..plots import figures as plots
from ..plots.data import FORMAT, WITH, WITHOUT, layer_names, layer_rows, picked, said_fast, share

_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters.update(number=format, share=share, json=json.dumps)


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
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, jinja2.TemplateError) as error:
        raise RecordError(
            f"record {record.name!r}: notes.tour or a row is not as a tour writes it ({type(error).__name__}: {error})"
        ) from error


def _page(record: records.Record, tour: dict, recorded: list[dict]) -> str:
    from plotly.offline import get_plotlyjs  # here, so that importing `plots` says what is missing

    own, large = split_rows(record.rows)
    beside = comparable(recorded, large)
    layers, packing, tile = tour["profile"]["layers"], tour["packing"], tour["tile"]
    without, sparse = tour["runs"][WITHOUT], tour["runs"][WITH]
    busiest = max(range(len(layers)), key=lambda i: layers[i]["density"])
    sizes = sorted({(row["d_model"], row["d_ff"]) for row in large})
    title = "; ".join(f"A feed-forward layer with d_model {d_model}, d_ff {d_ff}" for d_model, d_ff in sizes)
    of_own, of_large = plots.speedups(own, mine="this tour"), plots.speedups(large, beside, mine="this tour")
    figures = {
        "training": (plots.training_curves(tour["runs"]), see_training(without, sparse)),
        "firing": (plots.firing_by_layer(layers, without["density"]), see_firing(layers)),
        "frequency": (plots.neuron_frequency(layers, busiest), see_frequency(layers, busiest)),
        "tile": (plots.packed_tile(tile), see_tile(tile)),
        "bytes": (plots.formats_bytes(packing["layers"]), see_bytes(packing)),
        "own": (of_own.update_layout(title_text="The trained model's own layers"), see_speed(own) + see_size(own)),
        "large": (of_large.update_layout(title_text=title), see_speed(large) + " " + see_recorded(beside)),
    }
    return _PAGES.get_template("page.html.jinja").render(
        record=record,
        tour=tour,
        layers=layer_rows(tour),
        times=large,
        plotly=Markup(get_plotlyjs()),
        about={
            "training": about_training(tour),
            "firing": about_firing(tour),
            "packing": about_packing(packing),
            "timing": about_timing(record),
            **({"texts": about_texts(tour["texts"]), "speed": see_spoken(tour["texts"])} if "texts" in tour else {}),
        },
        figures={name: (_drawn(name, figure), caption) for name, (figure, caption) in figures.items()},
    )


def _drawn(name: str, figure) -> Markup:
    return Markup(
        figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            include_mathjax=False,
            div_id=f"figure-{name}",
            config={"displayModeBar": False, "responsive": True},
        )
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
    the same workload, with a mean nnz of about 8 or 29.

    Args:
        recorded: rows of `records.flat_rows`, oldest first. Of several rows for the same, the newest is taken.
        large: the tour's own rows.
    """
    workloads = {row["workload"] for row in large}
    latest = {}
    for row in recorded:
        size = (row["d_model"], row["d_ff"])
        near = [nnz for nnz in (8, 29) if row["nnz"] and nnz / 1.5 < row["nnz"] < nnz * 1.5]
        if (
            row["kind"] == "ffn_forward"
            and size == (2048, 5632)
            and row["workload"] in workloads
            and near
            and not records.is_cpu(row["device"])
        ):
            latest[row["device"], row["dtype"], row["path"], row["tokens"], near[0]] = row
    return list(latest.values())


# ---- sentences, made from the numbers --------------------------------------------------------------------


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
    layers = tour["profile"]["layers"]
    dead, neurons = sum(layer["dead"] for layer in layers), sum(layer["d_ff"] for layer in layers)
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
    total = {kind: sum(layer["bytes"][kind] for layer in packing["layers"]) for kind in plots.FORMATS}
    shares = ", ".join(f"{kind} {share(total[kind] / total['dense'])}" for kind in plots.FORMATS[1:])
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
    """Why a small layer gains nothing, if most of these points were slower; else ""."""
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
    text = f"Dotted lines were recorded on {', '.join(devices)} ({when}), not here."
    if any(row["stale"] for row in rows):
        text += " Those marked stale ran kernels that have changed since."
    return text


def about_texts(texts: dict) -> str:
    return (
        f"After the same {len(texts['prompt'])} characters of held-out text, each model went on, a byte at a time, "
        f"drawn at temperature {texts['temperature']:g}. They trained for a minute and are small: they have "
        "learned how the text looks, not what it says."
    )


def see_spoken(texts: dict) -> str:
    """What the sparse layers are worth where one token is computed at a time."""
    names = layer_names([row["layer"] for row in texts["layers"]])
    chosen = "; ".join(
        f"{name}: {row['choice']}" + (f", {row['x_dense']:.2f} times as fast as dense" if row["x_dense"] else "")
        for name, row in zip(names, texts["layers"], strict=True)
    )
    return f"With L1, and with layers as a plan for one token chooses them, not forced: {said_fast(texts)}. {chosen}."


def _is_sparse(row: dict) -> bool:
    return row.get("x_dense") is not None and not row["path"].startswith("dense") and picked(row["path"])


def _at(row: dict) -> str:
    what = f"{row['label']}, " if row.get("label") else ""
    graph = ", in a CUDA graph" if row["path"].endswith("(graph)") else ""
    return f"{what}{row['tokens']:,} token{'s' * (row['tokens'] != 1)} in {row['dtype']}{graph}"
