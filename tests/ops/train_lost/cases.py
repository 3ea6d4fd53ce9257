"""Layers with lost rows, and all that must come out in float64: for the CPU tests here and those on a GPU."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import linear

from twell_lab import formats
from twell_lab.ops import accuracy, train_lost

POISON = 12345.0
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


@dataclasses.dataclass
class Case:
    """x, weights and biases of a layer, and which rows are lost. gate None: a plain layer."""

    x: Tensor
    dy: Tensor
    dl1: Tensor | None
    gate: Tensor | None
    up: Tensor
    down_t: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    rows: Tensor
    start: tuple[Tensor, ...]  # the gradients before: like gate, up, down_t, and like the biases

    @classmethod
    def draw(
        cls,
        tokens: int,
        d_model: int,
        d_ff: int,
        dtype: torch.dtype,
        rows,
        *,
        gated: bool = True,
        biases: bool = False,
        slope: bool = True,
        density: float = 0.3,
        seed: int = 0,
    ) -> Case:
        """rows: which are lost. density: about which share of the neurons fires in a row."""
        generator = torch.Generator().manual_seed(tokens * 7 + d_model * 3 + d_ff + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        x = normal(tokens, d_model)
        x[:, 0] = d_model**0.5  # a constant, whose weight sets how often neurons fire
        pattern, up, down_t = (
            normal(d_ff, d_model) / d_model**0.5,
            normal(d_ff, d_model) / d_model**0.5,
            normal(d_ff, d_model),
        )
        (pattern if gated else up)[:, 0] = (
            -float(torch.special.ndtri(torch.tensor(1 - density, dtype=torch.float64))) / d_model**0.5
        )
        down_t = down_t / d_ff**0.5
        both = [normal(n).mul(0.1).to(dtype) if biases else None for n in (d_ff, d_ff, d_model)]
        both[0] = both[0] if gated else None
        start = [
            t.to(dtype)
            for t in (normal(d_ff, d_model), normal(d_ff, d_model), normal(d_ff, d_model), normal(d_ff), normal(d_ff))
        ]
        return cls(
            x.to(dtype),
            normal(tokens, d_model).to(dtype),
            normal(tokens) if slope else None,
            pattern.to(dtype) if gated else None,
            up.to(dtype),
            down_t.to(dtype),
            *both,
            torch.tensor(sorted(rows), dtype=torch.long),
            tuple(start),
        )

    def to(self, device: str) -> Case:
        move = lambda t: tuple(map(move, t)) if isinstance(t, tuple) else None if t is None else t.to(device)
        return Case(*(move(getattr(self, each.name)) for each in dataclasses.fields(self)))

    @property
    def lost(self) -> Tensor:
        """The list as the kernels get it; the numbers after its end lie far outside of x."""
        out = torch.full((1 + len(self.x),), 2**30, dtype=torch.int32, device=self.x.device)
        out[0] = len(self.rows)
        out[1 : 1 + len(self.rows)] = self.rows
        return out

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.full_like(self.x, POISON)
        l1 = torch.full((len(self.x),), POISON, device=self.x.device)
        kept = torch.full((len(self.x),), int(POISON), dtype=torch.int32, device=self.x.device)
        train_lost.lost_forward(
            self.lost,
            self.x,
            self.gate,
            self.up,
            self.down_t,
            self.gate_bias,
            self.up_bias,
            self.down_bias,
            y,
            l1,
            kept,
        )
        return y, l1, kept

    def backward(self) -> tuple[Tensor, ...]:
        """dx, and the gradients after: dgate, dup, ddown_t, dgate_bias, dup_bias (None where the layer has none)."""
        dx = torch.full_like(self.x, POISON)
        there = (self.gate, self.up, self.down_t, self.gate_bias, self.up_bias)
        gradients = [None if t is None else s.clone() for t, s in zip(there, self.start)]
        train_lost.lost_backward(self.lost, self.x, self.dy, self.dl1, *there, dx, *gradients)
        return dx, *gradients

    def expected(self):
        """In float64, of the lost rows whose x is finite: (those rows, y, l1, kept, dx, [gradients of the weights and
        biases], which neurons fire, [rows, d_ff]: where the sign of a gate value is not sure in float32; [d_ff]: the
        neurons none of whose gradients jumps for such a sign, or for that of an up value)."""
        rows = self.rows[self.x[self.rows].isfinite().all(1)]
        leaves = [
            None if t is None else t.double().requires_grad_()
            for t in (self.x[rows], self.gate, self.up, self.down_t, self.gate_bias, self.up_bias)
        ]
        x, gate, up, down_t, gate_bias, up_bias = leaves
        g = linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias)
        with torch.no_grad():
            first = up if gate is None else gate
            unsure = g.abs() <= _rounding(x, first)
            sure = ~unsure.any(0)
            if gate is not None:
                sure &= ~(linear(x, up, up_bias).abs() <= _rounding(x, up)).any(0)
        g = g + (g.detach().to(self.x.dtype).double() - g.detach())  # rounded, its gradient passed on
        keep = formats.fires(g.detach())
        active = torch.where(keep, g, 0)
        h = active if gate is None else active * torch.where(keep, linear(x, up, up_bias), 0)
        y, l1 = linear(h, down_t.t(), wide(self.down_bias)), h.abs().sum(1)
        loss = (y * self.dy[rows].double()).sum()
        if self.dl1 is not None:
            loss = loss + (l1 * self.dl1[rows].double()).sum()
        if len(rows):
            loss.backward()
        gradients = [None if t is None else torch.zeros_like(t) if t.grad is None else t.grad for t in leaves[1:]]
        return rows, y.detach(), l1.detach(), keep.sum(1), x.grad, gradients, keep.any(0), unsure, sure

    def dense_y(self, rows: Tensor) -> Tensor:
        x = self.x[rows]
        if self.gate is None:
            h = torch.relu(linear(x, self.up, self.up_bias))
        else:
            h = torch.relu(linear(x, self.gate, self.gate_bias)) * linear(x, self.up, self.up_bias)
        return linear(h, self.down_t.t().contiguous(), self.down_bias)

    def plain_y(self, rows: Tensor) -> Tensor:
        """y of these rows in float64, without a gate that is rounded."""
        x, gate, up, down_t, gate_bias, up_bias, down_bias = map(
            wide, (self.x[rows], self.gate, self.up, self.down_t, self.gate_bias, self.up_bias, self.down_bias)
        )
        g = torch.relu(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
        return linear(g if gate is None else g * linear(x, up, up_bias), down_t.t(), down_bias)

    def rounded_entries(self) -> Tensor:
        """How far a bias's gradient may be off where each row's part of it is rounded to 16 bits, and u before, as in
        torch's dense layer: [d_ff], the most of the biases of gate and up: four standard deviations of two independent
        roundings, each of which is off by 0.43 eps on average (root of the mean square)."""
        rows = self.rows[self.x[self.rows].isfinite().all(1)]
        x, gate, up, down_t, gate_bias, up_bias = map(
            wide, (self.x[rows], self.gate, self.up, self.down_t, self.gate_bias, self.up_bias)
        )
        g = torch.relu(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
        u = torch.ones_like(g) if gate is None else linear(x, up, up_bias)
        dh = self.dy[rows].double() @ down_t.t()
        if self.dl1 is not None:
            dh = dh + self.dl1[rows].double()[:, None] * (g * u).sign()
        dh = torch.where(g > 0, dh, 0)
        of_up = dh if gate is None else dh * g
        return 2.4 * EPS[self.x.dtype] * torch.maximum((dh * u).norm(dim=0), of_up.norm(dim=0))

    def check(self) -> None:
        """Run both directions: what the kernels must write is right, and everything else is as it was."""
        rows, y, l1, kept, dx, gradients, used, unsure, sure = self.expected()
        got = self.forward()
        spoilt = self.rows[~self.x[self.rows].isfinite().all(1)]
        others = torch.ones(len(self.x), dtype=torch.bool, device=self.x.device)
        others[self.rows] = False
        assert all((t[others] == POISON).all() for t in got)
        assert got[0][spoilt].isnan().all() and got[1][spoilt].isnan().all()
        assert ((got[2][rows] - kept).abs() <= unsure.sum(1)).all()
        # On tensor cores a gate value near zero may get the other sign more often, and one near the middle of two 16-bit
        # values may be rounded to the other; what belongs to a neuron and a row is rounded, as in the dense layer.
        tensor = train_lost.held(self.x) > 0
        if len(rows):
            torch.testing.assert_close(got[1][rows].double(), l1, rtol=1e-3, atol=1e-5)
            y = self.plain_y(rows) if tensor else y
            assert accuracy.worst_row(got[0][rows], self.dense_y(rows), y)[0] <= 1.0
        back = self.backward()
        assert (back[0][others] == POISON).all() and back[0][spoilt].isnan().all()
        eps = EPS[self.x.dtype]
        clear = ~unsure.any(1) if tensor else torch.ones_like(kept, dtype=torch.bool)
        limit = 2 * eps if tensor else eps
        assert not tensor or clear.any() or len(rows) < 5
        if clear.any():
            assert relative(back[0][rows][clear], dx[clear]) < limit
        for name, after, before, exact in zip(
            ("gate", "up", "down_t", "gate_bias", "up_bias"), back[1:], self.start, gradients
        ):
            assert (after is None) == (exact is None), name
            if after is None:
                continue
            silent = ~(used | unsure.any(0))
            assert torch.equal(bits(after[silent]), bits(before[silent])), name
            asked = used & sure if tensor else used
            if asked.any():
                assert relative(after[asked], before.double()[asked] + exact[asked]) < limit, name
                sides = after.double() - before.double() - exact, before.double() + exact, exact
                off, whole, added = (t.reshape(len(after), -1).norm(dim=1) for t in sides)
                allowed = eps * (2 * whole + added + added.mean())
                if name.endswith("bias") and tensor:
                    allowed = allowed + self.rounded_entries()
                assert (off <= allowed)[sure].all(), name
                assert sure.float().mean() > 0.5 or len(sure) < 100


def _rounding(x: Tensor, weight: Tensor) -> Tensor:
    """How far a sum of products in float32 may be off, in any order: four standard deviations of independent
    roundings."""
    return 4 * 2**-24 * x.shape[-1] ** 0.5 * linear(x.abs(), weight.abs())


def relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))
