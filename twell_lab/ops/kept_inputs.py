"""kept_inputs: products that read the weights of kept inputs alone, for few tokens (kernels/sm80_kept_inputs.cu).

An input is kept unless its magnitude is below a threshold, as TEAL (Liu et al., arXiv 2408.14690) cuts the inputs of a
layer's projections."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..cuda.launch import Buffer, Call, Entry, Macros, Source, aligned, capability, run, value
from .activation import CURVES, activation, rounded

MOST_TOKENS = 4  # that the kernel takes
FEW = 2  # up to which a layer takes it: four tokens together keep nearly all inputs
KINDS = ("relu", *CURVES)  # activations, without a threshold of their own
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows
_COLUMNS = {1: 256, 2: 32}  # of the result, those of a block, by version
_WIDTHS = {"_wide": 128, "": 64, "_narrow": 32}  # the same of version 3, by what its kernels' names end in
_ENOUGH = 0.6  # blocks for each multiprocessor: with fewer, a block's slab is made narrower
_ROW_LANES = 4  # lanes that share a row of a weight, 8 values each
_EACH_LANES = 8  # the same of products of the same inputs
TOGETHER = 3  # products of the same inputs that one launch computes at most


class Kept(NamedTuple):
    """What a layer with thresholds on its inputs computes.

    kind: its activation, one of KINDS. inputs, hidden: the thresholds of what enters gate and up, and of what enters
    down; finite numbers from 0 up, which count as they are rounded to the type of the values, as where torch compares
    a tensor with a number."""

    kind: str
    inputs: float
    hidden: float


def _macros(dtype: torch.dtype, tokens: int, paired: bool, kind: str | None) -> Macros:
    # A product without an activation is the one into d_model, which has few slabs: its blocks have more warps.
    sizes = (("TOKENS", 1 if tokens == 1 else 4), ("PAIRED", int(paired)), ("ACTIVATED", int(kind is not None)))
    warps, acts = ((("BLOCK_WARPS", 16),), ()) if kind is None else ((), activation(kind))
    return (*value(dtype), *sizes, *warps, *acts)


def _builds(dtype: torch.dtype, widths, capability) -> list[Macros]:
    """For each number of tokens the product into d_model; for each activation gate and up together, and up alone."""
    products = [(False, None), *((paired, kind) for kind in KINDS for paired in (True, False))]
    return [_macros(dtype, tokens, *one) for tokens in (1, 4) for one in products] if dtype.itemsize == 2 else []


KEPT_INPUTS = Source(
    "sm80_kept_inputs",
    {
        "kept_inputs_v1": Entry(256, "ppppppiiif"),
        "kept_inputs_v2": Entry(lambda macros: 32 * macros.get("BLOCK_WARPS", 8), "ppppppiiif"),
        "kept_inputs_v3_wide": Entry(512, "ppppppiiif", among=lambda macros: macros["TOKENS"] == 1),
        "kept_inputs_v3": Entry(512, "ppppppiiif"),
        "kept_inputs_v3_narrow": Entry(512, "ppppppiiif"),
        "kept_inputs_v3_each": Entry(512, "ppppppppiiiii", among=lambda macros: not macros["ACTIVATED"]),
    },
    builds=_builds,
    constants=(("ROW_LANES", _ROW_LANES), ("EACH_LANES", _EACH_LANES)),
    oldest=(8, 0),
)


def takes(capability: tuple[int, int], x, gate_t, up_t, down_t) -> bool:
    """Return whether `layer` takes x [tokens, d_model] with the fast version; gate_t and up_t [d_model, d_ff], down_t
    [d_ff, d_model]: 16-bit values, contiguous, weights aligned to 16 bytes."""
    weights = [t for t in (gate_t, up_t, down_t) if t is not None]
    return (
        capability >= KEPT_INPUTS.oldest
        and 1 <= x.shape[0] <= MOST_TOKENS
        and x.dtype.itemsize == 2
        and all(t.dtype == x.dtype and t.strides == (t.shape[1], 1) for t in weights)
        and x.strides[1] == 1
        and (x.shape[0] == 1 or x.strides[0] == x.shape[1])
        and not any(width % 8 for width in up_t.shape)
        and aligned(*weights)
    )


def product(
    call, x, first_t, second_t=None, first_bias=None, second_bias=None, *, threshold: float, kind=None, version=None
) -> Buffer:
    """Add x' first_t + first_bias, through the activation `kind` unless that is None, and with second_t times x'
    second_t + second_bias -> [tokens, outputs]; x' is x with what is below the threshold in magnitude at zero.

    x: bfloat16 or float16 [tokens, inputs], 1 to 4 tokens; first_t, second_t: [inputs, outputs]; biases [outputs]. All
    contiguous. version: 1, which takes any widths, or 2 or 3, which take outputs that are multiples of 8, and aligned
    weights; None: the newest that takes them."""
    (tokens, inputs), outputs = x.shape, first_t.shape[1]
    version = version or (3 if outputs % 8 == 0 and aligned(first_t, second_t) else 1)
    end, columns = ("", _COLUMNS[version]) if version < 3 else _slab(outputs, tokens, call.units)
    macros = _macros(x.dtype, tokens, second_t is not None, kind)
    kernel = KEPT_INPUTS.kernel(f"kept_inputs_v{version}{end}", macros, early=True)
    y = call.empty(tokens, outputs, dtype=x.dtype)
    grid = -(-outputs // columns), tokens if version == 1 else 1
    tensors = (x, first_t, second_t, first_bias, second_bias, y)
    call.launch(kernel, grid, *tensors, tokens, inputs, outputs, rounded(threshold, x.dtype))
    return y


def products(call, x, weights: tuple, biases: tuple) -> Buffer:
    """Add the products of x with up to three weights, whose results lie side by side -> [tokens, all outputs], in one
    launch. x, weights, biases: as of the newest version of `product`; a bias may be None."""
    (tokens, inputs), outputs = x.shape, [weight.shape[1] for weight in weights]
    kernel = KEPT_INPUTS.kernel("kept_inputs_v3_each", _macros(x.dtype, tokens, False, None), early=True)
    y = call.empty(tokens, sum(outputs), dtype=x.dtype)
    blocks = sum(-(-n // (8 * _EACH_LANES)) for n in outputs)
    parts = [part for given in (weights, biases) for part in (*given, None, None)[:TOGETHER]]
    call.launch(kernel, (blocks, 1), x, *parts, y, tokens, inputs, *(*outputs, 0, 0)[:TOGETHER])
    return y


def _slab(outputs: int, tokens: int, units: int) -> tuple[str, int]:
    """Return the slab of version 3 on a GPU of so many multiprocessors, as an item of _WIDTHS: the widest of which
    there are enough. What is read of a row at once is as long as a slab is wide, and memory gives long reads faster."""
    widths = [item for item in _WIDTHS.items() if tokens == 1 or item[0] != "_wide"]
    return next((item for item in widths if -(-outputs // item[1]) >= _ENOUGH * units), widths[-1])


def layer(call: Call, x, gate_t, up_t, down_t, gate_bias, up_bias, down_bias, kept: Kept) -> Buffer:
    """Add a feed-forward layer with thresholds on its inputs, in two launches: x [tokens, d_model] -> [tokens,
    d_model]. h is rounded to x's type between them, as torch rounds it, and compared with its threshold as it is
    rounded. For what `takes` says. gate_t None: a plain layer."""
    weights = (up_t, None, up_bias, None) if gate_t is None else (gate_t, up_t, gate_bias, up_bias)
    h = product(call, x, *weights, threshold=kept.inputs, kind=kept.kind)
    return product(call, h, down_t, None, down_bias, threshold=kept.hidden)


def reference(
    x, first_t, second_t=None, first_bias=None, second_bias=None, *, threshold: float, kind: str | None = None
) -> Tensor:
    """Return what `product` computes, from torch's operations."""
    x = x.masked_fill(x.abs() < threshold, 0)
    first = linear(x, first_t.t(), first_bias)
    if kind is not None:
        first = CURVES.get(kind, torch.relu)(first)
    return first if second_t is None else first * linear(x, second_t.t(), second_bias)


