"""How exact a feed-forward result has to be, as functions that tests, benchmarks and the attack
(twell_lab.bench.attack) share.

Row by row, the norm of the error against float64 may be at most twice that of torch's dense layer in the same
dtype, plus one unit in the last place of the row's largest value. `worst_row` measures that where float64's result is
given; `judge` and `Exact` work it out from the layer, and know which neurons may count as firing or as silent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..formats import twell
from . import reference

_MOST_TRIED = (
    200  # rows of one result whose doubtful neurons are counted the other way: more than those are no matter of luck
)
DOUBT = 2.0  # a gate below this many eps times the sum of |x w| has a sign that rounding decides


@dataclass(frozen=True)
class Verdict:
    """What `Exact.judge` found. ratio: error over what is allowed of the worst row, at most 1.0 keeps the promise; row:
    its number, -1 without rows. Rows that keep it only because a neuron may count either way (excused), because the
    dense layer overflows inside as well (overflowed), or if the gate that torch rounded is where both layers start
    (rounded)."""

    ratio: float
    row: int
    excused: int = 0
    overflowed: int = 0
    rounded: int = 0


def worst_row(y: Tensor, dense: Tensor, exact: Tensor) -> tuple[float, int]:
    """(error over what is allowed, row) of the worst row; at most 1.0 keeps the promise.

    y, dense: [rows, d_model] in the working dtype; exact: the float64 result. Where exact is not finite, y must
    be exactly what it is converted to y's dtype (NaN for NaN, the same infinity), otherwise the ratio is inf.
    A row that overflows y's dtype only is judged the same way.
    """
    if not y.shape == dense.shape == exact.shape:
        shapes = f"{list(y.shape)}, the dense one {list(dense.shape)}, the exact one {list(exact.shape)}"
        raise ValueError(f"the result has shape {shapes}; one shape for all is accepted")
    if y.numel() == 0:
        return 0.0, -1
    ratio = _ratios(y, exact, dense, exact)
    row = int(ratio.argmax())
    return float(ratio[row]), row


def judge(
    y: Tensor,
    dense: Tensor,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Verdict:
    """Whether y keeps the promise for (relu(x gate^T + gate_bias) * (x up^T + up_bias)) down^T + down_bias: see
    `Exact`.

    y, dense: [tokens, d_model], the layer under test and torch's in the same dtype. gate None: the up projection goes
    through the ReLU and takes the place of the product. All else is as the layers got it.
    """
    return Exact(x, gate, up, down, gate_bias, up_bias, down_bias).judge(y, dense)


class Exact:
    """A layer worked out in float64, on its tensors' device, and the judge of what others make of it.

    A neuron counts as either firing or silent if its gate in float64 is below 2 eps (of the working dtype) times the
    sum of |x w| over its inputs: no order of rounded additions is held to a sign closer than that. So a row is right if
    it keeps the bound for *some* way of counting those neurons. The plain one, by float64's signs, is tried first. Only
    a row that fails it goes on: starting from float64's signs, and from those of torch's gate in the working dtype, one
    doubtful neuron after the other is counted the other way as long as that brings the exact result closer to y. Each
    step is one of the allowed ways, so no row is accepted that none of them explains; one that only an unlikely
    combination would explain may be refused. Where torch's own gate is handed to `judge`, a row may start from its
    values instead, as paths behind torch's GEMM do: of a few float32 terms the dense layer's later roundings can undo
    that one by luck, and the same error alone is no fault. What is allowed stays twice the dense layer's error by
    float64's signs: if it took other signs itself, that error is its own, as it always was.

    Where the dense layer overflows inside, so that it gives an infinity or NaN for a row that is finite, a value may be
    infinite or NaN too; and what rounds over the end of the dtype may round the other way. A finite value is held to
    the bound, beside a dense layer of the same precision whose exponents have no end."""

    def __init__(
        self, x, gate, up, down, gate_bias=None, up_bias=None, down_bias=None, first: Tensor | None = None
    ) -> None:
        """first: the gate before its ReLU, [tokens, d_ff], where that was given to the layer under test, so that its
        rounding is not the layer's."""
        self._first = (
            (x, up, up_bias) if gate is None else (x, gate, gate_bias)
        )  # what decides who fires, as it was given
        wide = lambda t: None if t is None else t.detach().double()  # noqa: E731
        self.x, self._down, self._down_bias = wide(x), wide(down), wide(down_bias)
        self.first = linear(self.x, *map(wide, self._first[1:])) if first is None else wide(first)
        self._gated, self._times = gate is not None, None if gate is None else linear(self.x, wide(up), wide(up_bias))
        self._value = self.first if gate is None else self.first * self._times
        self.keep = twell.fires(self.first)
        self.y = self._result(slice(None), self.keep)

    def judge(self, y: Tensor, dense: Tensor, first: Tensor | None = None) -> Verdict:
        """The verdict on y [tokens, d_model], beside torch's dense layer in the same dtype. first: the dense layer's
        gate before its ReLU, [tokens, d_ff], or None."""
        if y.numel() == 0:
            return Verdict(0.0, -1)
        ratio, excused, overflowed, rounded = _ratios(y, self.y, dense, self.y), 0, 0, 0
        if bool((ratio > 1.0).any()):
            also = ~y.isfinite() & ~dense.isfinite() & self.x.isfinite().all(1, keepdim=True)
            lost = ~dense.isfinite().all(1, keepdim=True) & self.x.isfinite().all(1, keepdim=True)
            beside = torch.where(lost, self._endless(y.dtype), dense.double()) if bool(lost.any()) else dense
            held = _ratios(y, self.y, beside, self.y, also)
            overflowed = int(((ratio > 1.0) & (held <= 1.0)).sum())
            ratio = torch.minimum(ratio, held)
            if first is not None:
                keep = twell.fires(first)
                value = first.double() * self._times if self._gated else first.double()
                started = self._result(slice(None), keep, value)
                held = _ratios(y, started, beside, started, also)
                rounded = int(((ratio > 1.0) & (held <= 1.0)).sum())
                ratio = torch.minimum(ratio, held)
            for row in (ratio > 1.0).nonzero()[:_MOST_TRIED, 0].tolist():
                found = self._best_way(row, y, dense)
                excused += bool(found <= 1.0)
                ratio[row] = torch.minimum(ratio[row], found)
        row = int(ratio.argmax())
        return Verdict(float(ratio[row]), row, excused, overflowed, rounded)

    def doubtful(self, rows, eps: float) -> Tensor:
        """Which neurons count as either in some rows, boolean [rows, d_ff]."""
        return self.first[rows].abs() < DOUBT * eps * linear(self.x[rows].abs(), self._first[1].detach().double().abs())

    def _result(self, rows, keep: Tensor, value: Tensor | None = None) -> Tensor:
        """y of some rows, where keep [rows, d_ff] fires; value: of their neurons, if not the exact one."""
        y = linear(torch.where(keep, self._value[rows] if value is None else value, 0.0), self._down, self._down_bias)
        return torch.where(reference.spoilt(self.x[rows], keep)[:, None], torch.nan, y) if self._gated else y

    def _endless(self, dtype: torch.dtype) -> Tensor:
        """The dense layer in float64 with every value rounded as often, and to as many digits, as in `dtype`; none
        overflows."""

        def rounded(t: Tensor) -> Tensor:
            digits, exponent = torch.frexp(t)
            steps = 2.0 / torch.finfo(dtype).eps
            return torch.ldexp((digits * steps).round() / steps, exponent)

        hidden = reference.relu(rounded(self.first))
        hidden = rounded(torch.where(self.keep, hidden * rounded(self._times), 0.0)) if self._gated else hidden
        return rounded(linear(hidden, self._down, self._down_bias))

    def _best_way(self, row: int, y: Tensor, dense: Tensor) -> Tensor:
        """The ratio of a row for the best way of counting its doubtful neurons that is found."""
        one, best = slice(row, row + 1), torch.full((), torch.inf, dtype=torch.float64, device=y.device)
        doubtful = self.doubtful(one, torch.finfo(y.dtype).eps)[0].nonzero()[:, 0]
        target = y[row].double()
        if not doubtful.numel() or not (target.isfinite().all() and self.y[row].isfinite().all()):
            return best
        added = (
            self._value[row, doubtful, None] * self._down.t()[doubtful]
        )  # [doubtful, d_model]: what each adds if it fires
        x, weight, bias = self._first
        for start in (self.keep[row], twell.fires(linear(x[one], weight, bias))[0]):
            way = self.keep[row].clone()
            way[doubtful] = start[doubtful]
            rest = target - self._result(one, way[None])[0]
            for _ in range(len(doubtful)):
                step = torch.where(way[doubtful], -1.0, 1.0)[:, None] * added
                gain = (rest - step).norm(dim=1)
                j = int(gain.argmin())
                if gain[j] >= rest.norm():
                    break
                rest, way[doubtful[j]] = rest - step[j], ~way[doubtful[j]]
            best = torch.minimum(best, _ratios(y[one], self._result(one, way[None]), dense[one], self.y[one])[0])
        return best


