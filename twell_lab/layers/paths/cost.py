"""What a call's cost is counted from: the device's rates, how the layer fires, and how many tokens there are.

A GEMM takes as long as its operations, or its weights and values from memory, whichever is more. Each launch adds its
own time. Tokens for which more neurons fire than the packed form holds are computed densely once more."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats.twell import TILE, WORDS
from ...ops import decode, dispatch, down_rows, listed

CACHE_USED = 0.8  # share of the L2 cache that the most used rows are taken to keep


@dataclass(frozen=True)
class Rates:
    """What a device reaches with values of one dtype; analysis.costs.measure_rates measures it.

    bandwidth: bytes a second from and to memory (a copy). l2: bytes a second at which the sparse part reads the rows of
    up and down (what more entries add to its time). matmul: operations a second (a large torch.mm). launch: seconds
    that one more launch (on a CPU: operation) takes. cache: bytes of the GPU's L2 cache, 0 where none is modelled.
    fuses: whether there are kernels that pack inside the gate GEMM and multiply inside the up GEMM; from how many
    tokens they are taken is ops.dispatch's to say."""

    device: str
    dtype: str
    bandwidth: float
    l2: float
    matmul: float
    launch: float
    cache: int = 0
    fuses: bool = False


@dataclass(frozen=True, eq=False)
class Firing:
    """How a layer fires, as the predictions need it.

    frequency: float64 [d_ff], the share of tokens at which each neuron fires, descending. totals: float64 [d_ff + 1],
    the share of tokens with so many firing. overflowing, excess: of the layer in its own order, the share of tokens
    with a tile beyond its slots, and the entries beyond them, a token."""

    d_model: int
    gated: bool
    frequency: Tensor
    totals: Tensor
    overflowing: float = 0.0
    excess: float = 0.0

    @classmethod
    def of(cls, layer) -> Firing:
        """Return the firing that a LayerProfile counted at one token or more."""
        beyond = (torch.arange(layer.tile_histogram.numel(), device="cpu") - (layer.words - 1)).clamp(min=0)
        excess = (layer.tile_histogram * beyond).sum().item() / layer.tokens
        frequency = (layer.neuron_counts.double() / layer.tokens).sort(descending=True).values
        totals = layer.nnz_histogram.double() / layer.tokens
        return cls(layer.d_model, layer.gated, frequency, totals, layer.overflow_rows, excess)

    d_ff = property(lambda self: self.frequency.numel(), doc="The layer's neurons.")

    def lost(self, hot: int) -> float:
        """About what share of the tokens will be computed densely after all, if all but `hot` neurons are packed: those
        whose neurons would exceed the slots even if they were spread evenly over the tiles; in the layer's own order
        (hot 0) also those whose overflow would exceed the pool that 16 rows share, if all of it were in one tile."""
        packed, tiles = self._packed(hot), math.ceil((self.d_ff - hot) / TILE)
        most = math.floor((WORDS - 1) * tiles / packed) if packed else self.d_ff  # neurons that may fire
        lost = self.totals[most + 1 :].sum().item()
        if hot or not self.excess:
            return lost
        return max(lost, self.overflowing * max(0.0, 1 - 64 / (16 * self.excess)))

    def heavy(self, hot: int) -> tuple[float, float]:
        """About what share of the tokens has so many entries, if all but `hot` neurons are packed, that it is computed
        densely; and the share of all entries that these tokens have."""
        if not (packed := self._packed(hot)):
            return 0.0, 0.0
        many = math.floor(dispatch.HEAVY / packed) + 1
        counts = torch.arange(self.totals.numel(), dtype=self.totals.dtype, device=self.totals.device)
        entries = (counts * self.totals)[many:].sum().item() / self.frequency.sum().item()
        return self.totals[many:].sum().item(), min(1.0, entries)

    def _packed(self, hot: int) -> float:
        """Return what share of the entries is packed, if all but `hot` neurons are."""
        return self.frequency[hot:].sum().item() / max(self.frequency.sum().item(), 1e-30)


class Work:
    """One call of a layer with so many tokens, values of `itemsize` bytes, and what parts of it take, in seconds.

    gemms: those of the dense layer. few: whether the kernels for few tokens run; fuses_gate: the one that packs inside
    the gate GEMM; fuses_dense: the one that computes relu(gate) * up in one GEMM; lists: those that read the kept
    values from the dense gate as it is, so that nothing is packed (ops.listed). pieces: how many parts the rows of a
    fused call are cut into."""

    def __init__(self, firing: Firing, rates: Rates, tokens: int, itemsize: int) -> None:
        self.firing, self.rates, self.tokens, self.itemsize = firing, rates, tokens, itemsize
        self.gemms = 3 if firing.gated else 2
        self.few = tokens <= decode.MOST_TOKENS
        self.fuses_gate = rates.fuses and tokens >= dispatch.LEAST_PACKED
        self.fuses_dense = rates.fuses and tokens >= dispatch.LEAST_HIDDEN
        self.lists = not self.few and tokens <= listed.MOST_TOKENS and itemsize == 2 and not self.fuses_gate
        self.pieces = math.ceil(tokens / down_rows.CHUNK)

    def gemm(self, n: int, k: int, count: float = 1.0) -> float:
        """Seconds of `count` products of the tokens with weights [n, k]."""
        moved = (n * k + self.tokens * (n + k)) * self.itemsize
        return count * max(2 * self.tokens * n * k / self.rates.matmul, moved / self.rates.bandwidth)

    def rows(self, frequency: Tensor) -> float:
        """Seconds in which the rows of packed neurons are read: once from memory for each neuron that fires, and again
        where they do not fit the cache, and for each entry from the cache: two rows of d_model values in a gated layer
        (of up and of down), and one in a plain layer. frequency: of these neurons, as in Firing."""
        tokens, rates = self.tokens, self.rates
        row = (2 if self.firing.gated else 1) * self.firing.d_model * self.itemsize
        touched = (1 - (1 - frequency).clamp(min=0) ** tokens).sum().item() * row
        read = tokens * frequency.sum().item() * row
        missed = 0.0
        if rates.cache and touched > rates.cache * CACHE_USED:
            kept = int(rates.cache * CACHE_USED / row)
            missed = tokens * frequency[kept:].sum().item() * row
        # The two overlap: with few tokens nearly every entry is the first to ask for its row, and waits for memory.
        return max(min(touched, read) / rates.bandwidth, (read - missed) / rates.l2 + missed / rates.bandwidth)
