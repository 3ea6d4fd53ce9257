"""Whole models (rows of bench.models) beside their feed-forward layers (rows of "inference" and "training" records),
recorded and measured here, and Amdahl's law between the two."""

from __future__ import annotations

import math
from statistics import quantiles

import torch

from ... import records
from ...analysis.profile import FiringProfile
from ...bench import models
from ...core import StackError
from ...models.tiny import ModelConfig
from ..recorded import GRAPH, LEAST, LOGNORMAL, newest, select

FORWARD, DECODE, TRAINING = "forward", "decode", "training"
_KINDS = {"model_forward": FORWARD, "model_decode": DECODE, "model_training": TRAINING, "training": TRAINING}
# How a model runs: the dense path, the sparse one (the first of these that was timed), and which time counts. Launches
# of a graph are one, so a graph's time is the device's; a plain call's is what passes on the wall.
WAYS = {
    "eager": ("dense eager", ("planned",), "wall_ms"),
    "compiled": ("dense compiled", ("planned compiled",), "wall_ms"),
    "CUDA graph": ("dense eager (graph)", ("planned for graphs (graph)", "planned (graph)"), "ms"),
}
_NEAR = 0.25  # by how much the mean nnz of a layer may differ from that of the model that it stands for
DRAWN = "drawn Llama"
# What is timed on the reader's machine: a drawn model, wide enough for its layers to gain something.
_ON_GPU = ModelConfig(vocabulary=32768, d_model=2048, layers=8, heads=16, d_ff=5632, context=2048)
_ON_CPU = ModelConfig(vocabulary=2048, d_model=512, layers=2, heads=8, d_ff=2048, context=32)


# ---- Amdahl's law ----


def amdahl(share: float, times: float) -> float:
    """Return how many times as fast the whole is, where this share of its time becomes so many times as fast."""
    left = 1 - share + share / times
    return 1 / left if left else math.inf


# ---- rows of whole models ----


def recorded() -> list[dict]:
    """The rows of the large drawn model and of a model's training step that were recorded on GPUs; of equal
    measurements the newest. Each row gets `step` (FORWARD, DECODE, TRAINING), `model`, `what` and `where`."""
    large = lambda row: row["kind"] in _KINDS and "layers" in row and row["parameters"] > 1e8
    return [_read(row) for name in ("bench-model", "training") for row in newest(name, "", large)]


def _read(row: dict) -> dict:
    """A row of a whole model in the names used here."""
    model, what = DRAWN, row["workload"].partition(", ")[2]
    if row["kind"] == "training":  # which are those of a layer, too
        model, what = f"a model of {row['layers']} layers", f"training step, {row['tokens']:,} tokens"
    return {"head": True, **row, "step": _KINDS[row["kind"]], "model": model, "what": what}


def _size(row: dict) -> tuple:
    return tuple(row[key] for key in ("device", "d_model", "d_ff", "gated"))


def _model(row: dict) -> tuple:
    return row["device"], row["model"], row["parameters"]


def _same(row: dict) -> tuple:
    """Return what is equal in rows that measure the same thing, be it on different paths."""
    return (*_model(row), row["what"], row["head"], f"{row['nnz']:.2g}")


def layers_of(rows: list[dict]) -> list[dict]:
    """Every recorded row of a single layer like those of these models, on their device; of equal ones the newest."""
    sizes, kinds = {_size(row) for row in rows}, ("inference", "training")
    single = lambda row: row.get("kind") in kinds and "layers" not in row and row["workload"] == LOGNORMAL
    return newest("", "", lambda row: single(row) and _size(row) in sizes)


def _layer(row: dict, layers: list[dict]) -> dict[str, dict]:
    """The rows of the layer that stands for those of a model's row, by path: of the same sizes and as many tokens, and
    nearest in nnz; {} where there is none."""
    kind, off = "training" if row["step"] == TRAINING else "inference", lambda other: abs(other["nnz"] - row["nnz"])
    same = [other for other in select(layers, kind, tokens=row["tokens"]) if _size(other) == _size(row)]
    near = sorted((other for other in same if off(other) <= _NEAR * row["nnz"]), key=off)
    best = [other for other in near if (other["nnz"], other["where"]) == (near[0]["nnz"], near[0]["where"])]
    return {other["path"]: other for other in best}


def steps(rows: list[dict], layers: list[dict]) -> list[dict]:
    """Each forward, step of decoding and of training of these rows with its LM head, in each of WAYS that was timed:
    forwards first, few tokens before many.

    Each has name, how, step, tokens, where; the rows `dense` and `ours` of the model; dense_ms and ours_ms by the time
    that counts; x, how many times as fast the model is with planned layers, and low to high, the middle half of that.
    Where a layer like the model's was recorded, also share (of the dense model's time that its feed-forward layers
    take), layer_x, predicted (x by Amdahl's law) and `why` (see `_why`); else these are None."""
    found = []
    for key in dict.fromkeys((*_same(row), row["where"]) for row in rows if row["head"]):
        here = {row["path"]: row for row in rows if (*_same(row), row["where"]) == key}
        alone = _layer(next(iter(here.values())), layers)
        for how, (dense, sparse, clock) in WAYS.items():
            ours = next((here[path] for path in sparse if path in here), None)
            if ours is None or dense not in here:
                continue
            path = next((path for path in reversed(sparse) if path in alone), None)
            layer = [alone[dense], alone[path]] if path and dense in alone else []
            clocked = all(clock in row for row in (here[dense], ours, *layer))
            found.append(_step(how, here[dense], ours, layer, clock if clocked else "ms"))
    return sorted(found, key=_place)


