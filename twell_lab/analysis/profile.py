"""Who fires: hooks on the feed-forward layers of a model, and counts of what passed through them.

A neuron fires at a token where its gate's pre-activation is kept by packing: `not (g <= 0)`, so positive or
NaN (plain layers have no gate; there the up projection decides). All counts are whole numbers, gathered on
the model's device without waiting for it; everything else (density, frequencies, ...) is computed from them.

Memory does not grow with the number of tokens: long inputs are counted in pieces, short ones together. For a layer
there are 8 bytes a neuron, twice, about 3 kB, and the gate's answers to a few short inputs, about 2**18 at most; for a
model 16 bytes a token of its vocabulary.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import records
from ..core import WHOLE, InputError, RecordError, write_atomically
from ..formats.twell import TILE, WORDS, check_geometry, fires
from ..layers.find import FeedForward, Only, feed_forwards, firing_layers, sound
from . import saved
from .compare import Comparison, check_alike
from .layer_profile import LATER, POSITIONS, LayerProfile, layer_from
from .running import ALL, Gate, Rows, run, vocabulary_of

FORMAT = "twell-lab firing profile"
VERSION = 2
HEAVY = 3.0  # how many times as many neurons as later ones make a sequence's first tokens heavy
SEQUENCES = 4  # how many there have to be before that is said
_TOKENS = ("token_counts", "token_nnz")
_LARGEST = 2**24  # ids of a vocabulary, in a file
# How many values are counted at once: a CPU keeps so many in its cache; a GPU wants more to do for each launch.
_PIECE_CPU, _PIECE = 2**20, 2**26
_TOGETHER = 2**18  # and answers of short inputs are kept until there are so many: counting takes as long for one row


@dataclass(frozen=True, eq=False)
class FiringProfile:
    """The profiles of all feed-forward layers of a model, in the model's order.

    token_counts, token_nnz: int64 [vocabulary], how often each token was seen, and how many neurons of all layers
        together fired there. None where the batches did not say which tokens they held, and in profiles saved by
        version 1.
    """

    layers: list[LayerProfile]
    token_counts: Tensor | None = None
    token_nnz: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the layers saw: the largest number among them, should they differ."""
        return max(layer.tokens for layer in self.layers)

    def table(self) -> list[dict]:
        """One row a layer, JSON-able; None stands where a layer saw no token, and for what is not known."""
        return [
            {
                "layer": layer.name,
                "d_model": layer.d_model,
                "d_ff": layer.d_ff,
                "gated": layer.gated,
                "tokens": layer.tokens,
                "density": _number(layer.density),
                "mean_nnz": _number(layer.mean_nnz),
                "dead": layer.dead,
                "always_on": layer.always_on,
                "overflow_rows": _number(layer.overflow_rows),
                "neighbours_share": _number(layer.neighbours_share),
                "neighbours_by_chance": _number(layer.neighbours_by_chance),
            }
            for layer in self.layers
        ]

    def __str__(self) -> str:
        """`table` as lines of text, without the sizes; density and overflow as shares."""
        return records.table(
            self.table(),
            {
                "layer": "layer",
                "d_ff": "d_ff",
                "mean_nnz": "mean nnz",
                "density": "density",
                "dead": "dead neurons",
                "always_on": "always on",
                "overflow_rows": "overflow share",
            },
        )

    def by_position(self) -> list[dict]:
        """How much fires at the tokens of each group of positions in a sequence, in their order; empty where no
        position was known.

        Rows: first, last (positions, from 0; last is None for the last group, which has no end), tokens, density (the
        share of neurons that fire, in all layers together), layers (that of each layer; None where it saw none)."""
        tokens, nnz = self._placed()
        asked = tokens * torch.tensor([[layer.d_ff] for layer in self.layers], device="cpu")
        share, shares = nnz.sum(0) / asked.sum(0), nnz / asked
        return [
            {
                "first": first,
                "last": None if end is None else end - 1,
                "tokens": int(tokens[:, group].max()),
                "density": share[group].item(),
                "layers": [_number(each) for each in shares[:, group].tolist()],
            }
            for group, (first, end) in enumerate(pairwise((*POSITIONS, None)))
            if tokens[:, group].any()
        ]

    @property
    def heavy_first(self) -> dict | None:
        """What is known of heavy first tokens: many models fire several times as many neurons where a sequence begins.

        A layer is heavy where it saw the first tokens of SEQUENCES sequences, and HEAVY times as many neurons fire at
        them as from position LATER on. None where no layer is, and where positions are not known. Otherwise: positions
        (how many, from the first on, are heavy in all layers together; 0 if only single layers are), times (how many
        times as many fire at the first one), layers (how many layers are heavy), worst (the name of the one that is
        most), worst_times."""
        tokens, nnz = self._placed()
        heavy = [
            (layer.first_to_later, layer.name)
            for layer, seen in zip(self.layers, tokens[:, 0].tolist(), strict=True)
            if seen >= SEQUENCES and layer.first_to_later >= HEAVY
        ]
        if not heavy:
            return None
        later = nnz[:, LATER:].sum() / tokens[:, LATER:].sum()
        times = (nnz.sum(0) / tokens.sum(0) / later)[:LATER].tolist()
        worst_times, worst = max(heavy)
        return {
            "positions": next((group for group, each in enumerate(times) if not each >= HEAVY), LATER),
            "times": times[0],
            "layers": len(heavy),
            "worst": worst,
            "worst_times": worst_times,
        }

    def _placed(self) -> tuple[Tensor, Tensor]:
        """How many tokens each layer saw in each group of positions, and how many neurons fired there: float64 [layers,
        groups], 0 where that is not known."""
        none = torch.zeros(len(POSITIONS), dtype=torch.int64, device="cpu")
        tokens = [none if layer.position_tokens is None else layer.position_tokens for layer in self.layers]
        nnz = [none if layer.position_nnz is None else layer.position_nnz for layer in self.layers]
        return torch.stack(tokens).double(), torch.stack(nnz).double()

    def by_token(self, least: int = 1) -> list[dict]:
        """The tokens of the vocabulary that were seen at least so often, those where most neurons fire first; empty
        where the batches did not say which tokens they held.

        Rows: token (its number), count (how often it was seen), nnz (how many neurons fire there, in all layers
        together, on average), x_mean (of what fires at a token of any kind). InputError for a `least` below 1."""
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise InputError(f"least is {least!r:.80}; a whole number from 1 up is accepted")
        if self.token_counts is None:
            return []
        mean = self.token_nnz.sum().item() / max(1, self.token_counts.sum().item())
        ids = (self.token_counts >= least).nonzero().flatten()
        nnz = self.token_nnz[ids] / self.token_counts[ids].double()
        order = nnz.argsort(descending=True, stable=True)
        return [
            {"token": token, "count": count, "nnz": each, "x_mean": each / mean if mean else None}
            for token, count, each in zip(
                ids[order].tolist(), self.token_counts[ids[order]].tolist(), nnz[order].tolist(), strict=True
            )
        ]

    def merged(self, other: FiringProfile) -> FiringProfile:
        """The profile of the tokens of both, as if they had been profiled at once. InputError unless both are of one
        model, with tiles of one size."""
        _check(other)
        check_alike(self.layers, other.layers)
        layers = [mine.merged(its) for mine, its in zip(self.layers, other.layers, strict=True)]
        sums = {}
        for name in _TOKENS:
            held = [each for each in (getattr(self, name), getattr(other, name)) if each is not None]
            longest = max(map(len, held), default=0)
            sums[name] = sum(F.pad(each, (0, longest - len(each))) for each in held) if held else None
        return replace(self, layers=layers, **sums)

    def compare(self, other: FiringProfile) -> Comparison:
        """This profile beside another one of a model of the same sizes: another text, or another training. Its
        `str` is a table and a sentence. InputError, naming both, where the layers have other sizes."""
        _check(other)
        return Comparison.of(self.layers, other.layers)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the counts as JSON, the file whole or not at all. RecordError where it can't be written."""
        path, tokens = Path(path), None
        if self.token_counts is not None:
            ids = self.token_counts.nonzero().flatten()
            tokens = {"vocabulary": len(self.token_counts), "ids": ids.tolist()}
            tokens |= {name: getattr(self, name)[ids].tolist() for name in _TOKENS}
        content = {"layers": [layer.to_json() for layer in self.layers], "tokens": tokens}
        write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, **content}) + "\n", make_folder=False)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> FiringProfile:
        """The profile that `save` wrote, in this version or an earlier one. RecordError names the file and the field
        missing or wrong."""
        kinds: dict[int, dict] = {1: {"layers": list}, 2: {"layers": list, "tokens": (dict, NoneType)}}
        content, where, version = saved.load(path, "profile", FORMAT, kinds)
        if not content["layers"]:
            raise RecordError(f"{where}: 'layers' is empty; accepted: one layer or more")
        return cls(
            [layer_from(each, version, f"{where}, layer {number}") for number, each in enumerate(content["layers"])],
            **_tokens_from(content.get("tokens"), f"{where}, tokens"),
        )


