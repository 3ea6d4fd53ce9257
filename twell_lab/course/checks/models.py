"""Checks of the exercises of notebooks 03 to 05 and 10, and of the workshop: patterns of zeros, training with L1, cuts,
and the choice of a path."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...sparsities import magnitude, padding
from ...sparsities.two_four import two_four_mask
from ..choosing.data import hot_neurons, occupied, token_bytes
from ..sparsity_map.data import pays_after
from ..training import firing_share
from ..verdicts import NotYet, alike, close, exercise, formula, match_parts, skipping, written

# ---- notebook 03 ----


def _mask(got, like: Tensor) -> Tensor:
    """The reader's mask; NotYet unless it is one of this shape."""
    if written(got).shape != like.shape or got.dtype != torch.bool:
        raise NotYet(f"bool {list(like.shape)} is asked for; yours is {got.dtype} {list(got.shape)}.")
    return got


@exercise("exactly as many as asked, ties included.", magnitude.largest)
def keep_largest(answer) -> None:
    for count in (0, 1, 7, 20, 24):
        sizes = torch.randint(0, 6, (4, 6)).float()  # many are equal
        asked = f"keep_largest(torch.tensor({sizes.tolist()}), {count})"
        got = _mask(answer(sizes.clone(), count), sizes)
        alike(int(got.sum()), count, f"the number kept by {asked}")
        if not torch.equal(got, magnitude.largest(sizes, count)):
            raise NotYet(f"{asked} keeps as many as it should, but others: of equal ones the first in row order stay.")


@exercise("the two largest of each four, whatever their sign.", two_four_mask)
def two_four(answer) -> None:
    for rows, groups in ((1, 1), (3, 5), (8, 16)):
        weight = torch.randn(rows, 4 * groups).round(decimals=1)
        got, sizes = _mask(answer(weight.clone()), weight).view(rows, groups, 4), weight.abs().view(rows, groups, 4)
        if (got.sum(-1) != 2).any():
            row, group = (got.sum(-1) != 2).nonzero()[0].tolist()
            raise NotYet(
                f"of row {row}, columns {4 * group} to {4 * group + 3}, two should stay of "
                f"{weight[row, 4 * group : 4 * group + 4].tolist()}; yours keeps {got[row, group].sum()}."
            )
        if not torch.allclose((sizes * got).sum(-1), sizes.topk(2).values.sum(-1)):
            raise NotYet("two of four stay everywhere, but not always the two of largest magnitude.")


@formula(
    "half of the values, and 2 bits for the place of each: at 16 bits 56% of dense, not 50%.",
    [(2048, 5632, 2), (32, 64, 2), (16, 16, 1), (128, 256, 4)],
)
def two_four_bytes(rows: int, columns: int, value_bytes: int) -> int:
    half = rows * columns // 2
    return half * value_bytes + half // 4


@formula(
    "a block is empty only if all of its values are zero together.",
    lambda: [(0.9, 1), (0.99, 16), (0.999, 32), (0.5, 2), (random.random(), 3)],
)
def empty_blocks(sparsity: float, size: int) -> float:
    return sparsity ** (size * size)


formula(
    "and None where a product gains nothing that could pay for the conversion.",
    [(10.0, 1.0, 2.0), (10.0, 1.0, 5.0), (3.0, 2.0, 2.0), (3.0, 4.0, 2.0), (0.5, 1.0, 4.0), (7.0, 1.0, 8.0)],
)(pays_after)


@exercise("the largest magnitude becomes 127, and no value is off by more than half a scale.")
def quantise_row(answer) -> None:
    for row in (torch.randn(12), torch.randn(40) * 1e-3, torch.tensor([0.0, -2.54, 1.0]), torch.zeros(5)):
        asked = f"quantise_row(torch.tensor({[round(value, 4) for value in row.tolist()]}))"
        (values, scale), most = written(answer(row.clone())), float(row.abs().max())
        if not torch.equal(values, values.round()) or values.abs().max() > 127:
            raise NotYet(f"{asked} gives {values.tolist()}; whole numbers from -127 to 127 are asked for.")
        if row.any():
            alike(float(scale), most / 127, f"the scale of {asked}")
        off = float((values * scale - row).abs().max())
        if not off <= 0.51 * most / 127:
            raise NotYet(f"{asked} is off by {off:.3g}, and half a scale, {most / 254:.3g}, would do.")


