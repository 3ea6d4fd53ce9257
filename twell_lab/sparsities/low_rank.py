"""A feed-forward layer that computes, for each token, the neurons that two narrow matrices score highest. Lossy.

    (layer,) = feed_forwards(model)
    few = PredictedFFN(layer, LowRank(d_model, d_ff, rank=32), neurons=64)
    y = few(x)

`sparsities.predictors` trains such matrices and puts these layers into a model."""

from __future__ import annotations

from torch import Tensor, nn

from ..layers.find import FeedForward
from .few_neurons import FewNeurons, places


class LowRank(nn.Module):
    """Scores of neurons by two matrices: x [rows, d_model] -> [rows, d_ff], higher where firing is likelier.

    set_aside: `prune` leaves these alone."""

    set_aside = True

    def __init__(self, d_model: int, d_ff: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(d_model, rank, bias=False)
        self.wide = nn.Linear(rank, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x))


class PredictedFFN(FewNeurons):
    """Computes, for each token, the `neurons` neurons that a LowRank scores highest. Lossy.

    One row gathers them, the columns of down from a transpose that the layer owns; several rows, which have each their
    own, are computed densely and masked, and spare nothing."""

    down_t: Tensor

    def __init__(self, layer: FeedForward, predictor: LowRank, neurons: int) -> None:
        super().__init__(layer)
        self.predictor, self.neurons = predictor, neurons
        self.label = f"{neurons} predicted neurons a token"
        self.renew()

    def renew(self) -> None:
        self.own(down_t=self._parts[2].weight.t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        best = self.predictor(rows).topk(self.neurons, sorted=False).indices
        if len(rows) == 1:
            neurons = best[0]
            first, up = (None if part is None else part.weight.index_select(0, neurons) for part in self._parts[:2])
            return self.product(rows, first, up, self.down_t.index_select(0, neurons), neurons).view(x.shape)
        return self.masked(rows, places(best, len(self.down_t))).view(x.shape)
