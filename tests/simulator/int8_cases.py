"""A layer with INT8 rows, for the kernel that reads them: drawn, and beside torch's operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell_lab.cuda.launch import run
from twell_lab.ops.pack import pack
from twell_lab.ops.int8_rows import gated_int8
from twell_lab.sparsities.quantised import Rows, quantise, rows_product


@dataclass
class Int8Layer:
    """x [rows, d_model] with a NaN in the second row if `spoilt`, a gate [rows, d_ff], INT8 rows of up and down."""

    x: Tensor
    gate: Tensor
    up: Rows
    down: Rows
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def draw(cls, gate: Tensor, d_model: int, biases: bool = True, spoilt: bool = True, seed: int = 0) -> Int8Layer:
        generator = torch.Generator().manual_seed(d_model + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        (rows, d_ff), dtype = gate.shape, gate.dtype
        x = normal(rows, d_model).to(dtype)
        if spoilt:
            x[1 % rows, -1] = torch.nan
        up, down = (quantise(normal(d_ff, d_model) / d_model**0.5) for _ in range(2))
        up.values[:, :2], down.values[:, :2] = torch.tensor([-127, 127], dtype=torch.int8), -128
        made = [each.to(dtype) if biases else None for each in (normal(d_ff), normal(d_model))]
        return cls(x, gate, up, down, *made)

    def cuda(self) -> Int8Layer:
        """The same on the GPU."""
        move = lambda t: t if t is None else Rows(*map(move, t)) if isinstance(t, Rows) else t.cuda()  # noqa: E731
        return Int8Layer(*map(move, vars(self).values()))

    def check(
        self, tile: int, words: int, version: int | None = None, plain: bool = False, signed: bool = False
    ) -> None:
        """What the kernel gives, beside float32 sums of the same values: equal but for the order of the sums."""
        up, up_bias = (None, None) if plain else (self.up, self.up_bias)
        first = self.gate if signed else torch.relu(self.gate)
        packed = run(pack, self.gate, tile, words, signed=signed)
        y = gated_int8(self.x, packed, self.gate, up, self.down, up_bias, self.down_bias, tile, version, signed=signed)
        exact = rows_product(self.x, first, up, self.down, up_bias, self.down_bias)
        assert y.dtype == self.x.dtype and y.shape == self.x.shape
        whole = self.x.isfinite().all(1)
        assert torch.equal(y.isfinite().all(1), whole) and y[~whole].isnan().all()
        y, exact = y[whole].double(), exact[whole].double()
        most = (2 * torch.finfo(self.x.dtype).eps + 4e-6) * exact.abs().amax(1, keepdim=True)
        assert ((y - exact).abs() <= most).all()
