"""Layers with thresholds on their inputs: drawn, and by torch's operations in their own type and in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from twell_lab.ops import accuracy
from twell_lab.ops.activation import CURVES
from twell_lab.ops.kept_inputs import Kept


class Case(NamedTuple):
    """x [tokens, d_model]; gate, up [d_ff, d_model], gate None in a plain layer; down [d_model, d_ff]; biases or None."""

    x: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    kept: Kept

    @classmethod
    def draw(
        cls, tokens: int, d_model: int, d_ff: int, kind: str = "silu", gated: bool = True, biases: bool = True,
        zeros: float = 0.5, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0,
    ) -> Case:  # fmt: skip
        """With thresholds below which this share of the inputs and hidden values lies."""
        draw = torch.Generator().manual_seed(1000 * tokens + d_model + d_ff + seed)
        new = lambda *shape, by=1.0: (torch.randn(*shape, generator=draw) / by).to(dtype)  # noqa: E731
        x, up, down = new(tokens, d_model), new(d_ff, d_model, by=d_model**0.5), new(d_model, d_ff, by=d_ff**0.5)
        gate, gate_bias = (new(d_ff, d_model, by=d_model**0.5), new(d_ff, by=2)) if gated else (None, None)
        up_bias, down_bias = new(d_ff, by=2), new(d_model)
        if not biases:
            gate_bias = up_bias = down_bias = None
        x[:, 0] = 0
        case = cls(x, gate, up, down, gate_bias, up_bias, down_bias, Kept(kind, 0.0, 0.0))
        inputs = x.float().abs().quantile(zeros).item() if zeros else 0.0
        case = case._replace(kept=Kept(kind, inputs, 0.0))
        hidden = case.hidden().float().abs().quantile(zeros).item() if zeros else 0.0
        case = case._replace(kept=Kept(kind, inputs, hidden))
        return case._replace(**{name: t.to(device) for name, t in zip(case._fields, case) if isinstance(t, Tensor)})

    def turned(self) -> tuple[Tensor | None, ...]:
        """Gate, up and down as the kernel reads them, and the biases."""
        weights = [None if t is None else t.t().contiguous() for t in (self.gate, self.up, self.down)]
        return (*weights, self.gate_bias, self.up_bias, self.down_bias)

    def cut(self, values: Tensor, threshold: float, seen: Tensor | None = None) -> Tensor:
        """`values` where those that are `seen` are not below the threshold, as rounded to x's type; 0 elsewhere."""
        bound = torch.tensor(threshold, dtype=self.x.dtype).item()
        return values.masked_fill((values if seen is None else seen).abs() < bound, 0)

    def hidden(self, wide: bool = False) -> Tensor:
        """h before its threshold: [tokens, d_ff], in x's type or in float64."""
        act = CURVES.get(self.kept.kind, torch.relu)
        x, gate, up, gate_bias, up_bias = (
            None if t is None else t.double() if wide else t
            for t in (self.cut(self.x, self.kept.inputs), self.gate, self.up, self.gate_bias, self.up_bias)
        )
        beside = linear(x, up, up_bias)
        return act(beside) if gate is None else act(linear(x, gate, gate_bias)) * beside

    def dense(self) -> Tensor:
        """By torch's operations, in x's type."""
        return linear(self.cut(self.hidden(), self.kept.hidden), self.down, self.down_bias)

    def exact(self, h: Tensor) -> Tensor:
        """In float64, with the hidden values kept that are in `h`, which was rounded."""
        bias = None if self.down_bias is None else self.down_bias.double()
        return linear(self.cut(self.hidden(True), self.kept.hidden, h), self.down.double(), bias)

    def check(self, h: Tensor, y: Tensor) -> None:
        """The error of h, and of y given which of h were kept, at most what the library allows; and not finite where
        torch's is not. h: before its threshold."""
        finite = self.x.isfinite().all(1)
        exact = self.hidden(True)
        assert accuracy.worst_row(h[finite], self.hidden()[finite], exact[finite])[0] <= 1.0
        assert accuracy.worst_row(y[finite], self.dense()[finite], self.exact(h)[finite])[0] <= 1.0
        assert torch.equal(y.isnan(), self.dense().isnan())
