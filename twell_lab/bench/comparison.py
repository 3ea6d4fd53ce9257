"""The record of the comparison: one product C = A B, A [m, k] with zeros in it and B [k, n] dense, by every method that
skips zeros, beside torch's dense product of the same matrices; A drawn at random, or a trained model's activations.

A's zeros come in patterns. A method is measured on unstructured zeros and on the pattern that it was made for. Each
result is held against float64 before a clock starts, and one that is wrong is not timed: the row of the dense product
says which and why. What a method has to do for new zeros, its conversion, is timed by itself."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from .. import core
from ..core import InputError
from ..formats import COO, CSR, ELL, TwELL
from ..layers.find import feed_forwards
from ..models.tiny import LanguageModel
from ..ops import accuracy, spmm
from ..ops import blocks as block_kernels
from ..ops import clock as clocks
from ..ops.functional import packed_down
from ..sparsities import blocks, microtiles, semi_structured
from ..sparsities.experts import WAYS, ExpertsLayer
from ..sparsities.microtiles import find_microtiles
from ..sparsities.padding import add_padding, remove_padding
from ..sparsities.weights import PRODUCTS, SparseLinear
from ..training.text import source
from . import rows
from .density import ell_matmul
from .rows import DENSE

KIND = "comparison"
SPARSITIES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
SCATTERED, BLOCKS, TALL, WIDE, TWO_FOUR = "scattered", "blocks 32 x 32", "tiles 32 x 1", "tiles 1 x 32", "2:4"
PIECES = {SCATTERED: (1, 1), BLOCKS: (32, 32), TALL: (32, 1), WIDE: (1, 32)}  # what is zero together
NESTED, NESTED_SIZE = "2:4 in blocks 128 x 128", 128
CHECKED = 64  # rows of a result that are held against float64
WRONG = 4.0  # times as far off as this project's kernels may be (ops.accuracy): others sum in other orders
CONVERSIONS = 5  # samples of a conversion
CHECKPOINTS = ("wide", "sparse", "small")  # the models of data/checkpoints that were trained with L1
TILED = "micro-tiles 32 x 1"
MET = ("CSR (torch)", "csr_v3", TILED, "TwELL")  # what multiplies their activations, by name
WHOLE = "all experts as one dense layer"
# What it gains that cuSPARSELt writes y as it is wanted: both by the algorithm that it takes unasked.
FUSED = "2:4 (cuSPARSELt, called at once)"
APART = "2:4 (cuSPARSELt, called at once, y turned apart)"
REMOVED, ALONE = "padding removed", "real tokens alone"
LAYERS, SHARES = (1, 8), (0.25, 0.5, 0.75, 1.0)  # of padded batches: layers one after another, real tokens

Product = Callable[[Tensor], Tensor]  # of B [k, n]: C [m, n]


@dataclass(frozen=True)
class Method:
    """A way to compute A B.

    name: the path of its rows. convert: from A [m, k] to what the method multiplies. multiply: of that and B.
    patterns: those it is measured on. least: from which sparsity on; a naive kernel would take minutes below. gpu:
    whether only a GPU has it. turned: whether it takes B^T [n, k] and gives C^T [n, m], as a linear layer has them."""

    name: str
    convert: Callable[[Tensor], object]
    multiply: Callable[[object, Tensor], Tensor]
    patterns: tuple[str, ...] = (SCATTERED,)
    least: float = 0.0
    gpu: bool = False
    turned: bool = False

    def measured(self, pattern: str, sparsity: float, device: str) -> bool:
        """Return whether the record has it for this pattern and sparsity, on a "cuda" or a "cpu"."""
        return pattern in self.patterns and sparsity >= self.least and (device == "cuda" or not self.gpu)


def _semi_structured(kind: str) -> Callable[[Tensor], Tensor]:
    return lambda a: semi_structured.tensor_kind(a.shape, a.dtype, a.device, kind).from_dense(a)


def _searched(a: Tensor) -> Tensor:
    return semi_structured.searched(_semi_structured("cusparselt")(a), a.shape[1])


def _turned_apart(held: Any, x: Tensor) -> Tensor:
    """y of x [n, k] by way of y^T, which an operation of its own turns."""
    return torch._cslt_sparse_mm(held.packed, x.t(), transpose_result=False).t().contiguous()


def _layer(a: Tensor) -> nn.Linear:
    """A as the weight of a layer."""
    made = nn.Linear(a.shape[1], a.shape[0], False, "meta", a.dtype)
    made.weight = nn.Parameter(a, requires_grad=False)
    return made


def _pruned(product: str) -> Method:
    return Method(
        f"SparseLinear ({product})",
        lambda a: SparseLinear.from_linear(_layer(a), product=product),
        _called,
        least=0.9,
        turned=True,
    )


def _called(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x)


def _down(packed: TwELL, b: Tensor) -> Tensor:
    return packed_down(packed, b.t())


def _versions() -> list[Method]:
    """The versions of this package's kernels for COO, CSR and ELL, by the kernels' names; the naive ones where little
    is left, and all but the third, which is taken for such rows, on one pattern."""
    made = []
    for form in (COO, CSR, ELL):
        for version in spmm.VERSIONS:
            made.append(
                Method(
                    f"{form.__name__.lower()}_v{version}",
                    lambda a, form=form: spmm.SparseOperand(form.from_dense(a)),
                    lambda held, b, version=version: held(b, version),
                    _ANY if version == 3 else (SCATTERED,),
                    {1: 0.99, 3: 0.0}.get(version, 0.9),
                    gpu=True,
                )
            )
    return made


def _blocks(version: int) -> Method:
    return Method(
        f"blocks_v{version}",
        lambda a: block_kernels.BlockOperand(blocks.to_bsr(a, 32)),
        lambda held, x: held(x, None, version),
        (SCATTERED, BLOCKS) if version == 1 else (SCATTERED, BLOCKS, NESTED),
        0.9 if version == 1 else 0.0,
        gpu=True,
        turned=True,
    )


_ANY = tuple(PIECES)
METHODS: tuple[Method, ...] = (
    Method("CSR (torch)", Tensor.to_sparse_csr, torch.matmul, _ANY),
    *_versions(),
    Method("ELL (torch: embedding_bag)", ELL.from_dense, ell_matmul, least=0.9),
    *map(_pruned, PRODUCTS),
    *map(_blocks, block_kernels.VERSIONS),
    Method("BSR 32 x 32 (torch)", functools.partial(blocks.to_bsr, size=32), torch.matmul, (SCATTERED, BLOCKS, NESTED)),
    Method("2:4 (torch: CUTLASS)", _semi_structured("cutlass"), torch.matmul, (TWO_FOUR,)),
    Method("2:4 (torch: cuSPARSELt)", _semi_structured("cusparselt"), torch.matmul, (TWO_FOUR,)),
    Method("2:4 (torch: cuSPARSELt, searched)", _searched, lambda held, x: linear(x, held), (TWO_FOUR,), turned=True),
    Method(
        "2:4 (cuSPARSELt, searched, called at once)",
        _searched,
        lambda held, x: semi_structured.product(x, held),
        (TWO_FOUR,),
        turned=True,
    ),
    Method(
        FUSED,
        _semi_structured("cusparselt"),
        lambda held, x: semi_structured.product(x, held),
        (TWO_FOUR,),
        turned=True,
    ),
    Method(APART, _semi_structured("cusparselt"), _turned_apart, (TWO_FOUR,), turned=True),
    Method(TILED, find_microtiles, microtiles.product, (SCATTERED, TALL)),
    Method("TwELL", TwELL.from_dense, _down, _ANY, gpu=True),  # a CPU unpacks it, and multiplies densely
)


# ---- the matrices ----


def patterned(pattern: str, m: int, k: int, sparsity: float, *, dtype, device, seed: int = 0) -> Tensor:
    """A [m, k] whose zeros come in this pattern, the other values normal and at least 0.1 away from zero.

    In each band of pieces (rows of one, blocks side by side, ...) equally many stay: round((1 - sparsity) * pieces),
    at least one, at random places. Of "2:4" each four neighbours in a row hold two; its sparsity is 0.5. Of "2:4 in
    blocks 128 x 128" they do where blocks stay, so that twice as many stay as of others; its sparsity is 0.5 at least.

    Raises:
        InputError: for another pattern or sparsity, and sizes that the pieces do not divide.
    """
    fits = {TWO_FOUR: sparsity == 0.5, NESTED: 0.5 <= sparsity < 1}.get(pattern, 0 <= sparsity < 1)
    if pattern not in (*PIECES, TWO_FOUR, NESTED) or not fits:
        raise InputError(
            f"pattern is {pattern!r:.80} and sparsity {sparsity!r:.80}; accepted: {', '.join(PIECES)} with a share "
            f"from 0 up to, but not, 1, {TWO_FOUR} with 0.5, and {NESTED} with 0.5 or more"
        )
    high, wide = PIECES.get(pattern, (NESTED_SIZE, NESTED_SIZE) if pattern == NESTED else (1, 4))
    if m < high or k < wide or m % high or k % wide:
        raise InputError(f"A is [{m}, {k}]; multiples of {high} rows and {wide} columns are accepted for {pattern}")
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(m, k, generator=generator, device=device)
    values += 0.1 * torch.where(values < 0, -1.0, 1.0)  # or a value could round to a zero
    keep = torch.ones(m, k, dtype=torch.bool, device=device)
    if pattern in (TWO_FOUR, NESTED):
        order = torch.rand(m, k // 4, 4, generator=generator, device=device)
        keep = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order.topk(2).indices, True).view(m, k)
    if pattern != TWO_FOUR:
        places = torch.rand(m // high, k // wide, generator=generator, device=device)
        share = (1 - sparsity) * (2 if pattern == NESTED else 1)
        stay = max(1, round(share * places.shape[1]))
        chosen = torch.zeros_like(places, dtype=torch.bool).scatter_(1, places.topk(stay).indices, True)
        keep &= chosen.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return values.masked_fill_(~keep, 0).to(dtype)


def off(c: Tensor, a: Tensor, b: Tensor, dense: Tensor) -> float:
    """The error of the worst of `CHECKED` rows of C = A B over what is allowed (ops.accuracy), against float64."""
    picked = torch.linspace(0, len(a) - 1, min(CHECKED, len(a)), device=a.device).long()
    exact = a[picked].double() @ b.double()
    return accuracy.worst_row(c[picked], dense[picked], exact)[0]


# ---- what is timed ----


@dataclass(frozen=True)
class Shape:
    """Sizes of A [m, k] and B [k, n], and what they hold. seconds: of each comparison, on a CPU."""

    m: int = 4096
    k: int = 4096
    n: int = 4096
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seconds: float = 1.0


@torch.no_grad()
def product_rows(
    pattern: str, sparsity: float, shape: Shape = Shape(), methods: Iterable[Method] | None = None
) -> list[dict]:
    """A row for the dense product and one for each method that takes this pattern and runs here, of kind "comparison";
    and one for each conversion, "part: NAME, conversion".

    Rows say `density` (of A, as it is), `pattern`, and the sizes: tokens m, d_ff k, d_model n. The dense row has
    `left_out`, {name: why}: methods that this device does not have, and those whose result was wrong."""
    device = torch.device(shape.device)
    a = patterned(pattern, shape.m, shape.k, sparsity, dtype=shape.dtype, device=device)
    generator = torch.Generator(device).manual_seed(1)
    bs = [
        torch.randn(shape.k, shape.n, generator=generator, device=device).to(shape.dtype) for _ in range(clocks.ROTATED)
    ]
    chosen = METHODS if methods is None else methods
    chosen = [each for each in chosen if each.measured(pattern, sparsity, device.type)]
    said = {"kind": KIND, "workload": f"{pattern}, {sparsity:.1%} zeros", "pattern": pattern}
    return _timed(a, bs, chosen, said, shape.seconds)


def _timed(a: Tensor, bs: list[Tensor], methods: Iterable[Method], said: dict, seconds: float) -> list[dict]:
    """The rows of A [m, k] times each B [k, n] in turn, as `product_rows` has them. said: what else all rows say."""
    device = a.device
    turned = [b.t().contiguous() for b in bs]
    dense = a @ bs[0]
    calls: rows.Calls = {DENSE: rows.over(functools.partial(torch.matmul, a), bs)}
    conversions: rows.Calls = {}
    left_out: dict[str, str] = {}
    facts: dict[str, dict] = {DENSE: {"left_out": left_out}}
    for method in methods:
        given = turned if method.turned else bs
        try:
            call = functools.partial(method.multiply, method.convert(a))
            made = call(given[0])
            ratio = off(made.t() if method.turned else made, a, bs[0], dense)
        except torch.OutOfMemoryError:
            raise
        # torch's block product is compiled by Triton: without it, or the C compiler it calls, one of the others comes.
        except (InputError, RuntimeError, ImportError, TypeError, OSError, SubprocessError) as error:
            left_out[method.name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            continue
        if not ratio <= WRONG:
            left_out[method.name] = f"wrong: a row is off by {ratio:.3g} times what this project's kernels may be"
            continue
        calls[method.name] = rows.over(call, given)
        facts[method.name] = {"error_over_allowed": round(ratio, 4)}
        conversions[f"part: {method.name}, conversion"] = functools.partial(_again, method, a)
    if device.type == "cuda":
        samples, bursts = rows.clock_gpu(calls, max(len(bs[0].t()), clocks.GRAPH_TOKENS + 1))
        samples |= clocks.time_cuda(conversions, rounds=CONVERSIONS, warm=1) if conversions else {}
    else:
        samples, bursts = rows.clock_cpu(calls, seconds)
        samples |= rows.clock_cpu(conversions, seconds / 2)[0] if conversions else {}
    shared = {
        "device": clocks.device_name(device),
        "dtype": str(a.dtype).removeprefix("torch."),
        "tokens": len(a),
        "d_model": bs[0].shape[1],
        "d_ff": a.shape[1],
        "nnz": round(float((a != 0).sum()) / len(a), 2),
        "density": float((a != 0).double().mean()),
    }
    return rows.table(said | shared, samples, facts, bursts)


def _again(method: Method, a: Tensor, turn: int) -> object:
    return method.convert(a)


# ---- rows of a trained model's activations ----


@dataclass(frozen=True)
class Read:
    """How trained models read: so many held-out tokens of the default text, in this dtype, on this device. seconds: of
    each comparison, on a CPU."""

    tokens: int = 2**16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seconds: float = 1.0


def shipped() -> dict[str, int]:
    """The models of data/checkpoints that are here, by name, and the layers of each; a wheel has `small` alone."""
    folder = core.data_dir() / "checkpoints"
    there = [name for name in CHECKPOINTS if (folder / name / "config.json").is_file()]
    return {name: json.loads((folder / name / "config.json").read_text())["layers"] for name in there}


@torch.no_grad()
def activation_rows(name: str, layer: int, read: Read = Read()) -> list[dict]:
    """The down projection of one layer of a trained model: A its hidden activations relu(g) * u [tokens, d_ff], and B
    the turned weight [d_ff, d_model]. Rows as of `product_rows`, of kind "activations" and
    without a `pattern`.

    They say `model`, `layer` and `occupied`, the share of A's tiles of 32 x 1 that hold anything. The text is the
    default one, Python source; only `small` was trained on such, and the other models fire on it as they do. TwELL's
    conversion is that of a finished A by torch, which a layer does not pay: there the gate's product packs.

    name: of `shipped`. layer: from 0 on."""
    model = LanguageModel.load(core.data_dir() / "checkpoints" / name).to(read.device, read.dtype).eval()
    text = source.standard_library()
    context = model.config.context
    windows = source.spread_windows(text.split()[1].tokens, max(1, read.tokens // context), context)[:, :-1]
    ffn, seen = feed_forwards(model)[layer], []
    hook = ffn.module.register_forward_hook(lambda _, given, made: seen.append(given[0].flatten(0, 1)))
    for each in windows.split(32):
        model(each.to(read.device))
    hook.remove()
    a = rows.dense_hidden(torch.cat(seen), None if ffn.gate is None else ffn.gate.weight, ffn.up.weight)
    chosen = [each for each in METHODS if each.name in MET and (a.is_cuda or not each.gpu)]
    said = {
        "kind": "activations",
        "workload": f"layer {layer + 1} of {name}, on held-out {text.name}",
        "model": name,
        "layer": layer,
        "occupied": find_microtiles(a).occupied,
    }
    return _timed(a, [ffn.down.weight.t().contiguous()], chosen, said, read.seconds)


# ---- rows that hold nothing: padding, and experts ----


@dataclass(frozen=True)
class Batch:
    """Sizes of padded batches and of a mixture of experts: sequences of so many tokens, of d_model values; layers of
    d_ff; experts, of which each token takes top_k."""

    sequences: int = 64
    length: int = 256
    d_model: int = 2048
    d_ff: int = 5632
    experts: tuple[int, ...] = (2, 4, 8, 64)
    expert_d_ff: int = 1408
    top_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seconds: float = 1.0

    def shared(self, kind: str, tokens: int, d_ff: int, workload: str) -> dict:
        """Return what rows say of it."""
        sizes = {"tokens": tokens, "d_model": self.d_model, "d_ff": d_ff}
        device, dtype = clocks.device_name(torch.device(self.device)), str(self.dtype).removeprefix("torch.")
        return {"kind": kind, "device": device, "dtype": dtype, **sizes, "workload": workload}

    def timed(self, calls: rows.Calls) -> tuple[dict[str, list[float]], rows.Bursts]:
        """Samples and bursts, as rows.clock_gpu gives them."""
        if torch.device(self.device).type == "cpu":
            return rows.clock_cpu(calls, self.seconds)
        return rows.clock_gpu(calls, self.sequences * self.length)


class Residual(nn.Module):
    """x + f(x / rms(x)) for each of the layers f in turn: without the norm a gated layer's output grows as a square."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model]."""
        for layer in self.layers:
            x = x + layer(rms_norm(x, x.shape[-1:]))
        return x