def _ratios(y: Tensor, exact: Tensor, dense: Tensor, dense_exact: Tensor, excepted: Tensor | None = None) -> Tensor:
    """Error over what is allowed, float64 [rows]. exact: what y is held against; dense_exact: what the dense layer is.

    excepted: values that are not looked at. Where it is given, a number at the end of the dtype may be rounded over it:
    an infinity where that is near counts as the least number that rounds to it, or as the exact one beyond."""
    expected, most = exact.to(y.dtype), torch.finfo(y.dtype).max
    finite = expected.isfinite() if excepted is None else exact.isfinite() & ~excepted
    same = (
        (y == expected) | (y.isnan() & expected.isnan())
        if excepted is None
        else (y == expected) | (y.isnan() & exact.isnan()) | excepted
    )

    def number(value: Tensor, right: Tensor) -> Tensor:
        if excepted is None:
            return value.double()
        end = (most + most * torch.finfo(y.dtype).eps / 4) * right.sign()
        over = (
            value.isinf() & (value.sign() == right.sign()) & (right.abs() > most - 8 * most * torch.finfo(y.dtype).eps)
        )
        return torch.where(over, torch.where(right.abs() < end.abs(), end, right), value.double())

    def norm(value: Tensor, right: Tensor) -> Tensor:
        return torch.where(finite & value.isfinite(), value - right, 0.0).norm(dim=1)

    given, beside = number(y, exact), number(dense, dense_exact)
    broken = (~finite & ~same) | (finite & ~given.isfinite())
    largest = torch.where(finite & expected.isfinite(), expected, 0).abs().amax(1)
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)).double() - largest.double()
    ulp = torch.where(ulp.isfinite(), ulp, torch.finfo(y.dtype).eps * largest.double())
    ratio = norm(given, exact) / (2 * norm(beside, dense_exact) + ulp)
    return torch.where(broken.any(1), torch.inf, ratio)
