"""What the feed-forward layers of a model do, why, and what that was worth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .. import records
from ..analysis.plan import COLUMNS, chosen
from ..layers.choice import DENSE, LayerPlan
from ..layers.find import Only, feed_forwards
from ..layers.lossy import Lossy
from ..layers.sparse_ffn import SparseFFN
from .swap import PLANNED, find_layers

_COLUMNS = {"runs" if name == "choice" else name: heading for name, heading in COLUMNS.items()}
_COLUMNS |= {"tokens": "tokens up to", "runs": "runs", "why": "why"}


@dataclass(frozen=True)
class Report:
    """What `report` found; printed, it is a table. rows: one a layer and class of token counts, JSON-able."""

    rows: list[dict]

    @property
    def together(self) -> list[dict]:
        """For each class that all layers have, and with a time in each: `tokens`, and `us`, `dense_us` and `x_dense` of
        all layers together."""
        layers = {row["layer"] for row in self.rows}
        sums = []
        for tokens in sorted({row["tokens"] for row in self.rows if row["tokens"] is not None}):
            rows = [row for row in self.rows if row["tokens"] == tokens]
            if {row["layer"] for row in rows} == layers and all(row["us"] and row["dense_us"] for row in rows):
                us, dense_us = (sum(row[name] for row in rows) for name in ("us", "dense_us"))
                sums.append({"tokens": tokens, "us": us, "dense_us": dense_us, "x_dense": dense_us / us})
        return sums

    def __str__(self) -> str:
        lines = [records.table([{**row, "layer": row["layer"] or "layer"} for row in self.rows], _COLUMNS)]
        for all_of in self.together:
            tokens = f"{all_of['tokens']:,} token{'s' * (all_of['tokens'] > 1)}"
            times = f"{all_of['us']:,.0f} us instead of {all_of['dense_us']:,.0f}, {all_of['x_dense']:.3g}x dense"
            lines.append(f"all layers, {tokens}: {times}")
        return "\n".join(lines)


def report(model: nn.Module, *, only: Only | None = None) -> Report:
    """Say for each ReLU feed-forward layer of a model what runs, why, and what it was worth.

    Reads what the layers were told and what was timed when they were planned; it times nothing. A layer that is not
    swapped is run on a few rows, to say why it could not be; what a plan left dense throughout is the model's own.

    Returns:
        A Report: a table when printed, and `rows`, one a layer and class of token counts. A row has the `layer`; its
        `state` ("not swapped", "planned" or "told"); `tokens`, the largest count of the class, None for any count; the
        `choice` of path; what `runs` of it with the weights as they are: the choice, or "dense: " and why (then without
        times); `nnz`, the neurons firing at a token when they were counted; `us` and `dense_us`, the microseconds that
        so many tokens take, and took before the layer was swapped; `x_dense`, their ratio; `how` they are known
        ("measured", "measured on" a layer like it, "predicted"); and `why`. What is not known is None.

    Raises:
        InputError: for a model without ReLU feed-forward layers.
    """
    rows = []
    layers = feed_forwards(model, only=only)
    _, reasons = find_layers(model, only)
    plan = getattr(model, PLANNED, None)
    stayed = {} if plan is None else {layer.name: layer for layer in plan.layers if layer.unchanged}
    for found in layers:
        nothing = dict.fromkeys(("tokens", "nnz", "us", "dense_us", "x_dense", "how"))
        lossy = f"; {found.acts}" if isinstance(found.acts, Lossy) else f"; {found.cut}" if found.cut else ""
        if found.name in stayed and not isinstance(found.module, SparseFFN):
            state, told = "planned", chosen(stayed[found.name])
        elif not isinstance(found.module, SparseFFN):
            why = reasons.get(found.name, "sparsify left this layer as it is, or was not called")
            told = [{"choice": str(DENSE), "why": why}]
            state = "not swapped"
        elif isinstance(plan := found.module.plan, LayerPlan):
            state, told = "planned", chosen(plan)
        else:
            state, told = "told", [{"choice": str(plan), "why": "asked for by name, be it faster or not"}]
        for row in told:
            row = {**nothing, **row, "layer": found.name, "state": state, "why": f"{row['why']}{lossy}"}
            row["runs"] = row["choice"]
            if isinstance(found.module, SparseFFN):
                row["runs"] = found.module.runs(row["tokens"])
                row["why"] += "; its neurons lie in another order" if found.module.order else ""
            if row["runs"] != row["choice"] and row["runs"].startswith(f"{DENSE}: "):
                row |= dict.fromkeys(("us", "x_dense", "how"))
            rows.append(row)
    return Report(rows)
