"""kept_inputs: for few tokens, a layer with thresholds on its inputs reads the weights of those that are kept alone.

    model = tl.thresholds(model, batches, 0.5, method="teal").apply(model)
    model = tl.sparsify(model, "kept_inputs")         # or without a name: each layer then decides by time

TEAL (Liu et al., arXiv 2408.14690; models.thresholds puts it on a model) zeroes the small inputs of gate and up, and of
down. For more than ops.kept_inputs.FEW tokens, on a CPU and where gradients are needed the layer is dense, with the
same zeros: what is lossy is the layer, not the path. WINA's thresholds differ by column, which the kernel does not
know: torch's operations zero what enters it, and it skips zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ..cuda.launch import Call, Layout
from ..layers.parts import Weights
from ..layers.paths import Path
from ..layers.paths.cost import Rates, Work
from ..layers.storage import COLUMNS
from ..ops import kept_inputs


class KeptInputs(Path):
    """Two launches: gate and up together, then down. An input meets a column of the weight, so all lie by columns."""

    name = "kept_inputs"
    packs = False
    cuts = True
    learns = "dense"
    reads = {"gate": COLUMNS, "up": COLUMNS, "down": COLUMNS}

    def helps(self, tokens: int, rates: Rates) -> bool:
        return tokens <= kept_inputs.FEW and rates.device != "CPU"

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        x = x.contiguous()
        prepared = self.prepare(layer, x, weights, hot)
        return layer.dense(x) if prepared is None else prepared(x)

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor] | None:
        tokens, d_model = x.shape[:-1].numel(), x.shape[-1]
        if not x.is_cuda or not 0 < tokens <= kept_inputs.FEW:
            return None
        call = Call(x.device)
        rows = call.input(Layout((tokens, d_model), (d_model, 1), x.dtype, x.data_ptr() & 15))
        buffers = [call.input(weight) for weight in weights]
        turned = tuple(b if b is None else b.t() for b in buffers[:3])
        if not kept_inputs.takes(call.capability, rows, *turned):
            return None
        if layer.parts.cut.by_column:
            return partial(layer.by_kept_inputs, weights=weights)
        given = (rows, *turned, *buffers[3:], layer.kept)
        call.returns(kept_inputs.layer(call, *given))
        return call.bind(*weights)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        firing, rates = work.firing, work.rates
        # As many of a token's inputs are taken to be kept as of its hidden values, which are what a profile counts.
        touched = (1 - (1 - firing.frequency).clamp(min=0) ** work.tokens).mean().item()
        read = work.gemms * firing.d_ff * firing.d_model * work.itemsize * touched / rates.bandwidth
        memory = 2 * work.tokens * (firing.d_ff + firing.d_model) * work.itemsize / rates.bandwidth
        return {"gemm": 0.0, "rows": read, "memory": memory, "launches": 2 * rates.launch, "lost": 0.0}
