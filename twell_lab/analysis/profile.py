"""Who fires: hooks on the feed-forward layers of a model, and counts of what passed through them.

A neuron fires at a token where its gate's pre-activation is kept by packing: `not (g <= 0)`, so positive or
NaN (plain layers have no gate; there the up projection decides). All counts are whole numbers, gathered on
the model's device without waiting for it; everything else (density, frequencies, ...) is computed from them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import records
from ..core.errors import InputError, RecordError
from ..core.files import WHOLE, write_atomically
from ..formats.twell import TILE, WORDS, check_geometry, fires
from ..layers import probe
from ..layers.anatomy import FeedForward, Only, feed_forwards, firing_layers
from ..layers.sparse_ffn import SparseFFN
from . import saved

FORMAT = "twell-lab firing profile"
VERSION = 1


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The firing of one feed-forward layer, as counts over `tokens` tokens (int64 tensors on the CPU).

    nnz_histogram: [d_ff + 1], how many tokens had 0, 1, ..., d_ff neurons firing.
    neuron_counts: [d_ff], at how many tokens each neuron fired.
    tile_histogram: [tile + 1], how many pairs of a token and a tile of `tile` neighbouring neurons had 0, 1,
        ..., tile of them firing. The last tile of a width that is no multiple of `tile` is narrower.
    overflowing: how many tokens had a tile with more than `words - 1` firing, TwELL's slots.
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
    def overflow_rows(self) -> float:
        """The share of tokens with at least one tile that fires beyond its slots; NaN without tokens."""
        return self.overflowing / self.tokens if self.tokens else float("nan")


@dataclass(frozen=True, eq=False)
class FiringProfile:
    """The profiles of all feed-forward layers of a model, in the model's order."""

    layers: list[LayerProfile]

    @property
    def tokens(self) -> int:
        """How many tokens the layers saw: the largest number among them, should they differ."""
        return max(layer.tokens for layer in self.layers)

    def table(self) -> list[dict]:
        """One row a layer, JSON-able; None stands where a layer saw no token."""

        def number(value: float) -> float | None:
            return None if value != value else value

        return [
            {
                "layer": layer.name,
                "d_model": layer.d_model,
                "d_ff": layer.d_ff,
                "gated": layer.gated,
                "tokens": layer.tokens,
                "density": number(layer.density),
                "mean_nnz": number(layer.mean_nnz),
                "dead": layer.dead,
                "overflow_rows": number(layer.overflow_rows),
            }
            for layer in self.layers
        ]

    def __str__(self) -> str:
        """`table` as lines of text, without the sizes."""
        return records.table(
            self.table(),
            {
                "layer": "layer",
                "d_ff": "d_ff",
                "mean_nnz": "mean nnz",
                "density": "density",
                "dead": "dead neurons",
                "overflow_rows": "rows overflowing",
            },
        )

    def save(self, path: str | os.PathLike) -> Path:
        """Write the counts as JSON, the file whole or not at all. RecordError where it can't be written."""
        path = Path(path)
        layers = [
            {key: value.tolist() if isinstance(value, Tensor) else value for key, value in vars(layer).items()}
            for layer in self.layers
        ]
        write_atomically(
            path, json.dumps({"format": FORMAT, "version": VERSION, "layers": layers}) + "\n", make_folder=False
        )
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> FiringProfile:
        """The profile that `save` wrote. RecordError names the file and the field missing or wrong."""
        content, where, _ = saved.load(path, "profile", FORMAT, {VERSION: {"layers": list}})
        if not content["layers"]:
            raise RecordError(f"{where}: 'layers' is empty; accepted: one layer or more")
        return cls([_layer_from(each, f"{where}, layer {number}") for number, each in enumerate(content["layers"])])


