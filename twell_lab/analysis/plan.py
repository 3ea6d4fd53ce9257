"""What a plan is: for each layer and each class of token counts, the path to take, and why; saved as JSON.

The planner (twell_lab.analysis.planner) makes plans, SparseFFN follows them. A plan keeps how often each neuron fired
in the profile it was made from, so the hot neurons, and what the packed part is expected to keep, follow from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import InputError, RecordError
from ..core.files import write_atomically
from ..layers.choice import DENSE, Candidate, LayerPlan
from ..records import record as records
from . import saved

FORMAT = "twell-lab plan"
VERSION = 1


@dataclass(frozen=True)
class Plan:
    """The plans of a model's layers, in the model's order.

    device, dtype: what it was made for; rates: costs.Rates as a dict, what the predictions rest on; inputs: where the
    timed inputs came from ("captured from the batches", "drawn at the profile's rates"), None if nothing was timed.
    """

    layers: list[LayerPlan]
    device: str
    dtype: str
    rates: dict
    inputs: str | None = None

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

    def __str__(self) -> str:
        rows = []
        for each in self.layers:
            for tokens, choice in each.choices.items():
                weighed = [c for c in each.candidates if c.tokens == tokens]
                chosen = next(c for c in weighed if c.chosen)
                dense = next((c for c in weighed if c.choice == DENSE), chosen)
                timed = None not in (chosen.measured_us, dense.measured_us)
                dense_us, us = (c.measured_us if timed else c.predicted_us for c in (dense, chosen))
                rows.append(
                    {
                        "layer": each.name or "layer",
                        "nnz": each.nnz,
                        "tokens": tokens,
                        "choice": str(choice),
                        "us": us,
                        "dense_us": dense_us,
                        "x_dense": dense_us / us if us else None,
                        "how": "measured" if timed else "predicted",
                        "why": chosen.why,
                    }
                )
        columns = {
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
        left = f"; dense throughout: {', '.join(self.dense_layers)}" if self.dense_layers else ""
        return f"plan for {self.device}, {self.dtype}{left}\n{records.table(rows, columns)}"

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
        """The plan that `save` wrote. RecordError names the file and the field missing or wrong."""
        kinds = {"device": str, "dtype": str, "rates": dict, "inputs": (str, type(None)), "layers": list}
        content, where = saved.load(path, "plan", FORMAT, VERSION, kinds)
        layers = [_layer_from(each, f"{where}, layer {number}") for number, each in enumerate(content.pop("layers"))]
        return cls(layers=layers, **content)


def check_fits(found: Iterable, layers: Iterable, what: str) -> None:
    """InputError where `layers`, of a profile or plan, are not the model's (found: its FeedForwards), by name and
    shape."""
    have = {each.name: (each.up.weight.shape[1], each.up.weight.shape[0], each.gate is not None) for each in found}
    want = {each.name: (each.d_model, each.d_ff, each.gated) for each in layers}
    if sorted(have) != sorted(want):
        raise InputError(f"the {what} has layers {sorted(want)}, the model {sorted(have)}; the same ones are accepted")
    for name, shape in have.items():
        if want[name] != shape:
            described = [
                "d_model {}, d_ff {}, {}".format(*each[:2], "gated" if each[2] else "plain")
                for each in (want[name], shape)
            ]
            raise InputError(
                f"the {what}'s layer {name!r} has {described[0]}, the model's {described[1]}; the same is accepted"
            )


_LAYER = {
    "name": str,
    "d_model": int,
    "d_ff": int,
    "gated": bool,
    "profiled": int,
    "neuron_counts": list,
    "candidates": list,
}
_CANDIDATE = {
    "tokens": int,
    "path": str,
    "hot": int,
    "predicted_us": (int, float),
    "measured_us": (int, float, type(None)),
    "chosen": bool,
    "why": str,
}


def _layer_from(content, where: str) -> LayerPlan:
    content = saved.fields(content, _LAYER, where)
    saved.widths(content, where)
    length = len(content["neuron_counts"])  # which LayerPlan looks at
    counts = saved.counts(content, "neuron_counts", length, content["profiled"], where, "'profiled', ")
    weighed = content["candidates"]
    weighed = [saved.fields(each, _CANDIDATE, f"{where}, candidate {i}") for i, each in enumerate(weighed)]
    try:
        found = tuple(Candidate(**each) for each in weighed)
        return LayerPlan(**{**content, "neuron_counts": tuple(counts), "candidates": found})
    except InputError as error:
        raise RecordError(f"{where}: {error}") from None