@torch.no_grad()
def padding_rows(share: float, layers: int, batch: Batch = Batch()) -> list[dict]:
    """Gated layers, one after another with residuals, on sequences of which this share of the tokens is real: on all
    tokens, and with the padding `REMOVED`, which has a part of removing it before the first layer and putting it back
    after the last, but for finding the tokens, which a model does once; and on as many tokens that lie side by side
    before and after (`ALONE`), which nothing that removes padding can beat. Rows of kind "padding".

    Rows say how many tokens are `real`, and `layers`. Raises clocks.WrongResult where a real token's result differs
    from that of the same layers on all tokens."""
    layer, inputs = clocks.workload(
        batch.sequences * batch.length, batch.d_model, batch.d_ff, 29, "lognormal", batch.dtype, batch.device
    )
    stack = Residual([layer, *(copy.deepcopy(layer) for _ in range(layers - 1))])
    xs = [x.view(batch.sequences, batch.length, batch.d_model) for x in inputs]
    lengths = torch.linspace(2 * share - 1 if share > 0.5 else 0, min(1, 2 * share), batch.sequences)
    real = torch.arange(batch.length, device=batch.device) < (lengths[:, None] * batch.length).round().to(batch.device)
    found = remove_padding(xs[0], real)[1]

    def removed(x: Tensor, run: Callable[[Tensor], Tensor] = stack) -> Tensor:
        return add_padding(run(found.gather(x)), found)

    # Of the first layer, since roundings of other products grow from layer to layer; the stack on the same rows.
    pairs = ((removed(xs[0], layer), layer(xs[0])), (removed(xs[0])[real], stack(xs[0][real])))
    for ours, dense in ((pairs[0][0][real], pairs[0][1][real]), pairs[1]):
        if len(ours) and not float((ours.float() - dense.float()).norm()) <= 0.02 * float(dense.float().norm()):
            raise clocks.WrongResult("the layers give other results without padding: nothing was timed")
    alone = [found.gather(x) for x in xs]
    samples, bursts = batch.timed(
        {DENSE: rows.over(stack, xs), REMOVED: rows.over(removed, xs), ALONE: rows.over(stack, alone)}
    )
    shared = batch.shared(
        "padding", real.numel(), batch.d_ff, f"{layers} layer{'s' * (layers > 1)}, {share:.0%} of the tokens real"
    )
    return rows.table(shared | {"real": int(real.sum()), "layers": layers}, samples, None, bursts)


