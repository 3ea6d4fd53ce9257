"""Layers whose overflow lies in the pool, and all that must come out: for the tests here and on a GPU, and the
mutants."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.formats.pools import pool_used
from twell_lab.cuda.launch import run
from twell_lab.formats import packed_and_pool
from twell_lab.ops import accuracy, reference
from twell_lab.ops.down import ANY_NUMBER, down_pooled
from twell_lab.ops.gated import gated_pooled

POISON = 12345


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int16)


@dataclasses.dataclass
class Pooled:
    """A layer, its gate with a pool, and what a launch wrote."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down_t: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    start: Tensor | None

    @classmethod
    def draw(cls, gate: Tensor, d_model: int, biases: bool = False, start: bool = False, seed: int = 0):
        generator = torch.Generator().manual_seed(d_model + gate.shape[1] + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        (tokens, d_ff), dtype = gate.shape, gate.dtype
        x, up, down_t = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5, normal(d_ff, d_model) / d_ff**0.5
        both = (normal(d_ff).to(dtype), normal(d_model).to(dtype)) if biases else (None, None)
        return cls(x.to(dtype), gate, up.to(dtype), down_t.to(dtype), *both, normal(tokens, d_model) if start else None)

    def run(self, name: str, version: int | None, most: int = ANY_NUMBER) -> Tensor:
        """Returns y; self.lost and self.lost_x hold the lost rows."""
        tokens = len(self.x)
        packed, pool, self.expected_lost = packed_and_pool(self.gate)
        counts = packed[..., 0]
        self.beyond = self.expected_lost.clone()
        self.expected_lost |= counts.sum(1) > most
        here = {"device": self.x.device}
        unread = torch.arange(31, **here) >= counts[..., None]
        packed[..., 1:][unread] = POISON  # nobody may read these, nor what lies past the pool's end
        pool[torch.arange(64, **here) >= pool_used(packed)[..., None]] = POISON
        self.lost = torch.full((1 + tokens,), POISON, dtype=torch.int32, **here)
        self.lost[0] = 0
        self.lost_x = torch.full_like(self.x, POISON)
        y = torch.full_like(self.x, POISON)
        rest = (self.start, self.lost, self.lost_x, y, most, version)
        if name == "down":
            run(down_pooled, self.x, packed, pool, self.down_t, self.down_bias, *rest)
        else:
            run(gated_pooled, self.x, packed, pool, self.up, self.down_t, self.up_bias, self.down_bias, *rest)
        return y

    def exact_and_dense(self, name: str) -> tuple[Tensor, Tensor]:
        wide = lambda t: None if t is None else t.double()  # noqa: E731
        active, act = reference.relu(self.gate.double()), torch.relu(self.gate)
        if name == "gated":
            active = active * linear(self.x.double(), wide(self.up), wide(self.up_bias))
            act = act * linear(self.x, self.up, self.up_bias)
        exact = linear(active, wide(self.down_t).t(), wide(self.down_bias))
        dense = linear(act, self.down_t.t(), self.down_bias)
        if self.start is None:
            return exact, dense
        return exact + self.start.double(), (dense.float() + self.start).to(dense.dtype)

    def check(self, name: str, version: int, most: int = ANY_NUMBER) -> Tensor:
        """Runs the layer and checks y and the list of lost rows. Returns y."""
        y = self.run(name, version, most=most)
        lost, count = self.expected_lost, int(self.expected_lost.sum())
        rows = self.lost[1 : 1 + count].long()
        rows = torch.where(rows < 0, ~rows, rows)
        assert self.lost[0] == count and sorted(rows.tolist()) == lost.nonzero()[:, 0].tolist()
        assert torch.equal(self.lost[1 : 1 + count] < 0, self.beyond[rows])
        assert (self.lost[1 + count :] == POISON).all()
        assert torch.equal(bits(self.lost_x[:count]), bits(self.x[rows]))
        assert (self.lost_x[count:] == torch.full_like(self.x[0], POISON)).all()
        assert (y[lost] == torch.full_like(y[0], POISON)).all()  # left alone
        self.judge(name, y, ~lost)
        return y

    def judge(self, name: str, y: Tensor, rows) -> None:
        """Check some rows of y: NaN where x is not finite and a neuron is silent, else as good as the dense layer's."""
        got, exact, dense = (t[rows] for t in (y, *self.exact_and_dense(name)))
        if name == "gated":
            spoilt = (~self.x.isfinite().all(1) & (self.gate <= 0).any(1))[rows]
            assert got[spoilt].isnan().all()
            got, exact, dense = (t[~spoilt] for t in (got, exact, dense))
        assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got.isinf(), exact.isinf())
        assert len(got) == 0 or accuracy.worst_row(got, dense, exact)[0] <= 1.0, name
