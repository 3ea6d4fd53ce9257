"""What becomes of a SiLU model by the recipe of the library's page: `relufy`, then transformers' Trainer with a
SparsityCallback. Beside it stands the same model, trained on for as many steps without a change.

Rows say the loss of held-out text in nats a byte, the share of neurons that fire, and the time of a step of
`tl.generate`."""

from __future__ import annotations

import copy
import tempfile
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..analysis.profile import profile
from ..models.generate import generate
from ..models.relufy import relufy
from ..models.swap import sparsify
from ..models.tiny import ModelConfig
from ..ops import clock
from ..training.callback import SparsityCallback
from ..training.text import source
from . import drawn, rows

BASE, CONTROL, RELU, SPARSE = "SiLU", "SiLU, trained on", "ReLU and L1, dense", "ReLU and L1, planned"


class Recipe(NamedTuple):
    """A model, and how it is trained: first with SiLU, then with a ReLU and L1. rates: learning rates of the two."""

    sizes: ModelConfig = ModelConfig(d_model=2048, layers=4, heads=16, d_ff=5632, context=512)
    batch: int = 32
    steps: tuple[int, int] = (400, 600)
    rates: tuple[float, float] = (4e-4, 2e-4)
    l1: float = 5e-5
    warmup: int = 200  # of L1
    new: int = 256  # tokens of a generation that is timed
    held_out: int = 256  # windows


def fit(model: torch.nn.Module, windows: Tensor, batch: int, steps: int, rate: float, *callbacks: Any) -> list[dict]:
    """Train a model of transformers by its Trainer on windows, token ids [n, context]; return what the Trainer logs."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            bf16=torch.cuda.is_available(),
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        texts = [{"input_ids": window, "labels": window} for window in windows]
        trainer = Trainer(model.train().requires_grad_(True), arguments, train_dataset=texts, callbacks=[*callbacks])
        trainer.train()
    model.eval().requires_grad_(False)
    return trainer.state.log_history


@torch.no_grad()
def loss(model: torch.nn.Module, windows: Tensor) -> float:
    """Return the mean loss of windows, token ids [n, context], in nats a token."""
    return fmean(float(model(input_ids=part, labels=part).loss) for part in windows.split(8))


def tuned_rows(recipe: Recipe) -> list[dict]:
    """Train by the recipe; return a row for each model. WrongResult where the planned model's loss is another one."""
    device, context = clock.present_device(None), recipe.sizes.context
    seen, held_out = (part.tokens for part in source.standard_library().split())
    draw = torch.Generator().manual_seed(0)
    windows = source.random_windows(seen, recipe.batch * sum(recipe.steps), context, draw)[:, :-1]
    first, then = windows.split([recipe.batch * steps for steps in recipe.steps])
    judged = source.spread_windows(held_out, recipe.held_out, context)[:, :-1].to(device)
    models = {BASE: drawn.llama(recipe.sizes, device, torch.float32, hidden_act="silu", mlp_bias=False)}
    fit(models[BASE], first, recipe.batch, recipe.steps[0], recipe.rates[0])
    models[CONTROL] = copy.deepcopy(models[BASE])
    fit(models[CONTROL], then, recipe.batch, recipe.steps[1], recipe.rates[1])
    models[RELU] = relufy(copy.deepcopy(models[BASE]))
    sparse = SparsityCallback(recipe.l1, warmup=recipe.warmup)
    fit(models[RELU], then, recipe.batch, recipe.steps[1], recipe.rates[1], sparse)
    for name, model in models.items():
        models[name] = model.to(clock.dtype_for(device))
    texts = [{"input_ids": part} for part in first[: 4 * recipe.batch].to(device).split(recipe.batch)]
    calls = "captured" if device.type == "cuda" else "eager"
    models[SPARSE] = sparsify(copy.deepcopy(models[RELU]), texts, tokens=[1], calls=calls)
    facts = {name: {"loss": round(loss(model, judged), 5)} for name, model in models.items()}
    rows.hold(SPARSE, abs(facts[SPARSE]["loss"] - facts[RELU]["loss"]), 0.01)
    density = fmean(layer.density for layer in profile(models[RELU], texts).layers)
    facts[RELU]["density"] = facts[SPARSE]["density"] = round(density, 5)
    prompt, samples = judged[:1, : context // 4], rows.Samples()
    for name, model in models.items():
        model.generation_config.eos_token_id = None
        speak = lambda turn, model=model: generate(model, prompt, max_new_tokens=recipe.new)  # noqa: E731
        walls = clock.time_bursts({name: speak}, rows.drain, rounds=5, count=1, warm=2)[name][1]
        samples[name] = [ms / recipe.new for ms in walls]
    says = {"steps": [*recipe.steps], "l1": recipe.l1, "layers": recipe.sizes.layers, "d_model": recipe.sizes.d_model}
    shared = rows.about(
        "fine-tuning", models[BASE].lm_head.weight, "the standard library, bytes", d_ff=recipe.sizes.d_ff, **says
    )
    return rows.table(shared, samples, facts, base=CONTROL)


def sections(left_out: dict | None = None, recipe: Recipe | None = None) -> rows.Sections:
    """Return the steps of the record: one."""
    return {"fine-tuning": [lambda: tuned_rows(recipe or Recipe())]}