@torch.no_grad()
def experts_rows(experts: int, batch: Batch = Batch()) -> list[dict]:
    """A mixture of so many experts, in every way that computes it, and one dense layer of all their neurons (`WHOLE`),
    which a token would go through if nothing chose; rows of kind "experts". Others are compared with the loop over
    dense layers. Rows say `experts` and the `density`, the share of the neurons that a token's experts have. Raises
    clocks.WrongResult where ways differ by more than 2%."""
    torch.manual_seed(0)
    tokens = batch.sequences * batch.length
    sizes = (batch.d_model, batch.expert_d_ff, experts, batch.top_k)
    layer = ExpertsLayer(*sizes, device=batch.device, dtype=batch.dtype)
    xs = [torch.randn(tokens, batch.d_model, device=batch.device).to(batch.dtype) for _ in range(clocks.ROTATED)]
    routed = [(x, *layer.route(x)) for x in xs]
    gate_up, down = layer.experts.gate_up_proj.unflatten(1, (2, -1)), layer.experts.down_proj
    gate, up = (gate_up[:, which].flatten(0, 1) for which in (0, 1))
    together = down.transpose(0, 1).flatten(1)

    def through(way: str) -> Callable[[tuple], Tensor]:
        def call(given: tuple) -> Tensor:
            layer.experts.way = way
            return layer.experts(*given)

        return call

    def whole(x: Tensor) -> Tensor:
        return linear(layer.experts.act_fn(linear(x, gate)) * linear(x, up), together)

    few = xs[0][:CHECKED]
    everybody = torch.arange(experts, device=few.device).expand(len(few), -1)
    every = (few, everybody, torch.ones_like(everybody, dtype=few.dtype))
    wanted = {way: through("loop")(routed[0]).float() for way in WAYS if way != "loop"}
    wanted[WHOLE] = through("loop")(every).float()
    calls: rows.Calls = {DENSE: rows.over(through("loop"), routed)}
    for way, right in wanted.items():
        made = (whole(few) if way == WHOLE else through(way)(routed[0])).float()
        if float((made - right).norm()) > 0.02 * float(right.norm()):
            raise clocks.WrongResult(f"experts by {way!r} differ from the loop: nothing was timed")
        calls[way] = rows.over(whole, xs) if way == WHOLE else rows.over(through(way), routed)
    samples, bursts = batch.timed(calls)
    shared = batch.shared("experts", tokens, batch.expert_d_ff, f"{experts} experts, {batch.top_k} a token")
    return rows.table(shared | {"experts": experts, "density": batch.top_k / experts}, samples, None, bursts)


