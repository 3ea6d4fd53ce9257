"""kept_inputs: for few tokens, a layer with thresholds on its inputs reads the weights of those that are kept alone.

TEAL (Liu et al., arXiv 2408.14690; models.thresholds puts it on a model) zeroes the small inputs of gate and up, and of
down. An input meets a column of the weight, so the kernel wants gate and up by their columns, as other paths want down:
each weight is turned (ops.turned) or copied. From more than ops.kept_inputs.FEW tokens on, which together keep
nearly all inputs, on a CPU, in compiled code and where gradients are needed the layer is dense, with the same zeros.

    model = tl.thresholds(model, batches, 0.5, method="teal").apply(model)
    model = tl.sparsify(model, "kept_inputs")         # or without a name: each layer then decides by time

The path computes the layer as it is; what is lossy is the layer, which says so where it is printed."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from ..layers.again import Known
from ..layers.paths import Path
from ..layers.paths.cost import Rates, Work
from ..layers.paths.dense import again, by_torch
from ..layers.paths.path import Copy, held
from ..layers.weights import Weights
from ..ops import checks, copies, kept_inputs, turned
from ..ops.copies import TRANSPOSED


class KeptInputs(Path):
    """Two launches: gate and up together, then down."""

    name = "kept_inputs"
    packs = False
    cuts = True
    learns = "dense"
    copies = tuple(
        Copy(f"kept_{name}", name, source, TRANSPOSED)
        for name, source in (("gate", "gate"), ("up", "up"), ("down_t", "down"))
    )

    def helps(self, tokens: int, rates: Rates) -> bool:
        return tokens <= kept_inputs.FEW and rates.device != "CPU"

    def copy_bytes(self, weights: Weights, turned: Collection[str], reordered: bool) -> int:
        return super().copy_bytes(weights, turned, reordered) if _on_gpu(weights) else 0

    def prepare(self, layer: nn.Module, weights: Weights) -> tuple[Tensor | None, list[Tensor | None]]:
        if _on_gpu(weights):
            return super().prepare(layer, weights)
        self.release(layer)
        return None, [None] * len(self.copies)

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Tensor:
        if kept_inputs.few(x):
            gate, up, down, *biases, _ = weights
            checks.check_tensor("x", x)
            checks.check_weights(x.shape[-1], up.shape[0], gate, up, down, *biases)
            checks.check_together(x, x.dtype, up=up)
            read, rows = self.ready(layer, weights), x.detach().reshape(-1, x.shape[-1]).contiguous()
            if kept_inputs.takes(rows, read.gate, read.up, read.down_t):
                return _run(layer.kept, read, rows).view(x.shape)
        return by_torch(x, weights, **layer.formula)

    def again(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Known | None:
        if not kept_inputs.few(x):
            return again(**layer.formula)
        places = [held(layer).get(copy.buffer) for copy in self.copies]
        read = weights._replace(**{copy.name: place for copy, place in zip(self.copies, places)})
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if not kept_inputs.takes(rows, read.gate, read.up, read.down_t):
            return None
        there = [(copy, place) for copy, place in zip(self.copies, places) if place is not None]
        sources, beside = (
            [getattr(weights, copy.source) for copy, _ in there],
            [t for t in weights[3:6] if t is not None],
        )
        note = copies.settled([place for _, place in there], sources, None, beside)
        if note is None:
            return None
        kept = layer.kept

        def run(x: Tensor, given: list[Tensor | None]) -> Tensor:
            biases = dict(zip(("gate_bias", "up_bias", "down_bias"), given[3:6]))
            return _run(kept, read._replace(**biases), x.detach().reshape(rows.shape).contiguous()).view(x.shape)

        return Known(run, [place for _, place in there], note)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        """As many of a token's inputs are taken to be kept as of its hidden values, which are what a profile counts."""
        firing, rates = work.firing, work.rates
        touched = (1 - (1 - firing.frequency).clamp(min=0) ** work.tokens).mean().item()
        read = work.gemms * firing.d_ff * firing.d_model * work.itemsize * touched
        return {
            "gemm": 0.0,
            "rows": read / rates.bandwidth,
            "memory": 2 * work.tokens * (firing.d_ff + firing.d_model) * work.itemsize / rates.bandwidth,
            "launches": 2 * rates.launch,
            "lost": 0.0,
        }


def _on_gpu(weights: Weights) -> bool:
    return weights.up.device.type in turned.DEVICES


def _run(kept: kept_inputs.Kept, read: Weights, rows: Tensor) -> Tensor:
    gate_bias, up_bias, down_bias = (b if b is None else b.detach().contiguous() for b in read[3:6])
    return kept_inputs.layer(rows, read.gate, read.up, read.down_t, gate_bias, up_bias, down_bias, kept)


PATHS = (KeptInputs(),)