def profile(
    model: nn.Module, batches: Iterable, tile: int = TILE, words: int = WORDS, *, only: Only | None = None
) -> FiringProfile:
    """Run `model` over `batches` and count which feed-forward neurons fire, in memory that does not grow with them.

    What fires is what the layer's activation keeps; in a layer with thresholds on its inputs (TEAL), the hidden values
    that are kept. Each dense layer is first asked what it computes, once. Then the answers that its gate gives anyway
    are counted; a layer of `sparsify`'s gives none, so there the gate is computed once more, and with thresholds on
    inputs all hidden values are. Batches of a hundred tokens and more cost least.

    Args:
        model: any module in which `firing_layers` finds layers; dense, or already swapped by `sparsify`. It runs in
            evaluation mode without gradients, and eagerly if it was compiled; every module's mode is put back and the
            hooks are taken off afterwards, also when a batch fails.
        batches: what the model takes, one after the other: a tensor, a mapping of keyword arguments (what a
            transformers tokenizer returns) or a tuple of arguments. A single tensor or mapping is one batch. Tensors
            are moved to the device of the model's first parameter. Where there is an `attention_mask` [batch, tokens],
            by name or in its place, positions where it is 0 are left out of every count. Token ids [batch, tokens],
            the first argument or `input_ids`, say which tokens these are.
        tile: columns of the TwELL tiles that are counted.
        words: words of such a tile.
        only: profile the layers for which only(name, module) is true.

    Raises:
        InputError: for a model without feed-forward layers, for dense ones that compute something else than their parts
            say (probe.check: then the gate alone does not say who fires), for no batches, batches without a token or
            with one that the model does not know, and for a layer that is given NaN.
    """
    check_geometry(tile, words)
    found = firing_layers(model, only=only)
    found = sound(found)
    counters = [Counter(layer, tile, words) for layer in found]
    vocabulary = _Vocabulary(model)

    gathered = [_Gathered(counter, vocabulary) for counter in counters]
    if not run(model, [(each.counter.layer, each.see) for each in gathered], batches, after=vocabulary.see):
        raise InputError("batches is empty; accepted: at least one input of the model")
    for each in gathered:
        each.count()
        each.counter.check()
    layers = [counter.result() for counter in counters]
    if not any(layer.tokens for layer in layers):
        raise InputError(
            "no feed-forward layer saw a token: the batches were empty, or the model does not call its layers; "
            "accepted: one token or more"
        )
    return FiringProfile(layers, **vocabulary.result())