def sections(shape: Shape = Shape(), batch: Batch = Batch(), read: Read = Read()) -> rows.Sections:
    """The steps of the record, as in bench.inference: one for each pattern and sparsity, the highest sparsities first,
    which take least; then the layers of the models that are here, padding and experts."""
    cases = [(pattern, each) for each in sorted(SPARSITIES, reverse=True) for pattern in (*PIECES, NESTED)]
    return {
        "products": [
            functools.partial(product_rows, pattern, sparsity, shape) for pattern, sparsity in [(TWO_FOUR, 0.5), *cases]
        ],
        "activations": [
            functools.partial(activation_rows, name, layer, read)
            for name, layers in shipped().items()
            for layer in range(layers)
        ],
        "padding": [functools.partial(padding_rows, share, layers, batch) for layers in LAYERS for share in SHARES],
        "experts": [functools.partial(experts_rows, experts, batch) for experts in batch.experts],
    }


# ---- what it says ----


@dataclass(frozen=True)
class Crossing:
    """From which density of A on down a method takes less time than the dense product.

    density: by the medians; None where it is never faster, faster everywhere that was measured, or only in between.
    low, high: the same with the method's slower and dense's faster quartile, and the other way around. best, least: the
    most and the fewest times as fast that were measured; best_density: where the most was. densest: the highest density
    that was measured."""

    path: str
    pattern: str
    density: float | None
    low: float | None
    high: float | None
    best: float
    best_density: float
    least: float
    densest: float


