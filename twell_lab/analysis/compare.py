"""Two profiles beside each other: whether a plan that was made from one serves the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import records
from ..core import InputError
from ..layers.find import FeedForward

if TYPE_CHECKING:
    from .profile import LayerProfile

HOT = 0.05  # the share of a layer's neurons that are called its hottest
ALIKE = 1.25  # up to this ratio two layers fire as many neurons, as far as a plan is concerned
KEPT = 0.8  # from this share of the firing on, one profile's hottest neurons serve the other
_EXPLAINED = (
    "density: the share of the neurons that fire at a token, here and in the other profile; ratio: of the two",
    f"hot kept: what the other's hottest {HOT:.0%} catch of the firing here, as a share of what the hottest here do",
)


@dataclass(frozen=True)
class Comparison:
    """The result of `FiringProfile.compare`. rows: one a layer, JSON-able: layer, d_ff, tokens, other_tokens, density,
    other_density, ratio, hot_kept; None where a layer saw no token, or none fired."""

    rows: list[dict]

    @property
    def verdict(self) -> str:
        """Return what was found, and what that means for a plan, in one sentence."""
        rows = [row for row in self.rows if row["ratio"] is not None]
        if not rows:
            return "No layer fired in both profiles: there is nothing to compare."
        ratios, caught = [row["ratio"] for row in rows], [row["hot_kept"] for row in rows]
        todo = "a plan made from one serves the other"
        if other := sum(not 1 / ALIKE <= ratio <= ALIKE for ratio in ratios):
            todo = f"make a plan for each, since {other} of {len(rows)} layers fire another number of neurons"
        elif moved := sum(share < KEPT for share in caught):
            todo = f"make a plan for each if it has hot neurons, since others are hot in {moved} of {len(rows)} layers"
        return (
            f"{_span(ratios, '.2f')} times as many neurons fire as in the other profile, whose hottest {HOT:.0%} catch "
            f"{_span(caught, '.0%')} of what the hottest here do: {todo}."
        )

    def __str__(self) -> str:
        columns = ("layer", "density", "other_density", "ratio", "hot_kept")
        table = records.table(self.rows, {name: name.replace("_", " ") for name in columns})
        return "\n".join([table, *_EXPLAINED, self.verdict])


def compared(layers: Sequence[LayerProfile], others: Sequence[LayerProfile]) -> Comparison:
    """Compare two models' layers. InputError, naming both, unless they have the same sizes."""
    check_same(dict(enumerate(layers)), dict(enumerate(others)), "one profile", "the other")
    return Comparison([_row(mine, its) for mine, its in zip(layers, others, strict=True)])


def check_same(some: Mapping, others: Mapping, here: str, there: str) -> None:
    """Raise InputError unless two have the same layers of the same sizes: those of profiles or plans, or found ones, by
    name. here, there: what the two are called."""
    sizes = [{name: _size(layer) for name, layer in layers.items()} for layers in (some, others)]
    if differ := [name for name in {**some, **others} if sizes[0].get(name) != sizes[1].get(name)]:
        name, more = differ[0], f", and {len(differ) - 1} more differ" if differ[1:] else ""
        one, other = (of.get(name, "missing") for of in sizes)
        raise InputError(
            f"layer {name!r} is {one} in {here} and {other} in {there}{more}; the same layers are accepted"
        )


def _size(layer) -> str:
    shape = layer.up.weight.shape[::-1] if isinstance(layer, FeedForward) else (layer.d_model, layer.d_ff)
    gated = layer.gate is not None if isinstance(layer, FeedForward) else layer.gated
    return f"d_model {shape[0]}, d_ff {shape[1]}, {'gated' if gated else 'plain'}"


def _span(values: list[float], form: str) -> str:
    """Return the mean, and the least and the most of several."""
    mean = format(sum(values) / len(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def _row(mine: LayerProfile, its: LayerProfile) -> dict:
    row = {"layer": mine.name, "d_ff": mine.d_ff, "tokens": mine.tokens, "other_tokens": its.tokens}
    row |= {"density": mine.density if mine.tokens else None, "other_density": its.density if its.tokens else None}
    if not (row["density"] and row["other_density"]):
        return row | {"ratio": None, "hot_kept": None}
    most = math.ceil(HOT * mine.d_ff)
    hot, other = (layer.neuron_counts.argsort(descending=True, stable=True)[:most] for layer in (mine, its))
    caught = mine.neuron_counts[other].sum() / mine.neuron_counts[hot].sum()
    return row | {"ratio": mine.mean_nnz / its.mean_nnz, "hot_kept": caught.item()}
