"""Profile who fires in the feed-forward layers of a model, and compare two profiles.

A neuron fires at a token where packing keeps its gate's pre-activation: `not (g <= 0)`, so positive or NaN (in plain
layers the up projection's). All counts are whole numbers, gathered on the model's device without waiting for it, in
memory that does not grow with the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import records
from ..core import InputError
from ..formats.twell import TILE, WORDS, check_geometry, fires
from ..layers.find import FeedForward, Only, feed_forwards, firing_layers, sound
from .running import ALL, LATER, POSITIONS, Gate, Rows, run, vocabulary_of
from .saved import Saved

HOT = 0.05  # the share of a layer's neurons that are called its hottest
ALIKE = 1.25  # up to this ratio two layers fire as many neurons, as far as a plan is concerned
SERVES = 0.8  # from this share of the firing on, one profile's hottest neurons serve the other
# How many values are counted at once: a CPU keeps so many in its cache; a GPU wants more to do for each launch.
_PIECE_CPU, _PIECE = 2**20, 2**26
_TOKENS, _PLACES = ("token_counts", "token_nnz"), ("position_tokens", "position_nnz")


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The firing of one feed-forward layer, as counts over `tokens` tokens (int64 tensors on the CPU).

    nnz_histogram: [d_ff + 1], how many tokens had 0, 1, ..., d_ff neurons firing.
    neuron_counts: [d_ff], at how many tokens each neuron fired.
    tile_histogram: [tile + 1], how many pairs of a token and a tile of `tile` neighbouring neurons had 0, 1, ..., tile
        of them firing. The last tile may be narrower.
    overflowing: how many tokens had a tile with more than `words - 1` firing, TwELL's slots.
    position_tokens, position_nnz: [len(POSITIONS)], how many of the tokens whose place in their sequence is known stood
        in each group of positions, and how many neurons fired at them together."""

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
    position_tokens: Tensor
    position_nnz: Tensor

    def __post_init__(self) -> None:
        check_geometry(self.tile, self.words)
        lengths = {"neuron_counts": max(1, self.d_ff), "nnz_histogram": self.d_ff + 1, "tile_histogram": self.tile + 1}
        for name, length in (lengths | dict.fromkeys(_PLACES, len(POSITIONS))).items():
            if (many := len(getattr(self, name))) != length:
                raise InputError(f"{name!r} holds {many} numbers; {length} are accepted")

    # Neurons firing at a token, on average, and the share of them; the share of tokens with at least one tile that
    # fires beyond its slots; NaN where the layer saw no token.
    mean_nnz = property(lambda self: self.neuron_counts.sum().item() / self.tokens if self.tokens else math.nan)
    density = property(lambda self: self.mean_nnz / self.d_ff)
    overflow_rows = property(lambda self: self.overflowing / self.tokens if self.tokens else math.nan)
    # How many neurons fired at no token, and at every one.
    dead = property(lambda self: (self.neuron_counts == 0).sum().item())
    always_on = property(lambda self: (self.neuron_counts == self.tokens).sum().item() if self.tokens else 0)

    # The share of tokens at which each neuron fires: float32 [d_ff], NaN where there was no token.
    neuron_frequency = property(lambda self: (self.neuron_counts.double() / self.tokens).float())

    @property
    def first_to_later(self) -> float:
        """Return how many times as many neurons fire at the first token of a sequence as from position LATER on; NaN
        where either is unknown."""
        tokens, nnz = self.position_tokens, self.position_nnz
        later = nnz[LATER:].sum() / tokens[LATER:].sum()
        return (nnz[0] / tokens[0] / later).item() if later else math.nan


