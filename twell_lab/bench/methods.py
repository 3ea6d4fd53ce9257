"""Whole layers by every method that skips neurons or tokens, or has weights of few bits, beside their dense selves: the
map of the notebook on choosing a path, padded batches, mixtures of experts, and INT8 and E4M3.

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

from ..core import DeviceError
from ..layers.choice import Choice
from ..layers.find import feed_forwards
from ..layers.paths import STEP
from ..models.swap import sparsify
from ..ops import clock, int8
from ..ops.reference import GatedFeedForward
from ..sparsities import microtiles
from ..sparsities.experts import WAYS, ExpertsLayer
from ..sparsities.fp8 import fp8_linear
from ..sparsities.int8 import has_kernel, int8_linear, packed_two_four, two_four_int8
from ..sparsities.padding import add_padding, remove_padding
from ..sparsities.predictors import LowRank, PredictedFFN
from ..sparsities.quantised import Bitmap, Rows, output_error, quantise
from ..sparsities.two_four import two_four_mask
from . import comparison, rows
from .comparison import CHECKED, TILED

DENSE, PACKED, SPLIT, TILES = "dense", "packed (TwELL)", "hot and cold", TILED
EXPERTS, PREDICTED = "experts (another layer)", "predictor (lossy), at its best"
GROUPED = "its neurons as experts (lossy)"
METHODS = (DENSE, PACKED, SPLIT, TILES, EXPERTS, PREDICTED, GROUPED)
INEXACT = (EXPERTS, PREDICTED, GROUPED)  # another layer, and lossy ones
SHARES = (1 / 256, 1 / 64, 1 / 32, 1 / 8, 3 / 8)  # of the neurons that fire, or are computed, for a token
HEIGHT, RANK = 32, 64
NNZ = 29  # neurons that fire for a token where that makes no difference to what is compared
_EXPERTS = 32  # that a layer's neurons are cut into, for the map
OFF = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}  # of the dense result, at most
REMOVED, ALONE = "padding removed", "real tokens alone"
LAYERS, REAL = (1, 8), (0.25, 0.5, 0.75, 1.0)  # of padded batches: layers one after another, real tokens
WHOLE = "all experts as one dense layer"
COUNTS, TOP_K = (2, 4, 8, 64), 2  # experts, and of them those that a token takes


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
    """Return the layer's output for x [tokens, d_model], from micro-tiles of what the gate lets through: of each stripe
    of tokens, up and down are multiplied for the neurons that fire for one of them; on a GPU, whose kernel multiplies
    the tiles themselves, down alone, so that nothing waits. down_t: [d_ff, d_model]."""
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
        GROUPED: swapped(layer, Choice("experts")),
    }
    if (top := round(share * _EXPERTS)) >= 1:
        of = {"activation": "relu", "device": weight.device, "dtype": weight.dtype}
        calls[EXPERTS] = ExpertsLayer(d_model, d_ff // _EXPERTS, _EXPERTS, top, **of)
    return calls


@torch.no_grad()
def map_rows(share: float, sizes: Sizes = Sizes()) -> list[dict]:
    """Return the rows of a layer at one share of firing neurons and each number of tokens, by each method, of kind
    "map". The `share` is that asked for, `nnz` what fires; GROUPED has the `error` of its output."""
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
        facts = {GROUPED: {"error": output_error(methods[GROUPED](some), y)}}
        said = rows.describe("map", [some], layer.gate_proj.weight, f"drawn gated layer, {share:.2%} fire")
        made += rows.measured(said | {"share": share}, calls, sizes.seconds, facts, rounds=10)
    return made


# ---- padding ----


@torch.no_grad()
def padding_rows(share: float, layers: int, sizes: Sizes = Sizes()) -> list[dict]:
    """Return rows of kind "padding": gated layers, one after another with residuals, on sequences of which this share
    of the tokens is real: on all tokens; with the padding `REMOVED` before the first layer and put back after the last,
    but for finding the tokens, which a model does once; and on as many tokens that lie side by side before and after
    (`ALONE`), which nothing that removes padding can beat."""
    tokens, device = sizes.tokens[-1], sizes.device
    layer, inputs = clock.workload(tokens, sizes.d_model, sizes.d_ff, NNZ, "lognormal", sizes.dtype, device)
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
    return rows.measured(shared, calls, sizes.seconds)


def proportions(table: Iterable[dict]) -> list[tuple[int, float, float | None]]:
    """Return, for each number of layers in rows of kind "padding", of one device and size, how far the device's time
    without padding is from the dense layers' time for all tokens times the share of real ones, where it is furthest;
    negative where it is sooner. And the same of as many tokens alone, there."""
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
    their neurons (`WHOLE`), which a token would go through if nothing chose; compared with the loop over dense layers.
    crowded: whether all tokens take the same experts, and not those that a random router chooses."""
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
    return rows.measured(shared, calls, sizes.seconds)


