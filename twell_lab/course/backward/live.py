"""The training run of notebook 11 in which layers change their path: what its loop calls.

Data in, data out, nothing drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ...analysis import costs, switching
from ...analysis.switching import break_even
from ...core import InputError
from ...layers.find import feed_forwards
from ...layers.terms import LayerTerm, layer_terms
from ...models.swap import sparsify
from ...ops.reference import GatedFeedForward
from ...training.config import TrainConfig, learning_rate
from ...training.loop import initial_model
from ...training.objective import cross_entropy
from ...training.text.source import random_windows
from .. import notebook
from ..roofline.data import Rates
from .data import saved_tensors


def small_layer(d_model: int, d_ff: int, seed: int = 0) -> nn.Module:
    """A gated layer of float32, its weights drawn at random."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return GatedFeedForward(d_model, d_ff)


def start(config: TrainConfig, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]:
    """(model, optimizer, windows) before the first step: every feed-forward layer is a SparseFFN on its dense path.

    windows never ends and yields int64 [batch, context + 1] of the training part of config.text, which must be a Text.
    """
    model = sparsify(initial_model(config), "twell").to(device)
    for layer in feed_forwards(model):
        layer.module.learn("dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    return model, optimizer, _windows(config, device)


def _windows(config: TrainConfig, device: str) -> Iterator[Tensor]:
    data, order = config.text.split()[0].data.to(device), torch.Generator().manual_seed(config.seed)
    while True:
        yield random_windows(data, config.batch, config.context, order)


def sixteen_bits(device: str):
    """torch.autocast to 16 bits on a GPU, where the sparse kernels are; nothing on a CPU."""
    return torch.autocast("cuda", notebook.sixteen_bits(device)) if device == "cuda" else nullcontext()


def train(
    config: TrainConfig, device: str, limit: float, every: int = 10
) -> tuple[nn.Module, Iterator[Tensor], list[dict]]:
    """(model, windows, history): a run of config.steps in which a layer is sparse while fewer than `limit` fire.

    Every `every` steps, `switching.switch` compares what the layers' terms counted since the last time with the limit.
    history: rows {step, nnz and paths (by layer), bytes (kept by autograd in this step)}.
    """
    model, optimizer, windows = start(config, device)
    history, recent = [], []
    for step in range(1, config.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        with layer_terms(model) as terms, saved_tensors(model) as saved, sixteen_bits(device):
            loss = cross_entropy(model, next(windows))
        loss = loss + config.l1 * sum(term.l1 for term in terms) / len(terms)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(terms)
        if step % every == 0:
            mean, recent = averaged(recent), []
            switching.switch(model, mean, below=limit)
            history.append(
                {
                    "step": step,
                    "nnz": [float(term.nnz) for term in mean],
                    "bytes": sum(tensor["bytes"] for tensor in saved),
                    "paths": [layer.module.learning for layer in feed_forwards(model)],
                }
            )
    return model, windows, history


def break_even_share(reached: Rates, d_model: int = 2048, d_ff: int = 5632) -> float:
    """The share of firing neurons below which a training step is faster on the sparse path, at these rates.

    Computed as in twell_lab.analysis.switching.
    """
    rates = costs.Rates(
        device="a GPU", dtype="bfloat16", bandwidth=reached.memory, l2=reached.l2, matmul=reached.tensor, launch=0.0
    )
    return break_even(rates, d_model, d_ff) / d_ff


def averaged(recent: list[list[LayerTerm]]) -> list[LayerTerm]:
    """The terms of several forward passes as one, each number a mean."""
    if not recent:
        raise InputError("recent is empty; the terms of one forward pass or more are accepted")
    return [
        LayerTerm(each[0].name, *map(_mean, zip(*((term.l1.detach(), *term[2:]) for term in each), strict=True)))
        for each in zip(*recent, strict=True)
    ]


def _mean(values: Iterable[Tensor | None]) -> Tensor | None:
    known = [value for value in values if value is not None]
    return torch.stack(known).mean() if known else None


def gradients(model: nn.Module, windows: Tensor, path: str, l1: float) -> list[Tensor]:
    """The gradient of every parameter for one batch, with all layers on this path.

    The model's own `.grad` and the paths of its layers are the same afterwards.
    """
    layers = [found.module for found in feed_forwards(model)]
    before = [layer.learning for layer in layers]
    try:
        for layer in layers:
            layer.learn(path)
        with layer_terms(model) as terms:
            loss = cross_entropy(model, windows)
        loss = loss + l1 * sum(term.l1 for term in terms) / len(terms)
        return list(torch.autograd.grad(loss, list(model.parameters())))
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.learn(was)


def furthest_apart(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest |a - b| / |b| over pairs of tensors."""
    return max(
        float((one.double() - two.double()).norm() / two.double().norm().clamp(min=1e-300))
        for one, two in zip(a, b, strict=True)
    )
