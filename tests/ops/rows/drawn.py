"""What the cases draw: gates with hostile patterns of what fires, and layers around them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CASES: list = []  # none of its own
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PATTERNS = ("sparse", "dense", "silent", "all", "full tiles", "one over", "some over", "odd values")


def gate_of(pattern: str | float, rows: int, columns: int, dtype, tile: int = 256, words: int = 32, seed: int = 0):
    """Return a gate [rows, columns], before its activation, in which what fires follows the named pattern, or has this
    probability."""
    draw = torch.Generator().manual_seed(rows * 7919 + columns + seed)
    if pattern == "any bits":
        whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        limits = torch.iinfo(whole)
        return torch.randint(limits.min, limits.max, (rows, columns), generator=draw).to(whole).view(dtype)
    noise, value = torch.rand(rows, columns, generator=draw), torch.randn(rows, columns, generator=draw).abs() + 1e-3
    column, row = torch.arange(columns) % tile, torch.arange(rows)[:, None]
    if pattern == "odd values":  # NaN, infinities, denormals and negative zero
        odd = torch.tensor([torch.nan, torch.inf, 1e-41, 6e-8, -0.0, -torch.inf, -torch.nan])
        value = torch.where(noise < 0.05, odd[(noise * 1e6).long() % 7], value)
    if pattern == "denormal":
        value *= torch.finfo(dtype).tiny
    rates = {"sparse": 0.02, "dense": 0.6, "silent": 0.0, "all": 2.0, "odd values": 0.1, "denormal": 0.3}
    fires = {
        "full tiles": (column < words - 1).expand(rows, -1),  # exactly as many as there are slots
        "one over": (column >= tile - words).expand(rows, -1),
        "some over": noise < torch.where(row % 5 == 0, 0.5, 0.01),
        "heavy": noise < torch.where(row % 3 == 0, 0.9, 0.01),
    }.get(pattern)
    if fires is None:
        fires = noise < rates.get(pattern, pattern)
    return torch.where(fires, value, -value).to(dtype)


def adversarial(tokens: int, d_ff: int, dtype: torch.dtype) -> Tensor:
    """Return a gate whose rows have one full tile, one over, 40 in a tile, several tiles over, all, none: in groups
    that the pool holds, and that it does not."""
    draw = torch.Generator().manual_seed(tokens + d_ff)
    fires = torch.rand(tokens, d_ff, generator=draw) < 0.05
    gate = torch.randn(tokens, d_ff, generator=draw).abs() + 1e-3
    gate = torch.where(fires, gate, -gate).to(dtype)
    puts = [(0, 0, 40), (1, 0, 31), (2, 0, 32), (2, 1, 45), (3, 0, 33), (14, 1, 63)]
    puts += [(row, 0, 40) for row in range(16, 32)]  # 64 / 9: seven of them fit
    puts += [(299, d_ff // 256, 45)]
    for row, tile, count in puts:
        if row < tokens and tile * 256 < d_ff:
            part = gate[row, tile * 256 : (tile + 1) * 256]
            part.copy_(-part.abs())
            part[-count:] = part[-count:].abs()
    gate[32:34] = 1.0
    gate[34:35, :256] = -1.0  # behind a lost row, with no need of the pool
    gate[48:49], gate[49:50] = -1.0, -0.0
    return gate


class Layer(NamedTuple):
    """x [tokens, d_model]; gate, up, down_t [d_ff, d_model], gate None in a plain layer; biases or None."""

    x: Tensor
    gate: Tensor | None
    up: Tensor
    down_t: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def draw(cls, tokens, d_model, d_ff, dtype=BF16, gated=True, biases=False, bits=False, silent=0.0, seed=0) -> Layer:
        """bits: x and the weights that decide who fires are of so few bits that every order of adding gives their
        products exactly. silent: by how many deviations the gate lies below zero, above 0 with `bits` alone."""
        draw = torch.Generator().manual_seed(7919 * tokens + d_model + d_ff + seed)
        normal = lambda *shape, by=1.0: (torch.randn(*shape, generator=draw) / by).to(dtype)  # noqa: E731
        whole = lambda most, *shape: torch.randint(-most, most + 1, shape, generator=draw)  # noqa: E731
        x, first = normal(tokens, d_model), normal(d_ff, d_model, by=d_model**0.5)
        first_bias = normal(d_ff, by=2)
        if bits:
            x = (whole(4, tokens, d_model) / 4).to(dtype)
            scale = 2.0 ** round(torch.tensor((10 * d_model) ** -0.5).log2().item())
            first, first_bias = (whole(8, d_ff, d_model) * scale).to(dtype), (whole(2, d_ff) / 4).to(dtype)
            if silent:
                x[:, 0], first[:, 0] = 1.0, -silent
        up, up_bias = normal(d_ff, d_model, by=d_model**0.5), normal(d_ff)
        down_t, down_bias = normal(d_ff, d_model, by=d_ff**0.5), normal(d_model)
        if not biases:
            first_bias = up_bias = down_bias = None
        if gated:
            return cls(x, first, up, down_t, first_bias, up_bias, down_bias)
        return cls(x, None, first, down_t, None, first_bias, down_bias)

    def spoilt(self) -> Layer:
        """Return it with some rows of x that are not finite, among those that it has."""
        for row, column, bad in ((1, 3, torch.nan), (4, 0, torch.inf), (7, -1, -torch.inf), (20, 1, torch.inf)):
            self.x[row : row + 1, column] = bad
        return self


def named(*parts) -> str:
    """Return a test's name of these parts."""
    return " ".join(str(part).replace("torch.", "") for part in parts if part not in ("", None))