@exercise("each block once, and nothing for the empty ones.")
def block_product(answer) -> None:
    for high, wide, share in ((3, 4, 0.5), (2, 2, 0.0), (5, 3, 1.0)):
        size, width = 4, 7
        blocks = {(i, j): torch.randn(size, size) for i in range(high) for j in range(wide) if random.random() < share}
        b, whole = torch.randn(wide * size, width), torch.zeros(high * size, wide * size, dtype=torch.float64)
        for (i, j), block in blocks.items():
            whole[i * size : (i + 1) * size, j * size : (j + 1) * size] = block.double()
        asked = f"block_product of {len(blocks)} of {high * wide} blocks"
        most = 2 * len(blocks) * size * size * width
        close(skipping(answer, (blocks, b, size, high * size), most, asked), whole @ b.double(), asked)


# ---- notebook 04 ----


@exercise("the part of up that is behind a gate decides how hard it is pushed, and a silent gate is left alone.")
def gate_push(answer) -> None:
    # Few values first, in which a sign that was lost, or a gate of exactly zero, can be seen.
    gates, ups = [2.0, 1.0, -1.0, 0.0], [1.5, -3.0, 2.0, 4.0]
    got = answer(torch.tensor(gates), torch.tensor(ups), 1.0)
    alike(got, [1.5, 3.0, 0.0, 0.0], f"gate_push of gates {gates}, ups {ups} and c 1")
    for shape, c in (((4, 16), 1.0), ((3, 2, 40), 0.01)):
        gate, up = torch.randn(shape), torch.randn(shape)
        gate[..., 0] = 0.0  # what is exactly zero does not fire
        with torch.enable_grad():
            leaf = gate.double().requires_grad_()
            (exact,) = torch.autograd.grad(c * (leaf.relu() * up.double()).abs().sum(), leaf)
        asked = f"gate_push for gate and up {list(shape)} and c {c:g}"
        close(answer(gate.clone(), up.clone(), c), exact, asked)


@formula(
    "averaged over layers, tokens and neurons.",
    lambda: [([torch.randn(4, 8)], 0.5), ([torch.randn(2, 5, 24) for _ in range(3)], 1e-3)],
)
def formula_l1(hidden: list[Tensor], l1: float) -> Tensor:
    return l1 * torch.stack(hidden).double().abs().mean()


@formula(
    "what another seed does, in either direction, is no difference.",
    lambda: [
        *[(2.0, 2.1, 2.05), (2.0, 2.1, 1.95), (2.0, 2.1, 2.15), (2.0, 2.1, 1.85), (2.0, 1.9, 1.95), (2.0, 1.9, 2.15)],
        *[(3.0, 2.5, 2.4), (2.0, 1.5, 2.5), (2.0, 2.5, 2.5)],  # exactly as far as the other seed is no further
        *[(2 + random.random(), 2 + random.random(), 2 + random.random()) for _ in range(6)],
    ],
)
def seed_verdict(base: float, again: float, run: float) -> str:
    noise, change = abs(again - base), run - base
    return "no difference" if abs(change) <= noise else "worse" if change > 0 else "better"


formula(
    "the busiest first, added up, until the share is reached.",
    lambda: [
        (torch.tensor([1, 1, 1, 1]), 0.5),
        (torch.tensor([8, 0, 1, 1]), 0.8),
        (torch.tensor([0, 0, 7, 90, 3]), 0.95),
        (torch.tensor([5, 4, 3, 2, 1, 0, 0, 0]), 1.0),
        *[(torch.randint(0, 50, (60,)) ** 2, 0.8) for _ in range(3)],
    ],
)(firing_share)


