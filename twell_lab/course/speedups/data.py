"""Whole models beside their feed-forward layers, recorded and measured here, and Amdahl's law between the two.

Rows of whole models are those of twell_lab.bench.workloads, and what earlier releases recorded of them; rows of layers
are those of "inference" and "training" records. Nothing is drawn here."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor, nn

from ... import records
from ...bench import models, workloads
from ...bench import rows as timed
from ...bench.models import PLANNED
from ...bench.rows import DENSE
from ...bench.whole import model_name
from ...core import StackError
from ...layers.find import feed_forwards
from ...models.tiny import ModelConfig
from ..recorded import GRAPH, LEAST, LOGNORMAL, device_and_day, newest, select

FORWARD, DECODE, TRAINING = "forward", "decode", "training"
_KINDS = {"model_forward": FORWARD, "model_decode": DECODE, "model_training": TRAINING}
# How a model runs: the dense path, the sparse one (the first of these that was timed), and which time counts. Launches
# of a graph are one, so a graph's time is the device's; a plain call's is what passes on the wall.
WAYS = {
    "eager": ("dense eager", ("planned",), "wall_ms"),
    "compiled": ("dense compiled", ("planned compiled",), "wall_ms"),
    "CUDA graph": ("dense eager (graph)", ("planned for graphs (graph)", "planned (graph)"), "ms"),
}
_SPARSE = {path for _, paths, _ in WAYS.values() for path in paths}
_NEAR = 0.25  # by how much the mean nnz of a layer may differ from that of the model that it stands for
ALONE = "No layer like those of the model is recorded; on a GPU, `twell-lab record inference` makes a record."
DRAWN = "drawn Llama"
NOTHING = "No whole model is recorded in this checkout; on a GPU, `twell-lab record bench-2B` makes a record."
# What is timed on the reader's machine: a drawn model, wide enough for its layers to gain something.
_ON_GPU = ModelConfig(vocabulary=32768, d_model=2048, layers=8, heads=16, d_ff=5632, context=2048)
_ON_CPU = ModelConfig(vocabulary=4096, d_model=512, layers=2, heads=8, d_ff=3072, context=32)
_LAYERS = "layers: "  # before the names of calls of all layers by themselves


# ---- Amdahl's law ----


def amdahl(share: float, times: float) -> float:
    """Return how many times as fast the whole is, where this share of its time (0 to 1) becomes so many times as
    fast."""
    left = 1 - share + share / times
    return 1 / left if left else math.inf


def layer_needed(share: float, wanted: float) -> float | None:
    """Return how many times as fast this share of the time must become for the whole to be `wanted` times as fast; None
    where that is out of reach."""
    left = 1 / wanted - (1 - share)
    return share / left if left > 0 else None


def share_from(layer: float, model: float) -> float:
    """The share of a model's time in which its layers are, from how many times as fast the two became (layer not 1)."""
    return (1 - 1 / model) / (1 - 1 / layer)


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Where y falls below 1, on straight lines between points (x, y) of ascending x; None where it never does."""
    for (x, y), (next_x, next_y) in zip(points, points[1:]):
        if y >= 1 > next_y:
            return x + (next_x - x) * (y - 1) / (y - next_y)
    return None


# ---- rows of whole models ----


def recorded() -> list[dict]:
    """The rows of one recorded model, and of every recorded training step; of equal measurements the newest that timed
    planned layers. The model is the one with the most parameters, of those whose layers were recorded too, if there are
    any. Each row gets `step` (FORWARD, DECODE, TRAINING), `model`, `what` and `where`."""
    found: list[dict] = []
    taken: set[tuple] = set()
    known: set[tuple] = set()
    for record in reversed(records.load_all()):
        known |= {_size(row) for row in record.rows if _single(row)}
        rows = [read for row in record.rows if (read := _read(row)) and _same_way(read) not in taken]
        planned = {_same_way(row) for row in rows if row["path"] in _SPARSE}  # a record may time forced paths alone
        rows = [row for row in rows if _same_way(row) in planned]
        old = bool(rows) and records.stale(record)
        found += [{**row, "where": f"recorded on {device_and_day(row['device'], record.date, old)}"} for row in rows]
        taken |= set(map(_same_way, rows))
    speaking = [row for row in found if row["step"] != TRAINING]
    if not speaking:
        return found
    # Of equal ones the first, which is the newest.
    largest = max(speaking, key=lambda row: (_size(row) in known, row["parameters"]))
    return [row for row in found if row["step"] == TRAINING or _model(row) == _model(largest)]


def _read(row: dict) -> dict | None:
    """A row of a whole model in the names used here; None for any other row. Earlier releases called models "model",
    without saying whether it is a forward, and their training steps "training", as those of a layer."""
    if row.get("dense_ms") is None or not {"layers", "parameters"} <= row.keys():
        return None
    old = {"model": DECODE if "cached" in row else FORWARD, "training": TRAINING}
    step = (_KINDS | old).get(row["kind"])
    if step is None:
        return None
    model, _, what = row["workload"].partition(", ")
    if row["kind"] == "training":
        model, what = f"a model of {row['layers']} layers", f"training step, {row['tokens']:,} tokens"
    if model in ("Llama", model_name("2B")):  # what two records of the library itself call that model, which is drawn
        model = DRAWN
    return {"head": True, **row, "step": step, "model": model, "what": what}


def _single(row: dict) -> bool:
    """Return whether a row is that of a single layer."""
    return row.get("kind") in ("inference", "training") and "layers" not in row and row["workload"] == LOGNORMAL


def _size(row: dict) -> tuple:
    return tuple(row[key] for key in ("device", "d_model", "d_ff", "gated"))


def _model(row: dict) -> tuple:
    return row["device"], row["model"], row["parameters"]


def _same(row: dict) -> tuple:
    """Return what is equal in rows that measure the same thing, be it on different paths."""
    return (*_model(row), row["what"], row["head"], f"{row['nnz']:.2g}")


def _same_way(row: dict) -> tuple:
    """Return what is equal in rows that measure the same thing in the same way: as plain calls, compiled or in
    graphs."""
    return (*_same(row), GRAPH in row["path"], "compiled" in row["path"])


def layers_of(rows: list[dict]) -> list[dict]:
    """Every recorded row of a single layer like those of these models, on their device; of equal ones the newest."""
    sizes = {_size(row) for row in rows}
    devices = {row["device"] for row in rows}
    return [row for each in devices for row in newest("", each, lambda row: _single(row) and _size(row) in sizes)]


def alike(layers: list[dict], found: list[Step]) -> list[dict]:
    """The rows of layers like those of the first step's model."""
    return [row for row in layers if found and _size(row) == _size(found[0].dense)]


