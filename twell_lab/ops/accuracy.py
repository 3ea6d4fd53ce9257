"""The judge of all results of feed-forward layers, in tests, benchmarks and the attack (tests/nightly/attack).

Row by row, the norm of the error against float64 may be at most twice that of torch's dense layer in the same dtype,
plus one unit in the last place of the row's largest value. `worst_row` measures that where the float64 result is given.
`Exact` computes it from the layer, and knows which neurons may count as firing or as silent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..formats import twell
from . import reference

DOUBT = 2.0  # a gate below this many eps times the sum of |x w| has a sign that rounding decides
# The limits of one search for another way of counting doubtful neurons: how many rows it is made for, and how many
# neurons it counts the other way in all. A result that would need more is refused: that is no matter of luck.
_MOST_ROWS, _MOST_FLIPS = 200, 10_000


@dataclass(frozen=True)
class Verdict:
    """What `Exact.judge` found.

    ratio: the error of the worst row over what is allowed; at most 1.0 keeps the promise. row: the number of that row,
    -1 without rows; where the promise is broken, one that breaks it. How many rows keep the promise only because a
    neuron may count either way (excused), because the dense layer overflows inside as well (overflowed), or if both
    layers start from the gate as torch rounds it (rounded)."""

    ratio: float
    row: int
    excused: int = 0
    overflowed: int = 0
    rounded: int = 0


def worst_row(y: Tensor, dense: Tensor, exact: Tensor) -> tuple[float, int]:
    """Return (error over what is allowed, row) of the worst row; at most 1.0 keeps the promise.

    y, dense: [rows, d_model] in the working dtype; exact: the float64 result. Where exact, converted to y's dtype, is
    not finite, y must be the same (NaN for NaN, the same infinity), otherwise the ratio is inf."""
    if not y.shape == dense.shape == exact.shape:
        shapes = f"{list(y.shape)}, the dense one {list(dense.shape)}, the exact one {list(exact.shape)}"
        raise ValueError(f"the result has shape {shapes}; one shape for all is accepted")
    if y.numel() == 0:
        return 0.0, -1
    ratio = _ratios(y, exact, dense, exact)
    row = int(ratio.argmax())
    return float(ratio[row]), row


class Exact:
    """A layer computed in float64, on its tensors' device, and the judge of other results for the same layer.

    A neuron is in doubt, and counts as either firing or silent, if its gate in float64 is below 2 eps (of the working
    dtype) times the sum of |x w| over its inputs: no order of rounded additions can be held to a sign closer than that.
    So a row is right if it keeps the bound for *some* way of counting those neurons.

    For a row that fails with float64's signs others are searched: starting from these, and then from those of torch's
    gate in the working dtype, the doubtful neuron that brings the exact result closest to y is counted the other way,
    then the next, until the row keeps the bound or no neuron helps. So no row is accepted that no allowed way explains;
    one that only an unlikely combination would explain may be refused. The first such row ends the search.

    Where torch's own gate is handed to `judge`, a row may also start from its values, as paths behind torch's GEMM do:
    the dense layer's later roundings can undo the gate's by luck, and then the gate's error alone would look like a
    fault. What is allowed is always twice the dense layer's error by float64's signs: if that layer took other signs,
    their error is its own.

    Where the dense layer overflows inside, so that it gives an infinity or NaN for a row that is finite, the result may
    be infinite or NaN too; and what rounds to just beyond the end of the dtype may round the other way. A finite value
    is held to the bound, beside a dense layer of the same precision whose exponents have no end."""

    def __init__(self, x, gate, up, down, gate_bias=None, up_bias=None, down_bias=None, first=None) -> None:
        """first: the gate before its ReLU, [tokens, d_ff], where that was given to the layer under test, so that its
        rounding is not the layer's."""
        # What decides who fires, as it was given.
        self._first = (x, up, up_bias) if gate is None else (x, gate, gate_bias)
        wide = lambda t: None if t is None else t.detach().double()
        self.x, self._down, self._down_bias = wide(x), wide(down), wide(down_bias)
        self.first = linear(self.x, *map(wide, self._first[1:])) if first is None else wide(first)
        self._gated, self._times = gate is not None, 1.0 if gate is None else linear(self.x, wide(up), wide(up_bias))
        self._value = self.first * self._times
        self.keep = twell.fires(self.first)
        self.y = self._result(slice(None), self.keep)

    def judge(self, y: Tensor, dense: Tensor, first: Tensor | None = None) -> Verdict:
        """Judge y [tokens, d_model] beside torch's dense layer in the same dtype. first: the dense layer's gate before
        its ReLU, [tokens, d_ff], or None."""
        if y.numel() == 0:
            return Verdict(0.0, -1)
        ratio, counts = _ratios(y, self.y, dense, self.y), {"excused": 0}
        if bool((ratio > 1.0).any()):
            finite = self.x.isfinite().all(1, keepdim=True)
            also = ~y.isfinite() & ~dense.isfinite() & finite
            lost = ~dense.isfinite().all(1, keepdim=True) & finite
            beside = torch.where(lost, self._endless(y.dtype), dense.double()) if bool(lost.any()) else dense
            others = {"overflowed": self.y}
            if first is not None:
                others["rounded"] = self._result(slice(None), twell.fires(first), first.double() * self._times)
            for name, exact in others.items():
                held = _ratios(y, exact, beside, exact, also)
                counts[name] = int(((ratio > 1.0) & (held <= 1.0)).sum())
                ratio = torch.minimum(ratio, held)
            failed = (ratio > 1.0).nonzero()[:, 0]
            if 0 < len(failed) <= _MOST_ROWS:
                failed, flips = failed[ratio[failed].argsort(descending=True)], iter(range(_MOST_FLIPS))
                for row, doubtful in zip(failed.tolist(), self.doubtful(failed, torch.finfo(y.dtype).eps)):
                    ratio[row] = torch.minimum(ratio[row], self._best_way(row, doubtful, y, dense, flips))
                    if not ratio[row] <= 1.0:
                        return Verdict(float(ratio[row]), row, **counts)
                    counts["excused"] += 1
        row = int(ratio.argmax())
        return Verdict(float(ratio[row]), row, **counts)

    def doubtful(self, rows, eps: float) -> Tensor:
        """Return which neurons are in doubt in some rows, boolean [rows, d_ff]. eps: of the dtype of the work."""
        return self.first[rows].abs() < DOUBT * eps * linear(self.x[rows].abs(), self._first[1].detach().double().abs())

    def _result(self, rows, keep: Tensor, value: Tensor | None = None) -> Tensor:
        """y of some rows if the neurons of `keep` fire; value: of h, if not the exact ones."""
        y = linear(torch.where(keep, self._value[rows] if value is None else value, 0.0), self._down, self._down_bias)
        return torch.where(reference.spoilt(self.x[rows], keep)[:, None], torch.nan, y) if self._gated else y

    def _endless(self, dtype: torch.dtype) -> Tensor:
        """The dense layer in float64, every value rounded as in `dtype`; none overflows."""

        def rounded(t: Tensor) -> Tensor:
            digits, exponent = torch.frexp(t)
            steps = 2.0 / torch.finfo(dtype).eps
            return torch.ldexp((digits * steps).round() / steps, exponent)

        hidden = reference.relu(rounded(self.first))
        hidden = rounded(torch.where(self.keep, hidden * rounded(self._times), 0.0)) if self._gated else hidden
        return rounded(linear(hidden, self._down, self._down_bias))

    def _best_way(self, row: int, doubtful: Tensor, y: Tensor, dense: Tensor, flips: Iterator[int]) -> Tensor:
        """The ratio of one row for the first way of counting its doubtful neurons that keeps the bound, or else for the
        best way that is found. Counting a neuron the other way takes one of `flips`."""
        one, best = slice(row, row + 1), torch.full((), torch.inf, dtype=torch.float64, device=y.device)
        target, which = y[row].double(), doubtful.nonzero()[:, 0]
        if not which.numel() or not (target.isfinite().all() and self.y[row].isfinite().all()):
            return best
        value, down = self._value[row, which], self._down.t()[which]  # neuron i adds value[i] * down[i] if it fires
        square = value.square() * down.square().sum(1)
        ratio = lambda exact: _ratios(y[one], exact, dense[one], self.y[one])[0]
        x, weight, bias = self._first
        for start in (self.keep[row], twell.fires(linear(x[one], weight, bias))[0]):
            way = torch.where(doubtful, start, self.keep[row])
            rest = target - self._result(one, way[None])[0]
            for _ in itertools.islice(flips, len(which)):
                change = torch.where(way[which], -value, value)
                gain = 2 * change * (down @ rest) - square  # by how much each change lowers the square of the distance
                i = int(gain.argmax())
                if not gain[i] > 0 or ratio((target - rest)[None]) <= 1.0:
                    break
                rest, way[which[i]] = rest - change[i] * down[i], ~way[which[i]]
            best = torch.minimum(best, ratio(self._result(one, way[None])))
            if best <= 1.0:
                break
        return best