def leading(table: Iterable[dict]) -> list[dict]:
    """The rows without those of a kernel's other versions: of csr_v1 to csr_v4 that stay which was measured most often,
    as the one that is taken was (`_versions`)."""
    table = list(table)
    often: dict[str, dict[str, int]] = {}
    for row in table:
        name, found, version = row["path"].rpartition("_v")
        if found and version.isdigit():
            of = often.setdefault(name, {})
            of[row["path"]] = of.get(row["path"], 0) + 1
    stay = {max(of, key=of.__getitem__) for of in often.values()}
    others = {path for of in often.values() for path in of} - stay
    part = re.compile(r"part: (.*), conversion")
    return [row for row in table if part.sub(r"\1", row["path"]) not in others]


def crossings(table: Iterable[dict]) -> list[Crossing]:
    """Where each method, on each pattern, is as fast as dense: between two measured densities along the straight line
    through them, both axes logarithmic. table: rows of kind "comparison", of one device, dtype and size."""
    wanted = [row for row in table if row["kind"] == KIND]
    dense = {(row["pattern"], row["density"]): row for row in wanted if row["path"] == DENSE}
    found: dict[tuple[str, str], list[dict]] = {}
    for row in wanted:
        if row["path"] != DENSE and not row["path"].startswith("part: "):
            found.setdefault((row["path"], row["pattern"]), []).append(row)
    return [
        crossing(path, pattern, [(row["density"], row, dense[pattern, row["density"]]) for row in each])
        for (path, pattern), each in found.items()
    ]


