"""Random and hostile layers on every path that this machine has, compared with float64.

Each layer is drawn from a seed and its number alone. There are widths that no vector divides, heavy rows, bursts that
overflow tiles and the pool, rows with NaN and infinity, views with odd strides, values near the ends of their dtype, and
integers, of which every sum is exact. Every path computes the layer twice, which must give the same bits; on a GPU the
second call often runs on a side stream with an input that comes late, and memory that torch allocates is often filled
with NaN before. Results are judged by accuracy.Exact; gradients may have twice the dense layer's error."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.ops import dense
from tests.ops.table import bits, poisoned
from twell_lab.cuda import launch
from twell_lab.formats.twell import TILE, WORDS
from twell_lab.layers.choice import Choice, one_of_each
from twell_lab.layers.parts import Weights
from twell_lab.layers.paths import STEP
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import accuracy, decode, dispatch, functional, gate_pack, train
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

_SLEEP = 300_000  # cycles by which an input is late on a side stream: a fifth of a millisecond
_GEOMETRIES = ((TILE, WORDS), (TILE, WORDS), (64, 17), (32, 33), (100, 5), (8, 3), (7, 2), (300, 40), (1, 2))
_CPU_WIDTHS = (1, 2, 3, 5, 7, 8, 12, 16, 24, 33, 64, 100, 128, 200, 257)
# The kernels are compiled for each width that 8 divides; a kernel for any width takes the others.
_GPU_WIDTHS = (64, 264, 768, 2048, 1, 7, 100, 333)
NAMES = ("x", *Weights._fields[:6])


@dataclass
class Layer:
    """One drawn layer. tensors: in the order of NAMES, None for what is not there (without a gate, a plain layer);
    traits: what makes it hostile; tile, words: the geometry in which its gate is packed."""

    tensors: list[Tensor | None]
    traits: list[str]
    tile: int
    words: int

    @property
    def x(self) -> Tensor:
        return self.tensors[0]

    @property
    def weights(self) -> Weights:
        return Weights(*self.tensors[1:])

    @property
    def d_ff(self) -> int:
        return self.tensors[2].shape[0]

    def say(self) -> str:
        """The layer in a few words, for the message of a failure."""
        kind = "plain" if self.weights.gate is None else "gated"
        shape = f"{self.x.shape[0]} tokens, d_model {self.x.shape[1]}, d_ff {self.d_ff}"
        biases = "".join(letter for letter, b in zip("gud", self.tensors[4:]) if b is not None)
        return (
            f"{str(self.x.dtype)[6:]}, {kind}, {shape}, biases {biases or 'none'}, "
            f"tile {self.tile} x {self.words}, {', '.join(self.traits) or 'nothing special'}"
        )


# ---- drawing ----


def draw(r: random.Random, device: str = "cpu") -> Layer:
    """A layer: the same for the same state of r and kind of device."""
    g = torch.Generator(device).manual_seed(r.getrandbits(62))
    cuda = device.startswith("cuda")
    dtype = r.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    gated, traits = r.random() < 0.7, []
    d_model, d_ff, tokens = _sizes(r, cuda)
    normal = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
    x, first = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5
    up, down = normal(d_ff, d_model) / d_model**0.5, normal(d_model, d_ff) / 4
    rate = r.choice((2.6, 2.6, 2.3, 1.6, 1.0, 0.3, 0.0, -1.0, -9.0, 9.0))
    x[:, 0], first[:, 0] = 1.0, -rate
    biases = [normal(n) / 4 if r.random() < 0.4 else None for n in (d_ff, d_ff, d_model)]

    def chance(name: str, share: float) -> bool:
        hit = r.random() < share
        traits.extend([name] * hit)
        return hit

    some = lambda n, most: sorted(r.sample(range(n), min(n, r.randint(1, most))))  # noqa: E731
    if d_model > 1 and chance("heavy rows", 0.3):
        x[:, 1] = 0
        x[some(tokens, 4), 1] = 8.0
        first[: r.choice((d_ff, min(d_ff, 1500), min(d_ff, 300))), 1] = 4.0
    if d_model > 2 and chance("bursts", 0.3):  # up to 300 neighbours fire: more than a tile's words or the pool hold
        x[:, 2] = 0
        start, many = r.randrange(d_ff), r.choice((32, 40, 64, 300))
        begin = r.randrange(tokens)
        x[begin : begin + r.choice((1, 8, 20)), 2] = 16.0
        first[start : start + many, 2] = 1.0
    if chance("integers", 0.1):  # every product and sum is exact, and many gates are zero
        x, first, up, down = (
            torch.randint(-1, 2, t.shape, generator=g, device=device).float() for t in (x, first, up, down)
        )
        biases = [None if b is None else b.sign() for b in biases]
    if chance("zeros", 0.1):
        x[some(tokens, 3)], first[some(d_ff, 3)] = 0.0, -0.0
    if chance("opposites", 0.1):  # gates that are nearly zero: a neuron's inputs cancel
        half = d_model // 2
        x[:, half : 2 * half], first[:, half : 2 * half] = x[:, :half], -first[:, :half] * (1 + 1e-3 * normal(d_ff, 1))
    scale = r.choice((-8, 5) if dtype == torch.float16 else (-20, -60, -110, -126, 20, 30))
    if chance(f"scaled by 2^{scale}", 0.4):
        place = r.randrange(3)  # what is scaled: the input, the down projection, or gate and up
        x_by, down_by, first_by = (2.0 ** (scale * (place == each)) for each in range(3))
        x, down, first, up = x * x_by, down * down_by, first * first_by, up * first_by
        biases = [b if b is None else b * (2.0**scale / down_by) for b in biases]
    if chance("rows that are not finite", 0.15):
        for row in some(tokens, 3):
            x[row, r.randrange(d_model)] = r.choice((torch.nan, torch.inf, -torch.inf))
    kinds = (x, first if gated else None, up if gated else first, down, biases[0] if gated else None, *biases[1:])
    tensors = [None if t is None else t.to(dtype) for t in kinds]
    if chance("strided", 0.25):
        tensors = [t if t is None or r.random() < 0.4 else _strided(t, r) for t in tensors]
    tile, words = r.choice(_GEOMETRIES) if r.random() < 0.3 else (TILE, WORDS)
    return Layer(tensors, traits, tile, words)


def _sizes(r: random.Random, cuda: bool) -> tuple[int, int, int]:
    """d_model, d_ff, tokens; larger ones for a GPU."""
    widths, tiles, most = (_GPU_WIDTHS, 22, 4500) if cuda else (_CPU_WIDTHS, 3, 200)
    near_tiles = TILE * r.randint(1, tiles) + r.randint(-1, 1)
    d_ff = r.choice((r.randint(1, 40), r.randint(1, 200 * tiles), 8 * r.randint(1, 30 * tiles), near_tiles))
    return r.choice(widths), d_ff, round(most ** r.random())


def _strided(t: Tensor, r: random.Random) -> Tensor:
    """The same values in a view that is not contiguous, or does not start on 16 bytes."""
    way = r.randrange(4)
    if way == 0 and t.dim() == 2:
        return t.t().contiguous().t()
    if way == 1:
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
        wide[..., ::2] = t
        return wide[..., ::2]
    if way == 2 and t.dim() == 2:
        wide = t.new_full((t.shape[0], t.shape[1] + 3), torch.nan)
        wide[:, 1:-2] = t
        return wide[:, 1:-2]
    flat = t.new_full((t.numel() + 1,), torch.nan)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


# ---- the paths ----

Path = Callable[[Layer, Tensor], Tensor]  # computes a layer on an x like its own


def _ffn(layer: Layer, x: Tensor, **how) -> Tensor:
    w = layer.weights
    biases = {"gate_bias": w.gate_bias, "up_bias": w.up_bias, "down_bias": w.down_bias}
    return functional.ffn(x, w.up, w.down, w.gate, **biases, **how)


def _packed(layer: Layer, x: Tensor) -> Tensor:
    w, packed = layer.weights, functional.pack(dense.first(x, *layer.tensors[1:]), layer.tile, layer.words)
    if w.gate is None:
        return functional.packed_down(packed, w.down, w.down_bias)
    return functional.packed_gated(x, packed, w.up, w.down, w.up_bias, w.down_bias)


def _module(layer: Layer) -> nn.Module:
    """A dense module that holds these same tensors."""
    w = layer.weights
    with torch.device("meta"):
        module = (PlainFeedForward if w.gate is None else GatedFeedForward)(1, 1)
    for name, weight, bias in zip(("gate_proj", "up_proj", "down_proj"), w[:3], w[3:6]):
        if weight is not None:
            projection = getattr(module, name)
            projection.weight = nn.Parameter(weight, requires_grad=False)
            projection.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return module


def _swapped(layer: Layer, x: Tensor, choice: Choice | None = None) -> Tensor:
    return SparseFFN(_module(layer), plan=choice, tile=layer.tile, words=layer.words, probed=False)(x)


def paths_of(layer: Layer) -> dict[str, Path]:
    """Every way of computing this layer on its device, by name."""
    found: dict[str, Path] = {
        "operator": lambda layer, x: _ffn(layer, x, tile=layer.tile, words=layer.words),
        "packed": _packed,
        "module": _swapped,
    }
    for choice in one_of_each(layer.d_ff, STEP * max(1, (layer.d_ff // STEP) // 2)):
        found[f"infer, {choice.path}"] = functools.partial(_ffn, path=choice.path, hot=choice.hot)
        found[f"module, {choice.path}"] = functools.partial(_swapped, choice=choice)
    for path in train.PATHS:
        found[f"trained, {path}"] = lambda layer, x, path=path: train.train_ffn(x, *layer.tensors[1:], path=path)[0]
    return found | (_gpu_paths(layer) if layer.x.is_cuda else {})


def _gpu_paths(layer: Layer) -> dict[str, Path]:
    """The kernels called directly, also where dispatch would not pick them for this size."""
    gate, up, down, *biases = (t if t is None else t.contiguous() for t in layer.tensors[1:])
    turned, first = down.t().contiguous().t(), up if gate is None else gate
    weights, geometry = (gate, up, turned, *biases), (layer.tile, layer.words)
    found = {"portable": lambda layer, x: dispatch.portable(x.contiguous(), *weights, *geometry)}
    able = torch.cuda.get_device_capability(layer.x.device)
    x = launch.layout(layer.x.contiguous())
    of_up, of_first = launch.layout(up), launch.layout(first)
    for version in decode.VERSIONS if decode.takes(able, x, of_up) else ():
        found[f"decode v{version}"] = lambda layer, x, version=version: launch.run(
            decode.decode, x.contiguous(), gate, up, turned.t(), *biases, version
        )
    hots = [0] + [256 * ((layer.d_ff // 256 + 1) // 2)] * (layer.d_ff > 512 and not layer.d_ff % 8)
    for name in ("sm80", "sm90") if gate_pack.takes_sm90(able, x, of_up) else ():
        # The GEMMs of the latter compute rows that the pool cannot hold.
        packs, takes = getattr(gate_pack, f"gate_pack_{name}"), getattr(gate_pack, f"takes_{name}")
        for hot in hots if takes(able, x, of_first) else ():
            found[f"{name}{', hot/cold' * bool(hot)}"] = lambda layer, x, packs=packs, hot=hot: dispatch.sm90(
                x.contiguous(), *weights, hot, packs
            )
    return found


# ---- checking ----


def check(r: random.Random, counts: Counter, device: str = "cpu") -> None:
    """Draw a layer and compute it on every path, and its gradients on every path of training.

    Adds to counts: `checked` results and their `rows`; `excused`, `overflowed` and `rounded` rows, which kept the bound
    only for that reason (accuracy.Verdict); the `worst` error over what is allowed; and 1 for each category of a
    result. Raises AssertionError with everything that is wrong."""
    layer = draw(r, device)
    wrong = [*_wrong_results(layer, r, counts)]
    assert not wrong, f"{'; '.join(wrong)} ({layer.say()})"


def _wrong_results(layer: Layer, r: random.Random, counts: Counter) -> Iterator[str]:
    with torch.no_grad():
        # A path on a GPU may copy strided tensors first, and torch's GEMMs sum the copies in another order: the path is
        # compared with the dense layer of the tensors as given, and with that of the copies.
        anew = [None if t is None else t.contiguous() for t in layer.tensors]
        given = [layer.tensors, anew] if layer.x.is_cuda and "strided" in layer.traits else [layer.tensors]
        exact, beside = accuracy.Exact(*layer.tensors), [(dense.step(*each)[0], dense.first(*each)) for each in given]
        from_gate = accuracy.Exact(*layer.tensors, first=beside[0][1])
    for name, run in paths_of(layer).items():
        poisoned = r.random() < 0.5
        # The late input is a copy, and torch's GEMM sums in another order where x does not start on 16 bytes.
        late = layer.x.is_cuda and layer.x.is_contiguous() and layer.x.data_ptr() % 16 == 0 and r.random() < 0.3
        with torch.no_grad(), _poison(layer.x, poisoned):
            y = run(layer, layer.x)
            again = _late(run, layer) if late else run(layer, layer.x)
        judge = (from_gate if name == "packed" else exact).judge
        verdict = min((judge(y, *each) for each in beside), key=lambda one: one.ratio)
        counts.update(checked=1, rows=len(y))
        counts.update(excused=verdict.excused, overflowed=verdict.overflowed, rounded=verdict.rounded)
        counts.update([name, str(y.dtype)[6:], *layer.traits, *["side stream"] * late, *["poisoned memory"] * poisoned])
        counts["worst"] = max(counts["worst"], verdict.ratio)
        if not verdict.ratio <= 1.0:
            yield f"{name}: row {verdict.row} is off by {verdict.ratio:.3g} times what is allowed"
        if not torch.equal(bits(y), bits(again)):
            yield f"{name}: the second call gave other bits{', on a side stream' * late}"
    # The values of a training are finite, and in a range in which no product under- or overflows.
    if not any(trait.startswith(("scaled", "rows that")) for trait in layer.traits):
        yield from _wrong_gradients(layer, exact, r, counts)


def _poison(like: Tensor, filled: bool):
    """Fill memory that torch allocates meanwhile with NaN: all of it where `filled`, otherwise (on a GPU) what torch's
    cache of freed memory hands out again."""
    if like.is_cuda:
        held = [
            torch.full((size,), torch.nan, device=like.device)
            for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22, like.numel() // 2 + 1)
        ]
        del held
    return poisoned() if filled else nullcontext()


def _late(run, layer: Layer) -> Tensor:
    """The path's result on a side stream, for an input that is NaN until shortly before the call."""
    x, stream = torch.full_like(layer.x, torch.nan), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP)
        x.copy_(layer.x)
        y = run(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    for t in (x, y):
        t.record_stream(torch.cuda.current_stream())
    return y


# ---- gradients ----


def _wrong_gradients(layer: Layer, exact: accuracy.Exact, r: random.Random, counts: Counter) -> Iterator[str]:
    """What is wrong with the gradients of both training paths, a sentence each.

    The norm of the error of each gradient, over the whole tensor, may be twice the dense layer's, plus one unit in the
    last place of its largest value, as for results, plus what rounding each of its terms once makes of it (`_noise`): a
    dense gradient of a few values may be exact by luck. Values beyond the dtype's end are infinite. Rows with a
    neuron whose sign rounding decides get an upstream gradient of zero: with the other sign they are another
    function."""
    x, gate, up, down, gate_bias, up_bias, down_bias = layer.tensors
    # Sums are made in float32 at least: its rounding decides the signs of g and of u.
    doubt = exact.doubtful(slice(None), 16 * torch.finfo(torch.float32).eps).any(1)
    if gate is not None:
        other = accuracy.Exact(x, None, up, down, None, up_bias, None)
        doubt |= (other.doubtful(slice(None), 16 * torch.finfo(torch.float32).eps) & exact.keep).any(1)
    g = torch.Generator(x.device).manual_seed(r.getrandbits(62))
    dy = torch.randn(x.shape, generator=g, device=x.device).to(x.dtype)
    dl1 = torch.rand(len(x), generator=g, device=x.device)
    dy[doubt], dl1[doubt] = 0.0, 0.0
    right = dense.exact_gradients(layer.tensors, dy, dl1, keep=exact.keep)[2:]
    reached = dense.gradients(dense.step, layer.tensors, dy, dl1)[2:]
    noise = _noise(layer.tensors, exact.keep, dy, dl1)
    for path in train.PATHS:
        with _poison(x, r.random() < 0.5):
            found, again = (dense.gradients(train.train_ffn, layer.tensors, dy, dl1, path=path)[2:] for _ in range(2))
        counts.update([f"gradients, {path}", str(x.dtype)[6:]], checked=1, rows=len(x))
        for name, a, b, e, n, second in zip(NAMES, found, reached, right, noise, again):
            if a is None:
                continue
            if not (off := _off(a, b, e, n)) <= 1.0:
                yield f"gradient of {name}, {path}: off by {off:.3g} times what is allowed"
            if not torch.equal(bits(a), bits(second)):
                yield f"gradient of {name}, {path}: the second call gave other bits"


def _off(ours: Tensor, theirs: Tensor, exact: Tensor, noise: Tensor) -> float:
    """The error of a gradient over what is allowed; inf where a value is finite that should not be, or the reverse."""
    kind, most = torch.finfo(ours.dtype), torch.finfo(ours.dtype).max
    end = exact.abs() > most * (1 - 8 * kind.eps)  # what rounds to just beyond the end may round the other way
    at_end = (ours.sign() == exact.sign()) & (ours.abs() > most * (1 - 16 * kind.eps))
    also = ~ours.isfinite() & ~theirs.isfinite() & ~end  # the dense layer's sums overflow, too
    if not torch.where(end, at_end, ours.isfinite() | also).all():
        return torch.inf
    looked = ~(end | also)
    largest = torch.where(looked, exact, 0.0).abs().amax().to(ours.dtype)
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)).double() - largest.double()
    held = looked & theirs.isfinite()
    allowed = 2 * torch.where(held, theirs.double() - exact, 0.0).norm() + ulp + noise + kind.tiny
    return float(torch.where(looked, ours.double() - exact, 0.0).norm() / allowed)


