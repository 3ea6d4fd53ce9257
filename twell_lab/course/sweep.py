"""Notebook 04: runs with more and more L1, recorded or trained now, as rows and as figures; the models of
data/checkpoints. `where` says in a figure where its rows are from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from .. import core, plots, records
from ..core import InputError
from ..models.tiny import LanguageModel
from ..training.config import TrainResult
from ..training.sweep import cost, pressed, seed_spread, twin
from .charts import bars, finish, lines
from .recorded import device_and_day

LIGHT = "#C8C8C8"
SHADES = ("rgb(230, 159, 0)", "rgb(0, 158, 115)", "rgb(0, 114, 178)", "rgb(72, 15, 105)")  # from little L1 to much
LOSS = "validation_bits_per_byte"
BITS = "held-out text, bits per byte (lower is better)"
TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
RUNS = {  # what a run is besides the sweep itself, by a word of its label -> name and look
    "renewed": ("dead rows renewed", {"colour": plots.RED, "symbol": "diamond-open"}),
    "seed": ("another seed", {"colour": plots.ORANGE, "symbol": "square-open"}),
    "lr": ("no L1, another learning rate", {"colour": plots.GREY, "symbol": "circle-open"}),
}


def rows(results: Iterable[TrainResult]) -> list[dict]:
    """Return runs of one model as rows like those of a recorded sweep. The first seed's run without L1 is the twin."""
    made = []
    for run in results:
        config, names = run.summary()["config"], ("step", "nnz", "val_bits_per_byte")
        history = {name: [row.get(name) for row in run.history] for name in names}
        label = f"L1 {run.config.l1:g}" if run.config.l1 else f"lr {run.config.lr:g}"
        row = {"label": label, "config": config, "history": history, "mean_nnz": run.mean_nnz}
        row |= {"zeros": 1 - run.mean_nnz / run.config.d_ff, "validation_bits_per_byte": run.validation_bits_per_byte}
        made.append(row | {"layers": [{"nnz": share * run.config.d_ff} for share in run.density]})
        if made[0]["config"]["seed"] != run.config.seed:
            made[-1]["label"] = f"seed {run.config.seed}"
    return made


def recorded() -> records.Record:
    """Return the newest record of a sweep (twell-lab record sweep)."""
    return [record for record in records.load_all() if record.name == "sweep"][-1]


def where(record: records.Record) -> str:
    """Return the device and the day of a record: "recorded on NVIDIA H100 80GB HBM3, 2026-11-21"."""
    gpus = record.machine.get("gpus")
    device = gpus[0]["name"] if gpus else record.machine.get("cpu") or "an unnamed machine"
    return f"recorded on {device_and_day(device, record.date)}"


def renewed(rows: list[dict]) -> list[tuple[dict, dict]]:
    """Return pairs (without, with) of runs that differ in re-initialisation alone, by L1."""
    without = {row["config"]["l1"]: row for row in pressed(rows)}
    again = sorted((row for row in rows if row["config"].get("reinit")), key=lambda row: row["config"]["l1"])
    return [(without[row["config"]["l1"]], row) for row in again]


CHECKPOINTS = ("l1-free", "small", "sparse")


def folder(name: str) -> Path:
    """Return the folder of one of CHECKPOINTS; in an installed package that of a smaller twin for "l1-free" and
    "sparse". InputError for another name."""
    if name not in CHECKPOINTS:
        raise InputError(f"name is {name!r}; accepted: {', '.join(CHECKPOINTS)}")
    whole = core.data_dir() / "checkpoints" / name
    return whole if whole.is_dir() else whole.with_name(f"{name}-small")


def checkpoint(name: str) -> LanguageModel:
    """Return the trained model in `folder`, on the CPU; data/checkpoints/README.md says what each is."""
    return LanguageModel.load(folder(name)).eval()


# ---- figures ----