def activations(model: nn.Module, batch, layer: int | str) -> tuple[Tensor, Tensor]:
    """What really enters one feed-forward layer when `model` runs on `batch`, and its gate's answer.

    layer: position among the model's feed-forward layers (negative: from the end), or the layer's name.
    Returns (x [tokens, d_model], pre-activation [tokens, d_ff]) in the model's dtype on its device, masked
    positions left out; the relu of the second is what gets packed. Batch and errors are those of `profile`.
    """
    found = feed_forwards(model)
    names = [each.name for each in found]
    if isinstance(layer, str) and layer in names:
        chosen = found[names.index(layer)]
    elif isinstance(layer, int) and -len(found) <= layer < len(found):
        chosen = found[layer]
    else:
        raise InputError(f"layer is {layer!r}; accepted: a position among {len(found)}, or a name of {names}")
    seen: list[tuple[Tensor, Tensor]] = []
    run(model, [(chosen, lambda x, gate, rows: seen.append((rows.kept(x), rows.kept(gate(ALL)))))], [batch])
    if not any(x.shape[0] for x, _ in seen):
        raise InputError(f"no token reached {chosen.name!r} in this batch; accepted: at least one")
    return torch.cat([x for x, _ in seen]), torch.cat([gate for _, gate in seen])


def captured(model: nn.Module, batches: Iterable, names: Iterable[str], rows: int) -> dict[str, Tensor]:
    """What really enters the feed-forward layers called so when `model` runs on the batches.

    Returns for each name up to `rows` inputs, [rows, d_model], in the model's dtype on its device, masked positions
    left out; batches after those that hold so many are not run. Batches and errors are those of `profile`.
    """
    kept: dict[str, list[Tensor]] = {name: [] for name in names}

    def lacking(name: str) -> int:
        return rows - sum(map(len, kept[name]))

    def keep(name: str, x: Tensor, gate: Gate, rows: Rows) -> None:
        if lacking(name) > 0:
            kept[name].append(rows.kept(x)[: lacking(name)])

    watched = [(each, partial(keep, each.name)) for each in feed_forwards(model) if each.name in kept]
    run(model, watched, batches, enough=lambda: all(lacking(name) <= 0 for name in kept))
    for name in kept:
        if lacking(name) == rows:
            raise InputError(f"no token reached {name!r} in the batches; accepted: at least one")
    return {name: torch.cat(pieces) for name, pieces in kept.items()}


