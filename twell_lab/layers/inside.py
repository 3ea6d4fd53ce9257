"""Layers inside a block, as in OPT, GPT-2 and BERT: the block calls the up projection, the activation and the down
projection itself, so there is no module to swap. A SparseFFN takes the activation's seat and does all the work; the
projections hand on what they get.

Who has to compute is told by the width of what comes in, [..., d_model] or [..., d_ff], which are never the same here.
So nothing is remembered between the three calls: the up projection hands its input on only while all parts are as they
were when they were swapped (find.is_plain), and otherwise everything goes the block's own way, step by step."""

from __future__ import annotations

from torch import Tensor, nn

from .find import is_plain
from .parts import Over, part_at, parts_of, put


class HandOn(Over):
    """The forward of a projection of such a block. up: whether it is the one before the activation."""

    def __init__(self, projection: nn.Module, seat: Seat, up: bool) -> None:
        super().__init__(projection)
        self.seat, self.up = seat, up

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.seat.d_model and not (self.up and not is_plain(self.seat.sparse)):
            return x
        return self.beneath(x)


class Seat:
    """The place of a SparseFFN in its block, which it takes. activation: what was there.

    The layer's `marks` are to be made when it is seated (find.marks_of)."""

    def __init__(self, sparse: nn.Module, block: nn.Module) -> None:
        parts = parts_of(block)
        assert parts is not None
        self.sparse, self.block, self.family, self.activation = sparse, block, parts.family, parts.acts
        self.d_model = parts.up.weight.shape[1]
        put(block, self.family.activation, sparse)
        self.up = HandOn(parts.owners[0], self, up=True)
        self.down = HandOn(parts.owners[1], self, up=False)

    def dense(self, x: Tensor) -> Tensor:
        """Return what the block's own modules give for what came to the activation: hidden values [..., d_ff] go
        through that; an input [..., d_model], which the up projection handed on, goes through all three."""
        if x.shape[-1] != self.d_model:
            return self.sparse.report(self.activation(x))
        return self.down.beneath(self.sparse.report(self.activation(self.up.beneath(x))))

    def leave(self) -> None:
        """Put the activation back, unless something else is in its place, and have the projections compute. A
        projection that another module wraps by now computes in any case: its block is no longer as it was."""
        if part_at(self.block, self.family.activation) is self.sparse:
            put(self.block, self.family.activation, self.activation)
        for each in (self.up, self.down):
            HandOn.take_off(each.module)