def _layer(row: dict, layers: list[dict]) -> dict[str, dict]:
    """The rows of the layer that stands for those of a model's row, by path: of the same sizes and as many tokens, and
    nearest in nnz; {} where there is none."""
    kind = "training" if row["step"] == TRAINING else "inference"
    near = [
        each
        for each in select(layers, kind, tokens=row["tokens"])
        if _size(each) == _size(row) and abs(each["nnz"] - row["nnz"]) <= _NEAR * row["nnz"]
    ]
    if not near:
        return {}
    best = min(near, key=lambda each: abs(each["nnz"] - row["nnz"]))
    return {each["path"]: each for each in near if (each["nnz"], each["where"]) == (best["nnz"], best["where"])}


@dataclass(frozen=True, eq=False)
class Step:
    """A model's forward, step of decoding or of training, in one of WAYS, dense and planned, and its layers alone.

    dense, ours: the rows of the model. layer: the rows of a layer run in the same way, dense and planned; None where
    none like it is recorded. clock: the time that counts, in all four."""

    how: str
    dense: dict
    ours: dict
    layer: tuple[dict, dict] | None
    clock: str

    @property
    def name(self) -> str:
        fires = f", nnz {self.dense['nnz']:.0f}" if self.dense["step"] == TRAINING else ""
        return f"{self.dense['what']}{fires}, {self.how}"

    @property
    def x(self) -> float:
        """Return how many times as fast the model is with planned layers."""
        return self._times(self.dense, self.ours)[1]

    @property
    def span(self) -> tuple[float, float]:
        """The middle half of that, over the turns that both took."""
        low, x, high = self._times(self.dense, self.ours)
        return min(low, x), max(high, x)

    def _times(self, dense: dict, ours: dict) -> tuple[float, float, float]:
        """Dense over ours, and the quartiles around it. It is the ratio of the medians, as in the tables of records; on
        a CPU, which does other things too, the median over the turns: what disturbed the one disturbed the other."""
        samples = "wall_samples" if self.clock == "wall_ms" else "samples"
        turns = [a / b for a, b in zip(dense.get(samples, []), ours.get(samples, []))]
        x = dense[self.clock] / ours[self.clock]
        low, middle, high = quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else [x] * 3
        return low, middle if records.is_cpu(dense["device"]) else x, high

    @property
    def layers_ms(self) -> tuple[float, float] | None:
        """Return what all feed-forward layers take by themselves, dense and planned, in milliseconds."""
        if self.layer is None:
            return None
        dense, ours = (self.dense["layers"] / each.get("together", 1) * each[self.clock] for each in self.layer)
        return dense, ours

    @property
    def layer_x(self) -> float | None:
        """Return how many times as fast the layers by themselves are."""
        return self.layer and self._times(*self.layer)[1]

    @property
    def share(self) -> float | None:
        """The share of the dense model's time in which its feed-forward layers are."""
        return self.layers_ms and min(1.0, self.layers_ms[0] / self.dense[self.clock])

    @property
    def predicted(self) -> float | None:
        return self.share and amdahl(self.share, self.layer_x)

    @property
    def more_waiting(self) -> float:
        """By how many milliseconds longer the device waits for the host with planned layers."""
        waits = [
            each["wall_ms"] - _device_ms(each) if self.clock == "wall_ms" else 0.0 for each in (self.dense, self.ours)
        ]
        return waits[1] - waits[0]


