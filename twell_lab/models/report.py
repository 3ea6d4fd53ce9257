"""What the feed-forward layers of a model do, why, and what that was worth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .. import records
from ..analysis.plan import COLUMNS, chosen
from ..layers.anatomy import Only, feed_forwards
from ..layers.choice import DENSE, Choice, LayerPlan
from ..layers.lossy import Lossy
from ..layers.shards import part_of
from ..layers.sparse_ffn import SparseFFN

_COLUMNS = {"runs" if name == "choice" else name: heading for name, heading in COLUMNS.items()}
_COLUMNS |= {"tokens": "tokens up to", "runs": "runs", "layout": "weights"}


@dataclass(frozen=True)
class Report:
    """What `report` found; printed, it is a table.

    rows: one a layer and class of token counts, JSON-able; see `report`. model_bytes: of the model's parameters."""

    rows: list[dict]
    model_bytes: int = 0

    @property
    def extra_bytes(self) -> int:
        """What the layers hold beyond the dense ones' parameters, in bytes."""
        return sum({row["layer"]: row["extra_bytes"] for row in self.rows}.values())

    @property
    def together(self) -> list[dict]:
        """For each class that all layers have, and with a time in each: `tokens`, and `us`, `dense_us` and `x_dense` of
        all layers together."""
        layers = {row["layer"] for row in self.rows}
        found = []
        for tokens in sorted({row["tokens"] for row in self.rows if row["tokens"] is not None}):
            rows = [row for row in self.rows if row["tokens"] == tokens]
            if {row["layer"] for row in rows} == layers and all(row["us"] and row["dense_us"] for row in rows):
                us, dense_us = (sum(row[name] for row in rows) for name in ("us", "dense_us"))
                found.append({"tokens": tokens, "us": us, "dense_us": dense_us, "x_dense": dense_us / us})
        return found

    def __str__(self) -> str:
        lines = [records.table([{**row, "layer": row["layer"] or "layer"} for row in self.rows], _COLUMNS)]
        for all_of in self.together:
            tokens = f"{all_of['tokens']:,} token{'s' * (all_of['tokens'] > 1)}"
            times = f"{all_of['us']:,.0f} us instead of {all_of['dense_us']:,.0f}, {all_of['x_dense']:.3g}x dense"
            lines.append(f"all layers, {tokens}: {times}")
        share = f", {self.extra_bytes / self.model_bytes:.2%} of the model's" if self.model_bytes else ""
        return "\n".join([*lines, f"memory beyond the dense layers': {self.extra_bytes:,} bytes{share}"])


def report(model: nn.Module, *, only: Only | None = None) -> Report:
    """Say for each ReLU feed-forward layer of a model what runs, why, and what it was worth.

    Reads what the layers were told and what was timed when they were; it runs and times nothing. Of a path that takes
    some weights only it looks at the weights, and waits for the device.

    Args:
        model: dense, sparse, or in part.
        only: the layers for which only(name, module) is true.

    Returns:
        A Report: a table when printed, and `rows`, one a layer and class of token counts. A row has the `layer`; its
        `state` ("not swapped", "planned" or "told"); `tokens`, the largest count of the class, None for any
        count; the `choice` of path; what `runs` of it with the weights as they are: the choice, with what is taken
        where gradients are needed if that is another path, or "dense: " and why (then without times); `nnz`,
        the neurons firing at a token when they were counted; `us` and `dense_us`, the microseconds that so many tokens
        take, and took before the layer was swapped; `x_dense`, their ratio; `how` they are known ("measured", "measured
        on" a layer like it, "predicted"); `why`; `layout`, how the weights lie (SparseFFN.status); and `extra_bytes`,
        the memory held beyond the dense layer's. What is not known is None.

    Raises:
        InputError: for a model without ReLU feed-forward layers.
    """
    rows = []
    for found in feed_forwards(model, only=only):
        state, told = _state(found.module)
        held, layout = 0, "plain"
        if isinstance(found.module, SparseFFN):
            held, layout = found.module.extra_bytes, found.module.status()["layout"]
        nothing = dict.fromkeys(("tokens", "nnz", "us", "dense_us", "x_dense", "how"))
        same = {"layer": found.name, "state": state, "layout": layout, "extra_bytes": held}
        lossy = f"; {found.acts}" if isinstance(found.acts, Lossy) else f"; {found.cut}" if found.cut else ""
        rows += [_now(found.module, {**nothing, **row, **same, "why": f"{row['why']}{lossy}"}) for row in told]
    return Report(rows, sum(part_of(p).nbytes for p in model.parameters()))


def _now(module: nn.Module, row: dict) -> dict:
    """The row, with what the layer runs as it is now; without times where that is not what was timed."""
    runs = module.runs(row["tokens"]) if isinstance(module, SparseFFN) else row["choice"]
    untimed = runs != row["choice"] and runs.startswith(f"{DENSE}: ")
    return {**row, "runs": runs, **(dict.fromkeys(("us", "x_dense", "how")) if untimed else {})}


def _state(module: nn.Module) -> tuple[str, list[dict]]:
    """The state of a layer, and what else its rows say."""
    if not isinstance(module, SparseFFN):
        return "not swapped", [{"choice": str(DENSE), "why": "sparsify left this layer as it is, or was not called"}]
    status, plan = module.status(), module.plan
    if isinstance(plan, LayerPlan):
        return "planned", chosen(plan)
    (whole,) = status["classes"]
    choice = Choice(whole["path"], whole["hot"])
    return "told", [{"choice": str(choice), "why": "asked for by name, be it faster or not"}]
