"""What is counted of one feed-forward layer, what follows from these counts, and how they are read from a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import NoneType

import torch
from torch import Tensor

from ..core import WHOLE, InputError, RecordError
from ..formats.twell import check_geometry
from . import saved

# The first position of each group of positions: 0 to 7 each alone, then 8 to 15, 16 to 31, ...; the last has no end.
POSITIONS = (*range(8), *(2**power for power in range(3, 32)))
LATER = 8  # positions from here on, which stand in groups, are what the first ones are compared with


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The firing of one feed-forward layer, as counts over `tokens` tokens (int64 tensors on the CPU).

    nnz_histogram: [d_ff + 1], how many tokens had 0, 1, ..., d_ff neurons firing.
    neuron_counts: [d_ff], at how many tokens each neuron fired.
    tile_histogram: [tile + 1], how many pairs of a token and a tile of `tile` neighbouring neurons had 0, 1,
        ..., tile of them firing. The last tile of a width that is no multiple of `tile` is narrower.
    overflowing: how many tokens had a tile with more than `words - 1` firing, TwELL's slots.

    Of the tokens whose place in their sequence was known; None where none was, and in profiles saved by version 1:
    position_tokens, position_nnz: [len(POSITIONS)], how many tokens stood in each group of positions, and how many
        neurons fired at them together.
    pairs, pair_nnz, pair_shared: how many tokens had the next token of the same sequence beside them; how many neurons
        fired at the two, one by one, and how many at both, summed over these pairs.
    """

    name: str
    d_model: int
    d_ff: int
    gated: bool
    tokens: int
    tile: int
    words: int
    nnz_histogram: Tensor
    neuron_counts: Tensor
    tile_histogram: Tensor
    overflowing: int
    position_tokens: Tensor | None = None
    position_nnz: Tensor | None = None
    pairs: int | None = None
    pair_nnz: int | None = None
    pair_shared: int | None = None

    @property
    def mean_nnz(self) -> float:
        """Neurons firing at a token, on average; NaN where the layer saw no token."""
        return self.neuron_counts.sum().item() / self.tokens if self.tokens else float("nan")

    @property
    def density(self) -> float:
        """The share of neurons that fire at a token, on average: mean_nnz / d_ff."""
        return self.mean_nnz / self.d_ff

    @property
    def neuron_frequency(self) -> Tensor:
        """The share of tokens at which each neuron fires: float32 [d_ff], NaN where there was no token."""
        return (self.neuron_counts.double() / self.tokens).float()

    @property
    def dead(self) -> int:
        """How many neurons fired at no token at all."""
        return (self.neuron_counts == 0).sum().item()

    @property
    def always_on(self) -> int:
        """How many neurons fired at every token; 0 where there was none."""
        return (self.neuron_counts == self.tokens).sum().item() if self.tokens else 0

    @property
    def overflow_rows(self) -> float:
        """The share of tokens with at least one tile that fires beyond its slots; NaN without tokens."""
        return self.overflowing / self.tokens if self.tokens else float("nan")

    @property
    def neighbours_share(self) -> float:
        """Of the neurons that fire at a token or at the next one of its sequence, the share that fires at both: |A and
        B| / |A or B|, each summed over all pairs. NaN where neighbours are unknown, or nothing fires."""
        either = (self.pair_nnz or 0) - (self.pair_shared or 0)
        return self.pair_shared / either if either else float("nan")

    @property
    def neighbours_by_chance(self) -> float:
        """What `neighbours_share` would be if each neuron fired as often as it does, but at tokens of its own choice.
        NaN where nothing fires."""
        often = self.neuron_counts.double() / self.tokens
        both = often.square().sum()
        return (both / (2 * often.sum() - both)).item()

    @property
    def first_to_later(self) -> float:
        """How many times as many neurons fire at the first token of a sequence as at those from position LATER on; NaN
        where either is unknown."""
        if self.position_tokens is None:
            return float("nan")
        tokens, nnz = self.position_tokens, self.position_nnz
        later = nnz[LATER:].sum() / tokens[LATER:].sum()
        return (nnz[0] / tokens[0] / later).item() if later else float("nan")

    def merged(self, other: LayerProfile) -> LayerProfile:
        """Of the tokens of both. InputError unless they are of one layer, with one geometry."""
        for name in ("name", "d_model", "d_ff", "gated", "tile", "words"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                raise InputError(
                    f"{name} is {mine!r} in one profile of {self.name!r} and {its!r} in the other; accepted: profiles "
                    f"of one model, of tiles of one size"
                )
        sums = {}
        for name in ("tokens", *COUNTED):
            mine, its = getattr(self, name), getattr(other, name)
            sums[name] = its if mine is None else mine if its is None else mine + its
        return replace(self, **sums)

    def to_json(self) -> dict:
        """The counts as plain data."""
        return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in vars(self).items()}


