"""kept_inputs: for few tokens, a layer with thresholds on its inputs reads the weights of those that are kept alone.

    model = tl.thresholds(model, batches, 0.5, method="teal").apply(model)
    model = tl.sparsify(model, "kept_inputs")         # or without a name: each layer then decides by time

TEAL (Liu et al., arXiv 2408.14690; models.thresholds puts it on a model) zeroes the small inputs of gate and up, and of
down. An input meets a column of the weight, so all three weights are stored by their columns. From more than
ops.kept_inputs.FEW tokens on, which together keep nearly all inputs, on a CPU, in compiled code and where gradients are
needed the layer is dense, with the same zeros.

The path computes the layer as it is; what is lossy is the layer, which says so where it is printed."""

from __future__ import annotations

from torch import Tensor, nn

from ..cuda.launch import capability, layout, run
from ..layers.paths import Path
from ..layers.paths.cost import Rates, Work
from ..layers.storage import COLUMNS
from ..layers.weights import Weights
from ..ops import kept_inputs


class KeptInputs(Path):
    """Two launches: gate and up together, then down."""

    name = "kept_inputs"
    packs = False
    cuts = True
    learns = "dense"
    reads = {"gate": COLUMNS, "up": COLUMNS, "down": COLUMNS}

    def helps(self, tokens: int, rates: Rates) -> bool:
        return tokens <= kept_inputs.FEW and rates.device != "CPU"

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        tokens = x.shape[:-1].numel()
        if x.is_cuda and 0 < tokens <= kept_inputs.FEW:
            rows = x.reshape(tokens, x.shape[-1]).contiguous()
            turned = tuple(None if weight is None else weight.t() for weight in weights[:3])
            if kept_inputs.takes(capability(x.device.index), layout(rows), *map(layout, turned)):
                return run(kept_inputs.layer, rows, *turned, *weights[3:], layer.kept).view(x.shape)
        return layer.dense(x)

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


PATHS = (KeptInputs(),)
