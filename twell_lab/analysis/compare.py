"""Two profiles beside each other: whether a plan that was made from one serves the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .. import records
from ..core import InputError

if TYPE_CHECKING:
    from .profile import LayerProfile

HOT = 0.05  # the share of a layer's neurons that are called its hottest
ALIKE = 1.25  # up to this ratio two layers fire as many neurons, as far as a plan is concerned
KEPT = 0.8  # from this share of the firing on, one profile's hottest neurons serve the other
_EXPLAINED = (
    "density: the share of the neurons that fire at a token, here and in the other profile; ratio: of the two",
    f"hot overlap: the share of the {HOT:.0%} of neurons that fire most which are the same in both",
    "hot kept: what the other's hottest catch of the firing here, as a share of what the hottest here do",
    "nnz shift: by how many neurons the tokens' counts differ, on average, those of both sorted",
)


@dataclass(frozen=True)
class Comparison:
    """What `FiringProfile.compare` found.

    rows: one a layer, JSON-able: layer, d_ff, tokens, other_tokens, density, other_density, ratio (of the densities),
        hot_overlap (the share of the hottest HOT of the neurons that are the same), hot_kept (what the other's hottest
        neurons catch of this profile's firing, as a share of what its own hottest catch), nnz_shift (by how many
        neurons the tokens' counts differ on average, the tokens of both sorted by them). None where a layer saw no
        token, or none fired.
    """

    rows: list[dict]

    @classmethod
    def of(cls, layers: Sequence[LayerProfile], others: Sequence[LayerProfile]) -> Comparison:
        """Of two models' layers. InputError, naming both, unless they have the same sizes."""
        check_alike(layers, others)
        return cls([_row(mine, its) for mine, its in zip(layers, others, strict=True)])

    @property
    def verdict(self) -> str:
        """Return what was found, and what that means for a plan, in one sentence."""
        rows = [row for row in self.rows if row["ratio"] is not None]
        if not rows:
            return "No layer fired in both profiles: there is nothing to compare."
        ratios, kept = [row["ratio"] for row in rows], [row["hot_kept"] for row in rows]
        other = sum(not 1 / ALIKE <= ratio <= ALIKE for ratio in ratios)
        moved = sum(each < KEPT for each in kept)
        if other:
            todo = f"make a plan for each, since {other} of {len(rows)} layers fire another number of neurons"
        elif moved:
            todo = f"make a plan for each if it has hot neurons, since others are hot in {moved} of {len(rows)} layers"
        else:
            todo = "a plan made from one serves the other"
        return (
            f"{_span(ratios, '.2f')} times as many neurons fire as in the other profile, whose hottest {HOT:.0%} catch "
            f"{_span(kept, '.0%')} of what the hottest here do: {todo}."
        )

    def __str__(self) -> str:
        """`rows` as lines of text, and the verdict."""
        columns = {"layer": "layer", "density": "density", "other_density": "other density", "ratio": "ratio"}
        columns |= {"hot_overlap": "hot overlap", "hot_kept": "hot kept", "nnz_shift": "nnz shift"}
        return "\n".join([records.table(self.rows, columns), *_EXPLAINED, self.verdict])


def check_alike(layers: Sequence[LayerProfile], others: Sequence[LayerProfile]) -> None:
    """InputError unless both have as many layers, of the same sizes."""
    if len(layers) != len(others):
        one, other = (f"{len(each)}" + (f", the first {_said(each[0])}" if each else "") for each in (layers, others))
        raise InputError(
            f"the layers of one profile are {one}, and of the other {other}; accepted: two of the same sizes"
        )
    for mine, its in zip(layers, others, strict=True):
        if (mine.d_model, mine.d_ff, mine.gated) != (its.d_model, its.d_ff, its.gated):
            raise InputError(
                f"a layer is {_said(mine)} in one profile and {_said(its)} in the other; accepted: two of the same "
                f"sizes"
            )


def _said(layer: LayerProfile) -> str:
    return f"{layer.name!r} of {layer.d_model} x {layer.d_ff}{'' if layer.gated else ' without a gate'}"


def _span(values: list[float], form: str) -> str:
    """The mean, and the least and the most of several."""
    mean = format(sum(values) / len(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def _row(mine: LayerProfile, its: LayerProfile) -> dict:
    row = {
        "layer": mine.name,
        "d_ff": mine.d_ff,
        "tokens": mine.tokens,
        "other_tokens": its.tokens,
        "density": mine.density if mine.tokens else None,
        "other_density": its.density if its.tokens else None,
        "ratio": None,
        "hot_overlap": None,
        "hot_kept": None,
        "nnz_shift": None,
    }
    if mine.tokens and its.tokens:
        below = [(each.nnz_histogram.cumsum(0).double() / each.tokens) for each in (mine, its)]
        row["nnz_shift"] = (below[0] - below[1]).abs().sum().item()
        if mine.mean_nnz and its.mean_nnz:
            hot, other = _hottest(mine), _hottest(its)
            row["ratio"] = mine.mean_nnz / its.mean_nnz
            row["hot_overlap"] = len({*hot.tolist()} & {*other.tolist()}) / len(hot)
            row["hot_kept"] = (mine.neuron_counts[other].sum() / mine.neuron_counts[hot].sum()).item()
    return row


def _hottest(layer: LayerProfile) -> Tensor:
    """The neurons that fire most: HOT of them, one at least."""
    return layer.neuron_counts.argsort(descending=True, stable=True)[: math.ceil(HOT * layer.d_ff)]
