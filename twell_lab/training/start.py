"""Training that goes on with a model that is there: one of this project, or one of transformers, such as one that
`relufy` made and save_pretrained saved:

    twell-lab train --from my-relufied-llama --text my-texts --l1 1e-5 --out build/further"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..core import InputError
from ..layers.activations import is_squared
from ..layers.find import firing_layers
from ..models import published
from ..models.tiny import LanguageModel
from .config import TrainConfig


def load(name: str | os.PathLike) -> nn.Module:
    """Return the model of a folder, or of the Hub, on the CPU in float32, in training mode. Errors: as of tl.load, and
    InputError for a model without ReLU, or with thresholds, whose file would not hold what was trained."""
    model = published.load(name, dtype=torch.float32).train()
    if other := [layer.name for layer in firing_layers(model) if not isinstance(layer.pattern, nn.Linear)]:
        raise InputError(f"{other[0]} in {os.fspath(name)!r} is not made of nn.Linear; accepted: a Llama-like model")
    if not isinstance(model, LanguageModel):
        model.config.use_cache = False  # of keys and values, which training does not read
    return model


def fitted(config: TrainConfig, model: nn.Module) -> TrainConfig:
    """Return the config with the sizes of the model that it starts from. InputError for a size that was given and is
    another, and for windows that are longer than the model reads."""
    layers, sizes = firing_layers(model), model.config
    first = layers[0]
    own = {
        "d_model": first.up.in_features,
        "layers": len(layers),
        "heads": getattr(sizes, "heads", None) or getattr(sizes, "num_attention_heads", config.heads),
        "d_ff": first.up.out_features,
        "gated": first.gate not in (None, first.up),  # which stands for the gate of a squared plain layer
        "activation": "relu2" if first.gate is first.up or is_squared(first.acts) else "relu",
    }
    for name, value in own.items():
        if (asked := getattr(config, name)) not in (value, getattr(TrainConfig, name)):
            raise InputError(
                f"{name} is {asked!r}, and {value!r} in the model to start from; accepted: to leave it out"
            )
    most = getattr(sizes, "context", None) or getattr(sizes, "max_position_embeddings", None)
    if most and config.context > most:
        raise InputError(f"context is {config.context}; accepted: at most {most}, which the model to start from reads")
    return replace(config, **own)


def save(model: nn.Module, folder: str | os.PathLike, name: str | os.PathLike | None) -> None:
    """Write a trained model into the folder; one of transformers together with the tokenizer's files of the model
    called `name`, from which it started."""
    if isinstance(model, LanguageModel):
        model.save(folder)
        return
    model.config.use_cache = True
    with published.quiet():
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (path := published.folder_of(name) / file).is_file():
            shutil.copyfile(path, Path(folder) / file)