def _ratios(y: Tensor, exact: Tensor, dense: Tensor, dense_exact: Tensor, excepted: Tensor | None = None) -> Tensor:
    """Error over what is allowed, float64 [rows]. exact: what y is compared with; dense_exact: what the dense layer is.

    excepted: boolean, values that are not looked at. Where it is given, a number at the end of the dtype may be rounded
    to infinity: an infinity near the end counts as the least number that rounds to it, or as the exact one beyond."""
    expected, most, eps = exact.to(y.dtype), torch.finfo(y.dtype).max, torch.finfo(y.dtype).eps
    same, finite = (y == expected) | (y.isnan() & exact.isnan()), expected.isfinite()
    if excepted is not None:
        same, finite = same | excepted, exact.isfinite() & ~excepted

    def number(value: Tensor, right: Tensor) -> Tensor:
        if excepted is None:
            return value.double()
        end = (most + most * eps / 4) * right.sign()
        over = value.isinf() & (value.sign() == right.sign()) & (right.abs() > most - 8 * most * eps)
        return torch.where(over, torch.where(right.abs() < end.abs(), end, right), value.double())

    norm = lambda value, right: torch.where(finite & value.isfinite(), value - right, 0.0).norm(dim=1)
    given = number(y, exact)
    broken = (~finite & ~same) | (finite & ~given.isfinite())
    largest = torch.where(finite & expected.isfinite(), expected, 0).abs().amax(1)
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)).double() - largest.double()
    ulp = torch.where(ulp.isfinite(), ulp, eps * largest.double())
    ratio = norm(given, exact) / (2 * norm(number(dense, dense_exact), dense_exact) + ulp)
    return torch.where(broken.any(1), torch.inf, ratio)