def profile(
    model: nn.Module, batches: Iterable, tile: int = TILE, words: int = WORDS, *, only: Only | None = None
) -> FiringProfile:
    """Run `model` over `batches` and count which feed-forward neurons fire.

    model: any module in which `firing_layers` finds layers; dense, or already swapped by `sparsify`. It runs
        in evaluation mode without gradients; every module's mode is put back and the hooks are taken off
        afterwards, also when a batch fails.
    batches: what the model takes, one after the other: a tensor, a mapping of keyword arguments (what a
        transformers tokenizer returns) or a tuple of arguments. A single tensor or mapping is one batch.
        Tensors are moved to the device of the model's first parameter. Where a mapping holds an
        `attention_mask` [batch, tokens], positions where it is 0 are left out of every count.
    tile, words: the TwELL geometry for which tiles are counted.
    only: profile the layers for which only(name, module) is true.

    Raises InputError for a model without feed-forward layers, for dense ones that compute something else than their
    parts say (probe.check: then the gate alone does not say who fires), no batches, and batches without a token."""
    check_geometry(tile, words)
    found = firing_layers(model, only=only)
    probe.check_all((layer.name, layer.module) for layer in found if not isinstance(layer.module, SparseFFN))
    counters = [Counter(layer, tile, words) for layer in found]
    if not see_layers(model, [(counter.layer, counter.add) for counter in counters], batches):
        raise InputError("batches is empty; accepted: at least one input of the model")
    layers = [counter.result() for counter in counters]
    if not any(layer.tokens for layer in layers):
        raise InputError(
            "no feed-forward layer saw a token: the batches were empty, or the model was "
            "compiled, which hides it from hooks; accepted: one token or more, not yet compiled"
        )
    return FiringProfile(layers)


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
    see_layers(model, [(chosen, lambda *what: seen.append(rows_of(*what)))], [batch])
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

    def keep(name: str, *what: Tensor) -> None:
        if lacking(name) > 0:
            kept[name].append(rows_of(*what)[0][: lacking(name)])

    watched = [(each, partial(keep, each.name)) for each in feed_forwards(model) if each.name in kept]
    see_layers(model, watched, batches, enough=lambda: all(lacking(name) <= 0 for name in kept))
    for name in kept:
        if lacking(name) == rows:
            raise InputError(f"no token reached {name!r} in the batches; accepted: at least one")
    return {name: torch.cat(pieces) for name, pieces in kept.items()}