def _gradient_sums(x, gate, up, dy, h, dg, du) -> list[Tensor | None]:
    """The gradients of all tensors, from those of y and of the outputs of gate and up. gate None: a plain layer, of
    which dg is the gradient of up's output."""
    if gate is None:
        return [dg @ up, None, dg.t() @ x, dy.t() @ h, None, dg.sum(0), dy.sum(0)]
    return [dg @ gate + du @ up, dg.t() @ x, du.t() @ x, dy.t() @ h, dg.sum(0), du.sum(0), dy.sum(0)]


def _noise(tensors, keep: Tensor, dy: Tensor, dl1: Tensor) -> list[Tensor | None]:
    """The norm of the error that each gradient would have if every value and every term of every sum were rounded once
    in the tensors' dtype, independently of each other but for what dl1 does. What is computed here are variances, in
    units of eps^2."""
    x, gate, up, down, gate_bias, up_bias, down_bias, dy, dl1 = (
        None if t is None else t.double() for t in (*tensors, dy, dl1)
    )
    terms = lambda x, w, b=None: linear(x.square(), w.square(), None if b is None else b.square())  # noqa: E731
    first = (up, up_bias) if gate is None else (gate, gate_bias)
    g, g_off = torch.where(keep, linear(x, *first), 0.0), torch.where(keep, terms(x, *first), 0.0)
    u, u_off = (
        (torch.ones_like(g), torch.zeros_like(g)) if gate is None else (linear(x, up, up_bias), terms(x, up, up_bias))
    )
    h, h_off = g * u, g_off * u.square() + g.square() * u_off
    dh = torch.where(keep, dy @ down + dl1[:, None] * h.sign(), 0.0)
    dh_off = torch.where(keep, terms(dy, down.t()) + dl1[:, None].square(), 0.0)
    # The first term of each is the rounding of the value itself, its square; the others come from rounded factors.
    dg = (dh * u).square() + dh_off * u.square() + dh.square() * u_off
    du = (dh * g).square() + dh_off * g.square() + dh.square() * g_off
    exact_h, h = h, h.square() + h_off
    squared = (None if t is None else t.square() for t in (x, gate, up, dy))
    made = _gradient_sums(*squared, h, dg, du)
    # dl1 is added to values that were rounded: numbers on a grid, which the same number moves off it by the same
    # amount. So a token's neurons are rounded in the same direction, and the errors of a sum over them add up.
    half = dh.abs() * torch.where(keep, exact_h.sign(), 0.0) / 2
    made[0] += (half @ up if gate is None else (half * u) @ gate + (half * g) @ up).square()
    if gate is not None:  # the two halves of the gradient of x are rounded, then added
        made[0] += (torch.where(keep, dh * u, 0.0) @ gate).square() + ((dh * g) @ up).square()
    # Terms of one sign that are added one after the other in float32 cost up to this much more than rounding each.
    one_by_one = 0.15 * max(*x.shape, up.shape[0]) * torch.finfo(torch.float32).eps
    return [None if t is None else (torch.finfo(tensors[0].dtype).eps + one_by_one) * t.sum().sqrt() for t in made]
