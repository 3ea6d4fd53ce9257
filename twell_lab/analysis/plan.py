"""What a plan is: for each layer and each class of token counts, the path to take, and why; saved as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from .. import __version__, records
from ..core import InputError
from ..layers.choice import DENSE, LayerPlan
from ..layers.find import FeedForward
from ..ops.clock import device_name
from .profile import check_same
from .saved import Saved

IN_FOLDER = "plan.json"  # what the plan is called in a folder that has its model
# Of the table that a plan is printed as: the fields of its rows, with their headings.
COLUMNS = {"layer": "layer", "nnz": "mean nnz"}
COLUMNS |= {name: name.replace("_", " ") for name in ("tokens", "choice", "us", "dense_us", "x_dense", "how", "why")}


@dataclass(frozen=True)
class Plan(Saved):
    """The plans of a model's layers, in the model's order.

    device, dtype: what it was made for; rates: costs.Rates as a dict, what the predictions rest on. calls: whose time
    decides: "eager", "compiled" or "captured" calls; inputs: where what was timed came from ("captured from the
    batches", "drawn at the profile's rates"), None where nothing was."""

    FORMAT: ClassVar = "twell-lab plan"
    VERSION: ClassVar = 4

    layers: list[LayerPlan]
    device: str
    dtype: str
    rates: dict = field(default_factory=dict)
    calls: str = "eager"
    inputs: str | None = None
    release: str = __version__

    def layer(self, name: str) -> LayerPlan:
        """Return the plan of the layer called so; InputError names the ones there are."""
        layers = {layer.name: layer for layer in self.layers}
        if name not in layers:
            raise InputError(f"the plan has no layer {name!r}; it has {[*layers]}")
        return layers[name]

    def table(self) -> list[dict]:
        """List every candidate of every layer: `layer`, and the fields of Candidate."""
        return [{"layer": layer.name, **vars(row)} for layer in self.layers for row in layer.candidates]

    def summary(self) -> str:
        """Return lines that say which paths the layers take, what that should gain, and what stayed dense and why."""
        taken, lines = {layer.name: chosen(layer) for layer in self.layers}, []
        for tokens in sorted({tokens for layer in self.layers for tokens in layer.choices}):
            rows = [next((row for row in rows if tokens <= row["tokens"]), rows[-1]) for rows in taken.values()]
            paths = Counter(layer.choice(tokens).path for layer in self.layers)
            us, dense_us = (sum(row[name] or 0.0 for row in rows) for name in ("us", "dense_us"))
            gain = f"; {dense_us / us:.2f}x dense together" if us and all(row["us"] for row in rows) else ""
            ways = ", ".join(f"{count} {path}" for path, count in paths.most_common())
            lines.append(f"up to {tokens:,} token{'s' * (tokens > 1)}: {ways}{gain}")
        why: dict[str, list[str]] = {}
        for layer in self.layers:
            if {*layer.choices.values()} == {DENSE}:
                why.setdefault(taken[layer.name][-1]["why"], []).append(layer.name or "layer")
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
        have, planned = ({layer.name: layer for layer in some} for some in (layers, self.layers))
        check_same(planned, have, "the plan", "the model")
        weight = have[self.layers[0].name].up.weight
        here = device_name(weight.device), str(weight.dtype).removeprefix("torch.")
        if (self.device, self.dtype) != here:
            raise InputError(
                f"the plan is for {self.device}, {self.dtype}; the model is on {here[0]}, {here[1]}: a plan made there "
                "is accepted (tl.plan, twell-lab sparsify)"
            )

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read the plan that `save` wrote, or the one in a folder of `twell-lab sparsify`'s; RecordError as there."""
        return super().load(Path(path) / IN_FOLDER if os.path.isdir(path) else path)


def chosen(layer: LayerPlan) -> list[dict]:
    """List one row a class of token counts of a layer's plan: `layer`, `nnz`, `tokens`, `choice`, `us` and `dense_us`
    (None where nothing is known), `x_dense`, `how` and on which layer they were measured, and `why`."""
    rows = []
    for tokens, choice in layer.choices.items():
        weighed = [row for row in layer.candidates if row.tokens == tokens]
        taken = next(row for row in weighed if row.chosen)
        dense = next((row for row in weighed if row.choice == DENSE), taken)
        us, dense_us, how = taken.predicted_us or None, dense.predicted_us or None, "predicted"
        if taken.measured_us is not None:
            us, dense_us, how = taken.measured_us, taken.dense_us, "measured"
            us = dense_us if layer.unchanged else us  # nothing is swapped
            how += "" if taken.timed_on in (None, layer.name) else f" on {taken.timed_on}"
        row = {"layer": layer.name, "nnz": layer.nnz if layer.profiled else None, "tokens": tokens}
        row |= {"choice": str(choice), "us": us, "dense_us": dense_us}
        rows.append({**row, "x_dense": dense_us / us if us and dense_us else None, "how": how, "why": taken.why})
    return rows
