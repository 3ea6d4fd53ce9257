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
_UNKNOWN = ("tokens", "nnz", "us", "dense_us", "x_dense", "how")


@dataclass(frozen=True)
class Report:
    """What `report` found; printed, it is a table. rows: one a layer and class of token counts, JSON-able."""

    rows: list[dict]

    def __str__(self) -> str:
        return records.table([{**row, "layer": row["layer"] or "layer"} for row in self.rows], _COLUMNS)


def report(model: nn.Module, *, only: Only | None = None) -> Report:
    """Say for each ReLU feed-forward layer of a model what runs, why, and what it was worth. It times nothing; a layer
    that is not swapped is run on a few rows, to say why it could not be. InputError for a model without such layers.

    A row has the `layer`; its `state` ("not swapped", "planned" or "told"); `tokens`, the largest count of the class,
    None for any count; the `choice` of path; what `runs` of it with the weights as they are: the choice, or "dense: "
    and why (then without times); `nnz`, the neurons firing at a token when they were counted; `us` and `dense_us`, the
    microseconds that so many tokens take, and took before the layer was swapped; `x_dense`, their ratio; `how` they are
    known ("measured", "measured on" a layer like it, "predicted"); and `why`. What is not known is None."""
    rows = []
    _, reasons = find_layers(model, only)
    plan = getattr(model, PLANNED, None)
    stayed = {} if plan is None else {layer.name: layer for layer in plan.layers if layer.unchanged}
    for found in feed_forwards(model, only=only):
        sparse = found.module if isinstance(found.module, SparseFFN) else None
        plan = stayed.get(found.name) if sparse is None else sparse.plan
        state = "planned" if isinstance(plan, LayerPlan) else "told" if sparse else "not swapped"
        if isinstance(plan, LayerPlan):
            told = chosen(plan)
        elif sparse is not None:
            told = [{"choice": str(plan), "why": "asked for by name, be it faster or not"}]
        else:
            why = reasons.get(found.name, "sparsify left this layer as it is, or was not called")
            told = [{"choice": str(DENSE), "why": why}]
        lossy = f"; {found.acts}" if isinstance(found.acts, Lossy) else f"; {found.cut}" if found.cut else ""
        for row in told:
            row = {**dict.fromkeys(_UNKNOWN), **row, "layer": found.name, "state": state, "runs": row["choice"]}
            row["why"] += lossy
            if sparse is not None:
                row["runs"] = sparse.runs(row["tokens"])
                row["why"] += "; its neurons lie in another order" if sparse.order else ""
            if row["runs"] != row["choice"] and row["runs"].startswith(f"{DENSE}: "):
                row |= dict.fromkeys(("us", "x_dense", "how"))
            rows.append(row)
    return Report(rows)
