"""Predicted neurons: each token computes a fixed number of neurons, guessed before the gate is computed. Lossy.

    found = predict(model, batches, recall=0.95)    # model: dense, ReLU
    print(found)                                    # by layer: neurons, recall, precision
    model = found.apply(model)                      # lossy from here on; few_neurons.remove(model) takes it back

What fires is known once the gate is computed, which is a third of a gated layer's work. Deja Vu (Liu et al., arXiv
2310.17157) guesses earlier: two narrow matrices, trained for each layer, score all neurons of a token. Those with the
highest scores are computed; what fires and was not chosen is missing. `recall` is the share of firing neurons that were
chosen, `precision` the share of the chosen ones that fire, on inputs that the predictor was not trained on."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import captured
from ..core import InputError
from ..formats.twell import fires
from ..layers.find import FeedForward
from .checks import check_count, check_number
from .few_neurons import FewNeurons, Neurons, computed, dense_layers, gate_of, of_neurons

ROWS = 8192  # inputs of a layer that a predictor is made of, at most
HELD_OUT = 0.25  # the share of them, the last ones, on which it is judged


class LowRank(nn.Sequential):
    """Scores of neurons by two matrices: x [rows, d_model] -> [rows, d_ff], higher where firing is likelier."""

    def __init__(self, d_model: int, d_ff: int, rank: int) -> None:
        super().__init__(nn.Linear(d_model, rank, bias=False), nn.Linear(rank, d_ff))


class PredictedFFN(FewNeurons):
    """Computes, for each token, the `neurons` neurons that a LowRank scores highest: of one token the weights are
    gathered; of several, which have each their own, all are computed and masked. Lossy. It owns down transposed."""

    def __init__(self, layer: FeedForward, predictor: LowRank, neurons: int) -> None:
        super().__init__(layer, f"{neurons} predicted neurons a token")
        self.predictor, self.neurons = predictor, neurons
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        self.down_t = self.weights.down.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows, weights = x.reshape(-1, x.shape[-1]), self.weights
        scores = self.predictor(rows)
        best = scores.topk(self.neurons, sorted=False).indices
        if len(rows) == 1:
            return computed(rows, of_neurons(weights, best[0], self.down_t)).view(x.shape)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        return computed(rows, weights, chosen).view(x.shape)


class LayerPredictor(NamedTuple):
    """The predictor of one layer of shape (d_ff, d_model). firing: how many neurons fire at a token on average.
    recalls: float64 [d_ff + 1], the share of firing neurons among the n that score highest, on held-out inputs."""

    predictor: LowRank
    shape: tuple[int, int]
    firing: float
    recalls: Tensor

    @classmethod
    @torch.no_grad()
    def judged(cls, layer: FeedForward, predictor: LowRank, x: Tensor) -> LayerPredictor:
        """Make one of what a predictor makes of inputs x [tokens, d_model] of its layer."""
        order = predictor(x).argsort(dim=1, descending=True, stable=True)
        counts = F.pad(fires(gate_of(layer, x)).gather(1, order).sum(0).cpu().cumsum(0).double(), (1, 0))
        recalls = counts / counts[-1] if counts[-1] else torch.ones_like(counts)
        return cls(predictor, tuple(layer.up.weight.shape), float(counts[-1]) / len(x), recalls)

    def neurons(self, recall: float) -> int:
        """Return the least number of neurons, from 1 up, with which this recall is reached."""
        return max(1, int((self.recalls < recall - 1e-12).sum()))


def _check_recall(recall: float) -> float:
    return check_number("recall", recall, lambda share: 0 < share <= 1, "a number above 0 and up to 1")


class Predictors(Neurons):
    """Predictors of a model's layers, by name. recall: what was asked for, in each layer."""

    def __init__(self, layers: dict[str, LayerPredictor], recall: float) -> None:
        self.layers, self.recall = layers, _check_recall(recall)
        counts = {name: layer.neurons(recall) for name, layer in layers.items()}
        super().__init__(counts, {name: layer.shape for name, layer in layers.items()}, self._predicting)

    def at(self, recall: float) -> Predictors:
        """Return the same predictors for another recall. InputError for a number that is not above 0 and up to 1."""
        return Predictors(self.layers, recall)

    def _predicting(self, layer: FeedForward) -> PredictedFFN:
        predictor = copy.deepcopy(self.layers[layer.name].predictor).to(layer.up.weight)
        return PredictedFFN(layer, predictor, self.counts[layer.name])

    def table(self) -> list[dict]:
        """Return for each layer its name, neurons, d_ff, firing, recall and precision, JSON-able."""
        rows = []
        for name, layer in self.layers.items():
            neurons = self.counts[name]
            recall = float(layer.recalls[neurons])
            row = {"layer": name, "neurons": neurons, "d_ff": layer.shape[0], "firing": round(layer.firing, 2)}
            rows.append(row | {"recall": recall, "precision": recall * layer.firing / neurons})
        return rows

    def __str__(self) -> str:
        line = "{layer}: {neurons} of {d_ff} neurons, {firing} fire; recall {recall:.1%}, precision {precision:.1%}"
        return "\n".join([*(line.format(**row) for row in self.table()), super().__str__()])


def predict(
    model: nn.Module, batches: Iterable, *, recall: float = 0.95, rank: int = 32, steps: int = 300
) -> Predictors:
    """Train a predictor for each ReLU feed-forward layer of a trained model, to tell which neurons fire on what the
    layer is given (logistic loss, AdamW, float32). The model is left as it was.

    batches: as `twell_lab.profile` takes them. The first ROWS tokens are used; the last quarter of these only to judge.
    recall: the share of the firing neurons that each layer should compute, above 0 and up to 1; how many it computes
    follows. rank: how narrow the predictors are. steps: of 256 tokens each. InputError for wrong arguments, a model
    without a dense ReLU layer, fewer than 8 tokens, and inputs that are not finite."""
    _check_recall(recall)
    check_count("rank", rank)
    check_count("steps", steps)
    layers, trained = dense_layers(model), {}
    inputs = captured(model, batches, [layer.name for layer in layers], ROWS)
    for number, layer in enumerate(layers):
        x = inputs[layer.name].float()
        if len(x) < 8 or not x.isfinite().all():
            raise InputError(
                f"{layer.name!r} was given {len(x)} tokens, or values that are not finite; 8 tokens or more, of finite "
                "values, are accepted"
            )
        learnt = len(x) - max(1, round(HELD_OUT * len(x)))
        predictor = _train(layer, x[:learnt], rank, steps, number)
        trained[layer.name] = LayerPredictor.judged(layer, predictor, x[learnt:])
    return Predictors(trained, recall)


def _train(layer: FeedForward, x: Tensor, rank: int, steps: int, seed: int) -> LowRank:
    with torch.no_grad():
        target = fires(gate_of(layer, x))
    d_ff, d_model = layer.up.weight.shape
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
        torch.default_generator.manual_seed(seed)
        with torch.device("cpu"):
            predictor = LowRank(d_model, d_ff, rank).to(x.device)
        optimizer = torch.optim.AdamW(predictor.parameters(), lr=1e-2, weight_decay=1e-2)
        slope = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = torch.randint(len(x), (256,), device="cpu").to(x.device)
            scores = predictor(x[some])
            loss = F.binary_cross_entropy_with_logits(scores, target[some].float(), reduction="none").sum(1)
            optimizer.zero_grad(set_to_none=True)
            loss.mean().backward()
            optimizer.step()
            slope.step()
    return predictor.requires_grad_(False)