# ---- weights of few bits ----
# What INT8 and E4M3 gain without zeros, which a sparse path with few bits has to beat. And the gate's product alone:
# what scaling an INT8 product's sums within it saves, and what half of the weights gain, as INT8 that are 2:4, and as
# 16 bits that are expanded from a bitmap first.

PATHS = ("twell", "int8", "fp8", "twell_int8")
LOSSY = PATHS[1:]
TOKENS = (1, 16, 256, 2048, 16384)
# How far off an output may be, of its norm, or it is not timed: from the exact result, or, where x and the weights are
# rounded to few bits, from float64 on the rounded values (`off_on_rounded`). From the exact one these may be far off: a
# drawn x has one large value in each row, which sets the scale of the whole row.
MOST_OFF = {"twell": 0.01, "int8": 0.01, "fp8": 0.01, "twell_int8": 0.03}
ROUNDED = {"int8": (int8_linear, torch.int8), "fp8": (fp8_linear, torch.float8_e4m3fn)}
_COLUMN = 64  # tokens from which on the norm of a column says something of it
PLAIN, WITHIN, APART = "part: x Wg^T", "part: x Wg^T in INT8, scaled within", "part: x Wg^T in INT8, scaled apart"
# Of a Wg that was pruned to two of four, in the place of a drawn one.
TWO_FOUR, EXPANDED = "part: x Wg^T in INT8, Wg 2:4 (cuSPARSELt)", "part: x Wg^T, Wg half zeros, expanded from a bitmap"


@torch.no_grad()
def few_bits_rows(tokens: int, sizes: Sizes = Sizes()) -> list[dict]:
    """Return rows of kind "few bits": of a layer of which about NNZ neurons fire, on each of PATHS, with the `error` of
    its output against float64, as a share of its norm; and of the gate's product as in `products_of`. The dense row has
    `left_out`, {path: why}: what does not run here, and what is further off than MOST_OFF says."""
    how = sizes.dtype, torch.device(sizes.device)
    layer, xs = clock.workload(tokens, sizes.d_model, sizes.d_ff, NNZ, "lognormal", *how)
    exact = copy.deepcopy(layer).double()(xs[0].double())

    def entry(name: str) -> rows.Entry:
        call = swapped(layer, Choice(name))
        y = call(xs[0])
        error = output_error(y, exact)
        off = off_on_rounded(layer, xs[0], y, *ROUNDED[name]) if name in ROUNDED else {"y": error}
        for what, by in off.items():
            rows.hold(f"{what} of {name}", by, MOST_OFF[name])
        return rows.over(call, xs), {"error": error}

    left_out: dict[str, str] = {}
    ways = {f"forced {name}{' (lossy)' * (name in LOSSY)}": functools.partial(entry, name) for name in PATHS}
    calls, facts = rows.admit(ways, left_out)
    parts, _ = rows.admit(products_of(layer.gate_proj.weight, xs), left_out)
    shared = rows.of_layer("few bits", xs[0], sizes.d_ff, f"drawn gated layer, {tokens:,} tokens")
    calls, facts[rows.DENSE] = {rows.DENSE: rows.over(layer, xs), **calls}, {"left_out": left_out}
    return rows.measured(shared, calls, sizes.seconds, facts, tokens=tokens, parts=parts)