# ---- the operator: what compiled code calls

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "kept_inputs(Tensor x, Tensor first, Tensor? second, Tensor? first_bias, Tensor? second_bias, float threshold, "
    "str? kind) -> Tensor",
    # Weights [outputs, inputs] are stored by columns, and stay so in compiled code.
    tags=(getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),),
)


@torch.library.impl(_library, "kept_inputs", "CompositeExplicitAutograd")
@torch.no_grad()
def operator(
    x, first, second=None, first_bias=None, second_bias=None, threshold: float = 0.0, kind: str | None = None
) -> Tensor:
    """Compute `product` of x [..., inputs] with weights [outputs, inputs], as layers have them: by the kernel on a GPU,
    for 1 to MOST_TOKENS tokens of 16 bits and aligned weights that are stored by columns, and by torch otherwise.
    Nothing is checked, and it has no gradient."""
    rows, turned = x.reshape(-1, x.shape[-1]).contiguous(), [w if w is None else w.t() for w in (first, second)]
    given = rows, *turned, first_bias, second_bias
    compute = partial(run, product) if _fits(x, first, second) else reference
    return compute(*given, threshold=threshold, kind=kind).view(*x.shape[:-1], first.shape[0])


def _fits(x: Tensor, *weights: Tensor | None) -> bool:
    few = x.is_cuda and 1 <= x.shape[:-1].numel() <= MOST_TOKENS and x.dtype.itemsize == 2
    stored = all(w is None or w.t().is_contiguous() and not (w.data_ptr() % 16 or len(w) % 8) for w in weights)
    return few and stored and capability(x.device.index) >= KEPT_INPUTS.oldest


@torch.library.register_fake("twell_lab::kept_inputs", lib=_library)
def _(x, first, *_):
    return x.new_empty(*x.shape[:-1], first.shape[0])


_library.define(
    "kept_inputs_each(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor",
    tags=(getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),),
)


@torch.library.impl(_library, "kept_inputs_each", "CompositeExplicitAutograd")
@torch.no_grad()
def _(x, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """Compute `products` of x [..., inputs], for which `operator` says what it says of its own."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if _fits(x, *weights):
        y = run(products, rows, tuple(w.t() for w in weights), tuple(biases))
    else:
        y = torch.cat([linear(rows, *each) for each in zip(weights, biases)], 1)
    return y.view(*x.shape[:-1], -1)


@torch.library.register_fake("twell_lab::kept_inputs_each", lib=_library)
def _(x, weights, _):
    return x.new_empty(*x.shape[:-1], sum(len(w) for w in weights))