def short(row: dict) -> str:
    """Return the name of a run by its coefficient alone: "L1 1.5e-4" or "no L1"."""
    if not (l1 := row["config"]["l1"]):
        return "no L1"
    power = math.floor(math.log10(l1) + 1e-9)
    return f"L1 {l1 / 10**power:.3g}e{power}"


def loss_against_nnz(rows: list[dict], where: str) -> go.Figure:
    """Draw held-out loss over firing neurons: runs by L1, and others. The band: what another seed does."""
    runs, base = pressed(rows), twin(rows)
    loss, spread, d_ff = base[LOSS], seed_spread(rows) or 0.0, base["config"]["d_ff"]
    figure = go.Figure()
    band = {"annotation_text": "within what another seed does", "annotation_position": "top right", "layer": "below"}
    figure.add_hrect(y0=(1 - spread) * loss, y1=(1 + spread) * loss, fillcolor=plots.FAINT, line_width=0, **band)
    names = {"text": [short(row).removeprefix("L1 ") for row in runs], "textposition": "top left", "cliponaxis": False}
    by_l1 = names | {"colour": plots.BLUE, "size": 10, "symbol": "circle", "mode": "lines+markers+text"}
    lines(figure, runs, _nnz, LOSS, lambda row: "by L1", hover=_hover(rows), looks={"by L1": by_l1})
    others = [row for row in rows if row not in runs]
    kind = lambda row: next(name for word, (name, _) in RUNS.items() if word in row["label"])
    looks = {name: look | {"size": 11, "mode": "markers"} for name, look in RUNS.values()}
    lines(figure, others, _nnz, LOSS, kind, hover=_hover(rows), looks=looks)
    axes = {"x": f"neurons firing for a token, of {d_ff:,}, mean over layers", "y": BITS, "log_x": TICKS}
    figure = finish(figure, "Loss against sparsity", height=380, also=[where], **axes)
    return figure.update_xaxes(autorange="reversed").update_yaxes(rangemode="normal")


def _nnz(row: dict) -> float:
    return max(row["mean_nnz"], 1e-2)  # a log axis has no place for 0


def _hover(rows: list[dict]):
    spread = seed_spread(rows)
    beside = "" if spread is None else f" (another seed: {spread:.1%})"
    return lambda row: (
        f"{row['label']}: {row['mean_nnz']:.3g} fire, {row['zeros']:.2%} zeros, {row[LOSS]:.4f} bits per byte, "
        f"{cost(row, rows):+.2%} against the twin{beside}"
    )


def picked(rows: list[dict], index: int = 0, where: str = "") -> go.Figure:
    """Draw one run of the sweep among all: loss against nnz, nnz during training, and nnz of its layers at the end."""
    runs = pressed(rows)
    titles = ["loss against nnz", "nnz, while training", "nnz by layer, at the end"]
    cuts = {"horizontal_spacing": 0.1, "column_widths": [0.32, 0.38, 0.3]}
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, **cuts)
    line = {"line": {"color": LIGHT, "width": 1}, "marker": {"symbol": "circle"}, "showlegend": False}
    lines(figure, runs, _nnz, LOSS, lambda row: "", hover=_hover(rows), row=1, col=1, **line)
    look = {"mode": "lines", "showlegend": False, "hovertemplate": "step %{x}: %{y:.3g}", "row": 1, "col": 2}
    for row in runs:
        figure.add_scatter(x=row["history"]["step"], y=row["history"]["nnz"], name=short(row), **look)
    look = {"marker_color": plots.BLUE, "showlegend": False, "textposition": "outside", "cliponaxis": False}
    figure.add_bar(**look, textfont_size=10, hovertemplate="layer %{x}: %{y:.3g}<extra></extra>", row=1, col=3)
    log = {"type": "log", "tickformat": "~g", "dtick": 1, "title_text": "mean nnz (log scale)"}
    figure.update_xaxes(log, autorange="reversed", row=1, col=1).update_yaxes(title_text="bits per byte", row=1, col=1)
    figure.update_xaxes(title_text="step", row=1, col=2).update_yaxes(log, row=1, col=2)
    figure.update_xaxes(title_text="layer", row=1, col=3)
    figure = plots.styled(figure, "", height=400).update_layout(margin_t=110)
    figure.update_annotations(font_size=12)
    pick(figure, rows, index, where)
    return figure


