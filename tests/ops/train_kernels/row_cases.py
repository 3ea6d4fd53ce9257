"""Layers for the row kernels of a training step, and all that must come out of them: for the tests here and on a GPU.

Gates are drawn, not computed, so that every pattern can be had; but, as in a real layer, a row of x that is not finite
has no finite value in its row of the gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.simulator.pooled_cases import POISON, adversarial, gate_of
from twell_lab.cuda import sources
from twell_lab.formats import POOL_ROWS, fires, packed_and_pool
from twell_lab.ops import portable, train_rows

__all__ = ["RowCase", "adversarial", "gate_of", "most_light", "same_bits", "with_counts"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def with_counts(counts: Tensor, d_ff: int) -> Tensor:
    """A bfloat16 gate of rows in which so many neurons fire, as evenly spread over d_ff as can be."""
    column = torch.arange(d_ff)
    fire = column * counts[:, None] // d_ff != (column - 1) * counts[:, None] // d_ff
    value = torch.randn(fire.shape, generator=torch.Generator().manual_seed(d_ff)).abs() + 1e-3
    return torch.where(fire, value, -value).bfloat16()


def most_light(dtype: torch.dtype, d_model: int) -> int:
    """The most entries of a row that is not heavy."""
    return sources.number(train_rows.SURVIVORS, "HEAVY", portable.specialisation(dtype, d_model))


def poisoned_pack(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, pool, lost) of a gate, with POISON in all words that nobody may read."""
    packed, pool, lost = packed_and_pool(gate)
    counts, here = packed[..., 0], gate.device
    packed[..., 1:][torch.arange(31, device=here) >= counts[..., None]] = POISON
    used = (counts - 31).clamp(min=0)
    used = torch.cat([used, used.new_zeros(-len(gate) % POOL_ROWS, used.shape[1])])
    used = used.view(-1, POOL_ROWS, used.shape[1]).sum(1)
    pool[torch.arange(64, device=here) >= used[..., None]] = POISON
    return packed, pool, lost


