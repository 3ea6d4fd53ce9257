"""What becomes of a SiLU model by the recipe of the library's page: `relufy`, then transformers' Trainer with a
SparsityCallback. Beside it stands the same model, trained on for as many steps without a change.

Rows say the loss of held-out text in nats a byte, before and after, the share of neurons that fire, and the time of a
step of `tl.generate`."""

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
from ..training.objective import SparsityCallback
from ..training.text import source
from . import drawn, rows

CONTROL, SPARSE = "SiLU, trained on", "ReLU and L1, planned"


class Recipe(NamedTuple):
    """A model, and how it is trained: first with SiLU, then with a ReLU and L1. rates: learning rates of the two."""

    sizes: ModelConfig = ModelConfig(d_model=2048, layers=4, heads=16, d_ff=5632, context=512)
    batch: int = 32
    steps: tuple[int, int] = (300, 1000)
    rates: tuple[float, float] = (4e-4, 2e-4)
    l1: float = 6e-4
    warmup: int = 300  # of L1
    new: int = 256  # tokens of a generation that is timed
    held_out: int = 256  # windows


def fit(model: torch.nn.Module, windows: Tensor, batch: int, steps: int, rate: float, *callbacks: Any) -> list[dict]:
    """Train a model of transformers by its Trainer on windows, token ids [n, context]; return what the Trainer logs."""
    from transformers import Trainer, TrainingArguments

    tenth = max(1, steps // 10)
    how = {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": rate, "warmup_steps": tenth}
    how |= {"logging_steps": tenth, "lr_scheduler_type": "cosine", "bf16": torch.cuda.is_available()}
    how |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        texts = [{"input_ids": window, "labels": window} for window in windows]
        arguments = TrainingArguments(folder, **how)
        trainer = Trainer(model.train().requires_grad_(True), arguments, train_dataset=texts, callbacks=[*callbacks])
        trainer.train()
    model.eval().requires_grad_(False)
    return trainer.state.log_history


@torch.no_grad()
def loss(model: torch.nn.Module, windows: Tensor) -> float:
    """Return the mean loss of windows, token ids [n, context], in nats a token."""
    return fmean(float(model(input_ids=part, labels=part).loss) for part in windows.split(8))


def tuned_rows(recipe: Recipe) -> list[dict]:
    """Train by the recipe; return a row for each of the two models. WrongResult where the planned one's loss differs
    from that of the same model without kernels."""
    device, context = clock.present_device(None), recipe.sizes.context
    seen, held_out = (part.tokens for part in source.standard_library().split())
    draw = torch.Generator().manual_seed(0)
    windows = source.random_windows(seen, recipe.batch * sum(recipe.steps), context, draw)[:, :-1]
    first, then = windows.split([recipe.batch * steps for steps in recipe.steps])
    judged = source.spread_windows(held_out, recipe.held_out, context)[:, :-1].to(device)
    model = drawn.llama(recipe.sizes, device, torch.float32, hidden_act="silu")
    fit(model, first, recipe.batch, recipe.steps[0], recipe.rates[0])
    before, relu = loss(model, judged), relufy(copy.deepcopy(model))
    fit(model, then, recipe.batch, recipe.steps[1], recipe.rates[1])
    sparse = SparsityCallback(recipe.l1, warmup=recipe.warmup)
    logged = fit(relu, then, recipe.batch, recipe.steps[1], recipe.rates[1], sparse)
    model, relu = (each.to(clock.dtype_for(device)) for each in (model, relu))
    texts = [{"input_ids": part} for part in first[: 4 * recipe.batch].to(device).split(recipe.batch)]
    calls = "captured" if device.type == "cuda" else "eager"
    models = {CONTROL: model, SPARSE: sparsify(copy.deepcopy(relu), texts, tokens=[1], calls=calls)}
    facts: dict[str, dict] = {name: {"loss": round(loss(each, judged), 5)} for name, each in models.items()}
    rows.hold(SPARSE, abs(facts[SPARSE]["loss"] - loss(relu, judged)), 0.01)
    facts[SPARSE] |= {"density": round(fmean(layer.density for layer in profile(relu, texts).layers), 5)}
    facts[SPARSE] |= {"logged": [step for step in logged if "density" in step]}
    prompt, samples = judged[:1, : context // 4], rows.Samples()
    for name, each in models.items():
        each.generation_config.eos_token_id = None
        speak = lambda turn, each=each: generate(each, prompt, max_new_tokens=recipe.new)  # noqa: E731
        walls = clock.time_bursts({name: speak}, rows.drain, rounds=5, count=1, warm=2)[name][1]
        samples[name] = [ms / recipe.new for ms in walls]
    says = {"steps": [*recipe.steps], "l1": recipe.l1, "layers": recipe.sizes.layers, "d_model": recipe.sizes.d_model}
    says |= {"d_ff": recipe.sizes.d_ff, "loss_before": round(before, 5)}
    shared = rows.about("fine-tuning", model.lm_head.weight, "the standard library, bytes", **says)
    return rows.table(shared, samples, facts, base=CONTROL)


def sections(left_out: dict | None = None, recipe: Recipe | None = None) -> rows.Sections:
    """Return the steps of the record: one."""
    return {"fine-tuning": [lambda: tuned_rows(recipe or Recipe())]}