def products_of(weight: Tensor, xs: list[Tensor]) -> dict[str, Callable[[], rows.Entry]]:
    """Return ways to compute the gate's product, by name, x being rounded and what is packed expanded in the call. Each
    compares its result with the same values multiplied otherwise."""
    gate, pruned = quantise(weight), torch.where(two_four_mask(weight), weight, 0)
    short, bitmap = quantise(pruned), Bitmap.of(pruned)
    apart = functools.partial(int8_linear, apart=True)

    def within() -> Callable[[Tensor], Tensor]:
        if not has_kernel(xs[0].to(torch.int8), int8.Weight(*gate), weight.dtype):
            raise DeviceError("the kernel needs a GPU of compute capability 8.0 and 16 bits")
        return functools.partial(int8_linear, rows=gate)

    def way(call: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> rows.Entry:
        y, wanted = call(xs[0]).float(), right(xs[0]).float()
        if not torch.allclose(y, wanted, rtol=torch.finfo(weight.dtype).eps):
            raise clock.WrongResult("it differs from the same values multiplied otherwise: it was not timed")
        return rows.over(call, xs), {}

    dense, scaled_apart = (functools.partial(F.linear, weight=weight), functools.partial(apart, rows=gate))
    return {
        PLAIN: lambda: way(dense, dense),
        APART: lambda: way(scaled_apart, scaled_apart),
        EXPANDED: lambda: way(lambda x: F.linear(x, bitmap.dense()), lambda x: F.linear(x, pruned)),
        WITHIN: lambda: way(within(), scaled_apart),
        TWO_FOUR: lambda: way(
            functools.partial(two_four_int8, rows=short, packed=packed_two_four(short)),
            functools.partial(apart, rows=short),
        ),
    }


def off_on_rounded(
    layer: nn.Module, x: Tensor, y: Tensor, linear: Callable[[Tensor, Rows], Tensor], kind: torch.dtype
) -> dict[str, float]:
    """Return how far off the three products of a layer without biases are from float64, on values rounded as theirs
    are: of g, u and y the norm of the error over that of the exact result, for the worst token and, of many tokens, the
    worst column. g and u are what `linear` gives of x; y, which the layer gave, is compared with what these make of it:
    an H100 adds products of E4M3 with 13 or 14 bits, so that a tenth of the h = relu(g) u are rounded to a neighbour,
    6 to 12% away, which moves y by about 1% of its norm, though no product is off by more than 0.2%.

    layer: with the weights before they are rounded. linear: what multiplies rows of this kind."""

    def off(result: Tensor, a: Tensor, b: Rows) -> float:
        left, right = (part.values.double() * part.scale.double()[:, None] for part in (quantise(a, kind), b))
        exact, ways = left @ right.t(), (1, 0) if len(y) >= _COLUMN else (1,)
        wrong, norms = (torch.cat([t.norm(dim=along) for along in ways]) for t in (result.double() - exact, exact))
        return float(torch.where(wrong == 0, 0, wrong / norms).max())

    gate, up, down = (quantise(part.weight, kind) for part in (layer.gate_proj, layer.up_proj, layer.down_proj))
    g, u = linear(x, gate), linear(x, up)
    return {"g": off(g, x, gate), "u": off(u, x, up), "y": off(y, torch.relu(g) * u, down)}


def sections(left_out: dict | None = None, sizes: Sizes | None = None) -> rows.Sections:
    """Return the steps of the record of all comparisons, those of products first."""
    sizes = sizes or sizes_for("cuda")
    return comparison.sections() | {
        "padding": [functools.partial(padding_rows, share, layers, sizes) for layers in LAYERS for share in REAL],
        "experts": rows.steps(experts_rows, COUNTS, [sizes]),
        "map": rows.steps(map_rows, SHARES, [sizes]),
        "few bits": rows.steps(few_bits_rows, TOKENS),
    }
