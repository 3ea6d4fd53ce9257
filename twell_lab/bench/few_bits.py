"""A gated layer with weights of few bits beside the dense one: what INT8 and E4M3 gain without zeros, which a sparse
path with few bits has to beat. And its gate's product alone: what scaling an INT8 product's sums within it saves, and
what half of the weights gain, as INT8 that are 2:4, and as 16 bits that are expanded from a bitmap first."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..core import TwellError
from ..layers.choice import Choice
from ..ops import clock, int8
from ..sparsities.fp8 import fp8_linear
from ..sparsities.int8 import has_kernel, int8_linear, packed_two_four, two_four_int8
from ..sparsities.quantised import Bitmap, Rows, output_error, quantise
from ..sparsities.two_four import two_four_mask
from . import rows
from .methods import NNZ, Sizes, swapped
from .rows import DENSE

PATHS = ("twell", "int8", "fp8", "twell_int8")
LOSSY = PATHS[1:]
TOKENS = (1, 16, 256, 2048, 16384)
LAYER = Sizes()
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
def few_bits_rows(tokens: int, sizes: Sizes = LAYER) -> list[dict]:
    """Return rows of kind "few bits": of a layer of which about NNZ neurons fire, on each of PATHS, with the `error` of
    its output against float64, as a share of its norm; CUDA graphs for few tokens. And the gate's product as in
    `_parts`. The dense row has `left_out`, {path: why}: what does not run here. Raises clock.WrongResult for an output
    that is further off than MOST_OFF says, and where ways to compute one product differ."""
    device = torch.device(sizes.device)
    layer, xs = clock.workload(tokens, sizes.d_model, sizes.d_ff, NNZ, "lognormal", sizes.dtype, device)
    left_out: dict[str, str] = {}
    facts: dict[str, dict] = {DENSE: {"left_out": left_out}}
    calls: rows.Calls = {DENSE: rows.over(layer, xs)}
    exact = copy.deepcopy(layer).double()(xs[0].double())
    for name in PATHS:
        if name == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            left_out[name] = "FP8 products need compute capability 8.9"
            continue
        try:
            call = swapped(layer, Choice(name))
            y = call(xs[0])
        except TwellError as refused:
            left_out[name] = str(refused)
            continue
        error = output_error(y, exact)
        off = off_on_rounded(layer, xs[0], y, *ROUNDED[name]) if name in ROUNDED else {"y": error}
        for what, by in off.items():
            if not by <= MOST_OFF[name]:
                raise clock.WrongResult(f"{what} of {name} is off by {by:.4%} of its norm: nothing was timed")
        path = f"forced {name}{' (lossy)' * (name in LOSSY)}"
        calls[path], facts[path] = rows.over(call, xs), {"error": error}
    parts = {name: rows.over(call, xs) for name, call in _parts(layer.gate_proj.weight, xs[0], left_out).items()}
    shared = rows.of_layer("few bits", xs[0], sizes.d_ff, f"drawn gated layer, {tokens:,} tokens")
    return rows.measured(shared, calls, device, sizes.seconds, facts, tokens=tokens, parts=parts)


def _parts(weight: Tensor, x: Tensor, left_out: dict[str, str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the gate's product in each way, by name, x being rounded and what is packed expanded in the call; what
    does not run goes to left_out. WrongResult where a result is not that of the same values multiplied otherwise."""
    gate, pruned = quantise(weight), torch.where(two_four_mask(weight), weight, 0)
    short, bitmap = quantise(pruned), Bitmap.of(pruned)
    apart = functools.partial(int8_linear, rows=gate, apart=True)
    dense = functools.partial(linear, weight=weight)
    parts = {PLAIN: dense, APART: apart, EXPANDED: lambda x: linear(x, bitmap.dense())}
    wanted = {EXPANDED: linear(x, pruned)}
    if has_kernel(x.to(torch.int8), int8.Weight(*gate), x.dtype):
        parts[WITHIN], wanted[WITHIN] = functools.partial(int8_linear, rows=gate), apart(x)
    else:
        left_out[WITHIN] = "the kernel needs a GPU of compute capability 8.0 and 16 bits"
    try:
        two_four = functools.partial(two_four_int8, rows=short, packed=packed_two_four(short))
        two_four(x)
        parts[TWO_FOUR], wanted[TWO_FOUR] = two_four, int8_linear(x, short, apart=True)
    except torch.OutOfMemoryError:
        raise
    except (TwellError, RuntimeError) as refused:
        left_out[TWO_FOUR] = str(refused).splitlines()[0][:200]
    for name, right in wanted.items():
        if not torch.allclose(parts[name](x).float(), right.float(), rtol=torch.finfo(x.dtype).eps):
            raise clock.WrongResult(
                f"{name.removeprefix('part: ')} differs from the same values multiplied otherwise: nothing was timed"
            )
    return parts


def off_on_rounded(
    layer: nn.Module, x: Tensor, y: Tensor, linear: Callable[[Tensor, Rows], Tensor], kind: torch.dtype
) -> dict[str, float]:
    """Return how far off the three products of a layer without biases are from float64, on values rounded as theirs
    are: of g, u and y the norm of the error over that of the exact result, for the worst token and, of many tokens, the
    worst column. g and u are what `linear` gives of x; y, which the layer gave, is compared with what these make of it:
    an H100 adds products of E4M3 with 13 or 14 bits, so that a tenth of the h = relu(g) u are rounded to a neighbour,
    6 to 12% away, which moves y by about 1% of its norm, though no product is off by more than 0.2%.

    layer: with the weights before they are rounded. x: [tokens, d_model]. linear: what multiplies rows of this kind."""

    def exact(a: Tensor, b: Rows) -> Tensor:
        left, right = (part.values.double() * part.scale.double()[:, None] for part in (quantise(a, kind), b))
        return left @ right.t()

    gate, up, down = (quantise(part.weight, kind) for part in (layer.gate_proj, layer.up_proj, layer.down_proj))
    g, u = linear(x, gate), linear(x, up)
    pairs = {"g": (g, exact(x, gate)), "u": (u, exact(x, up)), "y": (y, exact(torch.relu(g) * u, down))}
    return {name: _worst(*pair) for name, pair in pairs.items()}


def _worst(y: Tensor, exact: Tensor) -> float:
    """Return the largest share that a token's error has of its norm, or, of _COLUMN tokens and more, a column's; where
    both are zero, 0."""
    wrong, ways = y.double() - exact, (1, 0) if len(y) >= _COLUMN else (1,)
    off = torch.cat([wrong.norm(dim=along) for along in ways])
    return float(torch.where(off == 0, 0, off / torch.cat([exact.norm(dim=along) for along in ways])).max())


def sections(sizes: Sizes = LAYER) -> rows.Sections:
    """Return the steps of the record, as in bench.comparison, by number of tokens."""
    return {"few bits": [functools.partial(few_bits_rows, tokens, sizes) for tokens in TOKENS]}