@dataclass(frozen=True, eq=False)
class FiringProfile(Saved):
    """The profiles of all feed-forward layers of a model, in the model's order.

    token_counts, token_nnz: int64 [vocabulary], how often each token was seen, and how many neurons of all layers
    together fired there. None where the batches did not say which tokens they held."""

    FORMAT: ClassVar = "twell-lab firing profile"
    VERSION: ClassVar = 4

    layers: list[LayerProfile]
    token_counts: Tensor | None = None
    token_nnz: Tensor | None = None

    def __post_init__(self) -> None:
        lengths = [None if counts is None else len(counts) for counts in (self.token_counts, self.token_nnz)]
        if not self.layers or lengths[0] != lengths[1]:
            said = (
                f"'layers' holds {len(self.layers)} profiles, 'token_counts' and 'token_nnz' have the lengths {lengths}"
            )
            raise InputError(f"{said}; one layer or more and one length are accepted")

    # The tokens that the layers saw: the largest number among them, should they differ.
    tokens = property(lambda self: max(layer.tokens for layer in self.layers))

    def table(self) -> list[dict]:
        """Return one row a layer, JSON-able; None stands for what is not known."""
        names = ("d_model", "d_ff", "gated", "tokens", "density", "mean_nnz", "dead", "always_on", "overflow_rows")
        return [{"layer": one.name, **{name: _number(getattr(one, name)) for name in names}} for one in self.layers]

    def __str__(self) -> str:
        columns = {"layer": "layer", "d_ff": "d_ff", "mean_nnz": "mean nnz", "density": "density"}
        columns |= {"dead": "dead neurons", "always_on": "always on", "overflow_rows": "overflow share"}
        return records.table(self.table(), columns)

    def by_position(self) -> list[dict]:
        """Return a row for each group of positions in a sequence that was seen: first, last (from 0; None for the group
        without an end), tokens, density (of all layers together) and layers (that of each, or None)."""
        tokens, nnz = (torch.stack([getattr(layer, name) for layer in self.layers]).double() for name in _PLACES)
        asked, rows = tokens * torch.tensor([[layer.d_ff] for layer in self.layers], device="cpu"), []
        for group, (first, end) in enumerate(pairwise((*POSITIONS, None))):
            if most := int(tokens[:, group].max()):
                row = {"first": first, "last": None if end is None else end - 1, "tokens": most}
                row["density"] = (nnz[:, group].sum() / asked[:, group].sum()).item()
                rows.append({**row, "layers": [*map(_number, (nnz[:, group] / asked[:, group]).tolist())]})
        return rows

    def by_token(self) -> list[dict]:
        """Return a row for each token that was seen, those where most neurons fire first: token (its number), count,
        nnz (the neurons that fire there on average, in all layers together) and x_mean (of what fires at any token).
        Empty where the batches did not say which tokens they held."""
        if self.token_counts is None:
            return []
        mean = self.token_nnz.sum().item() / max(1, self.token_counts.sum().item())
        seen = self.token_counts.nonzero().flatten()
        order = seen[(self.token_nnz[seen] / self.token_counts[seen].double()).argsort(descending=True, stable=True)]
        tokens = zip(*(values.tolist() for values in (order, self.token_counts[order], self.token_nnz[order])))
        rows = [{"token": token, "count": count, "nnz": fired / count} for token, count, fired in tokens]
        return [{**row, "x_mean": row["nnz"] / mean if mean else None} for row in rows]

    def compare(self, other: FiringProfile) -> Comparison:
        """Compare this profile with another one: another text, or another training. The result's `str` is a table and a
        sentence. InputError, naming both, where the layers have other sizes."""
        if not isinstance(other, FiringProfile):
            raise InputError(f"the other profile is a {type(other).__name__}; a FiringProfile is accepted")
        check_same(dict(enumerate(self.layers)), dict(enumerate(other.layers)), "one profile", "the other")
        rows = []
        for mine, its in zip(self.layers, other.layers):
            row = {"layer": mine.name, "d_ff": mine.d_ff, "tokens": mine.tokens, "other_tokens": its.tokens}
            row |= {"density": _number(mine.density), "other_density": _number(its.density)}
            both, most = row["density"] and row["other_density"], math.ceil(HOT * mine.d_ff)
            here, there = (one.neuron_counts.argsort(descending=True, stable=True)[:most] for one in (mine, its))
            kept = (mine.neuron_counts[there].sum() / mine.neuron_counts[here].sum()).item()
            rows.append(
                row | {"ratio": mine.mean_nnz / its.mean_nnz if both else None, "hot_kept": kept if both else None}
            )
        return Comparison(rows)