def pick(figure: go.Figure, rows: list[dict], index: int, where: str = "") -> None:
    """Pick another run in a figure that `picked` made (a FigureWidget of it too)."""
    runs = pressed(rows)
    row = runs[index]
    points, *during, layers = figure.data
    points.marker.color = [plots.BLUE if number == index else LIGHT for number in range(len(runs))]
    points.marker.size = [14 if number == index else 8 for number in range(len(runs))]
    for number, trace in enumerate(during):
        trace.line.color, trace.line.width = (plots.BLUE, 3) if number == index else (LIGHT, 1)
    nnz = [layer["nnz"] for layer in row["layers"]]
    layers.x, layers.y = [str(number) for number in range(len(nnz))], nnz
    layers.text = [f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in nnz]
    figure.layout.yaxis3.range = [0, 1.18 * max(*nnz, 1e-3)]
    figure.layout.title.text = (
        f"{short(row)}: {row['mean_nnz']:.3g} of {row['config']['d_ff']} neurons fire ({row['zeros']:.1%} zeros), "
        f"{row[LOSS]:.3f} bits per byte, {cost(row, rows):+.1%} against the twin<br><sup>{where}</sup>"
    )


def over_time(rows: list[dict], where: str) -> go.Figure:
    """Draw runs of the sweep during training: held-out loss on the left, firing neurons on the right."""
    runs = pressed(rows)
    colours = [plots.GREY, *sample_colorscale(SHADES, [i / len(runs) for i in range(1, len(runs))])]
    # A small L1 changes little: the line without L1 is drawn first and wide, so that it can be seen behind others.
    looks = {
        short(row): {"colour": colour, "width": 2 if row["config"]["l1"] else 6}
        for row, colour in zip(runs, colours, strict=True)
    }
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    said = lambda point: f"{point['run']}, step {point['step']}: {point['value']:.3g}"
    for column, key in enumerate(("val_bits_per_byte", "nnz"), 1):
        points = [
            {"run": short(row), "step": step, "value": value}
            for row in runs
            for step, value in zip(row["history"]["step"], row["history"][key], strict=True)
            if value is not None
        ]
        lines(figure, points, "step", "value", "run", hover=said, looks=looks, mode="lines", row=1, col=column)
    figure = finish(figure, "Loss and firing neurons during training", height=330, also=[where], x="step")
    figure.update_yaxes(title_text="held-out text, bits per byte", rangemode="normal", row=1, col=1)
    firing = f"neurons firing, of {runs[0]['config']['d_ff']:,} (log scale)"
    return figure.update_yaxes(type="log", tickformat="~g", tickvals=TICKS, title_text=firing, row=1, col=2)


def dead_by_layer(rows: list[dict], where: str) -> go.Figure:
    """Draw dead neurons by layer, with and without re-initialisation: a panel for each L1 trained both ways."""
    pairs = renewed(rows)
    titles = [short(before) for before, _ in pairs]
    figure = make_subplots(rows=1, cols=len(pairs), shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=titles)
    for column, pair in enumerate(pairs, start=1):
        dead = [
            {"layer": number, "dead": 100 * layer["dead"] / row["config"]["d_ff"], "of": name}
            for name, row in zip(("left as they are", "dead rows renewed"), pair, strict=True)
            for number, layer in enumerate(row["layers"])
        ]
        said = lambda row: f"layer {row['layer']}, {row['of']}: {row['dead']:.1f}%"
        bars(figure, dead, "layer", "dead", "of", hover=said, row=1, col=column)
    title = f"Dead neurons: silent on all of {pairs[0][0]['counted']:,} held-out bytes"
    figure = finish(figure, title, height=300, also=[where], x="layer")
    return figure.update_yaxes(title_text="neurons dead, %", col=1).update_annotations(font_size=12)