@formula(
    "0 where it fired just now, and all tokens where it never did.",
    lambda: [
        (torch.rand(tokens, d_ff) < p,) for tokens, d_ff, p in ((5, 6, 0.4), (40, 10, 0.05), (3, 4, 0), (1, 3, 1))
    ],
)
def silent_for(fired: Tensor) -> list[int]:
    tokens, d_ff = fired.shape
    return [next((back for back in range(tokens) if fired[tokens - 1 - back, n]), tokens) for n in range(d_ff)]


def _runs() -> list[tuple]:
    cases = [([(99.0, 2.0), (40.0, 2.03), (12.0, 2.1)], 2.0, 0.02), ([(5.0, 3.0)], 2.0, 0.02)]
    cases.append(([(5.0, 3.0), (2.0, 3.5)], 2.0, 0.5))  # exactly 1 + more times the twin's is good enough
    for _ in range(5):
        runs = [(round(random.uniform(1, 90), 1), round(random.uniform(1.9, 2.2), 3)) for _ in range(8)]
        cases.append((runs, 2.0, 0.05))
    return cases


@formula("and None where every run costs more.", _runs)
def sparsest_within(runs: list[tuple[float, float]], twin: float, more: float) -> float | None:
    return min((nnz for nnz, loss in runs if loss <= (1 + more) * twin), default=None)


# ---- notebook 05 ----


@exercise("so many of the smallest magnitudes lie below it, and what is zero already counts.")
def threshold_for(answer) -> None:
    for count, share, silent in ((40, 0.5, 0), (40, 0.9, 0), (200, 0.25, 20), (10, 0.0, 0), (40, 0.5, 30)):
        values = torch.randn(count)
        values[torch.randperm(count)[:silent]] = 0.0
        wanted = max(round(share * count), silent)
        asked = f"threshold_for of {count} values, {silent} of them zero, and sparsity {share:g}"
        got = float(written(answer(values.clone(), share)))
        zeros = int(((values.abs() < got) | (values == 0)).sum())
        if zeros != wanted:
            raise NotYet(f"{asked} should leave {wanted} zeros; with yours, {got:.4g}, there are {zeros}.")


@exercise("what is large in magnitude is kept, of either sign, and no other neuron's weights were read.")
def cut_token(answer) -> None:
    for trial in range(3):
        x, gate, up = torch.randn(24), torch.randn(60, 24), torch.randn(60, 24)
        down, threshold = torch.randn(24, 60), random.uniform(0.15, 0.25)
        gate = gate - 0.3 * x  # most activations small and negative
        activation = F.silu(gate @ x)
        kept = activation.abs() >= threshold
        exact = (down.double() * (activation * kept * (up @ x)).double()).sum(1)
        if trial:
            up[~kept], down[:, ~kept] = torch.nan, torch.nan
        asked = "cut_token" + " with NaN in the weights of neurons that are cut" * bool(trial)
        most = 2 * 24 * (60 + 2 * int(kept.sum()))
        close(skipping(answer, (x, gate, up, down, threshold), most, asked), exact, asked)


def _windows() -> Iterator[tuple[Tensor, Tensor]]:
    for count in (2, 12, 100):
        before = 2 + torch.rand(count, dtype=torch.float64)  # windows differ more than a cut changes any of them
        yield before, before + 0.05 + 0.02 * torch.randn(count, dtype=torch.float64)


@formula("the windows differ from each other, but each is compared with itself.", _windows)
def paired_interval(before: Tensor, after: Tensor) -> tuple[float, float, float]:
    difference = after - before
    reach, middle = 1.96 * difference.std().item() / math.sqrt(len(difference)), difference.mean().item()
    return middle - reach, middle, middle + reach


def _steps() -> Iterator[tuple]:
    for l1, delay, ramp in ((1e-3, 10, 20), (2.0, 0, 5), (0.5, 100, 0), (3e-3, random.randint(1, 40), 8)):
        for step in {1, delay, delay + 1, delay + 3, delay + ramp, delay + ramp + 50} - {0}:
            yield step, l1, delay, ramp


