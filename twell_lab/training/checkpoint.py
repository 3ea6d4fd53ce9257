"""What a training run keeps in its folder, and the model that it begins with and ends as.

    out/training.pt         of torch.save, read with weights_only=True: all that a run needs to go on
        metrics.jsonl       the rows of the history
        tokenizer.json      what the text is read through
        model.safetensors   with config.json the model, once the run has ended or was interrupted

A checkpoint is written beside the last one and then moved over it: whenever a run is killed, a whole one is there.
A run may begin with a model of this project, or one of transformers, such as `relufy` makes:

    twell-lab train --from my-relufied-llama --text my-texts --l1 1e-5 --out build/further"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..core import InputError, RecordError, locked_folder, write_atomically
from ..layers.activations import is_squared
from ..layers.find import firing_layers
from ..models import published
from ..models.tiny import LanguageModel
from .config import TrainConfig
from .text.source import Text, check_apart

STATE, MODEL, TOKENIZER = "training.pt", "model.safetensors", "tokenizer.json"

# What a checkpoint holds, its tensors whole (not sharded). step: steps made. config: of `fields_of`. text: what the
# text says of itself, and the sizes of its parts in bytes. seconds: how long it has trained. history: its rows.
# order, noise: states of the generators that draw windows and fresh gate rows. weights: the model's, by name.
# optimizer: AdamW's state, by name of the weight. silent: for each layer how many tokens ago each neuron fired.
FIELDS = "step config text seconds history order noise weights optimizer silent".split()

# Fields of the config that may change when a run is resumed.
FREE = ("steps", "device", "compile", "kernels", "parallel", "log", "from_", "text")


class Interrupted(KeyboardInterrupt):
    """A run that was interrupted and saved in a folder."""

    def __init__(self, folder: str | os.PathLike, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}, saved in {os.fspath(folder)!r}")
        self.folder = os.fspath(folder)


def fields_of(config: TrainConfig) -> dict:
    """Return the fields of a config as a resumption in another folder reads them, plain, with None for a Text."""
    fields = dict(vars(config))
    for name in ("text", "from_", "tokenizer"):
        path = os.fspath(fields[name]) if isinstance(fields[name], (str, os.PathLike)) else None
        fields[name] = os.path.abspath(path) if path is not None and os.path.exists(path) else path
    return fields


def save(folder: str | os.PathLike, state: dict) -> None:
    """Write `state` as the checkpoint of a folder, whole or not at all. InputError where it can't be written."""
    path = Path(folder, STATE)
    part = path.with_suffix(".part")
    try:
        torch.save(state, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            part.unlink()
        raise InputError(f"cannot save a checkpoint in {str(folder)!r}: {error}") from None


def load(folder: str | os.PathLike) -> dict:
    """Return the checkpoint in a folder, with FIELDS, its tensors mapped from the file. InputError where there is none,
    or where it can't be read."""
    path = Path(folder, STATE)
    if not path.is_file():
        raise InputError(f"there is no checkpoint in {str(folder)!r}; accepted: the folder that training saved in")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: state[name] for name in FIELDS}
    except Exception as error:  # of unpickling: errors of any kind
        raise InputError(f"{STATE} in {str(folder)!r} cannot be read: {error}") from None


def config_of(folder: str | os.PathLike, **changes) -> TrainConfig:
    """Return the config of the checkpoint in `folder`, with `changes`."""
    try:
        return TrainConfig(**{**load(folder)["config"], **changes})
    except TypeError as error:  # a damaged file may name other fields
        raise InputError(f"{STATE} in {str(folder)!r} cannot be read: {error}") from None


def check_same(state: dict, config: TrainConfig, text: dict) -> None:
    """Raise InputError, naming the field and both values, where the run in `state` began with another config or text,
    which is described as in a checkpoint."""

    def begun(config: dict, text: dict) -> dict:
        of_text = {f"the text's {name}": text[name] for name in ("sha256", "training_size")}
        of_text["the sha256 of the text's tokenizer"] = text.get("tokenizer", {}).get("sha256")
        return {**config, "tokenizer": config["tokenizer"] or "bytes", **of_text}

    then = begun(state["config"], state["text"])
    for name, value in begun(fields_of(config), text).items():
        if name not in FREE and value != then.get(name):
            raise InputError(
                f"{name} is {value!r}, and {then.get(name)!r} in the checkpoint; accepted: what the run began with "
                f"(what may change: {', '.join(FREE[:-1])}, and where the text lies)"
            )
    if config.steps <= state["step"] and config.steps != state["config"]["steps"]:
        raise InputError(f"steps is {config.steps}; accepted: more than {state['step']}, the steps made so far")


@contextmanager
def opened(folder: str | os.PathLike, text: Text, path, history: list[dict], new: bool) -> Iterator[Callable]:
    """A context in which a run alone saves in a folder; gives what writes a row into its metrics.jsonl, which has the
    history already.

    path: of the text. new: whether the run does not go on there. InputError for a folder that can't be written or is in
    use, and for a new run in the folder of its text or of another run or model, which it would overwrite."""
    if new:
        check_apart(folder, path)
    with locked_folder(folder, "training"):
        for what, name in (("run", STATE), ("model", MODEL)):
            if new and Path(folder, name).exists():
                raise InputError(
                    f"{str(folder)!r} holds a {what}; accepted: to resume a run, or another or an empty folder"
                )
        try:
            write_atomically(Path(folder, TOKENIZER), text.tokenizer.content)
            file = open(Path(folder, "metrics.jsonl"), "w", encoding="utf-8")
            file.writelines(json.dumps(row) + "\n" for row in history)
        except (OSError, RecordError) as error:
            raise InputError(f"cannot save in {str(folder)!r}: {error}") from None
        with file:
            yield lambda row: print(json.dumps(row), file=file, flush=True)


# ---- the model that a run begins with and ends as ----


def load_model(name: str | os.PathLike) -> nn.Module:
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
    another, and for longer windows than the model reads."""
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
            raise InputError(f"{name} is {asked!r}, and {value!r} in the model to start from; accepted: leave it out")
    most = getattr(sizes, "context", None) or getattr(sizes, "max_position_embeddings", None)
    if most and config.context > most:
        raise InputError(f"context is {config.context}; accepted: at most {most}, which the model to start from reads")
    return replace(config, **own)


def save_model(model: nn.Module, folder: str | os.PathLike, name: str | os.PathLike | None) -> None:
    """Write a trained model into the folder; one of transformers with the tokenizer of the model `name`, from which it
    started."""
    if isinstance(model, LanguageModel):
        model.save(folder)
        return
    model.config.use_cache = True
    with published.quiet():
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (path := published.folder_of(name) / file).is_file():
            shutil.copyfile(path, Path(folder) / file)