def profile(
    model: nn.Module, batches: Iterable, tile: int = TILE, words: int = WORDS, *, only: Only | None = None
) -> FiringProfile:
    """Run `model` over `batches` and count which feed-forward neurons fire, in memory that does not grow with them.

    What fires is what the layer's activation keeps; in a layer with thresholds on its inputs (TEAL), the hidden values
    that are kept. Dense layers whose gate alone does not say who fires are left out. A layer of `sparsify`'s computes
    its gate once more. Batches of a hundred tokens and more cost least.

    Args:
        model: dense, or already swapped by `sparsify`. It runs in evaluation mode without gradients, and eagerly if it
            was compiled, and is left as it was.
        batches: what the model takes, one after the other: a tensor, a mapping of keyword arguments (what a
            transformers tokenizer returns) or a tuple of arguments; a single tensor or mapping is one batch. Tensors
            are moved to the device of the model's first parameter. Where an `attention_mask` [batch, tokens] is 0,
            nothing is counted. Token ids [batch, tokens], the first argument or `input_ids`, say which tokens they are.
        tile, words: columns and words of the TwELL tiles that are counted.
        only: profile the layers for which only(name, module) is true.

    Raises InputError for a model without feed-forward layers, or with none that computes what its parts say; for no
    batches, and batches that the model does not take; and for a layer that is given NaN."""
    check_geometry(tile, words)
    return count(model, sound(firing_layers(model, only=only)), batches, tile, words)


def count(model: nn.Module, layers: list[FeedForward], batches: Iterable, tile: int, words: int) -> FiringProfile:
    """Profile these layers of the model, which compute what their parts say: `profile` without asking them."""
    counters = [Counter(layer, tile, words) for layer in layers]
    sums = {name: torch.zeros(vocabulary_of(model) + 1, dtype=torch.int64, device="cpu") for name in _TOKENS}

    def add(name: str, rows: Rows, values: Tensor) -> None:
        if rows.ids is not None:  # what is in no vocabulary has the last place, which is left out in the end
            sums[name] = sums[name].to(values.device).scatter_add_(0, rows.ids.to(values.device), values)

    def see(counter: Counter, x: Tensor, gate: Gate, rows: Rows) -> None:
        add("token_nnz", rows, counter.add(x, gate, rows))

    def after(output: object, seen: list[Rows]) -> None:
        for rows in seen:
            if rows.ids is not None:
                add("token_counts", rows, torch.ones_like(rows.ids) if rows.counted is None else rows.counted.long())

    run(model, [(counter.layer, partial(see, counter)) for counter in counters], batches, after)
    profiles, known = [counter.result() for counter in counters], sums["token_counts"].any()
    if not any(layer.tokens for layer in profiles):
        why = "the batches were empty, or the model does not call its layers"
        raise InputError(f"no feed-forward layer saw a token: {why}; accepted: one token or more")
    return FiringProfile(profiles, **{name: counts[:-1].cpu() if known else None for name, counts in sums.items()})


def activations(model: nn.Module, batch, layer: int | str) -> tuple[Tensor, Tensor]:
    """Return what enters one feed-forward layer when `model` runs on `batch`, x [tokens, d_model], and its gate's
    pre-activation [tokens, d_ff], masked positions left out; batch and errors as of `profile`.

    layer: position among the model's feed-forward layers (negative: from the end), or the layer's name."""
    layers = {found.name: found for found in feed_forwards(model)}
    if isinstance(layer, int) and -len(layers) <= layer < len(layers):
        layer = [*layers][layer]
    if not isinstance(layer, str) or layer not in layers:
        raise InputError(f"layer is {layer!r}; accepted: a position among {len(layers)}, or a name of {[*layers]}")
    taken: list[tuple[Tensor, Tensor]] = []
    run(model, [(layers[layer], lambda x, gate, rows: taken.append((rows.kept(x), rows.kept(gate(ALL)))))], [batch])
    if not any(len(x) for x, _ in taken):
        raise InputError(f"no token reached {layer!r} in this batch; accepted: at least one")
    x, gate = map(torch.cat, zip(*taken))
    return x, gate


