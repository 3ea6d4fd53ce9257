"""Two savings at once: weights that are 2:4 and INT8, and batches without padding whose silent neurons are skipped.

Results are held against their own exact ones: a product's of its pruned and rounded operands, in float64, while `error`
says how far it is from the dense product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.choice import Choice
from ..ops import accuracy, clock
from ..sparsities import microtiles, two_four
from ..sparsities.int8 import int8_linear
from ..sparsities.padding import add_padding
from ..sparsities.quantised import Rows, output_error, quantise, round_tokens
from . import methods, rows
from .comparison import CHECKED, WRONG
from .methods import PACKED, REMOVED, TILES

KIND, PADDED = "composing", "padding and ReLU"
# Tokens, in and out: of a 2B model, and of ViT-H. With 2,048 tokens the GPU waited for the host.
SHAPES = ((16384, 2048, 5632), (16384, 1280, 5120))
OPT = methods.Sizes(d_ff=8192)  # a layer of OPT-1.3B
FIRING, REAL = (1 / 256, 1 / 64), 0.5  # shares: of neurons that fire, and of tokens that are no padding


def int8_two_four(weight: Rows, values: Tensor, inside: bool, searched: bool) -> Callable[[Tensor], Tensor]:
    """Return x -> x W^T by cuSPARSELt's INT8 product of a W that is 2:4, for INT8 rows x of this shape. inside: the
    product scales by W's scales and gives bfloat16; else it gives int32. searched: by the fastest of its algorithms."""
    packed = torch._cslt_compress(weight.values)
    how = {"out_dtype": torch.bfloat16, "alpha": weight.scale} if inside else {"out_dtype": torch.int32}
    how["transpose_result"] = True
    try:
        torch._cslt_sparse_mm(packed, values.t(), **how)
    except RuntimeError:  # a version that writes INT8's result as y^T alone
        how["transpose_result"] = False
    if searched:
        how["alg_id"] = torch._cslt_sparse_mm_search(packed, values.t(), **how)

    def product(values: Tensor) -> Tensor:
        y = torch._cslt_sparse_mm(packed, values.t(), **how)
        return y if how["transpose_result"] else y.t()

    return product