class Counter:
    """Adds up the firing of one layer, on the device where it fires; nothing here waits for that device."""

    def __init__(self, layer: FeedForward, tile: int, words: int) -> None:
        self.layer, self.tile, self.words = layer, tile, words
        self.d_ff, self.d_model = layer.pattern.weight.shape
        self.counts = {
            "tokens": torch.zeros((), dtype=torch.int64, device="cpu"),
            "overflowing": torch.zeros((), dtype=torch.int64, device="cpu"),
            "nnz_histogram": torch.zeros(self.d_ff + 1, dtype=torch.int64, device="cpu"),
            "neuron_counts": torch.zeros(self.d_ff, dtype=torch.int64, device="cpu"),
            "tile_histogram": torch.zeros(tile + 1, dtype=torch.int64, device="cpu"),
        }

    def add(self, x: Tensor, gate: Tensor, mask: Tensor | None = None) -> None:
        """Count one batch. gate: the pre-activations, [..., d_ff]; mask: bool [batch, tokens], None counts all."""
        gate = gate.reshape(-1, self.d_ff)
        # What a threshold kept may be negative: SiLU's small values are.
        firing = fires(gate) if self.layer.acts is None else self.layer.acts(gate) != 0
        counted = firing.new_ones(len(firing)) if mask is None else _flat_mask(mask, firing)
        firing &= counted[:, None]
        counted = counted.long()
        tiles = -(-self.d_ff // self.tile)
        in_tile = F.pad(firing, (0, tiles * self.tile - self.d_ff)).view(-1, tiles, self.tile).sum(-1)
        self.counts = {name: count.to(gate.device) for name, count in self.counts.items()}
        self.counts["tokens"] += counted.sum()
        self.counts["overflowing"] += (in_tile >= self.words).any(-1).sum()
        # scatter_add_ rather than bincount, which waits for the largest value to size its result.
        self.counts["nnz_histogram"].scatter_add_(0, firing.sum(-1), counted)
        self.counts["neuron_counts"] += firing.sum(0)
        self.counts["tile_histogram"].scatter_add_(0, in_tile.flatten(), counted.repeat_interleave(tiles))

    def result(self) -> LayerProfile:
        counts = {name: count.cpu() for name, count in self.counts.items()}
        return LayerProfile(
            name=self.layer.name,
            d_model=self.d_model,
            d_ff=self.d_ff,
            gated=self.layer.gate is not None,
            tile=self.tile,
            words=self.words,
            tokens=counts.pop("tokens").item(),
            overflowing=counts.pop("overflowing").item(),
            **counts,
        )


@contextmanager
def on_gate(layer: FeedForward, see: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Within this context, `see(x, gate pre-activation)` is called whenever `layer` runs."""
    if isinstance(layer.module, SparseFFN):  # it never calls the projection that decides: compute it again

        def on_sparse(module: SparseFFN, args: tuple) -> None:
            see(args[0], module.in_own_order(F.linear(args[0], layer.pattern.weight, layer.pattern.bias)))

        hook = layer.module.register_forward_pre_hook(on_sparse)
    else:
        hook = layer.pattern.register_forward_hook(lambda module, args, output: see(args[0], output))
    try:
        yield
    finally:
        hook.remove()


def see_layers(
    model: nn.Module,
    watched: list[tuple[FeedForward, Callable]],
    batches: Iterable,
    enough: Callable[[], bool] = lambda: False,
) -> bool:
    """Run the model over the batches until there are enough; `see(x, gate pre-activation, mask)` is called of each
    watched layer whenever that runs, with what `rows_of` takes. Returns whether there was a batch. Batches and errors
    are those of `profile`."""
    mask, ran = None, False
    with evaluating(model), ExitStack() as hooks:
        for layer, see in watched:
            hooks.enter_context(
                on_gate(layer, lambda x, gate, see=see, layer=layer: see(x, gate, _routed(mask, layer)))
            )
        for batch in _each(batches):
            batch = _moved(batch, model)
            mask, ran = _mask(batch), True
            _call(model, batch)
            if enough():
                break
    return ran


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is back in its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _each(batches) -> Iterable:
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise InputError(f"batches is a {type(batches).__name__}; accepted: an iterable of inputs")
    return batches


def _moved(batch, model: nn.Module):
    """The batch with its tensors on the device of the model's first parameter."""
    device = next(model.parameters()).device

    def move(value):
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return {name: move(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(move(value) for value in batch)
    if not isinstance(batch, Tensor):
        raise InputError(f"a batch is a {type(batch).__name__}; accepted: a tensor, mapping or tuple")
    return batch.to(device)


def _call(model: nn.Module, batch) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple):
        model(*batch)
    else:
        model(batch)


def _mask(batch) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None


def rows_of(x: Tensor, gate: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x and gate as [rows, ...], the masked positions left out."""
    x, gate = x.reshape(-1, x.shape[-1]), gate.reshape(-1, gate.shape[-1])
    counted = slice(None) if mask is None else _flat_mask(mask, x)
    return x[counted], gate[counted]


def _routed(mask: Tensor | None, layer: FeedForward) -> Tensor | None:
    """The part of the mask that is about the tokens which a routed expert was given."""
    rows = getattr(layer.pattern, "rows", None)
    return mask if mask is None or rows is None else mask.flatten().to(rows.device)[rows]


def _flat_mask(mask: Tensor, rows: Tensor) -> Tensor:
    """The mask as bool [rows] on the device of `rows`, one entry for each row that a layer saw."""
    if mask.numel() != len(rows):
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}, but a layer saw {len(rows)} "
            f"positions; accepted: one entry a position"
        )
    return mask.flatten().to(rows.device)


_NUMBERS = ("d_model", "d_ff", "tokens", "tile", "words", "overflowing")
_COUNTS = ("nnz_histogram", "neuron_counts", "tile_histogram")
_LAYER = {"name": str, "gated": bool, **dict.fromkeys(_NUMBERS, int), **dict.fromkeys(_COUNTS, list)}


def _layer_from(content, where: str) -> LayerProfile:
    """A LayerProfile from its JSON form, each field checked."""
    content = saved.fields(content, _LAYER, where)
    saved.widths(content, where)
    try:
        check_geometry(content["tile"], content["words"])
    except InputError as error:
        raise RecordError(f"{where}: {error}") from None
    for name, length in zip(_COUNTS, (content["d_ff"] + 1, content["d_ff"], content["tile"] + 1)):
        saved.counts(content, name, length, WHOLE - 1, where)
    _check_counts(**content, where=where)
    tensors = {name: torch.tensor(content[name], dtype=torch.int64, device="cpu") for name in _COUNTS}
    return LayerProfile(**{**content, **tensors})


def _check_counts(d_ff, tokens, tile, overflowing, nnz_histogram, neuron_counts, tile_histogram, where, **_) -> None:
    """RecordError unless they can be counts of the same tokens: what is computed from others would be wrong without a
    word."""
    fired = sum(neuron_counts)
    for name, found, wanted in (
        ("nnz_histogram", sum(nnz_histogram), tokens),
        ("tile_histogram", sum(tile_histogram), tokens * -(-d_ff // tile)),
        ("nnz_histogram", sum(nnz * count for nnz, count in enumerate(nnz_histogram)), fired),
        ("tile_histogram", sum(nnz * count for nnz, count in enumerate(tile_histogram)), fired),
    ):
        if found != wanted:
            raise RecordError(
                f"{where}: {name!r} counts {found} where 'tokens' and 'neuron_counts' make {wanted}; accepted: a "
                f"whole profile"
            )
    if max([overflowing, *neuron_counts]) > tokens:
        raise RecordError(
            f"{where}: 'overflowing' or one of 'neuron_counts' is above 'tokens', {tokens}; accepted: a whole profile"
        )
