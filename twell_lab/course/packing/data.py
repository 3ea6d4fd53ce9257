"""What the notebook on packing computes, as functions: data in, data out, nothing drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.twell import TILE, WORDS, TwELL


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits: NaN equals itself, and -0 does not equal +0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def one_tile(firing: int, seed: int = 0) -> Tensor:
    """A gate, bfloat16 [1, TILE], with exactly `firing` positive columns at random places; the others are negative."""
    generator = torch.Generator().manual_seed(seed)
    gate = -torch.rand(1, TILE, generator=generator) - 0.01
    gate[0, torch.randperm(TILE, generator=generator)[:firing]] *= -1
    return gate.bfloat16()


# ---- a packing that loses values, and two ways to look for it ----


def toy_unpack(gate: Tensor, tile: int = TILE, words: int = WORDS) -> Tensor:
    """relu(gate), [rows, d_ff], packed without a tail and unpacked again: values that find no slot are gone."""
    packed = TwELL.from_gate(gate, tile, words)
    no_tail = (torch.zeros_like(packed.tail_pointer), packed.tail_column[:0], packed.tail_value[:0])
    return TwELL(packed.packed, *no_tail, packed.shape, packed.dtype, packed.tile).to_dense()


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| / |want| of each row, float64 [rows]; 0 where both are zero."""
    got, want = got.double(), want.double()
    off, size = (got - want).norm(dim=1), want.norm(dim=1)
    return torch.where(off == 0, 0.0, off / size)


# ---- the packing algorithm, as a warp does it ----


def warp_slots(fires: Tensor) -> tuple[int, list[int]]:
    """One step of a warp: (ballot, slot of each lane). fires: bool [32]. Bit i of the ballot says whether lane i fires.
    A lane's slot is the number of bits below its own, plus 1 because word 0 is the count."""
    ballot = sum(1 << lane for lane in range(32) if fires[lane])
    return ballot, [1 + (ballot & ((1 << lane) - 1)).bit_count() for lane in range(32)]
