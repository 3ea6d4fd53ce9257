"""The record of thresholds: a model with SiLU layers, trained here for as long as a record may take, and cut by CATS
and by TEAL (twell_lab.models.thresholds). What the cuts cost in loss on text that was held out, and what a step of
decoding takes: the model as it was trained, with thresholds and computed densely, and with them through the kernels."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.choice import Choice
from ..layers.find import feed_forwards
from ..models.swap import sparsify
from ..models.thresholds import Calibration, LossChange, Thresholds, calibrate
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..training.text import source
from . import rows
from .causal import Causal
from .cut_checks import CutLayer, hard_inputs, inputs_of, model_ratio
from .rows import DENSE
from .workloads import Clocks, Tokens, decode

CUT, SPARSE = "thresholds, dense", {"cats": "thresholds, forced twell", "teal": "thresholds, forced kept_inputs"}
KIND = "thresholds"
STEPS = 4  # of decoding, whose inputs of each layer are compared


@dataclass(frozen=True)
class Shape:
    """The model, how long it is trained, and what is measured of it.

    batch, steps, lr: windows of `context` bytes a step, steps, and the highest learning rate. sparsities: of what each
    method cuts. held_out: windows on which losses are measured. cached: bytes of a sequence in a step of decoding, of
    `batches` sequences."""

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(d_model=2048, layers=4, heads=16, d_ff=5632, context=512)
    )
    batch: int = 32
    steps: int = 400
    lr: float = 4e-4
    sparsities: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    held_out: int = 256
    cached: int = 256
    batches: tuple[int, ...] = (1, 4, 16)
    device: str = "cuda"


class Trained:
    """The trained model, and what its layers did on some of the text it was trained on.

    Attributes:
        model: float32, in evaluation mode.
        windows: held-out text, int64 [held_out, context].
    """

    def __init__(self, shape: Shape) -> None:
        self.shape, self.device = shape, torch.device(shape.device)
        self.text = source.standard_library()
        seen, held_out = (part.tokens for part in self.text.split())
        self.held_out, context = held_out, shape.model.context
        self.windows = source.spread_windows(held_out, shape.held_out, context)[:, :-1].to(self.device)
        self.model = _train(shape, seen.to(self.device))
        batches = source.spread_windows(seen, max(1, shape.held_out // 8), context)[:, :-1].to(self.device)
        self.batches = batches.split(8)
        self._calibrations: dict[str, Calibration] = {}

    def cut(self, sparsity: float, method: str = "cats") -> tuple[Thresholds, LossChange]:
        """Thresholds of this sparsity, and what they cost in float32."""
        if method not in self._calibrations:
            self._calibrations[method] = calibrate(self.model, self.batches, method=method)
        found = self._calibrations[method].at(sparsity)
        return found, found.loss(self.model, self.windows, bytes_per_token=1.0)


def _train(shape: Shape, text: Tensor) -> LanguageModel:
    """A SiLU model trained on random windows of a text of bytes, by AdamW with a linear warm-up and a cosine after it.

    Weights are float32, products bfloat16. TrainConfig's models have a ReLU, whose firing the trainer counts."""
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = LanguageModel(shape.model)
        draw = torch.Generator(shape.device).manual_seed(0)
    for layer in feed_forwards(model):
        layer.module.act_fn = nn.SiLU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.lr, betas=(0.9, 0.95))
    warm = max(1, shape.steps // 10)
    slope = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / shape.steps))
    )
    within = torch.arange(shape.model.context + 1, device=text.device)
    for _ in range(shape.steps):
        at = torch.randint(0, len(text) - len(within), (shape.batch, 1), device=text.device, generator=draw)
        windows = text[at + within].long()
        with torch.autocast(shape.device, torch.bfloat16):
            logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slope.step()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def cut_rows(
    trained: Trained, sparsity: float, method: str = "cats", refused: dict[str, str] | None = None
) -> list[dict]:
    """A step of decoding in bfloat16 for each batch size, the model with thresholds of this sparsity beside the one
    without; each row of the former says what they cost, and with "teal" the density of hidden values.

    refused: where the kernels compute something else than the dense layers (bench.cut_checks), why is put here, and the
    rows of that path are missing; without it, clock.WrongResult is raised."""
    shape, path = trained.shape, SPARSE[method]
    found, cost = trained.cut(sparsity, method)
    exact = Causal(found.apply(copy.deepcopy(trained.model)))
    plain = copy.deepcopy(trained.model).bfloat16()
    cut = found.apply(copy.deepcopy(plain))
    sparse = sparsify(copy.deepcopy(cut), Choice(path.rpartition(" ")[2]))
    models = {DENSE: Causal(plain), CUT: Causal(cut), path: Causal(sparse)}
    tokens = Tokens(shape.model.vocabulary, trained.device, trained.held_out.long())
    says = {
        "sparsity": sparsity,
        "density": [round(layer.density["activation" if method == "cats" else "hidden"], 4) for layer in found.layers],
        "loss": round(cost.thresholded, 5),
        "dense_loss": round(cost.dense, 5),
        "loss_change": [round(each, 5) for each in (cost.low, cost.change, cost.high)],
    }
    layers = [CutLayer(layer) for layer in feed_forwards(cut)]
    made = []
    for batch in shape.batches:
        label, ways = f"{method.upper()} {sparsity:.0%}, decode step, batch {batch}", [DENSE, CUT]
        facts = {DENSE: {}, CUT: says, path: dict(says)}
        try:
            facts[path] |= _checked(models, path, exact, layers, tokens, batch, shape.cached)
            ways.append(path)
        except clock.WrongResult as error:
            if refused is None:
                raise clock.WrongResult(f"{label}: {error}") from None
            refused[f"{label}, {path}"] = str(error)
        (work,) = decode(tokens, models[DENSE], batch, shape.cached, (True,))
        calls = {name: work.makes(models[name], False) for name in ways}
        shared = _shared(trained, batch, label, says["density"])
        made += [row | work.says for row in rows.table(shared, *_timed(calls, batch, trained.device, facts))]
    return made