@formula("nothing during the delay, a straight line, and then the whole.", _steps)
def l1_at(step: int, l1: float, delay: int, ramp: int) -> float:
    return l1 * min(1.0, max(0, step - delay) / max(ramp, 1))


@formula(
    "training improves any model, so the gap to the twin is what counts.",
    lambda: [
        (before + random.random() / 10, *others)
        for before, *others in ((2.0, 2.4, 2.0, 1.9), (2.0, 2.4, 1.8, 1.9), (3.0, 3.1, 3.05, 3.0))
    ],
)
def won_back(before: float, at_once: float, after: float, twin: float) -> float:
    return 1 - (after - twin) / (at_once - before)


def _points() -> Iterator[tuple]:
    yield from (([(0.1, 1.0)],), ([(0.1, 1.0), (0.2, 2.0)],))
    yield ([(0.1, 5.0), (0.2, 2.0), (0.05, 9.0), (0.2, 3.0), (0.1, 5.5)],)
    for _ in range(4):
        drawn = [(random.randint(1, 9) / 10, float(random.randint(0, 9))) for _ in range(8)]
        yield ([*dict.fromkeys(drawn)],)


@formula("each of these is beaten by no other in both.", _points)
def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(a for a in points if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points))


# ---- notebook 10 ----

formula(
    "a column is empty only if all of its values are zero together.",
    lambda: [(0.02, 32), (0.5, 1), (0.3, 2), (0.0, 32), (random.random() / 10, 8)],
)(occupied)


@exercise(
    "the layer saw the real rows alone, and they are back where they were.",
    *(padding.unpadded, padding.remove_padding, padding.add_padding),
)
def without_padding(answer) -> None:
    for shape, share in (((3, 5, 8), 0.5), ((1, 7, 4), 1.0), ((4, 6, 8), 0.0)):
        layer, seen = nn.Linear(shape[-1], 6), []
        layer.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].numel() // given[0].shape[-1]))
        x, real = torch.randn(shape), torch.rand(shape[:-1]) < share
        wanted = layer(x).detach().double() * real[..., None]
        seen.clear()
        x = torch.where(real[..., None], x, torch.nan)  # padding holds anything
        asked = f"without_padding for x {list(shape)}, {int(real.sum())} of its rows real,"
        with torch.no_grad():
            close(answer(layer, x, real), wanted, asked)
        if sum(seen) != int(real.sum()):
            raise NotYet(f"{asked} is right, but the layer was given {sum(seen)} rows; give it the real ones alone.")


def _shares() -> Iterator[tuple[Tensor, float]]:
    for d_ff, times in ((8, 4.0), (30, 8.0), (30, 0.5), (5, 64.0)):
        shares = (torch.rand(d_ff) ** 3 * 16).round() / 16  # many are equal
        shares[3] = min(1.0, 1 / times)  # one is at the break-even, exactly
        yield shares, times


formula("those for which one dense neuron costs less than its firing, busiest first.", _shares)(hot_neurons)


@exercise("sorted by expert, and as many lines of Python for 64 experts as for 4.")
def route(answer) -> None:
    steps = []
    for tokens, experts, top_k in ((6, 4, 2), (40, 4, 1), (400, 64, 3)):
        scores = torch.randn(tokens, experts)
        if tokens == 6:
            scores[:, -1] = -9.0  # nobody's choice
        asked = f"route for scores {list(scores.shape)} and top_k {top_k}"
        got, lines = _lines_of(partial(answer, scores.clone(), top_k))
        steps.append(lines)
        chosen = scores.topk(top_k).indices
        rows = [(chosen == expert).any(1).nonzero()[:, 0].tolist() for expert in range(experts)]
        match_parts(got, (sum(rows, []), [*map(len, rows)]), ("rows", "counts"), asked)
    if steps[-1] > steps[0]:
        raise NotYet(f"it is right, but runs {steps[0]} lines for 4 experts and {steps[-1]} for 64: do without a loop.")


