"""The training run of notebook 11 in which layers change their path: what its loop calls.

Data in, data out, nothing drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ...analysis import switching
from ...layers.find import feed_forwards
from ...layers.terms import layer_terms
from ...models.swap import sparsify
from ...training.config import TrainConfig, learning_rate
from ...training.loop import initial_model
from ...training.objective import cross_entropy
from ...training.text.source import random_windows
from .. import notebook
from .data import saved_tensors


def sixteen_bits(device: str):
    """torch.autocast to 16 bits on a GPU, where the sparse kernels are; nothing on a CPU."""
    return torch.autocast("cuda", notebook.sixteen_bits(device)) if device == "cuda" else nullcontext()


def windows_of(config: TrainConfig, device: str) -> Iterator[Tensor]:
    """Yield int64 [batch, context + 1] of the training part of config.text, which must be a Text, without an end."""
    data, order = config.text.split()[0].tokens.to(device), torch.Generator().manual_seed(config.seed)
    while True:
        yield random_windows(data, config.batch, config.context, order)


def train(
    config: TrainConfig, device: str, limit: float, every: int = 10
) -> tuple[nn.Module, Iterator[Tensor], list[dict]]:
    """(model, windows, history): a run of config.steps that begins with every layer on its dense path.

    Every `every` steps, `switching.switch` compares how many neurons fired since the last time with `limit`: a layer is
    sparse while fewer do. history: rows {step, nnz and paths (by layer), bytes (kept by autograd)}."""
    model = sparsify(initial_model(config), "twell").to(device)
    layers = [layer.module for layer in feed_forwards(model)]
    for layer in layers:
        layer.learn("dense")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    windows, history, recent = windows_of(config, device), [], []
    for step in range(1, config.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        with layer_terms(model) as terms, saved_tensors(model) as saved, sixteen_bits(device):
            loss = cross_entropy(model, next(windows))
        loss = loss + config.l1 * sum(term.l1 for term in terms) / len(terms)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        recent.append([term.nnz for term in terms])
        if step % every == 0:
            means = [torch.stack(nnz).mean() for nnz in zip(*recent, strict=True)]
            terms, recent = [term._replace(nnz=nnz) for term, nnz in zip(terms, means, strict=True)], []
            switching.switch(model, terms, below=limit)
            row = {"step": step, "nnz": [float(nnz) for nnz in means]}
            row["bytes"] = sum(tensor["bytes"] for tensor in saved)
            history.append(row | {"paths": [layer.learning for layer in layers]})
    return model, windows, history


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