_SIZES = ("d_model", "d_ff", "tokens", "tile", "words", "overflowing")
_LISTS = ("nnz_histogram", "neuron_counts", "tile_histogram")
_PLACED = {"position_tokens": list, "position_nnz": list, "pairs": int, "pair_nnz": int, "pair_shared": int}
COUNTED = tuple(each.name for each in fields(LayerProfile) if each.name in {"overflowing", *_LISTS, *_PLACED})
_VERSION_1 = {"name": str, "gated": bool, **dict.fromkeys(_SIZES, int), **dict.fromkeys(_LISTS, list)}
# The fields of a saved layer, and their kinds, by the version of the profile.
FIELDS = {1: _VERSION_1, 2: {**_VERSION_1, **{name: (kind, NoneType) for name, kind in _PLACED.items()}}}


def layer_from(content, version: int, where: str) -> LayerProfile:
    """A LayerProfile from its JSON form, each field checked; RecordError names the one that is wrong."""
    content = saved.fields(content, FIELDS[version], where)
    saved.widths(content, where)
    try:
        check_geometry(content["tile"], content["words"])
    except InputError as error:
        raise RecordError(f"{where}: {error}") from None
    lengths = dict(zip(_LISTS, (content["d_ff"] + 1, content["d_ff"], content["tile"] + 1)))
    placed = [name for name in _PLACED if content.get(name) is not None]
    if placed and len(placed) < len(_PLACED):
        lacking = next(name for name in _PLACED if name not in placed)
        raise RecordError(f"{where}: {placed[0]!r} is known and {lacking!r} is not; accepted: all of {list(_PLACED)}")
    if placed:
        lengths |= dict.fromkeys(("position_tokens", "position_nnz"), len(POSITIONS))
    for name, length in lengths.items():
        saved.counts(content, name, length, WHOLE - 1, where)
    for wrong in _contradictions(**content):
        raise RecordError(f"{where}: {wrong}; accepted: a whole profile")
    tensors = {name: torch.tensor(content[name], dtype=torch.int64, device="cpu") for name in lengths}
    return LayerProfile(**{**content, **tensors})


def _contradictions(
    d_ff, tokens, tile, overflowing, nnz_histogram, neuron_counts, tile_histogram, position_tokens=None, **placed
) -> Iterator[str]:
    """Why these cannot be counts of the same tokens: what is computed from others would be wrong without a word."""
    fired = sum(neuron_counts)
    for name, found, wanted in (
        ("nnz_histogram", sum(nnz_histogram), tokens),
        ("tile_histogram", sum(tile_histogram), tokens * -(-d_ff // tile)),
        ("nnz_histogram", sum(nnz * count for nnz, count in enumerate(nnz_histogram)), fired),
        ("tile_histogram", sum(nnz * count for nnz, count in enumerate(tile_histogram)), fired),
    ):
        if found != wanted:
            yield f"{name!r} counts {found} where 'tokens' and 'neuron_counts' make {wanted}"
    if max([overflowing, *neuron_counts]) > tokens:
        yield f"'overflowing' or one of 'neuron_counts' is above 'tokens', {tokens}"
    if position_tokens is None:
        return
    for name, found, most in (
        ("position_tokens", sum(position_tokens), tokens),
        ("position_nnz", sum(placed["position_nnz"]), fired),
        ("pairs", placed["pairs"], sum(position_tokens)),
        ("pair_nnz", placed["pair_nnz"], 2 * fired),
        ("pair_shared", 2 * placed["pair_shared"], placed["pair_nnz"]),
    ):
        if found > most:
            yield f"{name!r} makes {found} where the other counts allow {most}"
    for group, (stood, nnz) in enumerate(zip(position_tokens, placed["position_nnz"])):
        if nnz > stood * d_ff:
            yield f"'position_nnz' has {nnz} at {group}, where {stood} tokens have {d_ff} neurons each"