def steps(rows: list[dict], layers: list[dict]) -> list[Step]:
    """Each forward, step of decoding and of training of these rows, in each way that was timed, with its LM head."""
    found = []
    for key in dict.fromkeys((*_same(row), row["where"]) for row in rows if row["head"]):
        here = {row["path"]: row for row in rows if (*_same(row), row["where"]) == key}
        alone = _layer(next(iter(here.values())), layers)
        for how, (dense, sparse, clock) in WAYS.items():
            ours = next((here[path] for path in sparse if path in here), None)
            if ours is None or dense not in here:
                continue
            path = next((path for path in reversed(sparse) if path in alone), None)
            layer = (alone[dense], alone[path]) if path and dense in alone else None
            clocked = all(clock in each for each in (here[dense], ours, *(layer or ())))
            found.append(Step(how, here[dense], ours, layer, clock if clocked else "ms"))
    return sorted(found, key=lambda step: _place(step.dense))


def _place(row: dict) -> tuple[int, int]:
    """Where a row comes: forwards, decoding, training, and in each of them few tokens before many."""
    return (FORWARD, DECODE, TRAINING).index(row["step"]), row["tokens"]


def trainings(found: list[Step]) -> tuple[list[Step], list[Step]]:
    """The steps in which a model speaks, and those in which it learns."""
    learns = [step for step in found if step.dense["step"] == TRAINING]
    return [step for step in found if step not in learns], learns


def about(found: list[Step]) -> str:
    """Return which model was measured, in a few words; where and when, say the figures."""
    speaks, _ = trainings(found)
    if not speaks:
        return NOTHING
    row = speaks[0].dense
    random = ", random weights" * row["model"].startswith("drawn ")
    return (
        f"{row['model']}{random}: {row['parameters'] / 1e9:.2g} billion parameters, {row['layers']} layers of "
        f"{row['d_model']:,} x {row['d_ff']:,}, mean nnz {row['nnz']:.0f}"
    )


def compared(found: list[Step]) -> str:
    """A Markdown table of steps: what Amdahl's law says of them, what was measured, and what lies between the two."""
    lines = [
        f"| {step.name} | {step.share:.0%} | {step.layer_x:.2f} | {amdahl(step.share, math.inf):.2f} | "
        f"{step.predicted:.2f} | {step.x:.2f} | {between(step)} |"
        for step in found
        if step.share
    ]
    heads = ("", "layers' share", "layers: times as fast", "model: at most", "predicted", "measured", "")
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines]) if lines else ALONE


def between(step: Step) -> str:
    """Return what lies between prediction and measurement: "as predicted" up to 3%; "host" where more waiting for the
    host is half of the difference or more; "within spread" where the middle half of the turns holds the prediction; or
    which of the two is more."""
    low, high = step.span
    if abs(step.x / step.predicted - 1) <= 1 - LEAST:
        return "as predicted"
    if step.more_waiting >= 0.5 * (step.ours[step.clock] - step.dense[step.clock] / step.predicted) > 0:
        return "host"
    return "within spread" if low <= step.predicted <= high else "more" if step.x > step.predicted else "less"