@dataclass
class RowCase:
    """A layer and its gradients: x, dy [tokens, d_model]; gate [tokens, d_ff], before the ReLU; Wg, up, down_t [d_ff,
    d_model]."""

    x: Tensor
    dy: Tensor
    gate: Tensor
    Wg: Tensor | None  # None: a plain layer
    up: Tensor
    down_t: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    dl1: Tensor | None = None
    capacity: int | None = None
    dense: tuple[int, int] | None = None  # `few` and `most` of train_rows.survivors

    @classmethod
    def draw(
        cls,
        gate: Tensor,
        d_model: int,
        *,
        gated: bool = True,
        biases: bool = False,
        dl1: bool = True,
        seed: int = 0,
        **more,
    ):
        (tokens, d_ff), dtype, device = gate.shape, gate.dtype, gate.device
        generator = torch.Generator(device).manual_seed(d_model + d_ff + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
        wide = [normal(d_ff, d_model) / d_model**0.5 for _ in range(3)]
        wide = [w.to(dtype) for w in wide]
        both = (normal(d_ff).to(dtype) if gated else None, normal(d_model).to(dtype)) if biases else (None, None)
        x, dy = normal(tokens, d_model).to(dtype), normal(tokens, d_model).to(dtype)
        return cls(x, dy, gate, wide[0] if gated else None, *wide[1:], *both, normal(tokens) if dl1 else None, **more)

    def spoil(self, row: int, gate: str, value: float = torch.nan, column: int = 0) -> None:
        """Make x's row non-finite at one column, and its gate so: all 'nan', all 'silent' (-inf), or 'mixed'
        infinities."""
        self.x[row, column] = value
        self.gate[row] = {"nan": torch.nan, "silent": -torch.inf, "mixed": -torch.inf}[gate]
        if gate == "mixed":
            self.gate[row, 1::3] = torch.inf

    def to(self, device: str) -> RowCase:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def survivors(self) -> train_rows.Survivors:
        packed, pool, self.pool_lost = poisoned_pack(self.gate)
        up, bias = (None, None) if self.Wg is None else (self.up, self.up_bias)
        more = {} if self.dense is None else dict(zip(("few", "most"), self.dense))
        return train_rows.survivors(self.x, packed, pool, up, bias, self.gate.shape[1], self.capacity, **more)

    def expected_lost(self) -> Tensor:
        lost = self.pool_lost | ~self.x.isfinite().all(1)
        counts = torch.where(lost, 0, fires(self.gate).sum(1))
        if self.dense is not None:
            heavy = counts > most_light(self.gate.dtype, self.x.shape[1])
            if heavy.sum() > self.dense[0] and (heavy | lost).sum() <= self.dense[1]:
                lost, counts = lost | heavy, torch.where(heavy, 0, counts)
        room = train_rows.capacity_for(*self.gate.shape) if self.capacity is None else self.capacity
        return lost | (counts.cumsum(0) > room)

    def exact(self) -> tuple[Tensor, Tensor]:
        """(g, u) in float64, [tokens, d_ff]: 0 where nothing fires; u is 1 in a plain layer."""
        g = torch.where(fires(self.gate), self.gate.double(), 0)
        if self.Wg is None:
            return g, torch.ones_like(g)
        u = self.x.double() @ self.up.double().t()
        return g, u if self.up_bias is None else u + self.up_bias.double()

    # ---- checks ----

    def check_survivors(self, s: train_rows.Survivors) -> Tensor:
        """s is what it must be. Returns which rows are lost."""
        lost, keep = self.expected_lost(), fires(self.gate)
        count = int(lost.sum())
        assert s.lost[0] == count and s.lost[1 : 1 + count].tolist() == lost.nonzero()[:, 0].tolist()
        counts = torch.where(lost, 0, keep.sum(1))
        assert torch.equal(s.spans[:, 1], counts.int())
        heavy = (counts > most_light(self.gate.dtype, self.x.shape[1])).nonzero()[:, 0].tolist()
        assert s.lost.shape == (len(self.x) + 2,) and s.lost.flip(0)[: 1 + len(heavy)].tolist() == [len(heavy), *heavy]
        starts = torch.where(lost, -1, counts.cumsum(0) - counts)
        assert torch.equal(s.spans[:, 0], starts.int())
        rows, columns = (keep & ~lost[:, None]).nonzero(as_tuple=True)
        words = s.words[: len(rows)]
        assert torch.equal(words.long() & 0xFFFF, columns)
        got, wanted = (words >> 16).to(torch.int16).view(self.gate.dtype), self.gate[rows, columns]
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got[~got.isnan()], wanted[~got.isnan()])
        assert torch.equal(s.kept[~lost], counts[~lost].int())
        g, u = self.exact()
        if s.ups is not None:
            room = 1e-5 * (self.x.double()[rows].norm(dim=1) * self.up.double()[columns].norm(dim=1) + 1)
            assert ((s.ups[: len(rows)].double() - u[rows, columns]).abs() <= room).all()
        l1 = (g * u).abs().sum(1)[~lost]
        assert_near(s.l1[~lost][:, None], l1[:, None], (l1 + g[~lost].norm(dim=1))[:, None], 0)
        return lost

    def check_rows(self, s: train_rows.Survivors, lost: Tensor, version: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """The three row kernels on s, against float64; lost rows left as they were. Returns (y, dh, dx)."""
        g, u = self.exact()
        keep, h = fires(self.gate), g * u
        down_t, eps = self.down_t.double(), torch.finfo(self.gate.dtype).eps
        y = train_rows.weighted_rows(s, self.down_t, self.down_bias, version)
        exact = torch.where(keep, h, 0) @ down_t
        if self.down_bias is not None:
            exact = exact + self.down_bias.double()
        self._check_rows(y, exact, h.abs() @ down_t.abs() + 1, eps, lost)

        dh = train_rows.hidden_gradient(self.dy, s, self.down_t, self.dl1, version)
        wanted = self.dy.double() @ down_t.t()
        if self.dl1 is not None:
            wanted = wanted + self.dl1.double()[:, None] * torch.where(h.isnan(), torch.nan, h.sign())
        rows, columns = (keep & ~lost[:, None]).nonzero(as_tuple=True)
        assert_near(
            dh[: len(rows), None], wanted[rows, columns, None], self.dy.double()[rows].norm(dim=1, keepdim=True) + 1, 0
        )

        dx = train_rows.input_gradient(s, dh, self.Wg, self.up, version)
        wanted = torch.where(keep, wanted, 0)
        du = wanted * (g if self.Wg is not None else 1)
        exact, room = du @ self.up.double(), du.abs() @ self.up.double().abs() + 1
        if self.Wg is not None:
            dg = torch.where(keep, wanted * u, 0)
            exact, room = exact + dg @ self.Wg.double(), room + dg.abs() @ self.Wg.double().abs()
        self._check_rows(dx, exact, room, eps, lost)
        return y, dh, dx

    def _check_rows(self, got: Tensor, exact: Tensor, room: Tensor, eps: float, lost: Tensor) -> None:
        if torch.are_deterministic_algorithms_enabled():  # torch filled what it allocated with NaN
            assert got[lost].isnan().all()
        assert_near(got[~lost], exact[~lost], room[~lost], eps)


def assert_near(got: Tensor, exact: Tensor, scale: Tensor, eps: float) -> None:
    """|got - exact| within half a unit of a value of `eps`, and 1e-5 of scale for what is added in float32."""
    assert torch.equal(got.isnan(), exact.isnan())
    there = ~exact.isnan() & exact.isfinite()
    off, room = (got.double() - exact).abs(), eps * exact.abs() + 1e-5 * scale
    assert torch.equal(got.isinf(), exact.isinf()) and (off <= room)[there].all(), float((off / room)[there].max())
