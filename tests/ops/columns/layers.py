"""Survivors for the tests of train_columns, here and in tests/gpu, and the gradients that they give, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twell_lab.ops import train_columns
from twell_lab.ops.train_rows import Survivors

NAMES = ("dgate", "dup", "ddown_t", "dgate_bias", "dup_bias")
_POISON = -77_777  # as a span, a word, a number of a row: what nobody may read


@dataclass
class Layer:
    """x, dy: [tokens, d_model]; the pattern fires: bool [tokens, d_ff] without the lost rows; s and dh as
    train_columns takes them."""

    x: Tensor
    dy: Tensor
    fires: Tensor
    s: Survivors
    dh: Tensor

    @staticmethod
    def draw(
        fires: Tensor, d_model: int, dtype=torch.bfloat16, *, gated: bool = True, lost=(), gap: int = 3, seed: int = 0
    ) -> Layer:
        """Random values at the places that fire. lost: rows that are not listed; gap: unused, poisoned entries between
        two rows."""
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        fires = fires.clone()
        fires[list(lost)] = False
        tokens, d_ff = fires.shape
        x, dy = normal(tokens, d_model).to(dtype), normal(tokens, d_model).to(dtype)
        count = fires.sum(1)
        start = (count + gap).cumsum(0) - count
        row, column = fires.nonzero(as_tuple=True)
        at = start[row] + torch.arange(len(row)) - (count.cumsum(0) - count)[row]
        capacity = int(count.sum()) + gap * tokens + 5
        words = torch.full((capacity,), _POISON, dtype=torch.int32)
        g = normal(len(row)).abs().to(dtype)
        words[at] = g.view(torch.int16).to(torch.int32) << 16 | column.to(torch.int32)
        u, dh = torch.full((2, capacity), torch.nan)
        u[at], dh[at] = normal(len(row)), normal(len(row))
        spans = torch.stack([start, count], 1).to(torch.int32)
        spans[list(lost)] = torch.tensor([-1, 0], dtype=torch.int32)
        numbers = torch.full((tokens + 2,), _POISON, dtype=torch.int32)
        numbers[0] = len(lost)
        numbers[1 : 1 + len(lost)] = torch.tensor(sorted(lost), dtype=torch.int32)
        x[list(lost)] = dy[list(lost)] = torch.nan  # nobody reads them here
        s = Survivors(
            spans, words, u if gated else None, numbers, count.to(torch.int32), torch.full((tokens,), torch.nan)
        )
        return Layer(x, dy, fires, s, dh)

    def to(self, device) -> Layer:
        move = lambda t: t if t is None else t.to(device)  # noqa: E731
        s = Survivors(*(move(getattr(self.s, f)) for f in Survivors.__dataclass_fields__))
        return Layer(self.x.to(device), self.dy.to(device), self.fires.to(device), s, self.dh.to(device))

    def run(self, biases: bool = True, version: int = 2) -> dict[str, Tensor | None]:
        d_ff = self.fires.shape[1]
        return dict(zip(NAMES, train_columns.weight_gradients(self.x, self.dy, self.s, self.dh, d_ff, biases, version)))

    def coefficients(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """(dg, du, h) as dense float64 [tokens, d_ff]; the records hold them in float32. Plain: (None, dh, g)."""
        spans, entries = self.s.spans.long(), self.s.words
        row = torch.repeat_interleave(torch.arange(len(spans), device=spans.device), spans[:, 1])
        before = spans[:, 1].cumsum(0) - spans[:, 1]
        at = spans[row, 0] + torch.arange(len(row), device=spans.device) - before[row]
        column = entries[at].long() & 0xFFFF
        g = (entries[at] >> 16).to(torch.int16).view(self.x.dtype).float()
        dense = torch.zeros(self.fires.shape, dtype=torch.float64, device=spans.device)
        put = lambda v: dense.clone().index_put_((row, column), v.double())  # noqa: E731
        dh = self.dh[at]
        if self.s.ups is None:
            return None, put(dh), put(g)
        u = self.s.ups[at]
        return put(dh * u), put(dh * g), put(g * u)

    def expected(self) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        """In float64: the gradients, each a sum of terms, and the sums of the absolute values of these terms."""
        x, dy = self.x.double(), self.dy.double()
        silent = ~self.fires.any(1)
        x[silent] = dy[silent] = 0
        dg, du, h = self.coefficients()
        results = []
        for f in (lambda t: t, torch.abs):
            gate = None if dg is None else f(dg)
            values = (gate, f(du), f(h))
            rows = [None if v is None else v.T @ f(t) for v, t in zip(values, (x, x, dy))]
            results.append(dict(zip(NAMES, [*rows, *(None if v is None else v.sum(0) for v in values[:2])])))
        return tuple(results)

    def check(self, biases: bool = True, version: int = 2) -> dict[str, Tensor | None]:
        """Run and compare. Tolerance: half an ulp of the result, and the rounding of a float32 sum of these terms."""
        found = self.run(biases, version)
        expected, sizes = self.expected()
        half_ulp = torch.finfo(self.x.dtype).eps / 2
        tiny = torch.finfo(self.x.dtype).tiny * torch.finfo(self.x.dtype).eps
        most = max(int(self.fires.sum(0).max()), 1) if self.fires.numel() else 1
        for name, exact in expected.items():
            got = found[name]
            if exact is None or (name.endswith("bias") and not biases):
                assert got is None, name
                continue
            assert got.dtype == self.x.dtype and got.shape == exact.shape, name
            allowed = 1.01 * half_ulp * exact.abs() + tiny + 2**-23 * most**0.5 * 2 * sizes[name]
            error = (got.double() - exact).abs()
            wrong = ~(error <= allowed)
            assert not wrong.any(), f"{name}: {int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}"
            never = ~self.fires.any(0)
            assert not got[never].view(torch.int16).any(), f"{name}: a neuron that never fired has a gradient"
        return found

    def check_records(self, columns: train_columns.Columns) -> None:
        """Every list holds its neuron's tokens, ascending, with the three numbers that belong to them, bit for bit."""
        starts = columns.starts.long()
        count = self.fires.sum(0)
        assert torch.equal(starts[1:] - starts[:-1], count) and starts[0] == 0
        neuron, token = self.fires.T.nonzero(as_tuple=True)
        records = columns.records[: len(token)]
        assert torch.equal(records[:, 0].long(), token)
        for i, v in enumerate(self.coefficients(), 1):
            if v is not None:
                assert torch.equal(records[:, i].contiguous().view(torch.float32).double(), v[token, neuron])


def bits(found: dict[str, Tensor | None]) -> list[Tensor]:
    return [t.view(torch.int16) for t in found.values() if t is not None]


def pattern(tokens: int, d_ff: int, density: float = 0.05, seed: int = 1) -> Tensor:
    """Which neurons fire, bool [tokens, d_ff]: at random, but one never, one always, one in half of the rows; one row
    is empty, one full."""
    generator = torch.Generator().manual_seed(seed)
    fires = torch.rand(tokens, d_ff, generator=generator) < density
    fires[tokens // 2] = True
    fires[:, d_ff // 3] = torch.rand(tokens, generator=generator) < 0.5
    fires[:, d_ff - 1] = True
    fires[:, 0] = False
    if tokens > 3:
        fires[3] = False
    return fires
