"""Whole layers by every method that skips neurons or tokens, beside their dense selves: the map of the notebook on
choosing a path, padded batches, and mixtures of experts.

Each method is held against the dense layer before it is timed, unless it is lossy or another layer, which its name
says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
from ..sparsities.padding import add_padding, remove_padding
from ..sparsities.predictors import LowRank, PredictedFFN
from ..sparsities.quantised import output_error
from . import comparison, rows
from .comparison import CHECKED, TILED

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
WHOLE = "all experts as one dense layer"
TOP_K = 2  # experts that a token takes


@dataclass(frozen=True)
class Sizes:
    """Of what is timed on a device, by default a 2B model's layer on a GPU. tokens: of the map, in ascending order; the
    last is where one count is looked at, in so many `sequences`. seconds: of each comparison, on a CPU."""

    d_model: int = 2048
    d_ff: int = 5632
    tokens: tuple[int, ...] = (1, 64, 2048, 16384)
    sequences: int = 64
    expert_d_ff: int = 1408
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seconds: float = 1.0


def sizes_for(device: str) -> Sizes:
    """Return the sizes for a GPU or, of a smaller layer whose weights are still too many for most caches, a CPU."""
    if device == "cuda":
        return replace(Sizes(), dtype=clock.dtype_for(device))
    return Sizes(1024, 4096, (1, 8, 32, 128), 8, 1024, torch.float32, device, 0.3)


def drawn(share: float, sizes: Sizes, tokens: int | None = None) -> tuple[GatedFeedForward, Tensor]:
    """Return a gated layer whose neurons fire at lognormal rates, the busiest first, and an input [tokens, d_model]."""
    rates = clock.firing_rates(sizes.d_ff, share * sizes.d_ff).sort(descending=True).values
    at = (tokens or sizes.tokens[-1], sizes.d_model, sizes.dtype, sizes.device)
    layer, inputs = clock.drawn(rates, *at, shrink=(share * sizes.d_ff) ** 0.5)
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


def _methods(layer: GatedFeedForward, share: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the methods by name. Experts there are where this share of them is one at least."""
    weight = layer.up_proj.weight
    d_ff, d_model = weight.shape
    guess = LowRank(d_model, d_ff, RANK).to(weight.device, weight.dtype).requires_grad_(False)
    (ffn,) = feed_forwards(nn.Sequential(layer))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        DENSE: layer,
        PACKED: swapped(layer, Choice("twell")),
        SPLIT: swapped(layer, Choice("hot_cold", STEP)),
        TILES: functools.partial(by_stripes, layer, layer.down_proj.weight.t().contiguous()),
        PREDICTED: PredictedFFN(ffn, guess, max(1, round(share * d_ff))),
    }
    if (top := round(share * _EXPERTS)) >= 1:
        of = {"activation": "relu", "device": weight.device, "dtype": weight.dtype}
        calls[EXPERTS] = ExpertsLayer(d_model, d_ff // _EXPERTS, _EXPERTS, top, **of)
    return calls


@torch.no_grad()
def map_rows(share: float, sizes: Sizes = Sizes()) -> list[dict]:
    """Return rows of kind "map": a layer at one share of firing neurons and each number of tokens, by each method. The
    `share` is that asked for, `nnz` what fires."""
    layer, x = drawn(share, sizes)
    methods, made = _methods(layer, share), []
    for tokens in sizes.tokens:
        some = x[:tokens].contiguous()
        y = layer(some)
        for method in (PACKED, SPLIT, TILES):
            check_close(method, methods[method](some), y)
        # Of more than one token the predictor computes all, and masks.
        there = {name: call for name, call in methods.items() if name != PREDICTED or tokens == 1}
        calls = {rows.DENSE if name == DENSE else name: rows.over(call, [some]) for name, call in there.items()}
        said = rows.describe("map", [some], layer.gate_proj.weight, f"drawn gated layer, {share:.2%} fire")
        made += rows.measured(said | {"share": share}, calls, seconds=sizes.seconds, rounds=10)
    return made


# ---- padding ----


@torch.no_grad()
def padding_rows(share: float, layers: int, sizes: Sizes = Sizes()) -> list[dict]:
    """Return rows of kind "padding": gated layers, one after another with residuals, on sequences of which this share
    of the tokens is real: on all tokens; with the padding `REMOVED` before the first layer and put back after the last
    (a model finds the tokens once); and on as many tokens that lie side by side (`ALONE`), which nothing can beat."""
    tokens, device = sizes.tokens[-1], sizes.device
    layer, inputs = clock.workload(tokens, sizes.d_model, sizes.d_ff, 29, "lognormal", sizes.dtype, device)
    stacked = [copy.deepcopy(layer) for _ in range(layers)]
    xs = [x.view(sizes.sequences, -1, sizes.d_model) for x in inputs]
    lengths = torch.linspace(2 * share - 1 if share > 0.5 else 0, min(1, 2 * share), sizes.sequences)
    length = xs[0].shape[1]
    real = torch.arange(length, device=device) < (lengths[:, None] * length).round().to(device)
    padding = remove_padding(xs[0], real)[1]

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
    padded = [row for row in table if row["kind"] == "padding" and row["real"]]
    made = []
    for layers in sorted({row.get("layers", 1) for row in padded}):
        paths: dict[str, dict[float, float]] = {rows.DENSE: {}, REMOVED: {}, ALONE: {}}
        for row in padded:
            if row.get("layers", 1) == layers:
                paths[row["path"]][row["real"] / row["tokens"]] = row["ms"]
        dense = fmean(paths[rows.DENSE].values())
        off = {path: {share: ms / share / dense - 1 for share, ms in own.items()} for path, own in paths.items()}
        worst = max(off[REMOVED], key=lambda share: abs(off[REMOVED][share]))
        made.append((layers, off[REMOVED][worst], off[ALONE].get(worst)))
    return made


# ---- experts ----


@torch.no_grad()
def experts_rows(experts: int, sizes: Sizes = Sizes(), *, crowded: bool = False) -> list[dict]:
    """Return rows of kind "experts": a mixture of so many in every way that computes it, and one dense layer of all
    their neurons (`WHOLE`), beside the loop over dense layers. crowded: all tokens take the same experts, and not those
    that a random router chooses."""
    torch.manual_seed(0)
    like = {"device": sizes.device, "dtype": sizes.dtype}
    layer = ExpertsLayer(sizes.d_model, sizes.expert_d_ff, experts, TOP_K, **like)
    xs = [
        torch.randn(sizes.tokens[-1], sizes.d_model, device=sizes.device).to(sizes.dtype) for _ in range(clock.ROTATED)
    ]
    routed = [(x, *layer.route(x)) for x in xs]
    if crowded:
        same = torch.arange(TOP_K, device=sizes.device).expand(len(xs[0]), -1)
        routed = [(x, same, weights) for x, _, weights in routed]
    gate, up = (part.flatten(0, 1) for part in layer.experts.gate_up_proj.chunk(2, 1))
    down = layer.experts.down_proj.transpose(0, 1).flatten(1)

    def by(way: str, given: tuple) -> Tensor:
        layer.experts.way = way
        return layer.experts(*given)

    def whole(x: Tensor) -> Tensor:
        return F.linear(layer.experts.act_fn(F.linear(x, gate)) * F.linear(x, up), down)

    ways = {way: functools.partial(by, way) for way in WAYS}
    loop = ways.pop("loop")
    calls = {rows.DENSE: rows.over(loop, routed)}
    for way, call in ways.items():
        check_close(way, call(routed[0]), loop(routed[0]))
        calls[way] = rows.over(call, routed)
    few = xs[0][:CHECKED]
    everybody = torch.arange(experts, device=few.device).expand(len(few), -1)
    check_close(WHOLE, whole(few), loop((few, everybody, torch.ones_like(everybody, dtype=few.dtype))))
    calls[WHOLE] = rows.over(whole, xs)
    shared = rows.of_layer("experts", xs[0], sizes.expert_d_ff, f"{experts} experts, {TOP_K} a token")
    shared |= {"experts": experts, "density": TOP_K / experts}
    return rows.measured(shared, calls, seconds=sizes.seconds)


def sections(left_out: dict | None = None, sizes: Sizes | None = None) -> rows.Sections:
    """Return the steps of the record of all comparisons that are recorded, those of products first."""
    sizes = sizes or sizes_for("cuda")
    return comparison.sections() | {
        "padding": [functools.partial(padding_rows, share, layers, sizes) for layers in LAYERS for share in REAL],
        "map": rows.steps(map_rows, SHARES, [sizes]),
    }
