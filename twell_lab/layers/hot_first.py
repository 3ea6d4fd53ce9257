"""The hot/cold order of a layer's weights: copies in which the most used neurons come first, kept equal to the weights.

They are buffers outside the state_dict: who saves, loads or trains the layer sees the module's own order alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..ops import copies
from ..ops.copies import COLUMNS, ROWS, ROWS_OF_TRANSPOSE

# gate, up and down are the first three weights; down is held twice, also transposed, and the two biases of the neurons
# last.
NAMES = ("gate", "up", "down", "down_t", "gate_bias", "up_bias")
_HELD = tuple(f"hot_first_{name}" for name in NAMES)
BUFFERS = ("order", *_HELD)
_HOW = (ROWS, ROWS, COLUMNS, ROWS_OF_TRANSPOSE, ROWS, ROWS)


class HotFirst(nn.Module):
    """What SparseFFN needs for hot/cold: `order`, int64 [d_ff], and `hot_first_*`, the weights in that order.

    All are non-persistent buffers that are there once `_hold_order` was called. The sources that the methods take are
    the module's own gate, up and down weights, and gate's and up's bias (None where there is none), in this order."""

    def __init__(self) -> None:
        super().__init__()
        self._neurons: list[int] | None = None  # the order once more, should its buffer be moved by to_empty

    def _hold(self, name: str, t: Tensor | None) -> None:
        """Keep t as a buffer outside the state_dict; None: have no buffer of that name (torch.export miscounts those
        that are None)."""
        if t is None:
            self._buffers.pop(name, None)
        else:
            self.register_buffer(name, t, persistent=False)

    def _hold_order(self, order: Tensor, sources: list[Tensor | None]) -> None:
        """Keep copies in this order; made from the sources."""
        self._neurons = order.tolist()
        self._renew_order(sources, anew=True)

    def _drop_order(self) -> None:
        for name in BUFFERS:
            self._hold(name, None)

    def _hot_first(self, sources: list[Tensor | None]) -> dict[str, Tensor | None]:
        """The copies by name, as ops.infer takes them, brought up to date."""
        order, held = self._buffers.get("order"), [self._buffers.get(name) for name in _HELD]
        if not self._order_fits(order, held, sources):
            order, held = self._renew_order(sources)
        present = [(name, t, c, how) for name, t, c, how in zip(NAMES, _doubled(sources), held, _HOW) if t is not None]
        weights = {name: t for name, t, _, _ in present}
        copies.refresh(weights, [c for _, _, c, _ in present], [how for *_, how in present], order)
        return dict(zip(NAMES, held))

    @staticmethod
    def _order_fits(order: Tensor | None, held: list, sources: list) -> bool:
        """Whether every copy is a place for its weight."""
        placed = all(copies.fits(copy, how, source) for copy, how, source in zip(held, _HOW, _doubled(sources)))
        return placed and order is not None and order.device == sources[1].device

    def _renew_order(self, sources: list, anew: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """Memory for all copies, for the next refresh to fill: what is there if it fits and not `anew` is asked for."""
        up = sources[1]
        if up.shape[0] != len(self._neurons):
            raise InputError(
                f"up has {up.shape[0]} neurons, but the layer's plan is for {len(self._neurons)}; as many are accepted"
            )
        order, held = self._buffers.get("order"), [self._buffers.get(name) for name in _HELD]
        if anew or not self._order_fits(order, held, sources):
            with torch.inference_mode(False):
                order = torch.tensor(self._neurons, device=up.device)
            held = [copies.place(how, source) for how, source in zip(_HOW, _doubled(sources))]
            for name, t in zip(BUFFERS, (order, *held)):
                self._hold(name, t)
        return order, held


def _doubled(sources: list) -> list:
    """gate, up, down, gate_bias, up_bias -> one source for each of NAMES."""
    gate, up, down, gate_bias, up_bias = sources
    return [gate, up, down, down, gate_bias, up_bias]