def crossing(path: str, pattern: str, measured: Iterable[tuple[float, dict, dict]]) -> Crossing:
    """Of a method's rows, each with its density and the dense row beside it."""
    each = sorted(measured, key=lambda point: point[0])
    densities = [density for density, *_ in each]
    by_median, slow, fast = (
        _falls_below_one(densities, [quantile(dense, 1 - q) / quantile(row, q) for _, row, dense in each])
        for q in (0.5, 0.75, 0.25)
    )
    times = [dense["ms"] / row["ms"] for _, row, dense in each]
    best = max(times)
    where = densities[times.index(best)]
    return Crossing(path, pattern, by_median, slow, fast, best, where, min(times), densities[-1])


def of_experts(table: Iterable[dict]) -> list[Crossing]:
    """Where each way to compute a mixture of experts is as fast as one dense layer of all their neurons. table: rows of
    kind "experts", of one device and size; [] of records made before they had that layer."""
    wanted = [row for row in table if row["kind"] == "experts" and "density" in row]
    dense = {row["density"]: row for row in wanted if row["path"] == WHOLE}
    paths = dict.fromkeys(row["path"] for row in wanted if row["path"] != WHOLE)
    return [
        crossing(
            path, "experts", [(row["density"], row, dense[row["density"]]) for row in wanted if row["path"] == path]
        )
        for path in paths
    ]


