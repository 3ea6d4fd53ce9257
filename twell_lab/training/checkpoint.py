"""The checkpoint of a training run: one file with all that a run needs to go on as if nothing had happened.

    out/training.pt         of torch.save, read with weights_only=True
        metrics.jsonl       the rows of the history
        tokenizer.json      where the text is not read as bytes
        model.safetensors   with config.json the model, once the run has ended or was interrupted

A checkpoint is written beside the last one and then moved over it: whenever a run is killed, a whole one is there.
Under torchrun every process gathers the tensors, and the first one writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

from ..core import InputError, RecordError, locked_folder
from .config import TrainConfig
from .text.source import check_apart
from .text.tokenizer import BYTES, Tokenizer

STATE, MODEL, TOKENIZER = "training.pt", "model.safetensors", "tokenizer.json"

# What a checkpoint holds, its tensors whole (not sharded). step: steps made. config: of `fields_of`. text: what the
# text says of itself, its path and its training_size in bytes. seconds: how long it has trained. history: its rows.
# order, noise: states of the generators that draw windows and fresh gate rows. weights: the model's, by name.
# optimizer: AdamW's state, by name of the weight. silent: for each layer how many tokens ago each neuron fired.
FIELDS = "step config text seconds history order noise weights optimizer silent".split()

# Fields of the config that may change when a run is resumed: how long, where and how it computes, how often it saves,
# where the model lies that it began with.
FREE = ("steps", "device", "compile", "kernels", "parallel", "checkpoint_every", "log", "from_")


class Interrupted(KeyboardInterrupt):
    """A run that was interrupted and saved; the message says where."""

    def __init__(self, folder: str | os.PathLike, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}, saved in {os.fspath(folder)!r}")
        self.folder = os.fspath(folder)


def fields_of(config: TrainConfig) -> dict:
    """Return the fields of a config, except the text, as torch.load reads them back with weights_only=True."""
    plain = {name: value for name, value in vars(config).items() if name != "text"}
    return {**plain, "tokenizer": config.tokenizer and os.fspath(config.tokenizer), "from_": lasting(config.from_)}


def lasting(path) -> str | None:
    """Return a path, or a name on the Hub, as a resumption in another folder reads it; None for what is neither."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return os.path.abspath(name) if name is not None and os.path.exists(name) else name


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
    if not exists(folder):
        raise InputError(
            f"there is no checkpoint in {os.fspath(folder)!r}; accepted: the folder that training saved in"
        )
    try:
        state = torch.load(Path(folder, STATE), map_location="cpu", weights_only=True, mmap=True)
        return {name: state[name] for name in FIELDS}
    except Exception as error:  # of unpickling: errors of any kind
        raise InputError(f"{STATE} in {os.fspath(folder)!r} cannot be read: {error}") from None


def exists(folder: str | os.PathLike) -> bool:
    """Return whether a folder holds a checkpoint."""
    return Path(folder, STATE).is_file()


def text_of(folder: str | os.PathLike) -> dict:
    """Return what the checkpoint in a folder says of its text; {} where there is none."""
    return load(folder)["text"] if exists(folder) else {}


def config_of(folder: str | os.PathLike, **changes) -> TrainConfig:
    """Return the config of the checkpoint in `folder`, with `changes`. Its `text` is the path the text had."""
    state = load(folder)
    try:
        return TrainConfig(**{**state["config"], "text": state["text"]["path"], **changes})
    except (TypeError, KeyError) as error:  # a damaged file may name other fields
        raise InputError(f"{STATE} in {os.fspath(folder)!r} cannot be read: {error}") from None


def check_same(state: dict, config: TrainConfig, text: dict) -> None:
    """Raise InputError, naming the field and both values, where the run in `state` began with another config or text,
    which is described as in a checkpoint."""

    def begun(config: dict, text: dict) -> dict:
        fields = {name: value for name, value in config.items() if name not in FREE}
        fields |= {f"the text's {name}": text[name] for name in ("sha256", "training_size")}
        return fields | {
            "tokenizer": config["tokenizer"] or "bytes",
            "the sha256 of the text's tokenizer": text.get("tokenizer", {}).get("sha256"),
        }

    then = begun(state["config"], state["text"])
    for name, value in begun(fields_of(config), text).items():
        if value != then.get(name):
            raise InputError(
                f"{name} is {value!r}, and {then.get(name)!r} in the checkpoint; accepted: what the run began with "
                f"(what may change: {', '.join(FREE)}, and where the text lies)"
            )
    if config.steps <= state["step"] and config.steps != state["config"]["steps"]:
        raise InputError(f"steps is {config.steps}; accepted: more than {state['step']}, the steps made so far")


@contextmanager
def opened(folder: str | os.PathLike, text, tokenizer: Tokenizer, history: list[dict], new: bool) -> Iterator[IO[str]]:
    """A context in which a run alone saves in a folder, with its open metrics.jsonl, to which the history is written.

    text: the config's. new: whether the run does not go on there. InputError for a folder that can't be written or is
    in use, and for a new run in the folder of its text or of another run or model, which it would overwrite."""
    if new:
        check_apart(folder, text)
    with locked_folder(folder, "training"):
        for what, name in (("run", STATE), ("model", MODEL)):
            if new and Path(folder, name).exists():
                raise InputError(
                    f"{os.fspath(folder)!r} holds a {what}; accepted: to resume a run, or another or an empty folder"
                )
        try:
            if tokenizer == BYTES:
                Path(folder, TOKENIZER).unlink(missing_ok=True)  # of a run that ended before it saved anything
            else:
                tokenizer.save(Path(folder, TOKENIZER))
            file = open(Path(folder, "metrics.jsonl"), "w", encoding="utf-8")
            file.writelines(json.dumps(row) + "\n" for row in history)
        except (OSError, RecordError) as error:
            raise InputError(f"cannot save in {os.fspath(folder)!r}: {error}") from None
        with file:
            yield file
