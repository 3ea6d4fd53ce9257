"""Two profiles beside each other: whether a plan that was made from one serves the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import records
from ..core import InputError

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

    @classmethod
    def of(cls, layers: Sequence[LayerProfile], others: Sequence[LayerProfile]) -> Comparison:
        """Compare two models' layers. InputError, naming both, unless they have the same sizes."""
        sizes, theirs = (dict(enumerate(map(size_of, some))) for some in (layers, others))
        check_same(sizes, theirs, "one profile", "the other")
        return cls([_row(mine, its) for mine, its in zip(layers, others, strict=True)])

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


def size_of(layer) -> str:
    """Return what a layer of a profile or plan measures, in words."""
    return f"d_model {layer.d_model}, d_ff {layer.d_ff}, {'gated' if layer.gated else 'plain'}"


def check_same(some: Mapping[object, str], others: Mapping[object, str], here: str, there: str) -> None:
    """Raise InputError unless two have the same layers of the same sizes. here, there: what the two are called."""
    if differ := [name for name in {**some, **others} if some.get(name) != others.get(name)]:
        name, more = differ[0], f", and {len(differ) - 1} more differ" if differ[1:] else ""
        raise InputError(
            f"layer {name!r} is {some.get(name, 'missing')} in {here} and {others.get(name, 'missing')} in {there}"
            f"{more}; the same layers are accepted"
        )


def _span(values: list[float], form: str) -> str:
    """Return the mean, and the least and the most of several."""
    mean = format(sum(values) / len(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def _row(mine: LayerProfile, its: LayerProfile) -> dict:
    row = {"layer": mine.name, "d_ff": mine.d_ff, "tokens": mine.tokens, "other_tokens": its.tokens}
    row |= {"density": mine.density if mine.tokens else None, "other_density": its.density if its.tokens else None}
    if not (mine.tokens and its.tokens and mine.mean_nnz and its.mean_nnz):
        return row | {"ratio": None, "hot_kept": None}
    most = math.ceil(HOT * mine.d_ff)
    hot, other = (layer.neuron_counts.argsort(descending=True, stable=True)[:most] for layer in (mine, its))
    caught = mine.neuron_counts[other].sum() / mine.neuron_counts[hot].sum()
    return row | {"ratio": mine.mean_nnz / its.mean_nnz, "hot_kept": caught.item()}
