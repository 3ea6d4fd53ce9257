"""hot_cold: the neurons that fire most computed densely, the others packed; one sum, rounded once.

The weights are held a second time with the hot neurons first, in buffers outside the state_dict: who saves, loads or
trains the layer sees the module's own order alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.errors import InputError
from ...ops import decode, dispatch
from ...ops.copies import COLUMNS, ROWS, ROWS_OF_TRANSPOSE
from ..weights import Weights
from .cost import Call
from .path import Copy, Path, hold
from .twell import packed_cost

STEP = 256  # hot sizes are multiples of this, so that the cold part starts with a whole tile


class HotCold(Path):
    """Beside the copies there is `order`, int64 [d_ff]: the neuron that comes first, second, ..."""

    name = "hot_cold"
    splits = True
    copies = tuple(
        Copy(f"hot_first_{name}", name, source, how)
        for name, source, how in (
            ("gate", "gate", ROWS),
            ("up", "up", ROWS),
            ("down", "down", COLUMNS),
            ("down_t", "down", ROWS_OF_TRANSPOSE),
            ("gate_bias", "gate_bias", ROWS),
            ("up_bias", "up_bias", ROWS),
        )
    )

    def sizes(self, d_ff: int) -> range:
        return range(STEP, d_ff, STEP)

    def prepare(self, layer: nn.Module, weights: Weights) -> tuple[Tensor, list[Tensor | None]]:
        up, neurons = weights.up, layer.neurons  # a list, since a buffer that is moved by to_empty loses its values
        if up.shape[0] != len(neurons):
            raise InputError(
                f"up has {up.shape[0]} neurons, but the layer's plan is for {len(neurons)}; as many are accepted"
            )
        with torch.inference_mode(False):
            order = torch.tensor(neurons, device=up.device)
        hold(layer, "order", order)
        return order, super().prepare(layer, weights)[1]

    def moved(self, layer: nn.Module, weights: Weights) -> None:
        self.prepare(layer, weights)

    def release(self, layer: nn.Module) -> None:
        hold(layer, "order", None)
        super().release(layer)

    def _held(self, layer: nn.Module) -> tuple[Tensor | None, list[Tensor | None]]:
        return layer._buffers.get("order"), super()._held(layer)[1]

    def _fits(self, order: Tensor | None, places: list[Tensor | None], weights: Weights) -> bool:
        return order is not None and order.device == weights.up.device and super()._fits(order, places, weights)

    def cost(self, call: Call, hot: int = 0) -> dict[str, float]:
        d_model, tokens = call.firing.d_model, call.tokens
        fused, few = call.fuses(dispatch.LEAST_HOT), tokens <= decode.MOST_TOKENS
        gemm = call.gemm(call.firing.d_ff - hot, d_model) + call.gemm(hot, d_model, call.gemms)
        moved = 2 * tokens * hot * call.itemsize + 2 * tokens * d_model * 4
        launches = (2 if fused or few else 3) + (2 if fused else 5)
        return packed_cost(call, hot, fused, gemm, moved, launches)


def hot_first(counts: Tensor, hot: int) -> Tensor:
    """An order of the neurons, int64: the `hot` with the highest counts first, by count; then the others, dealt to
    tiles.

    Dealt like cards, back and forth, so that every tile of 256 gets its share of what still fires often: packed in the
    order of their counts, the first tile would overflow while the last ones stay empty. Equal counts keep their order.
    """
    order = counts.argsort(descending=True, stable=True)
    rest = order[hot:]
    place = torch.arange(rest.numel(), device=rest.device)
    tile, slot, tiles = place // STEP, place % STEP, -(-rest.numel() // STEP)
    turn = slot * tiles + torch.where(slot % 2 == 1, tiles - 1 - tile, tile)
    dealt = torch.empty_like(rest)
    dealt[turn.argsort()] = rest
    return torch.cat([order[:hot], dealt])