def _lines_of(call: Callable) -> tuple[object, int]:
    """What a call gives, and how many lines of Python it runs, those of torch left out."""
    lines = 0

    def watch(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return None if "torch" in frame.f_globals.get("__name__", "").partition(".")[0] else watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return call(), lines
    finally:
        sys.settrace(before)


def _guessed() -> Iterator[tuple[Tensor, Tensor]]:
    for fire, choose in ((0.3, 0.5), (0.1, 0.9), (0.8, 0.2)):
        yield torch.rand(9, 20) < fire, torch.rand(9, 20) < choose
    lonely = torch.zeros(3, 8, dtype=torch.bool)
    lonely[0, :4] = lonely[1, 0] = True
    yield lonely, lonely.roll(1, 1) | lonely & (torch.arange(8) < 2)


@formula("recall of what fires, precision of what was chosen, over all tokens together.", _guessed)
def recall_and_precision(fires: Tensor, chosen: Tensor) -> tuple[float, float]:
    both = float((fires & chosen).sum())
    return both / float(fires.sum()), both / float(chosen.sum())


formula(
    "the gate is read whole unless somebody guesses what it would say.",
    [(2048, 5632, 29, 64, 300, 2), (512, 2048, 0, 16, 1, 4), (64, 128, 128, 8, 128, 1)],
)(token_bytes)


# ---- the workshop ----


@formula(
    "with n tokens, the first adds (first - later) / n to the mean.",
    lambda: [
        *[(101, 10, 0.1), (101, 10, 1.0), (37, 37, 0.1), (5, 20, 0.1), (64, 8, 0.5), (65, 8, 0.5)],
        *[(random.randint(1, 2000), random.randint(1, 90), random.choice([0.25, 0.125, 0.5])) for _ in range(5)],
    ],
)
def hiding_window(first: int, later: int, within: float) -> int:
    return max(1, math.ceil(Fraction(first - later) / (Fraction(str(within)) * later)))


def _layers() -> Iterator[tuple]:
    yield from (([(1024, 20.5, True)],), ([(1024, 20.5, False)],), ([(8, 8.0, True)],))
    yield ([(100, 1.0, True), (900, 90.0, False)],)
    for _ in range(3):
        widths = [random.randint(1, 40) * 64 for _ in range(5)]
        yield ([(d_ff, round(random.random() * d_ff, 1), random.random() < 0.7) for d_ff in widths],)


@formula("a third is always read, wide layers count for more, and who stays dense saves nothing.", _layers)
def share_saved(layers: list[tuple[int, float, bool]]) -> float:
    saved = sum(2 * (d_ff - nnz) for d_ff, nnz, swapped in layers if swapped)
    return saved / sum(3 * d_ff for d_ff, *_ in layers)


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, acts=F.relu, inner=lambda h: h) -> Tensor:
    hidden = inner(acts(x @ gate.T) * (x @ up.T))
    half = hidden.shape[1] // 2  # two sums, so that a layer which computes the formula is off by rounding
    return hidden[:, :half] @ down[:, :half].T + hidden[:, half:] @ down[:, half:].T


# What is nearly a ReLU layer, and where it differs: of what a layer of each kind computes.
_OTHERS = {
    "gelu": {"acts": F.gelu},  # a ReLU again for large x
    "silu": {"acts": F.silu},
    "clamped": {"acts": lambda gate: gate.clamp(0, 200)},  # a ReLU as long as x is small
    "squared": {"acts": lambda gate: gate.relu().square()},
    "scaled": {"inner": lambda h: 0.9 * h},
    "normed": {"inner": lambda h: F.rms_norm(h, h.shape[-1:])},
}