def captured(model: nn.Module, batches: Iterable, names: Iterable[str], rows: int) -> dict[str, Tensor]:
    """Return what enters the feed-forward layers called so when `model` runs on the batches: for each name up to `rows`
    inputs, [rows, d_model], masked positions left out. Batches and errors are those of `profile`."""
    taken: dict[str, list[Tensor]] = {name: [] for name in names}
    lacking = lambda name: rows - sum(map(len, taken[name]))

    def keep(name: str, x: Tensor, gate: Gate, known: Rows) -> None:
        if many := lacking(name):
            taken[name].append(known.kept(x)[:many])

    watched = [(layer, partial(keep, layer.name)) for layer in feed_forwards(model) if layer.name in taken]
    run(model, watched, batches, lambda *_: not any(map(lacking, taken)))
    if idle := [name for name in taken if lacking(name) == rows]:
        raise InputError(f"no token reached {idle[0]!r} in the batches; accepted: at least one")
    return {name: torch.cat(pieces) for name, pieces in taken.items()}


class Counter:
    """Adds up the firing of one layer, on the device where it fires; nothing here waits for that device."""

    def __init__(self, layer: FeedForward, tile: int, words: int) -> None:
        self.layer, self.tile, self.words = layer, tile, words
        self.d_ff, self.d_model = layer.pattern.weight.shape
        sizes = {"nnz_histogram": [self.d_ff + 1], "neuron_counts": [self.d_ff], "tile_histogram": [tile + 1]}
        # undefined: tokens at which the gate's first answer is NaN, as all are where x holds one
        sizes |= dict.fromkeys(("tokens", "overflowing", "undefined"), []) | dict.fromkeys(_PLACES, [len(POSITIONS)])
        self.counts = {name: torch.zeros(size, dtype=torch.int64, device="cpu") for name, size in sizes.items()}

    def add(self, x: Tensor, gate: Gate, rows: Rows | None = None) -> Tensor:
        """Count one input, x [..., d_model], and its gate's answers; rows: what is known of its rows. Returns how many
        neurons fired at each row, int64, 0 where it does not count."""
        rows = (rows or Rows()).map(lambda values: values.to(x.device))
        self.counts = {name: count.to(x.device) for name, count in self.counts.items()}
        # One tensor for all answers: many small ones, kept between the pieces' large ones, leave holes in the heap.
        nnz = torch.zeros(x.shape[:-1].numel(), dtype=torch.int64, device=x.device)
        step = max(1, (_PIECE_CPU if x.device.type == "cpu" else _PIECE) // self.d_ff)
        for piece in (slice(start, start + step) for start in range(0, len(nnz), step)):
            nnz[piece] = self._add(gate(piece), rows.map(lambda values, piece=piece: values[piece]))
        return nnz

    def _add(self, gate: Tensor, rows: Rows) -> Tensor:
        # What a threshold kept may be negative: SiLU's small values are.
        acts, cut, counts = self.layer.acts, self.layer.cut, self.counts
        firing = gate != 0 if cut is not None else fires(gate) if acts is None else acts(gate) != 0
        if rows.counted is not None:
            firing &= rows.counted[:, None]
        tiles = -(-self.d_ff // self.tile)
        whole = F.pad(firing, (0, tiles * self.tile - self.d_ff)) if self.d_ff % self.tile else firing.contiguous()
        in_tile = whole.view(len(whole), tiles, self.tile).sum(-1, dtype=torch.int32).long()  # faster than in int64
        nnz = in_tile.sum(-1)
        counted = torch.ones_like(nnz) if rows.counted is None else rows.counted.long()
        counts["undefined"] += (gate[:, 0].isnan() * counted).sum()
        counts["tokens"] += counted.sum()
        counts["overflowing"] += (in_tile >= self.words).any(-1).sum()
        # scatter_add_ rather than bincount, which waits for the largest value to size its result.
        counts["nnz_histogram"].scatter_add_(0, nnz, counted)
        counts["neuron_counts"] += firing.sum(0, dtype=torch.int32)
        counts["tile_histogram"].scatter_add_(0, in_tile.flatten(), counted[:, None].expand(-1, tiles).flatten())
        if rows.group is not None:
            counts["position_tokens"].scatter_add_(0, rows.group, counted)
            counts["position_nnz"].scatter_add_(0, rows.group, nnz)
        return nnz

    def result(self) -> LayerProfile:
        """Return the profile. InputError if the gate answered NaN, which counts as firing."""
        counts = {name: count.cpu() for name, count in self.counts.items()}
        numbers = {name: count if count.dim() else count.item() for name, count in counts.items()}
        if broken := numbers.pop("undefined"):
            said = f"what enters {self.layer.name!r}, or its gate, is NaN at {broken:,} of {numbers['tokens']:,} tokens"
            why = "a training may have diverged, float16 may have overflowed"
            raise InputError(f"{said}, which would count as firing; accepted: a model of finite values ({why})")
        sizes = dict(d_model=self.d_model, d_ff=self.d_ff, tile=self.tile, words=self.words)
        return LayerProfile(name=self.layer.name, gated=self.layer.gate is not None, **sizes, **numbers)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class Comparison:
    """Two profiles beside each other. rows: one a layer, JSON-able; None where a layer saw no token, or none fired."""

    rows: list[dict]

    @property
    def verdict(self) -> str:
        rows = [row for row in self.rows if row["ratio"] is not None]
        if not rows:
            return "No layer fired in both profiles: there is nothing to compare."
        ratios, caught = [row["ratio"] for row in rows], [row["hot_kept"] for row in rows]
        todo = "a plan made from one serves the other"
        if other := sum(not 1 / ALIKE <= ratio <= ALIKE for ratio in ratios):
            todo = f"make a plan for each, since {other} of {len(rows)} layers fire another number of neurons"
        elif moved := sum(share < SERVES for share in caught):
            todo = f"make a plan for each if it has hot neurons, since others are hot in {moved} of {len(rows)} layers"
        hottest = f"whose hottest {HOT:.0%} catch {mean(caught):.0%} of what the hottest here do"
        return f"{mean(ratios):.2f} times as many neurons fire as in the other profile, {hottest}: {todo}."

    def __str__(self) -> str:
        names = ("layer", "density", "other_density", "ratio", "hot_kept")
        return (
            f"{records.table(self.rows, {name: name.replace('_', ' ') for name in names})}\n"
            "density: the share of the neurons that fire at a token, here and in the other profile; ratio: of the two\n"
            f"hot kept: what the other's hottest {HOT:.0%} catch of the firing here, of what the hottest here do\n"
            f"{self.verdict}"
        )


def check_same(some: Mapping, others: Mapping, here: str, there: str) -> None:
    """Raise InputError unless two have the same layers of the same sizes; here, there: what the two are called."""

    def size(layer) -> str:
        found = isinstance(layer, FeedForward)
        d_model, d_ff = layer.up.weight.shape[::-1] if found else (layer.d_model, layer.d_ff)
        gated = layer.gate is not None if found else layer.gated
        return f"d_model {d_model}, d_ff {d_ff}, {'gated' if gated else 'plain'}"

    mine, its = ({name: size(layer) for name, layer in layers.items()} for layers in (some, others))
    if differ := [name for name in mine | its if mine.get(name) != its.get(name)]:
        one, other = (of.get(differ[0], "missing") for of in (mine, its))
        said = f"layer {differ[0]!r} is {one} in {here} and {other} in {there}"
        more = f", and {len(differ) - 1} more differ" if differ[1:] else ""
        raise InputError(f"{said}{more}; the same layers are accepted")