def _checked(
    models: dict[str, Causal], path: str, exact: Causal, layers: list[CutLayer], tokens: Tokens, batch: int, cached: int
) -> dict:
    """Return what a row says of the checks that a path passed; clock.WrongResult for one that it did not."""
    ids = tokens.windows(tokens.MEASURED, STEPS * batch, cached).split(batch)
    steps = [(some[:, -1:], models[DENSE].keep(some[:, :-1])) for some in ids]
    step = models[CUT].stepper()
    entered = inputs_of([each.layer for each in layers], lambda: [step(*each) for each in steps])
    worst = 0.0
    for each in layers:
        xs = entered[each.layer.name]
        ratio = each.ratio(models[path].model.get_submodule(each.layer.name), [*xs, *hard_inputs(each.layer, xs[0])])
        if not ratio <= 1.0:
            raise clock.WrongResult(f"{each.layer.name} is off by {ratio:.3g} times what is allowed")
        worst = max(worst, ratio)
    ratio, read = model_ratio(exact, models[CUT], models[path], models[DENSE], tokens, batch, cached)
    if not ratio <= 1.0:
        raise clock.WrongResult(
            f"the logits of {read:,} tokens are off by {ratio:.3g} times what is allowed on average"
        )
    return {"layer_over_allowed": round(worst, 4), "error_over_allowed": round(ratio, 4), "compared_tokens": read}


def _timed(calls: dict[str, Callable], batch: int, device: torch.device, facts: dict) -> tuple:
    samples, bursts = (
        rows.clock_cpu(calls, 1.0) if device.type == "cpu" else Clocks(device, graphs=True).time(calls, batch, "", None)
    )
    return samples, facts, bursts


def _shared(trained: Trained, batch: int, workload: str, density: list[float]) -> dict:
    sizes = trained.shape.model
    return {
        "kind": KIND,
        "device": clock.device_name(trained.device),
        "dtype": "bfloat16",
        "tokens": batch,
        "d_model": sizes.d_model,
        "d_ff": sizes.d_ff,
        "gated": sizes.gated,
        "layers": sizes.layers,
        "parameters": sum(each.numel() for each in trained.model.parameters()),
        "nnz": round(sizes.d_ff * sum(density) / len(density), 2),
        "workload": f"{workload}, SiLU trained on {trained.text.name}",
    }


def sections(refused: dict[str, str], shape: Shape = Shape()) -> rows.Sections:
    """The steps of the record, as in bench.inference: one for each method and sparsity. The model is trained when the
    first needs it. refused: as for `cut_rows`."""
    trained = functools.cache(lambda: Trained(shape))

    def step(method: str, sparsity: float) -> list[dict]:
        return cut_rows(trained(), sparsity, method, refused)

    steps = itertools.product(SPARSE, shape.sparsities)
    return {"thresholds": [functools.partial(step, *each) for each in steps]}