class Counter:
    """Adds up the firing of one layer, on the device where it fires; nothing here waits for that device."""

    def __init__(self, layer: FeedForward, tile: int, words: int) -> None:
        self.layer, self.tile, self.words = layer, tile, words
        self.d_ff, self.d_model = layer.pattern.weight.shape
        sizes = dict.fromkeys(("tokens", "overflowing", "pairs", "pair_nnz", "pair_shared"), ())
        sizes |= {"nnz_histogram": (self.d_ff + 1,), "neuron_counts": (self.d_ff,), "tile_histogram": (tile + 1,)}
        sizes |= dict.fromkeys(("position_tokens", "position_nnz"), (len(POSITIONS),))
        sizes["undefined"] = ()  # tokens at which the gate's first answer is NaN, as all are where x holds one
        self.counts = {name: torch.zeros(size, dtype=torch.int64, device="cpu") for name, size in sizes.items()}
        self.placed = False  # whether the position of any token was known

    def add(self, x: Tensor, gate: Gate, rows: Rows | None = None) -> Tensor:
        """Count one input, x [..., d_model], and its gate's answers; rows: what is known of its rows. Returns how many
        neurons fired at each row, int64, 0 where it does not count."""
        rows = (rows or Rows()).to(x.device)
        self.placed |= rows.group is not None
        self.counts = {name: count.to(x.device) for name, count in self.counts.items()}
        many, step = x.shape[:-1].numel(), max(1, (_PIECE_CPU if x.device.type == "cpu" else _PIECE) // self.d_ff)
        # Each piece has one row more than is counted with it: the neighbour of the last one.
        nnz = torch.zeros(many, dtype=torch.int64, device=x.device)
        for start in range(0, many, step):
            end = min(start + step, many)
            nnz[start:end] = self._add(gate(slice(start, end + 1)), rows.part(start, end + 1), end - start)
        return nnz

    def _add(self, gate: Tensor, rows: Rows, many: int) -> Tensor:
        """`add` for one piece, of whose rows the first `many` count."""
        # What a threshold kept may be negative: SiLU's small values are.
        acts, cut = self.layer.acts, self.layer.cut
        firing = gate != 0 if cut is not None else fires(gate) if acts is None else acts(gate) != 0
        if rows.counted is not None:
            firing &= rows.counted[:, None]
        tiles = -(-self.d_ff // self.tile)
        whole = F.pad(firing, (0, tiles * self.tile - self.d_ff)) if self.d_ff % self.tile else firing.contiguous()
        in_tile = _in_runs(whole, self.tile)
        nnz, own = in_tile.sum(-1), in_tile[:many]
        counted = nnz.new_ones(many) if rows.counted is None else rows.counted[:many].long()
        self.counts["undefined"] += (gate[:many, 0].isnan() * counted).sum()
        self.counts["tokens"] += counted.sum()
        self.counts["overflowing"] += (own >= self.words).any(-1).sum()
        # scatter_add_ rather than bincount, which waits for the largest value to size its result.
        self.counts["nnz_histogram"].scatter_add_(0, nnz[:many], counted)
        self.counts["neuron_counts"] += _in_columns(whole[:many])[: self.d_ff]
        self.counts["tile_histogram"].scatter_add_(0, own.flatten(), counted[:, None].expand(-1, tiles).flatten())
        if rows.group is not None:
            self.counts["position_tokens"].scatter_add_(0, rows.group[:many], counted)
            self.counts["position_nnz"].scatter_add_(0, rows.group[:many], nnz[:many])
        if rows.linked is not None:
            linked = rows.linked[: len(firing) - 1]
            self.counts["pairs"] += linked.sum()
            self.counts["pair_nnz"] += (linked * (nnz[:-1] + nnz[1:])).sum()
            self.counts["pair_shared"] += (linked * _in_runs(whole[:-1] & whole[1:], self.tile).sum(-1)).sum()
        return nnz[:many]

    def check(self) -> None:
        """InputError if the gate answered NaN, which counts as firing."""
        if broken := int(self.counts["undefined"]):
            raise InputError(
                f"what enters {self.layer.name!r}, or its gate, is NaN at {broken:,} of "
                f"{int(self.counts['tokens']):,} tokens, where neurons would count as firing; accepted: a model that "
                "gives finite values (a training may have diverged, float16 may have overflowed)"
            )

    def result(self) -> LayerProfile:
        counts = {name: count.cpu() for name, count in self.counts.items() if name != "undefined"}
        placed = ("position_tokens", "position_nnz", "pairs", "pair_nnz", "pair_shared")
        if not self.placed:
            counts |= dict.fromkeys(placed)
        numbers = {name: count.item() for name, count in counts.items() if count is not None and not count.dim()}
        return LayerProfile(
            name=self.layer.name,
            d_model=self.d_model,
            d_ff=self.d_ff,
            gated=self.layer.gate is not None,
            tile=self.tile,
            words=self.words,
            **{**counts, **numbers},
        )


# Booleans are bytes of 0 or 1, so eight are added by one addition of 64-bit words, 255 times before a byte overflows.
# torch's own sum of booleans writes them as whole numbers first, which takes a GPU longer than all else here.
_EIGHT, _MOST = 8, 255


def _in_runs(firing: Tensor, width: int) -> Tensor:
    """How many are true of each `width` neighbours: bool [rows, runs * width] to int64 [rows, runs]."""
    rows, columns = firing.shape
    if width % _EIGHT or width > _EIGHT * _MOST:
        return firing.view(rows, columns // width, width).sum(-1, dtype=torch.int32).long()
    words = firing.view(torch.int64).view(rows, columns // width, width // _EIGHT).sum(-1)
    fours = (words & 0x00FF00FF00FF00FF) + (words >> 8 & 0x00FF00FF00FF00FF)  # four sums of 16 bits
    return fours * 0x0001000100010001 >> 48 & 0xFFFF


def _in_columns(firing: Tensor) -> Tensor:
    """How many are true in each column: bool [rows, columns] to int64 [columns]."""
    rows, columns = firing.shape
    if columns % _EIGHT:
        return firing.sum(0, dtype=torch.int32).long()
    words, whole = firing.view(torch.int64), rows - rows % _MOST
    sums = words[:whole].view(whole // _MOST, _MOST, columns // _EIGHT).sum(1).view(torch.uint8).sum(0)
    return sums + words[whole:].sum(0).view(torch.uint8)


class _Gathered:
    """Has the inputs of one layer counted, those of few rows together."""

    def __init__(self, counter: Counter, vocabulary: _Vocabulary) -> None:
        self.counter, self.vocabulary = counter, vocabulary
        self._gates: list[Tensor] = []
        self._rows: list[Rows] = []

    def see(self, x: Tensor, gate: Gate, rows: Rows) -> None:
        """As analysis.running.run calls it."""
        if self._rows and (self._rows[-1].known != rows.known or self._gates[-1].device != x.device):
            self.count()
        if x.shape[:-1].numel() * self.counter.d_ff > _TOGETHER:
            self.vocabulary.add(rows, self.counter.add(x, gate, rows))
            return
        self._gates.append(gate(ALL).clone())  # the model may go on in the same memory
        self._rows.append(rows)
        if sum(map(Tensor.numel, self._gates)) >= _TOGETHER:
            self.count()

    def count(self) -> None:
        """Count what was kept."""
        if self._rows:
            gates, rows = torch.cat(self._gates), Rows.joined(self._rows)
            self._gates, self._rows = [], []
            self.vocabulary.add(rows, self.counter.add(gates, gates.__getitem__, rows))


class _Vocabulary:
    """Adds up how often each token of the vocabulary was seen, and how many neurons fired there."""

    def __init__(self, model: nn.Module) -> None:
        self.size = vocabulary_of(model)
        self.sums: dict[str, Tensor] = {}

    def see(self, rows: Rows) -> None:
        """Count the tokens of a batch."""
        if rows.ids is not None:
            counted = torch.ones_like(rows.ids) if rows.counted is None else rows.counted.long()
            self._add("token_counts", rows.ids, counted)

    def add(self, rows: Rows, nnz: Tensor) -> None:
        """Count what fired in one layer at its rows."""
        if rows.ids is not None:
            self._add("token_nnz", rows.ids.to(nnz.device), nnz)

    def _add(self, name: str, ids: Tensor, values: Tensor) -> None:
        if name not in self.sums:  # with a place for what is in no vocabulary, which is left out in the end
            self.sums[name] = torch.zeros(self.size + 1, dtype=torch.int64, device=ids.device)
        self.sums[name] = self.sums[name].to(ids.device).scatter_add_(0, ids, values)

    def result(self) -> dict[str, Tensor]:
        return {name: sums[:-1].cpu() for name, sums in self.sums.items()}


def _check(other) -> None:
    if not isinstance(other, FiringProfile):
        raise InputError(f"the other profile is a {type(other).__name__}; a FiringProfile is accepted")


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _tokens_from(content, where: str) -> dict[str, Tensor]:
    """The counts of a profile's tokens from their JSON form, each field checked."""
    if content is None:
        return {}
    saved.fields(content, {"vocabulary": int, "ids": list, **dict.fromkeys(_TOKENS, list)}, where)
    ids, size = content["ids"], content["vocabulary"]
    if size > _LARGEST:
        raise RecordError(f"{where}: 'vocabulary' is {size}; accepted: a whole number up to {_LARGEST}")
    for name in ("ids", *_TOKENS):
        saved.counts(content, name, len(ids), size - 1 if name == "ids" else WHOLE - 1, where)
    if any(one >= next for one, next in pairwise(ids)) or 0 in content["token_counts"]:
        raise RecordError(
            f"{where}: 'ids' are not in ascending order, or one was never seen; accepted: a whole profile"
        )
    made = {name: torch.zeros(size, dtype=torch.int64, device="cpu") for name in _TOKENS}
    return {
        name: sums.scatter_(0, torch.tensor(ids).long(), torch.tensor(content[name]).long())
        for name, sums in made.items()
    }
