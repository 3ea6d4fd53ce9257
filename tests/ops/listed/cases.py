"""Layers behind their dense gate, with as many kept values in each row as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from twell_lab.ops import accuracy
from twell_lab.ops.listed import listed

HEAVY = [1500, 0, 3, 700, 513, 512, 1]  # kept values by row: more than 512 are heavy


class Case(NamedTuple):
    """x [tokens, d_model]; gate [tokens, d_ff]; up, down_t [d_ff, d_model], up None in a plain layer; biases or None."""

    x: Tensor
    gate: Tensor
    up: Tensor | None
    down_t: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def draw(
        cls, counts: Sequence[int], d_model: int, d_ff: int, gated: bool = True, biases: bool = False,
        dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0,
    ) -> Case:  # fmt: skip
        """counts: how many values fire in each row, at most d_ff."""
        draw = torch.Generator().manual_seed(seed)
        new = lambda *shape, by=1.0: (torch.randn(*shape, generator=draw) / by).to(dtype)  # noqa: E731
        gate = -torch.rand(len(counts), d_ff, generator=draw)
        for row, count in zip(gate, counts):
            row[torch.randperm(d_ff, generator=draw)[: min(count, d_ff)]] *= -1
        gate += 0.1 * gate.sign()
        x, down_t = new(len(counts), d_model), new(d_ff, d_model, by=d_ff**0.5)
        up = new(d_ff, d_model, by=d_model**0.5) if gated else None
        up_bias, down_bias = new(d_ff) if gated and biases else None, new(d_model) if biases else None
        parts = (x, gate.to(dtype), up, down_t, up_bias, down_bias)
        return cls(*(t if t is None else t.to(device) for t in parts))

    def dense(self, wide: bool = False) -> Tensor:
        """By torch's operations, in x's type or in float64."""
        x, gate, up, down_t, up_bias, down_bias = (t if t is None or not wide else t.double() for t in self)
        h = torch.relu(gate)
        return linear(h if up is None else h * linear(x, up, up_bias), down_t.t(), down_bias)

    def run(self, version: int | None = None) -> Tensor:
        return listed(*self, version=version)

    def check(self, versions: Sequence[int | None] = (1, 2, None)) -> None:
        """The error at most what the library allows, NaN where torch has it, and the same bits twice. What it is compared
        with is computed on the CPU: racecheck finds hazards within cuBLAS."""
        here = Case(*(t if t is None else t.cpu() for t in self))
        dense, exact = here.dense(), here.dense(wide=True)
        finite = exact.isfinite().all(1)
        for version in versions:
            y = self.run(version).cpu()
            assert torch.equal(y.isnan(), dense.isnan())
            if finite.any():
                assert accuracy.worst_row(y[finite], dense[finite], exact[finite])[0] <= 1
            assert torch.equal(y.nan_to_num(), self.run(version).cpu().nan_to_num())
