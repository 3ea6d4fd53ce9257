"""Whole layers by every method that skips neurons or tokens, beside their dense selves: the map of the notebook on
choosing a path, padded batches, and mixtures of experts.

Each method is held against the dense layer before it is timed, unless it is lossy or another layer, which its name
says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.choice import Choice
from ..layers.find import feed_forwards
from ..layers.paths import STEP
from ..models.swap import sparsify
from ..ops import clock
from ..ops.reference import GatedFeedForward
from ..sparsities import microtiles
from ..sparsities.experts import WAYS, ExpertsLayer
from ..sparsities.padding import Padding, add_padding, remove_padding
from ..sparsities.predictors import LowRank, PredictedFFN
from ..sparsities.quantised import output_error
from . import comparison, rows
from .comparison import TILED

DENSE, PACKED, SPLIT, TILES = "dense", "packed (TwELL)", "hot and cold", TILED
EXPERTS, PREDICTED = "experts (another layer)", "predictor (lossy), at its best"
METHODS = (DENSE, PACKED, SPLIT, TILES, EXPERTS, PREDICTED)
INEXACT = (EXPERTS, PREDICTED)  # another layer, and a lossy one
SHARES = (1 / 256, 1 / 64, 1 / 32, 1 / 8, 3 / 8)  # of the neurons that fire, or are computed, for a token
HEIGHT, RANK = 32, 64
_EXPERTS = 32  # that a layer's neurons are cut into, for the map
OFF = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}  # of the dense result, at most
REMOVED, ALONE = "padding removed", "real tokens alone"
LAYERS, REAL = (1, 8), (0.25, 0.5, 0.75, 1.0)  # of padded batches: layers one after another, real tokens
TOP_K = 2  # experts that a token takes


@dataclass(frozen=True)
class Sizes:
    """Of what is timed on a device, by default a 2B model's layer on a GPU. tokens: of the map, in ascending order; the
    last is where one count is looked at, in so many `sequences`. seconds: of each comparison, on a CPU."""

    d_model: int = 2048
    d_ff: int = 5632
    tokens: tuple[int, ...] = (1, 64, 2048, 16384)
    sequences: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seconds: float = 1.0


def sizes_for(device: str) -> Sizes:
    """Return the sizes for a GPU or, of a smaller layer whose weights are still too many for most caches, a CPU."""
    if device == "cuda":
        return Sizes(dtype=clock.dtype_for(device))
    return Sizes(1024, 4096, (1, 8, 32, 128), 8, torch.float32, device, 0.3)


def drawn(share: float, sizes: Sizes, tokens: int) -> tuple[GatedFeedForward, Tensor]:
    """Return a gated layer whose neurons fire at lognormal rates, the busiest first, and an input [tokens, d_model]."""
    rates, shrink = clock.firing_rates(sizes.d_ff, share * sizes.d_ff), (share * sizes.d_ff) ** 0.5
    at = (tokens, sizes.d_model, sizes.dtype, sizes.device)
    layer, inputs = clock.drawn(rates.sort(descending=True).values, *at, shrink=shrink)
    return layer, inputs[0]


def swapped(layer: nn.Module, choice: Choice) -> nn.Module:
    """Return a copy of the layer with this choice, whose weights may lie as the choice reads them."""
    return sparsify(nn.Sequential(copy.deepcopy(layer).requires_grad_(False).eval()), choice)


def check_close(name: str, y: Tensor, wanted: Tensor) -> None:
    """Raise WrongResult unless a method gave what the dense layer gives."""
    rows.hold(name, output_error(y, wanted), OFF[wanted.dtype])


# ---- the map ----


def by_stripes(layer: GatedFeedForward, down_t: Tensor, x: Tensor, height: int = HEIGHT) -> Tensor:
    """Return the layer's output for x [tokens, d_model] by micro-tiles: of each stripe of tokens, up and down are
    multiplied for the neurons that fire for one of them; on a GPU, whose kernel multiplies the tiles themselves, down
    alone, so that nothing waits. down_t: [d_ff, d_model]."""
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


@torch.no_grad()
def map_rows(share: float, sizes: Sizes = Sizes()) -> list[dict]:
    """Return rows of kind "map": a layer at one share of firing neurons and each number of tokens, by each method. The
    `share` is that asked for, `nnz` what fires. Experts there are where this share of them is one at least."""
    layer, x = drawn(share, sizes, sizes.tokens[-1])
    guess = LowRank(sizes.d_model, sizes.d_ff, RANK).to(x).requires_grad_(False)
    (ffn,) = feed_forwards(nn.Sequential(layer))
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        rows.DENSE: layer,
        PACKED: swapped(layer, Choice("twell")),
        SPLIT: swapped(layer, Choice("hot_cold", STEP)),
        TILES: functools.partial(by_stripes, layer, layer.down_proj.weight.t().contiguous()),
        PREDICTED: PredictedFFN(ffn, guess, max(1, round(share * sizes.d_ff))),
    }
    if (top := round(share * _EXPERTS)) >= 1:
        like = {"activation": "relu", "device": x.device, "dtype": x.dtype}
        methods[EXPERTS] = ExpertsLayer(sizes.d_model, sizes.d_ff // _EXPERTS, _EXPERTS, top, **like)
    made = []
    for tokens in sizes.tokens:
        some = x[:tokens].contiguous()
        for method in (PACKED, SPLIT, TILES):
            check_close(method, methods[method](some), layer(some))
        # Of more than one token the predictor computes all, and masks.
        calls = {name: rows.over(methods[name], [some]) for name in methods if name != PREDICTED or tokens == 1}
        said = rows.describe("map", [some], layer.gate_proj.weight, f"drawn gated layer, {share:.2%} fire")
        made += rows.measured(said | {"share": share}, calls, seconds=sizes.seconds, rounds=10)
    return made


# ---- padding ----


def padded(inputs: list[Tensor], share: float, sizes: Sizes) -> tuple[Tensor, list[Tensor], Padding]:
    """Return which tokens of a batch are no padding, this share of them all: bool [sequences, length]; the inputs as
    such batches; and the padding."""
    lengths = torch.linspace(2 * share - 1 if share > 0.5 else 0, min(1, 2 * share), sizes.sequences)
    length = sizes.tokens[-1] // sizes.sequences
    real = (torch.arange(length) < (lengths[:, None] * length).round()).to(sizes.device)
    xs = [x.view(*real.shape, -1) for x in inputs]
    return real, xs, remove_padding(xs[0], real)[1]


@torch.no_grad()
def padding_rows(share: float, layers: int, sizes: Sizes = Sizes()) -> list[dict]:
    """Return rows of kind "padding": gated layers, one after another with residuals, on sequences of which this share
    of the tokens is real: on all tokens; with the padding `REMOVED` before the first layer and put back after the last
    (a model finds the tokens once); and on as many tokens that lie side by side (`ALONE`), which nothing can beat."""
    tokens, device = sizes.tokens[-1], sizes.device
    layer, inputs = clock.workload(tokens, sizes.d_model, sizes.d_ff, 29, "lognormal", sizes.dtype, device)
    stacked = [copy.deepcopy(layer) for _ in range(layers)]
    real, xs, padding = padded(inputs, share, sizes)

    def stack(x: Tensor) -> Tensor:
        for one in stacked:  # without a norm a gated layer's output grows as a square
            x = x + one(F.rms_norm(x, x.shape[-1:]))
        return x

    def removed(x: Tensor, run: Callable[[Tensor], Tensor] = stack) -> Tensor:
        return add_padding(run(padding.gather(x)), padding)

    # Of the first layer, since roundings of other products grow from layer to layer; the stack on the same rows.
    check_close(REMOVED, removed(xs[0], layer)[real], layer(xs[0])[real])
    check_close(REMOVED, removed(xs[0])[real], stack(xs[0][real]))
    calls = {rows.DENSE: rows.over(stack, xs), REMOVED: rows.over(removed, xs)}
    calls[ALONE] = rows.over(stack, [padding.gather(x) for x in xs])
    workload = f"{layers} layer{'s' * (layers > 1)}, {share:.0%} of the tokens real"
    shared = rows.of_layer("padding", inputs[0], sizes.d_ff, workload) | {"real": int(real.sum()), "layers": layers}
    return rows.measured(shared, calls, seconds=sizes.seconds)


def proportions(table: Iterable[dict]) -> list[tuple[int, float, float | None]]:
    """Return, for each number of layers in rows of kind "padding" of one device and size, how far the time without
    padding is from the dense layers' time for all tokens times the share of real ones, where it is furthest; and the
    same of as many tokens alone, there."""
    padded, made = [row for row in table if row["kind"] == "padding" and row["real"]], []
    for layers in sorted({row.get("layers", 1) for row in padded}):
        mine = [row for row in padded if row.get("layers", 1) == layers]
        dense = fmean(row["ms"] for row in mine if row["path"] == rows.DENSE)
        off = {(row["path"], row["real"]): row["ms"] * row["tokens"] / row["real"] / dense - 1 for row in mine}
        _, real = max((key for key in off if key[0] == REMOVED), key=lambda key: abs(off[key]))
        made.append((layers, off[REMOVED, real], off.get((ALONE, real))))
    return made


# ---- experts ----


@torch.no_grad()
def experts_rows(experts: int, d_ff: int, sizes: Sizes = Sizes(), *, crowded: bool = False) -> list[dict]:
    """Return rows of kind "experts": a mixture of so many of d_ff neurons in every way that computes it, beside the
    loop over dense layers. crowded: all tokens take the same experts, and not those that a random router chooses."""
    torch.manual_seed(0)
    like = {"device": sizes.device, "dtype": sizes.dtype}
    layer, routed = ExpertsLayer(sizes.d_model, d_ff, experts, TOP_K, **like), []
    for _ in range(clock.ROTATED):
        x = torch.randn(sizes.tokens[-1], sizes.d_model, device=sizes.device).to(sizes.dtype)
        chosen, weights = layer.route(x)
        routed.append((x, torch.arange(TOP_K, device=x.device).expand_as(chosen) if crowded else chosen, weights))

    def by(way: str, given: tuple) -> Tensor:
        layer.experts.way = way
        return layer.experts(*given)

    right = by("loop", routed[0])
    for way in WAYS:
        check_close(way, by(way, routed[0]), right)
    calls = {way: rows.over(functools.partial(by, way), routed) for way in WAYS}
    calls = {rows.DENSE: calls.pop("loop"), **calls}
    shared = rows.of_layer("experts", routed[0][0], d_ff, f"{experts} experts, {TOP_K} a token")
    shared |= {"experts": experts, "density": TOP_K / experts}
    return rows.measured(shared, calls, seconds=sizes.seconds)


def sections(left_out: dict | None = None, sizes: Sizes | None = None) -> rows.Sections:
    """Return the steps of the record of all comparisons that are recorded, those of products first."""
    sizes = sizes or sizes_for("cuda")
    padded = [functools.partial(padding_rows, share, layers, sizes) for layers in LAYERS for share in REAL]
    return comparison.sections() | {"padding": padded, "map": rows.steps(map_rows, SHARES, [sizes])}
