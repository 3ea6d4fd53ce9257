"""The record of thresholds: a model with SiLU layers, trained here, and cut by CATS and by TEAL (models.thresholds).
What the cuts cost in loss on held-out text, and what a step of decoding takes: the model as it was trained, with
thresholds and computed densely, and with them through the kernels."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..analysis.profile import captured
from ..layers.find import feed_forwards
from ..models.swap import sparsify
from ..models.thresholds import LossChange, calibrate
from ..models.tiny import LanguageModel, ModelConfig
from ..training.objective import cross_entropy
from ..training.text import source
from . import rows
from .causal import Causal
from .rows import DENSE
from .workloads import PLACES, Tokens, check_cut, layer_errors, variant_rows

PATHS = {"cats": "twell", "teal": "kept_inputs"}
CUT, SPARSE = "thresholds, dense", {method: f"thresholds, forced {path}" for method, path in PATHS.items()}
KIND = "thresholds"


@dataclass(frozen=True)
class Shape:
    """The model, how long it is trained, and what is measured of it.

    batch, steps, lr: windows of `context` bytes a step, steps, and the highest learning rate. sparsities: of what each
    method cuts. held_out: windows on which losses are measured. cached: bytes of a sequence in a step of decoding, of
    `batches` sequences."""

    model: ModelConfig = ModelConfig(d_model=2048, layers=4, heads=16, d_ff=5632, context=512)
    batch: int = 32
    steps: int = 400
    lr: float = 4e-4
    sparsities: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    held_out: int = 256
    cached: int = 256
    batches: tuple[int, ...] = (1, 4, 16)
    device: str = "cuda"


class Trained:
    """The trained model, float32, in evaluation mode; held-out windows, int64 [held_out, context]; and by method what
    its layers did on some of the text that it was trained on."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.text, context = shape, source.standard_library(), shape.model.context
        seen, self.held_out = (part.tokens.to(shape.device) for part in self.text.split())
        self.windows = source.spread_windows(self.held_out, shape.held_out, context)[:, :-1]
        self.model = _train(shape, seen)
        batches = source.spread_windows(seen, max(1, shape.held_out // 8), context)[:, :-1].split(8)
        self.calibration = {method: calibrate(self.model, batches, method=method) for method in PATHS}


def _train(shape: Shape, text: Tensor) -> LanguageModel:
    """Return a SiLU model trained on random windows of a text of bytes, by AdamW with a linear warm-up and a cosine
    after it. Weights are float32, products bfloat16. TrainConfig's models have a ReLU, whose firing is counted."""
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = LanguageModel(shape.model)
    for layer in feed_forwards(model):
        layer.module.act_fn = nn.SiLU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.lr, betas=(0.9, 0.95))
    rise = lambda step: min(10 * (step + 1) / shape.steps, 0.5 + 0.5 * math.cos(math.pi * step / shape.steps))  # noqa: E731
    slope = torch.optim.lr_scheduler.LambdaLR(optimizer, rise)
    draw = torch.Generator().manual_seed(0)
    for _ in range(shape.steps):
        windows = source.random_windows(text, shape.batch, shape.model.context, draw).to(shape.device)
        with torch.autocast(shape.device, torch.bfloat16):
            loss = cross_entropy(model, windows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slope.step()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def cut_rows(trained: Trained, method: str, sparsity: float) -> list[dict]:
    """Return a step of decoding in bfloat16 for each batch size, the model with thresholds of this sparsity beside the
    one without; each row of the former says what they cost, and with "teal" the density of hidden values. Raises
    WrongResult where the kernels compute something else than the dense layers."""
    shape, path = trained.shape, SPARSE[method]
    chosen = trained.calibration[method].at(sparsity)
    cost = chosen.loss(trained.model, trained.windows, bytes_per_token=1.0)
    plain = copy.deepcopy(trained.model).bfloat16()
    cut = chosen.apply(copy.deepcopy(plain))
    sparse = sparsify(copy.deepcopy(cut), PATHS[method])
    models = {DENSE: Causal(plain), CUT: Causal(cut), path: Causal(sparse)}
    tokens = Tokens(shape.model.vocabulary, trained.windows.device, trained.held_out.long())
    density = [layer.density["activation" if method == "cats" else "hidden"] for layer in chosen.layers]
    says = {"sparsity": sparsity, "density": [round(share, 4) for share in density], **loss_facts(cost)}
    says["dense_loss"] = round(cost.dense, 5)
    how = {"cached": shape.cached, "nnz": shape.model.d_ff * sum(density) / len(density), "seconds": 1.0}
    label = f"{method.upper()} {sparsity:.0%}, {{}}, SiLU trained on {trained.text.name}"
    made = []
    layers = feed_forwards(cut)
    inputs = captured(cut, trained.windows.split(8), [layer.name for layer in layers], PLACES)
    for batch in shape.batches:
        worst = check_cut(layer_errors(layers, sparse, inputs, batch), path)
        facts = {CUT: says, path: says | {"layer_over_allowed": worst}}
        made += variant_rows(KIND, label, models, facts, tokens, batch, **how)
    return made


def loss_facts(cost: LossChange) -> dict:
    """Return what a row says of the loss of a lossy model, in nats, and of its change (low, mean, high)."""
    return {
        "loss": round(cost.thresholded, 5),
        "loss_change": [round(change, 5) for change in (cost.low, cost.change, cost.high)],
    }


def sections(shape: Shape = Shape()) -> rows.Sections:
    """Return the steps of the record: one for each method and sparsity. The first one trains the model."""
    trained = functools.cache(lambda: Trained(shape))
    steps = itertools.product(PATHS, shape.sparsities)
    return {"thresholds": [functools.partial(lambda *how: cut_rows(trained(), *how), *how) for how in steps]}