@torch.no_grad()
def quantised_rows(searched: bool, shape: tuple[int, int, int], left_out: dict, device: str = "cuda") -> list[dict]:
    """Return rows of kind "composing": x W^T in bfloat16, W [out, in] as it is, 2:4, INT8, or both; INT8's with x
    rounded in each call, a scale a token, and without that, and without scales, of rows that are INT8 before. shape:
    tokens, in, out. searched: only 2:4, by the fastest algorithm."""
    (tokens, d_in, d_out), normal = shape, torch.Generator(device).manual_seed(0)
    drawn = lambda count: torch.randn(count, d_in, generator=normal, device=device).bfloat16()
    weight, xs = drawn(d_out), [drawn(tokens) for _ in range(clock.ROTATED)]
    pruned = weight.masked_fill(~two_four.two_four_mask(weight), 0)
    whole, half = quantise(weight), quantise(pruned)
    picked = torch.linspace(0, tokens - 1, min(CHECKED, tokens), device=device).long()
    shorts, x = [round_tokens(x, torch.int8) for x in xs], xs[0][picked]
    values, short = [rows.values for rows in shorts], shorts[0].dense()[picked]

    def sparse() -> Callable[[Tensor], Tensor]:
        tensor = two_four.packed(pruned, "cusparselt")
        return partial(two_four.product, sparse=two_four.searched(tensor, tokens) if searched else tensor)

    def both(inside: bool) -> Callable[[Tensor], Tensor]:
        multiply = int8_two_four(half, values[0], inside, searched)

        def product(x: Tensor) -> Tensor:
            rounded, scale = round_tokens(x, torch.int8)
            y = multiply(rounded)
            if inside:
                return torch.mul(y, scale[:, None], out=y)
            return torch.mul(y * scale[:, None], half.scale, out=torch.empty_like(y, dtype=x.dtype))

        return product

    def entry(make: Callable, inputs: list[Tensor], first: Tensor, second: Tensor) -> rows.Entry:
        y = (call := make())(inputs[0])[picked]
        scaled, y = y.is_floating_point(), y if y.is_floating_point() else y.float()
        exact, dense = (a.double() @ b.double().t() for a, b in ((first, second), (x, weight)))
        ratio = rows.hold("a row", accuracy.worst_row(y, exact.to(y.dtype), exact)[0], WRONG)
        facts = {"error_over_allowed": ratio} | ({"error": output_error(y, dense)} if scaled else {})
        return rows.over(call, inputs), facts

    sums = lambda weight: (values, values[0][picked], weight.values)
    ways = {  # what makes the call, its inputs, and the operands that it multiplies
        rows.DENSE: (lambda: partial(F.linear, weight=weight), xs, x, weight),
        "2:4": (sparse, xs, x, pruned),
        "INT8, scaled after": (lambda: partial(int8_linear, rows=whole, apart=True), xs, short, whole.dense()),
        "INT8, scaled inside": (lambda: partial(int8_linear, rows=whole), xs, short, whole.dense()),
        "INT8, the sums alone": (lambda: partial(torch._int_mm, mat2=whole.values.t()), *sums(whole)),
        "INT8 and 2:4, scaled after": (lambda: both(False), xs, short, half.dense()),
        "INT8 and 2:4, W's scales inside": (lambda: both(True), xs, short, half.dense()),
        "INT8 and 2:4, the sums alone": (lambda: int8_two_four(half, values[0], False, searched), *sums(half)),
    }
    workload = f"{d_in:,} to {d_out:,}" + ", searched" * searched
    taken = {path: partial(entry, *way) for path, way in ways.items() if not searched or path[:5] != "INT8,"}
    calls, facts = rows.admit(taken, left_out, f"{tokens:,} tokens, {workload}, ", [rows.DENSE])
    return rows.measured(rows.of_layer(KIND, xs[0], d_out, workload), calls, facts)


@torch.no_grad()
def padded_rows(firing: float, sizes: methods.Sizes = OPT) -> list[dict]:
    """Return rows of kind "padding and ReLU": a plain ReLU layer on a padded batch, in which this share of the neurons
    fires: with micro-tiles or TwELL for those, without the padding, and both."""
    rates, tokens = clock.firing_rates(sizes.d_ff, firing * sizes.d_ff), sizes.tokens[-1]
    how = {"shrink": (firing * sizes.d_ff) ** 0.5, "gated": False}
    layer, inputs = clock.drawn(rates, tokens, sizes.d_model, sizes.dtype, sizes.device, **how)
    (real, xs, padding), down_t = methods.padded(inputs, REAL, sizes), layer.down_proj.weight.t().contiguous()

    def tiled(x: Tensor) -> Tensor:
        tiles = microtiles.find_microtiles(F.relu(layer.up_proj(x)).flatten(0, -2))
        return microtiles.product(tiles, down_t).view_as(x)

    calls = rows.Calls()
    for path, way in {"": layer, TILES: tiled, PACKED: methods.swapped(layer, Choice("twell"))}.items():
        without = lambda x, way=way: add_padding(way(padding.gather(x)), padding)
        for name, call in ((path or rows.DENSE, way), (f"{REMOVED}, {path}" if path else REMOVED, without)):
            methods.check_close(name, call(xs[0])[real], layer(xs[0])[real])
            calls[name] = rows.over(call, xs)
    shared = rows.describe(PADDED, inputs, layer.up_proj.weight, f"{firing:.2%} fire, {REAL:.0%} of the tokens real")
    return rows.measured(shared | {"real": int(real.sum()), "share": firing}, calls, seconds=sizes.seconds)


def sections(left_out: dict) -> rows.Sections:
    """Return the steps of the record; last what searches algorithms, one of which has ended a process."""
    made = {PADDED: rows.steps(padded_rows, FIRING)}
    made |= {f"{KIND}{', searched' * on}": rows.steps(quantised_rows, [on], SHAPES, [left_out]) for on in (False, True)}
    return made
