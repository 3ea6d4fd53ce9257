"""What a plan is: for each layer and each class of token counts, the path to take, and why; saved as JSON.

The planner (twell_lab.analysis.planner) makes plans, SparseFFN follows them. A plan keeps how often each neuron fired
in the profile that it was made from: which neurons are hot, and how many the packed part should keep, follow from
that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import __version__, records
from ..core import InputError, RecordError, write_atomically
from ..layers.choice import DENSE, Candidate, LayerPlan
from ..layers.find import FeedForward
from ..layers.paths.cost import Rates
from ..ops.measure import device_name
from . import saved

FORMAT = "twell-lab plan"
IN_FOLDER = "plan.json"  # what the plan is called in a folder that has its model
VERSION = 3
COLUMNS = {  # of the table that a plan is printed as: field of a row, heading
    "layer": "layer",
    "nnz": "mean nnz",
    "tokens": "tokens",
    "choice": "choice",
    "us": "us",
    "dense_us": "dense us",
    "x_dense": "x dense",
    "how": "how",
    "why": "why",
}


@dataclass(frozen=True)
class Plan:
    """The plans of a model's layers, in the model's order.

    device, dtype: what it was made for; rates: costs.Rates as a dict, what the predictions rest on. inputs: where the
    timed inputs came from ("captured from the batches", "drawn at the profile's rates"). clock: what measured_us is,
    the "wall" time of plain calls, the time of a CUDA "graph" or, in files of version 1, that of the "device". Both are
    None if nothing was timed. release: the twell-lab that made it; None in files of version 1. memory: the share of the
    model's bytes within which the layers hold copies of weights; None if nobody asked.
    """

    layers: list[LayerPlan]
    device: str
    dtype: str
    rates: dict
    inputs: str | None = None
    clock: str | None = None
    release: str | None = __version__
    memory: float | None = None

    @property
    def dense_layers(self) -> list[str]:
        """The layers that stay dense whatever the number of tokens."""
        return [each.name for each in self.layers if {*each.choices.values()} == {DENSE}]

    def layer(self, name: str) -> LayerPlan:
        """The plan of the layer called so; InputError names the ones there are."""
        for each in self.layers:
            if each.name == name:
                return each
        raise InputError(f"the plan has no layer {name!r}; it has {[each.name for each in self.layers]}")

    def table(self) -> list[dict]:
        """Every candidate of every layer: `layer`, and the columns of LayerPlan.table."""
        return [{"layer": each.name, **row} for each in self.layers for row in each.table()]

    @property
    def timed_on(self) -> dict[str, list[str]]:
        """Layer that was timed -> the layers whose candidates have times from there, itself among them."""
        found: dict[str, dict] = {}
        for layer in self.layers:
            for each in layer.candidates:
                if each.timed_on is not None:
                    found.setdefault(each.timed_on, {})[layer.name] = None
        return {name: [*layers] for name, layers in found.items()}

    def check_model(self, found: Iterable[FeedForward]) -> None:
        """InputError unless the plan is for a model with these layers, where they are now, and made by this release:
        paths cost something else elsewhere."""
        layers = [*found]
        check_fits(layers, self.layers, "plan")
        weight = layers[0].up.weight
        here = device_name(weight.device), str(weight.dtype).removeprefix("torch.")
        if (self.device, self.dtype) != here:
            raise InputError(
                f"the plan is for {self.device}, {self.dtype}; the model is on {here[0]}, {here[1]}: a plan made there "
                "is accepted (tl.plan, twell-lab plan)"
            )
        if self.release not in (None, __version__):
            raise InputError(
                f"the plan was made by twell-lab {self.release:.80}, this is {__version__}: a plan made by this one is "
                "accepted (tl.plan, twell-lab plan)"
            )

    def __str__(self) -> str:
        rows = [{**row, "layer": each.name or "layer"} for each in self.layers for row in chosen(each)]
        left = f"; dense throughout: {', '.join(self.dense_layers)}" if self.dense_layers else ""
        clock = f"; times: {self.clock}" if self.clock else ""
        return f"plan for {self.device}, {self.dtype}{clock}{left}\n{records.table(rows, COLUMNS)}"

    def save(self, path: str | os.PathLike) -> Path:
        """Write the plan as JSON, the file whole or not at all. RecordError where it cannot be written."""
        layers = [
            {**vars(each), "neuron_counts": list(each.neuron_counts), "candidates": each.table()}
            for each in self.layers
        ]
        content = {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "dtype": self.dtype,
            "rates": self.rates,
            "inputs": self.inputs,
            "clock": self.clock,
            "release": self.release,
            "memory": self.memory,
            "layers": layers,
        }
        try:
            text = json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"the plan cannot be written as JSON: {error}") from None
        write_atomically(path, text + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """The plan that `save` wrote, or the one in a folder of `twell-lab sparsify`'s. RecordError names the file and
        the field missing or wrong."""
        path = Path(path) / IN_FOLDER if os.path.isdir(path) else path
        content, where, version = saved.load(path, "plan", FORMAT, _PLAN)
        layers = content.pop("layers")
        layers = [_layer_from(each, version, f"{where}, layer {number}") for number, each in enumerate(layers)]
        if version == 1:
            timed = any(each.measured_us is not None for layer in layers for each in layer.candidates)
            content |= {"clock": "device" if timed else None, "release": None}
        return cls(layers=layers, **content)


def rates_of(plan: Plan) -> Rates | None:
    """The rates that a plan was made with; None where they were kept in an older form."""
    try:
        return Rates(**plan.rates)
    except TypeError:
        return None


def chosen(layer: LayerPlan) -> list[dict]:
    """One row a class of token counts of a layer's plan: `tokens`, `choice`, `us` and `dense_us` (None without a dense
    candidate), `x_dense`, `how` and on which layer they were measured, and `why`. dense_us: of the layer as it was,
    where that was timed."""
    rows = []
    for tokens, choice in layer.choices.items():
        weighed = [each for each in layer.candidates if each.tokens == tokens]
        taken = next(each for each in weighed if each.chosen)
        dense = next((each for each in weighed if each.choice == DENSE), taken)
        us, dense_us, how = taken.predicted_us, dense.predicted_us, "predicted"
        if taken.measured_us is not None and dense.measured_us is not None:
            us, dense_us, how = taken.measured_us, dense.measured_us, "measured"
            dense_us = taken.before_us or dense_us
        if how == "measured" and taken.timed_on not in (None, layer.name):
            how = f"measured on {taken.timed_on}"
        nnz = layer.nnz if layer.profiled else None
        row = {"layer": layer.name, "nnz": nnz, "tokens": tokens, "choice": str(choice), "us": us}
        x_dense = dense_us / us if us else None
        rows.append({**row, "dense_us": dense_us, "x_dense": x_dense, "how": how, "why": taken.why})
    return rows


def check_fits(found: Iterable, layers: Iterable, what: str) -> None:
    """InputError where `layers`, of a profile or plan, are not the model's (found: its FeedForwards), by name and
    shape."""
    have = {each.name: (each.up.weight.shape[1], each.up.weight.shape[0], each.gate is not None) for each in found}
    want = {each.name: (each.d_model, each.d_ff, each.gated) for each in layers}
    if have.keys() != want.keys():
        raise InputError(
            f"the {what} has layers that the model lacks: {_lacking(want, have)}; the model has layers that the {what} "
            f"lacks: {_lacking(have, want)}; the same ones are accepted"
        )
    for name, shape in have.items():
        if want[name] != shape:
            described = [
                "d_model {}, d_ff {}, {}".format(*each[:2], "gated" if each[2] else "plain")
                for each in (want[name], shape)
            ]
            raise InputError(
                f"the {what}'s layer {name!r} has {described[0]}, the model's {described[1]}; the same is accepted"
            )


def _lacking(some: dict, others: dict) -> str:
    """The first names of those that the others have not: an expert is a layer, so there may be thousands."""
    names = [name for name in some if name not in others]
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return ", ".join(map(repr, names[:3])) + more or "none"


_TEXT, _TIME = (str, type(None)), (int, float, type(None))
_PLAN_1 = {"device": str, "dtype": str, "rates": dict, "inputs": _TEXT, "layers": list}
_PLAN_2 = {**_PLAN_1, "clock": _TEXT, "release": _TEXT}
_PLAN = {1: _PLAN_1, 2: _PLAN_2, VERSION: {**_PLAN_2, "memory": _TIME}}
_LAYER = {
    "name": str,
    "d_model": int,
    "d_ff": int,
    "gated": bool,
    "profiled": int,
    "neuron_counts": list,
    "candidates": list,
}
_CANDIDATE_1 = {
    "tokens": int,
    "path": str,
    "hot": int,
    "predicted_us": (int, float),
    "measured_us": _TIME,
    "chosen": bool,
    "why": str,
}
_CANDIDATE_2 = {**_CANDIDATE_1, "host_us": _TIME, "device_us": _TIME, "before_us": _TIME, "timed_on": _TEXT}
_CANDIDATE = {1: _CANDIDATE_1, 2: _CANDIDATE_2, VERSION: _CANDIDATE_2}


def _layer_from(content, version: int, where: str) -> LayerPlan:
    content = saved.fields(content, _LAYER, where)
    saved.widths(content, where)
    length = len(content["neuron_counts"])  # which LayerPlan looks at
    counts = saved.counts(content, "neuron_counts", length, content["profiled"], where, "'profiled', ")
    weighed = enumerate(content["candidates"])
    weighed = [saved.fields(each, _CANDIDATE[version], f"{where}, candidate {i}") for i, each in weighed]
    try:
        found = tuple(Candidate(**each) for each in weighed)
        return LayerPlan(**{**content, "neuron_counts": tuple(counts), "candidates": found})
    except InputError as error:
        raise RecordError(f"{where}: {error}") from None