def _step(how: str, dense: dict, ours: dict, layer: list[dict], clock: str) -> dict:
    low, x, high = _times(dense, ours, clock)
    fires = f", nnz {dense['nnz']:.0f}" if dense["step"] == TRAINING else ""
    step = {key: dense[key] for key in ("step", "tokens", "where")} | {"dense": dense, "ours": ours, "how": how}
    step |= {"name": f"{dense['what']}{fires}, {how}", "dense_ms": dense[clock], "ours_ms": ours[clock]}
    step |= {"x": x, "low": min(low, x), "high": max(high, x)}
    step |= dict.fromkeys(("share", "layer_x", "predicted", "why"))
    if layer:
        alone = dense["layers"] * layer[0][clock]
        share, layer_x = min(1.0, alone / dense[clock]), _times(layer[0], layer[1], clock)[1]
        step |= {"share": share, "layer_x": layer_x, "predicted": amdahl(share, layer_x)}
        waits = [row["wall_ms"] - _device_ms(row) if clock == "wall_ms" else 0.0 for row in (dense, ours)]
        step["why"] = _why(step, waits[1] - waits[0])
    return step


def _times(dense: dict, ours: dict, clock: str) -> tuple[float, float, float]:
    """Return dense over ours between its quartiles. It is the ratio of the medians, as in the tables of records; on a
    CPU, which does other things too, the median over the turns: what disturbed the one disturbed the other."""
    samples = "wall_samples" if clock == "wall_ms" else "samples"
    turns = [a / b for a, b in zip(dense.get(samples, []), ours.get(samples, []))]
    x = dense[clock] / ours[clock]
    low, middle, high = quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else [x] * 3
    return low, middle if records.is_cpu(dense["device"]) else x, high


def _why(step: dict, waiting: float) -> str:
    """Return what lies between prediction and measurement: "as predicted" up to 3%; "host" where waiting longer for the
    host, by so many milliseconds, is half of the difference or more; "within spread" where the middle half of the turns
    holds the prediction; or which of the two is more."""
    if abs(step["x"] / step["predicted"] - 1) <= 1 - LEAST:
        return "as predicted"
    if waiting >= 0.5 * (step["ours_ms"] - step["dense_ms"] / step["predicted"]) > 0:
        return "host"
    within = step["low"] <= step["predicted"] <= step["high"]
    return "within spread" if within else "more" if step["x"] > step["predicted"] else "less"


def _place(row: dict) -> tuple[int, int]:
    return (FORWARD, DECODE, TRAINING).index(row["step"]), row["tokens"]


def pieces(rows: list[dict], layers: list[dict]) -> list[dict]:
    """Where the time of plain calls goes, dense and planned: what, path, where, whole (ms of the call), and rows `of`
    each piece with its ms: feed-forward layers, the LM head (where it was also timed without), the rest of the device's
    work, and waiting for the host."""
    found = []
    for row in sorted(rows, key=_place):
        alone = _layer(row, layers)
        layer = alone.get(row["path"] + GRAPH) or alone.get(row["path"])
        if row["path"] not in ("dense eager", "planned") or row["step"] == TRAINING or not row["head"] or layer is None:
            continue
        same = lambda row: (*_model(row), row["what"], row["path"])
        without = [other for other in rows if not other["head"] and same(other) == same(row)]
        device = _device_ms(row)
        head = max(0.0, device - _device_ms(without[0])) if without else 0.0
        own = min(row["layers"] * layer["ms"], device - head)
        rest = "attention, norms and the rest" if without else "attention, LM head and the rest"
        parts = {"feed-forward layers": own, "LM head": head, rest: device - head - own}
        parts |= {"waiting for the host": row["wall_ms"] - device}
        shared = {key: row[key] for key in ("what", "path", "where")} | {"whole": row["wall_ms"]}
        found += [shared | {"of": of, "ms": ms} for of, ms in parts.items() if ms]
    return found


def _device_ms(row: dict) -> float:
    """Return what the device works for a plain call. Without a graph's time it is the time of events, or of the call if
    that is shorter: then the device never waits."""
    return min(row["wall_ms"], row.get("gpu_ms", row["ms"]))


# ---- this machine ----


@torch.no_grad()
def yours(
    device: str, firing: FiringProfile | None = None, config: ModelConfig | None = None, seconds: float = 1.5
) -> list[dict]:
    """Rows of a drawn model that is planned, checked and timed here: a forward of its context, and a step of decoding
    behind up to 511 tokens. firing: of the model that it fires like; by default as in the paper. config: other sizes.
    seconds: of each, on a CPU. StackError without transformers, or with too little memory."""
    config = config or (_ON_GPU if device == "cuda" else _ON_CPU)
    how = {"tokens": (config.context,), "batches": (1,), "device": device, "firing": firing}
    try:
        bench = models.Bench(config, **how, seconds=seconds)
        found = [row for key in bench.works for row in bench.rows(*key)]
    except RuntimeError as error:
        raise StackError(f"nothing was timed here: {error}") from None
    return [_read(row) | {"where": f"yours, now, on {row['device']}"} for row in found]
