"""Load as sparse, compute as dense: a matrix as the values that are not zero, and a bit for each place.

    small = Bitmap.of(weight)
    y = F.linear(x, small.dense())

Method: Xia et al., Flash-LLM, arXiv 2309.10285. With few tokens a layer waits for its weights to come from memory; what
is expanded before a dense product spares bytes, and no operations. That pays where it is expanded on the way into the
product; expanded by an operation of its own, as here, it only spares memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..formats.matrix import as_matrix


class Bitmap(NamedTuple):
    """values: [nnz], in row order; bits: uint8 [ceil(rows * columns / 8)], the first place in the lowest bit; shape:
    (rows, columns)."""

    values: Tensor
    bits: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Tensor) -> Bitmap:
        """Make that of a matrix, exactly, zeros as +0. Waits for the device. InputError for what is no dense matrix."""
        matrix = as_matrix(matrix).detach()
        there = matrix != 0
        places = F.pad(there.flatten(), (0, -there.numel() % 8)).view(-1, 8)
        return cls(matrix[there], (places * _powers(places)).sum(1, dtype=torch.uint8), tuple(matrix.shape))

    def dense(self) -> Tensor:
        """Return the matrix, [rows, columns]."""
        rows, columns = self.shape
        there = (self.bits[:, None] & _powers(self.bits)).view(-1)[: rows * columns] != 0
        return self.values.new_zeros(self.shape).masked_scatter_(there.view(self.shape), self.values)


def _powers(like: Tensor) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=like.device)
