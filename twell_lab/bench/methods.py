"""A gated layer by every method that skips neurons, for the map of the notebook on choosing a path, beside its dense
self.

Each method is held against the dense layer before it is timed, unless it is lossy or another layer, which its name
says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.choice import Choice
from ..layers.find import feed_forwards
from ..layers.paths.twell import STEP
from ..models.swap import sparsify
from ..ops import clock
from ..ops.clock import dtype_for
from ..ops.reference import GatedFeedForward
from ..sparsities import experts, microtiles
from ..sparsities.predictors import LowRank, PredictedFFN
from ..sparsities.quantised import output_error
from . import rows

DENSE, PACKED, SPLIT, TILES = "dense", "packed (TwELL)", "hot and cold", "micro-tiles 32 x 1"
EXPERTS, PREDICTED = "experts (another layer)", "predictor (lossy), at its best"
GROUPED = "its neurons as experts (lossy)"
METHODS = (DENSE, PACKED, SPLIT, TILES, EXPERTS, PREDICTED, GROUPED)
INEXACT = (EXPERTS, PREDICTED, GROUPED)  # another layer, and lossy ones
SHARES = (1 / 256, 1 / 64, 1 / 32, 1 / 8, 3 / 8)  # of the neurons that fire, or are computed, for a token
HEIGHT, RANK = 32, 64
_EXPERTS = 32  # that a layer's neurons are cut into, for the map
OFF = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}  # of the dense result, at most


@dataclass(frozen=True)
class Sizes:
    """Of the layers that are timed on a device. tokens: of the map. many: where one count is looked at."""

    d_model: int
    d_ff: int
    tokens: tuple[int, ...]
    many: int


def sizes_for(device: str) -> Sizes:
    """A 2B model's layer on a GPU; on a CPU a smaller one, whose weights are still too many for most caches."""
    if device == "cuda":
        return Sizes(2048, 5632, (1, 64, 2048, 16384), 16384)
    return Sizes(1024, 4096, (1, 8, 32, 128), 128)


def drawn(share: float, device: str, tokens: int | None = None) -> tuple[GatedFeedForward, Tensor]:
    """A gated layer whose neurons fire at lognormal rates, the busiest first, and an input [tokens, d_model]."""
    sizes = sizes_for(device)
    rates = clock.firing_rates(sizes.d_ff, share * sizes.d_ff).sort(descending=True).values
    layer, inputs = clock.drawn(
        rates, tokens or sizes.many, sizes.d_model, dtype_for(device), device, shrink=(share * sizes.d_ff) ** 0.5
    )
    return layer, inputs[0]


def swapped(layer: nn.Module, choice: Choice) -> nn.Module:
    """The layer with this choice, on the same weights."""
    held = GatedFeedForward(layer.up_proj.in_features, layer.up_proj.out_features).to_empty(device="meta")
    held.load_state_dict(layer.state_dict(), assign=True)
    return sparsify(nn.Sequential(held.requires_grad_(False).eval()), choice)


def _methods(layer: GatedFeedForward, share: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """The methods by name. Experts there are where this share of them is one at least."""
    weight = layer.up_proj.weight
    d_ff, d_model = weight.shape
    guess = LowRank(d_model, d_ff, RANK).to(weight.device, weight.dtype).requires_grad_(False)
    (found,) = feed_forwards(nn.Sequential(layer))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        DENSE: layer,
        PACKED: swapped(layer, Choice("twell")),
        SPLIT: swapped(layer, Choice("hot_cold", STEP)),
        TILES: functools.partial(by_stripes, layer, layer.down_proj.weight.t().contiguous()),
        PREDICTED: PredictedFFN(found, guess, max(1, round(share * d_ff))),
        GROUPED: swapped(layer, Choice("experts")),
    }
    if (top := round(share * _EXPERTS)) >= 1:
        calls[EXPERTS] = experts.ExpertsLayer(
            d_model, d_ff // _EXPERTS, _EXPERTS, top, activation="relu", device=weight.device, dtype=weight.dtype
        )
    return calls


def by_stripes(layer: GatedFeedForward, down_t: Tensor, x: Tensor, height: int = HEIGHT) -> Tensor:
    """The layer's output for x [tokens, d_model], from micro-tiles of what the gate lets through: of each stripe of
    tokens, up and down are multiplied for the neurons that fire for one of them. down_t: [d_ff, d_model].

    On a GPU, whose kernel multiplies the tiles themselves, down alone is, so that nothing waits."""
    gate = F.linear(x, layer.gate_proj.weight).relu()
    if x.is_cuda:
        return microtiles.product(microtiles.find_microtiles(gate * layer.up_proj(x), height), down_t)
    tiles = microtiles.find_microtiles(gate, min(height, len(x)))
    made = []
    for some, values, columns, count in zip(x.split(tiles.height), tiles.values, tiles.columns, tiles.counts.tolist()):
        neurons = columns[:count].long()
        hidden = values[:count, : len(some)].t() * F.linear(some, layer.up_proj.weight[neurons])
        made.append(hidden @ down_t[neurons])
    return torch.cat(made)


def hold(name: str, y: Tensor, wanted: Tensor) -> None:
    """WrongResult unless a method gave what the dense layer gives."""
    error = float((y.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))
    if y.shape != wanted.shape or not error <= OFF[wanted.dtype]:
        raise clock.WrongResult(f"{name} is off by {error:.2g} of the dense result: nothing was timed")


def held(
    layer: GatedFeedForward, x: Tensor, share: float, counts: Iterable[int]
) -> Iterator[tuple[int, dict[str, Callable]]]:
    """For each number of tokens it, and the methods as calls without arguments, the exact ones held to the layer."""
    methods = _methods(layer, share)
    for tokens in counts:
        some = x[:tokens].contiguous()
        calls = {name: functools.partial(call, some) for name, call in methods.items()}
        if tokens > 1:  # for more it computes all, and masks
            del calls[PREDICTED]
        wanted = layer(some)
        for method in (PACKED, SPLIT, TILES):
            hold(method, calls[method](), wanted)
        yield tokens, calls


@torch.no_grad()
def map_rows(share: float, device: str = "cuda") -> list[dict]:
    """The layer at one share of firing neurons and each number of tokens, by each method, as rows of kind "map" for a
    record: their path is the method. The `share` is that asked for, `nnz` what fires; the `error` of GROUPED is that of
    the layer's output."""
    sizes, made = sizes_for(device), []
    layer, x = drawn(share, device, max(sizes.tokens))
    for tokens, calls in held(layer, x, share, sizes.tokens):
        said = rows.describe("map", [x[:tokens]], layer.gate_proj.weight, f"drawn gated layer, {share:.2%} fire")
        turned = {
            rows.DENSE if name == DENSE else name: (lambda turn, call=call: call()) for name, call in calls.items()
        }
        if device == "cuda":
            samples, bursts = rows.clock_gpu(turned, clock.GRAPH_TOKENS + 1, rounds=10)
        else:
            samples, bursts = rows.clock_cpu(turned, 0.3)
        facts = {GROUPED: {"error": output_error(calls[GROUPED](), calls[DENSE]())}}
        made += rows.table(said | {"share": share}, samples, facts, bursts)
    return made
