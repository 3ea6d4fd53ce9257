"""What a plan is: for each layer and each class of token counts, the path to take, and why; saved as JSON.

The planner (twell_lab.analysis.planner) makes plans, SparseFFN follows them. A plan keeps how often each neuron fired
in the profile that it was made from: which neurons are hot follows from that."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .. import __version__, records
from ..core import InputError, RecordError, read_json, write_atomically
from ..layers.choice import DENSE, Candidate, Choice, LayerPlan
from ..layers.find import FeedForward
from ..ops.clock import device_name

FORMAT, VERSION = "twell-lab plan", 4
IN_FOLDER = "plan.json"  # what the plan is called in a folder that has its model
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

    device, dtype: what it was made for; rates: costs.Rates as a dict, what the predictions rest on. calls: whose time
    decides: "eager", "compiled" or "captured" calls; inputs: where what was timed came from ("captured from the
    batches", "drawn at the profile's rates"), None where nothing was."""

    layers: list[LayerPlan]
    device: str
    dtype: str
    rates: dict = field(default_factory=dict)
    calls: str = "eager"
    inputs: str | None = None
    release: str = __version__

    @property
    def dense_layers(self) -> list[str]:
        """The layers that stay dense whatever the number of tokens."""
        return [layer.name for layer in self.layers if {*layer.choices.values()} == {DENSE}]

    def layer(self, name: str) -> LayerPlan:
        """Return the plan of the layer called so; InputError names the ones there are."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InputError(f"the plan has no layer {name!r}; it has {[layer.name for layer in self.layers]}")

    def choice(self, name: str, tokens: int) -> Choice:
        """Return what the layer called so does with this many tokens at once."""
        return self.layer(name).choice(tokens)

    def table(self) -> list[dict]:
        """List every candidate of every layer: `layer`, and the columns of LayerPlan.table."""
        return [{"layer": layer.name, **row} for layer in self.layers for row in layer.table()]

    def summary(self) -> str:
        """Return lines that say which paths the layers take, what that should gain, and what stayed dense and why."""
        lines = []
        for tokens in sorted({tokens for layer in self.layers for tokens in layer.choices}):
            paths = Counter(layer.choice(tokens).path for layer in self.layers)
            rows = [_taken(layer, tokens) for layer in self.layers]
            us, dense_us = (sum(row[name] or 0.0 for row in rows) for name in ("us", "dense_us"))
            gain = f"; {dense_us / us:.2f}x dense together" if us and all(row["us"] for row in rows) else ""
            taken = ", ".join(f"{count} {path}" for path, count in paths.most_common())
            lines.append(f"up to {tokens:,} token{'s' * (tokens > 1)}: {taken}{gain}")
        why: dict[str, list[str]] = {}
        dense = {*self.dense_layers}
        for layer in self.layers:
            if layer.name in dense:
                why.setdefault(_taken(layer, max(layer.choices))["why"], []).append(layer.name or "layer")
        for reason, names in why.items():
            more = f" and {len(names) - 3} more" if names[3:] else ""
            lines.append(f"dense throughout: {', '.join(names[:3])}{more}: {reason}")
        how = f"timed, {self.calls} calls" if self.inputs else "predicted"
        return "\n".join([*lines, f"for {self.device}, {self.dtype}; {how}"])

    def __str__(self) -> str:
        rows = [{**row, "layer": layer.name or "layer"} for layer in self.layers for row in chosen(layer)]
        return f"{records.table(rows, COLUMNS)}\n{self.summary()}"

    def check_model(self, layers: Iterable[FeedForward]) -> None:
        """Raise InputError unless the plan is for a model with these layers, where they are now."""
        layers = [*layers]
        check_fits(layers, self.layers, "plan")
        weight = layers[0].up.weight
        here = device_name(weight.device), str(weight.dtype).removeprefix("torch.")
        if (self.device, self.dtype) != here:
            raise InputError(
                f"the plan is for {self.device}, {self.dtype}; the model is on {here[0]}, {here[1]}: a plan made there "
                "is accepted (tl.plan, twell-lab plan)"
            )

    def save(self, path: str | os.PathLike) -> Path:
        """Write the plan as JSON, the file whole or not at all. RecordError where it cannot be written."""
        layers = [{**vars(layer), "candidates": layer.table()} for layer in self.layers]
        content = {"format": FORMAT, "version": VERSION, **vars(self), "layers": layers}
        try:
            text = json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordError(f"the plan cannot be written as JSON: {error}") from None
        write_atomically(path, text + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Read the plan that `save` wrote, or the one in a folder of `twell-lab sparsify`'s. RecordError, naming the
        file, for one that holds no plan of this version, or not all of one."""
        path = Path(path) / IN_FOLDER if os.path.isdir(path) else path
        content = read_json(path, "plan")
        try:
            form, version = content.pop("format"), content.pop("version")
            if (form, version) != (FORMAT, VERSION):
                raise ValueError(f"it says {form!r:.80}, version {version!r:.80}; {FORMAT!r}, {VERSION} is accepted")
            layers = [_layer(layer) for layer in content.pop("layers")]
            return cls(layers, **content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{os.fspath(path)!r} holds no plan: {error}") from None


def _layer(content: dict) -> LayerPlan:
    counts = tuple(content["neuron_counts"])
    if not all(type(count) is int and 0 <= count <= content["profiled"] for count in counts):
        raise ValueError("neuron_counts are not whole numbers from 0 to 'profiled'")
    candidates = tuple(Candidate(**row) for row in content["candidates"])
    if not all(type(row.tokens) is int and row.tokens > 0 for row in candidates):
        raise ValueError("the tokens of a candidate are no whole number from 1 up")
    return LayerPlan(**{**content, "neuron_counts": counts, "candidates": candidates})


def chosen(layer: LayerPlan) -> list[dict]:
    """List one row a class of token counts of a layer's plan: `layer`, `nnz`, `tokens`, `choice`, `us` and `dense_us`
    (of the layer as torch computes it; both None where nothing is known), `x_dense`, `how` and on which layer they were
    measured, and `why`."""
    return [_taken(layer, tokens) for tokens in layer.choices]


def _taken(layer: LayerPlan, tokens: int) -> dict:
    """Return the row of the class that holds so many tokens."""
    tokens = next((most for most in layer.choices if tokens <= most), max(layer.choices))
    rows = [row for row in layer.candidates if row.tokens == tokens]
    taken = next(row for row in rows if row.chosen)
    dense = next((row for row in rows if row.choice == DENSE), taken)
    us, dense_us, how = taken.predicted_us or None, dense.predicted_us or None, "predicted"
    if taken.measured_us is not None:
        us, dense_us, how = taken.measured_us, taken.dense_us, "measured"
        us = dense_us if layer.unchanged else us  # nothing is swapped
        how += "" if taken.timed_on in (None, layer.name) else f" on {taken.timed_on}"
    return {
        "layer": layer.name,
        "nnz": layer.nnz if layer.profiled else None,
        "tokens": tokens,
        "choice": str(taken.choice),
        "us": us,
        "dense_us": dense_us,
        "x_dense": dense_us / us if us and dense_us else None,
        "how": how,
        "why": taken.why,
    }


def check_fits(found: Iterable[FeedForward], layers: Iterable, what: str) -> None:
    """Raise InputError where `layers`, of a profile or plan, are not the model's, by name and shape."""
    have = {layer.name: (layer.up.weight.shape[1], layer.up.weight.shape[0], layer.gate is not None) for layer in found}
    want = {layer.name: (layer.d_model, layer.d_ff, layer.gated) for layer in layers}
    if have.keys() != want.keys():
        raise InputError(
            f"the {what} has layers that the model lacks: {_lacking(want, have)}; the model has layers that the {what} "
            f"lacks: {_lacking(have, want)}; the same ones are accepted"
        )
    for name, shape in have.items():
        if want[name] != shape:
            theirs, ours = (
                f"d_model {d_model}, d_ff {d_ff}, {'gated' if gated else 'plain'}"
                for d_model, d_ff, gated in (want[name], shape)
            )
            raise InputError(f"the {what}'s layer {name!r} has {theirs}, the model's {ours}; the same is accepted")


def _lacking(some: dict, others: dict) -> str:
    """Return the first names of those that the others have not: an expert is a layer, so there may be thousands."""
    names = [name for name in some if name not in others]
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return ", ".join(map(repr, names[:3])) + more or "none"