def pieces(rows: list[dict], layers: list[dict]) -> list[dict]:
    """Where the time of plain calls goes, dense and planned: what, path, and milliseconds of `layers` (feed-forward),
    `head` (the LM head, where it was also timed without), `rest` (other work of the device) and `wait` (for the host).
    """
    found = []
    for row in rows:
        alone = _layer(row, layers)
        layer = alone.get(row["path"] + GRAPH) or alone.get(row["path"])
        if row["path"] not in ("dense eager", "planned") or row["step"] == TRAINING or not row["head"] or layer is None:
            continue
        without = [
            each
            for each in rows
            if not each["head"]
            and (*_model(each), each["what"], each["path"]) == (*_model(row), row["what"], row["path"])
        ]
        device = _device_ms(row)
        head = max(0.0, device - _device_ms(without[0])) if without else 0.0
        own = min(row["layers"] / layer.get("together", 1) * layer["ms"], device - head)
        found.append(
            {key: row[key] for key in ("what", "path", "where", "step", "tokens")}
            | {"layers": own, "head": head, "rest": device - head - own, "wait": row["wall_ms"] - device}
        )
    return sorted(found, key=_place)


def _device_ms(row: dict) -> float:
    """Return what the device works for a plain call. Without a graph's time it is the time of events, or of the call if
    that is shorter: then the device never waits."""
    return min(row["wall_ms"], row.get("gpu_ms", row["ms"]))


# ---- layers: by tokens and by nnz ----


def by_tokens(layers: list[dict], nnz: float = 29) -> list[dict]:
    """Return how many times as fast a planned layer is in each way, by the number of tokens: how, tokens, x, where."""
    found = []
    here = [row for row in select(layers) if abs(row["nnz"] - nnz) <= _NEAR * nnz]
    for tokens in sorted({row["tokens"] for row in here}):
        at = {row["path"]: row for row in reversed(here) if row["tokens"] == tokens}
        for how, (dense, sparse, clock) in WAYS.items():
            ours = next((at[path] for path in sparse if path in at), None)
            if ours and dense in at and clock in ours and at[dense]["where"] == ours["where"]:
                found.append(
                    {"how": how, "tokens": tokens, "x": at[dense][clock] / ours[clock], "where": ours["where"]}
                )
    return found


def most_measured(layers: list[dict]) -> int | None:
    """The number of tokens at which these layers were measured at the most nnz; None for no layers."""
    nnzs: dict[int, set[float]] = {}
    for row in layers:
        nnzs.setdefault(row["tokens"], set()).add(row["nnz"])
    return max(nnzs, key=lambda tokens: len(nnzs[tokens]), default=None)


def by_nnz(layers: list[dict], kind: str, tokens: int | None) -> dict[str, list[tuple[float, float]]]:
    """For so many tokens: path ("forced twell", "planned") -> points (nnz, times as fast as the dense layer, by the
    device's time), nnz ascending. kind: "inference" or "training"."""
    found = {}
    for path in ("forced twell", "planned"):
        if at := select(layers, kind, tokens=tokens, path=path):
            found[path] = sorted({f"{row['nnz']:.2g}": (row["nnz"], row["x_dense"]) for row in reversed(at)}.values())
    return found


def stops(panels: dict[str, dict]) -> str:
    """Between which measured nnz TwELL becomes slower than torch's layer. panels: what it was timed in -> what `by_nnz`
    returned."""
    said = []
    for what, paths in panels.items():
        if points := paths.get("forced twell"):
            below = [f"{nnz:.0f}" for nnz, x in points if x < 1]
            where = next(
                (f"between nnz {a:.0f} and {b:.0f}" for (a, x), (b, y) in zip(points, points[1:]) if x >= 1 > y),
                f"at nnz {', '.join(below)}" if below else "",
            )
            said.append(f"{what}: {where or f'nowhere up to {points[-1][0]:.0f}'}")
    return "; ".join(said)


# ---- memory and energy ----


def costs(found: list[Step]) -> list[dict]:
    """Return what planned models cost in percent of dense ones, where recorded: what, of (time, weights, peak memory,
    energy), percent, dense and ours with their unit, where."""
    lines = []
    for step in found:
        keys = {
            "time": (step.clock, 1.0, "ms"),
            "weights": ("weight_bytes", 2**-20, "MiB"),
            "peak memory": ("peak_bytes", 2**-20, "MiB"),
            "energy": ("mj_per_token", 1.0, "mJ a token"),
        }
        for of, (key, scale, unit) in keys.items():
            dense, ours = step.dense.get(key), step.ours.get(key)
            if dense and ours:
                said = {"percent": 100 * ours / dense, "dense": dense * scale, "ours": ours * scale, "unit": unit}
                lines.append({"what": step.name, "of": of, "where": step.dense["where"]} | said)
    return lines