@exercise("each was asked what it computes, at small and at large x, row by row.")
def must_stay(answer) -> None:
    for trial in range(3):
        kinds = ["relu"] * 4 + random.sample([*_OTHERS], 3) if trial else [*_OTHERS, "relu", "relu"]
        random.shuffle(kinds)
        layers: dict[str, tuple] = {}
        named = {f"layers.{number}.mlp": kind for number, kind in enumerate(kinds)}
        for name, kind in named.items():
            d_model, d_ff = random.choice([16, 24]), random.choice([48, 96])
            weights = torch.randn(d_ff, d_model), torch.randn(d_ff, d_model), torch.randn(d_model, d_ff)
            layer = lambda x, weights=weights, kind=kind: _gated(x, *weights, **_OTHERS.get(kind, {}))  # noqa: E731
            layers[name] = (layer, *weights)
        want = {name for name, kind in named.items() if kind != "relu"}
        got = written(answer(dict(layers)))
        if not isinstance(got, (list, tuple, set)):
            raise NotYet(f"must_stay should give names; yours gave a {type(got).__name__}.")
        if missed := sorted(want - {*got}):
            raise NotYet(f"{missed[0]} is missing among the names: it computes something else ({named[missed[0]]}).")
        if wrong := sorted(map(str, {*got} - want)):
            raise NotYet(f"{wrong[0]} computes the formula, up to rounding, and may be swapped.")


def _turns() -> Iterator[tuple]:
    yield from (([(1.0, 0.9)] * 3 + [(1.0, 1.2)],), ([(1.0, 0.9)] * 3 + [(1.0, 1.2)] * 2,), ([(1.0, 1.0)] * 4,))
    yield ([(9.0, 3.0), (1.0, 1.1), (1.0, 1.1)],)  # the sums say yes
    yield ([(1.0, 0.9)] * 7 + [(1.0, 60.0)],)  # the sums say no
    yield ([(1.0, 0.99), (5.0, 4.99), (9.0, 8.99), (2.0, 8.5)],)  # faster, though each time alone spreads further
    for _ in range(5):
        dense = [random.uniform(1, 5) for _ in range(random.randint(1, 12))]
        yield ([(ms, ms * random.uniform(0.5, 1.15)) for ms in dense],)


@formula("what disturbs one time of a pair disturbs the other, and a single bad turn decides nothing.", _turns)
def is_faster(turns: list[tuple[float, float]]) -> bool:
    return 4 * sum(ours < dense for dense, ours in turns) >= 3 * len(turns)


def _intervals() -> Iterator[tuple]:
    yield from (((6.0, 8.1), (-0.8, 0.7)), ((-0.2, 0.3), (0.5, 0.9)), ((0.1, 0.9), (0.5, 2.0)))
    yield from (((0.5, 2.0), (0.1, 0.9)), ((0.0, 3.0), (1.0, 1.2)), ((1.0, 1.2), (0.0, 3.0)))  # one within the other
    for _ in range(4):
        lows = random.uniform(-1, 3), random.uniform(-1, 3)
        yield tuple((low, low + random.random()) for low in lows)


@formula("where intervals overlap, either may cost less.", _intervals)
def cut_or_train(cut: tuple[float, float], trained: tuple[float, float]) -> str:
    return "train" if trained[1] < cut[0] else "cut" if cut[1] < trained[0] else "measure more"


def _cuts() -> Iterator[tuple]:
    points = [(0.5, -0.1, 0.0, 0.1), (0.9, 0.4, 0.7, 0.9), (0.95, 0.3, 0.8, 1.3), (0.98, 5.0, 6.0, 7.0)]
    yield from ((points, most) for most in (1.0, 0.05, 8.0, 1.3))
    yield from ((points[::-1], 1.0), (points[3:], 1.0))
    for _ in range(4):
        made, change = [], 0.0
        for sparsity in sorted(random.sample(range(1, 96), 6)):
            change += random.random()
            made.append((sparsity / 100, change - random.random(), change, round(change + random.random(), 3)))
        random.shuffle(made)
        yield made, random.uniform(0.5, 4.0)


@formula("what the interval allows for may be true, so its upper end has to be within the limit.", _cuts)
def deepest_cut(points: list[tuple[float, float, float, float]], most: float) -> float:
    return max((sparsity for sparsity, *_, high in points if high <= most), default=0.0)