@dataclass(frozen=True)
class Proportion:
    """How nearly the time without padding is proportional to the real tokens, by the device's time.

    layers: one after another. fixed, each: milliseconds of the line fixed + each * share of real tokens through the
    measured times, by least squares. fitted: how far measured times are at most from the proportional time c * share
    that fits them best, as a share of it. beside_dense: the same with the dense layers' time for c, which is theirs for
    all tokens: negative where the worst is sooner. own: how far the layers are there on as many tokens alone, with no
    padding to remove, None where that was not recorded: no way to remove padding can be below it."""

    layers: int
    fixed: float
    each: float
    fitted: float
    beside_dense: float
    own: float | None


def proportions(table: Iterable[dict]) -> list[Proportion]:
    """For each number of layers in rows of kind "padding", of one device and size. Records made before rows said
    `layers` had one."""
    by: dict[int, dict[float, dict[str, float]]] = {}
    for row in table:
        if row["kind"] == "padding":
            at = by.setdefault(row.get("layers", 1), {}).setdefault(row["real"] / row["tokens"], {})
            at[row["path"]] = row["ms"]
    made = []
    for layers, times in sorted(by.items()):
        took = {share: each[REMOVED] for share, each in times.items() if share}
        dense = sum(each[DENSE] for each in times.values()) / len(times)
        rates = {share: ms / share for share, ms in took.items()}
        line = torch.tensor([[1.0, share] for share in took], dtype=torch.float64)
        fixed, each = torch.linalg.lstsq(line, torch.tensor([*took.values()], dtype=torch.float64)[:, None]).solution
        least, most = min(rates.values()), max(rates.values())
        worst = max(rates, key=lambda share: abs(rates[share] / dense - 1))
        alone = times[worst].get(ALONE)
        own = None if alone is None else alone / worst / dense - 1
        fitted, beside = (most - least) / (most + least), rates[worst] / dense - 1
        made.append(Proportion(layers, float(fixed), float(each), fitted, beside, own))
    return made


def quantile(row: dict, share: float) -> float:
    """Milliseconds below which this share of a row's samples lies."""
    return float(torch.tensor(row["samples"], dtype=torch.float64).quantile(share))


def _falls_below_one(densities: Sequence[float], times: Sequence[float]) -> float | None:
    """The density at which times as fast, given for ascending densities, falls to 1 for the first time."""
    for (low, above), (high, below) in pairwise(zip(densities, times)):
        if above >= 1 > below:
            return exp(log(low) + (log(high) - log(low)) * log(above) / (log(above) - log(below)))
    return None