# ---- this machine ----


def yours(device: str) -> tuple[list[dict], list[dict]]:
    """Rows of a drawn model that is planned, checked and timed on this machine, and rows of its layers.

    device: "cpu" or "cuda". Raises StackError where transformers is missing, or too little memory is there."""
    try:
        return measured(_ON_GPU if device == "cuda" else _ON_CPU, device)
    except RuntimeError as error:
        raise StackError(f"nothing was timed here: {error}") from None


@torch.no_grad()
def measured(config: ModelConfig, device: str, seconds: float = 1.5) -> tuple[list[dict], list[dict]]:
    """As `yours`, for a model of these sizes: a forward of its context, and a step of decoding behind as many tokens.
    seconds: for how long each is timed on a CPU."""
    length = config.context
    bench = models.Bench(config, tokens=(length,), batches=(1,), cached=length, device=device, about=DRAWN)
    found: list[dict] = []
    layers: list[dict] = []
    for key in bench.works:
        work, _ = bench.work(*key), bench.ready(key[1])
        clocks = _Beside(bench, work, seconds)
        found += bench.measure(work, [DENSE, PLANNED], clocks)
        if work.head:
            layers += clocks.rows({**found[-1], "kind": "inference", "workload": LOGNORMAL})
    where = {"where": f"yours, now, on {found[0]['device']}"}
    return [row | where for each in found if (row := _read(each))], [row | where for row in layers]


class _Beside(workloads.Clocks):
    """Clocks of a model that time its feed-forward layers too, on what enters them, one after another: in the same
    turns, so that what disturbs the one disturbs the other."""

    def __init__(self, bench: models.Bench, work: workloads.Workload, seconds: float) -> None:
        super().__init__(bench.tokens.device, seconds)
        entered: list[Tensor] = []
        hooks = [
            each.module.register_forward_pre_hook(lambda _, given: entered.append(given[0])) for each in bench.layers
        ]
        work.makes(bench.dense, False)(0)
        for hook in hooks:
            hook.remove()
        self.calls = {
            f"{_LAYERS}{path}": functools.partial(_through, [(each.module, x) for each, x in zip(layers, entered)])
            for path in (DENSE, PLANNED)
            for layers in [feed_forwards(bench.model_of(path).model)]
        }

    def time(self, calls, tokens, label, left_out, captured=True):
        taken = super().time({**calls, **self.calls}, tokens, label, left_out, captured)
        own = [name for name in taken[0] if name.startswith(_LAYERS)]
        self.taken = [{name.removeprefix(_LAYERS): each.pop(name) for name in own if name in each} for each in taken]
        return taken

    def rows(self, like: dict) -> list[dict]:
        """Rows of all layers together, with the sizes of a model's row."""
        keys = ("kind", "workload", "device", "dtype", "tokens", "d_model", "d_ff", "gated", "nnz")
        shared = {key: like[key] for key in keys} | {"together": like["layers"]}
        return timed.table(shared, self.taken[0], None, self.taken[1])


def _through(pairs: list[tuple[nn.Module, Tensor]], turn: int) -> Tensor:
    return [layer(x) for layer, x in pairs][-1]


# ---- what it comes to ----


def three_lines(found: list[Step], own: list[Step]) -> list[str]:
    """Return what the numbers say, in three lines: of layers and models, of what lies between, and of this machine."""
    both = [step for step in found if step.share]
    if not both:
        lines = [ALONE if found else NOTHING, "So there is nothing to compare."]
    else:
        ends = lambda values: f"{min(values):.2f} to {max(values):.2f}"  # noqa: E731
        count = lambda why: sum(between(step) == why for step in both)  # noqa: E731
        best = max(found, key=lambda step: step.x)
        models = ends([step.x for step in both])
        lines = [
            f"Layers {ends([step.layer_x for step in both])} times as fast make models {models}; best of all: "
            f"{best.x:.2f} ({best.name}).",
            f"Amdahl's law is within {1 - LEAST:.0%} in {count('as predicted')} of {len(both)}, within the "
            f"spread in {count('within spread')}; the host explains {count('host')}.",
        ]
    if not own:
        return [*lines, "Nothing was timed here."]
    last = max(own, key=lambda step: step.x)
    predicted = f" ({last.predicted:.2f} predicted)" if last.predicted else ""
    low, high = last.span
    advice = "swap" if low > 1 else "stay dense" if high < 1 else "no difference"
    return [*lines, f"Here: {last.x:.2f} times{predicted}, {last.name}: {advice}."]
