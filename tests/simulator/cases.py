"""Adversarial inputs for the kernels, and what has to come out: shared by the tests that run kernels/ on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from tests.ops.rows.drawn import gate_of
from twell_lab.cuda.launch import run
from twell_lab.formats import TwELL
from twell_lab.ops import accuracy, reference
from twell_lab.ops.down import down, specialisation
from twell_lab.ops.gated import gated
from twell_lab.ops.pack import pack

NO_TAIL = (None, None, None)
FINITE = ["sparse", "dense", "silent", "all", "full tiles", "one over", "some over", "denormal"]
PATTERNS = [*FINITE, "odd values", "any bits"]
# (tile, words): from two words to a slot for every column, and columns that no vector divides.
GEOMETRIES = [(256, 32), (64, 17), (32, 33), (100, 5), (8, 3), (7, 2), (300, 40)]


def check_pack(gate: Tensor, tile: int, words: int, version: int) -> None:
    """The words equal TwELL.from_gate's bit by bit; those that must not be written still hold torch's poison."""
    packed = run(pack, gate, tile, words, version)
    expected = TwELL.from_gate(gate, tile, words)
    assert packed.dtype == expected.packed.dtype and packed.shape == expected.packed.shape
    assert torch.equal(packed[..., 0], expected.counts)
    used = torch.arange(words - 1) < expected.counts[..., None]
    assert torch.equal(packed[..., 1:][used], expected.packed[..., 1:][used])
    assert (packed[..., 1:][~used] == torch.iinfo(packed.dtype).max).all()


@dataclass
class Layer:
    """A packed gate and the rest of a layer. `exact`, `dense`: results of the gated layer; `plain_*`: of the plain one."""

    x: Tensor
    gate: Tensor
    packed: TwELL
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    tile: int

    @classmethod
    def draw(cls, gate: Tensor, d_model: int, tile: int, words: int, biases: str = "", spoilt: str = "", seed: int = 0):
        """biases: letters u and d. spoilt: letters n (NaN), i (infinity), each in a row of x of its own."""
        generator = torch.Generator().manual_seed(d_model + gate.shape[1] + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        (rows, d_ff), dtype = gate.shape, gate.dtype
        x, up = normal(rows, d_model), normal(d_ff, d_model) / d_model**0.5
        down, up_bias, down_bias = normal(d_model, d_ff) / d_ff**0.5, normal(d_ff), normal(d_model)
        for i, letter in enumerate(spoilt):
            x[-1 - i % rows, [0, -1, d_model // 2][i % 3]] = {"n": torch.nan, "i": -torch.inf}[letter]
        packed = TwELL.from_gate(gate, tile, words)
        used = torch.arange(words - 1) < packed.counts[..., None]
        packed.packed[..., 1:][~used] = -1  # NaN in a column that no matrix has
        biases = [b.to(dtype) if letter in biases else None for b, letter in ((up_bias, "u"), (down_bias, "d"))]
        return cls(x.to(dtype), gate, packed, up.to(dtype), down.to(dtype), *biases, tile)

    @property
    def down_t(self) -> Tensor:
        return self.down.t().contiguous()

    @property
    def sources(self) -> tuple:
        """The two ways to pass the values that tiles could not hold, each as (gate, tail)."""
        tail = (self.packed.tail_pointer, self.packed.tail_column, self.packed.tail_value)
        return (self.gate, NO_TAIL), (None, tail)

    def gated(self, version: int, gate: Tensor | None, tail: tuple) -> Tensor:
        weights = self.up, self.down_t, self.up_bias, self.down_bias
        return run(gated, self.x, self.packed.packed, gate, tail, *weights, self.tile, version)

    def plain(self, version: int, gate: Tensor | None, tail: tuple) -> Tensor:
        weights = self.down_t, self.down_bias, self.gate.shape[1]
        return run(down, self.packed.packed, gate, tail, *weights, self.tile, version)

    def _wide(self, *names: str) -> list[Tensor | None]:
        tensors = [getattr(self, name) for name in names]
        return [None if t is None else t.double() for t in tensors]

    def gated_error(self, y: Tensor) -> float:
        """The error of y over what is promised (accuracy.worst_row); at most 1 is right."""
        exact = reference.gated(*self._wide("x", "gate", "up", "down", "up_bias", "down_bias"))
        dense = linear(torch.relu(self.gate) * linear(self.x, self.up, self.up_bias), self.down, self.down_bias)
        return accuracy.worst_row(y, dense, exact)[0]

    def plain_error(self, y: Tensor) -> float:
        gate, down, bias = self._wide("gate", "down", "down_bias")
        exact = linear(reference.relu(gate), down, bias)
        dense = linear(torch.relu(self.gate), self.down, self.down_bias)
        return accuracy.worst_row(y, dense, exact)[0]


def versions(name: str, dtype: torch.dtype, d_model: int) -> range:
    """The versions of the down or gated kernel that take this width."""
    newest = {"gated": 4, "down": 3}[name]
    return range(1, newest + 1) if specialisation(dtype, d_model) else range(1, 2)


@st.composite
def gates(draw, dtype: torch.dtype, patterns: list[str], most_columns: int = 700, vectors: bool = False):
    """(gate, tile, words). vectors: only widths that the kernels with 16-byte loads take."""
    vector = 16 // dtype.itemsize
    geometries = [(tile, words) for tile, words in GEOMETRIES if not vectors or tile % vector == 0]
    tile, words = draw(st.sampled_from(geometries))
    # Around whole numbers of tiles, and anywhere.
    near = st.builds(lambda n, off: max(1, n * tile + off), st.integers(1, most_columns // tile), st.integers(-1, 1))
    columns = draw(st.one_of(near, st.integers(1, most_columns)))
    columns = -(-columns // vector) * vector if vectors else columns
    rows, seed = draw(st.integers(1, 5)), draw(st.integers(0, 99))
    return gate_of(draw(st.sampled_from(patterns)), rows, columns, dtype, tile, words, seed), tile, words


@st.composite
def layers(draw, dtype: torch.dtype, d_model: int):
    gate, tile, words = draw(gates(dtype, FINITE, most_columns=400))
    biases = draw(st.sampled_from(["", "u", "d", "ud"]))
    spoilt = draw(st.sampled_from(["", "", "n", "i", "ni"]))
    return Layer.draw(gate, d_model, tile, words, biases, spoilt, draw(st.integers(0, 99)))
