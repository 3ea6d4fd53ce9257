"""Checkpoints of a training run: everything that a run needs to go on as if nothing had happened.

    out/checkpoint-000300/model.safetensors   weights; with config.json a model that twell-lab profile reads
                          config.json         and tokenizer.json, where it reads no bytes
                          training.pt         the rest of a State, for torch.load(..., weights_only=True)

A checkpoint is written into a folder of another name (checkpoint-000300.part) and then renamed, so that a folder with a
checkpoint's name is always whole; then the others are removed, renamed to .part first. Whatever a killed run left half
written or half removed ends in .part, and goes when a run begins or goes on there. Under torchrun every process gathers
the tensors, and the first one writes them."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from ..core import InputError, RecordError, check_folder
from ..models.tiny import FORMAT as MODEL_FORMAT
from ..models.tiny import ModelConfig
from .config import TrainConfig
from .text.prepared import PreparedText
from .text.source import Text

WEIGHTS, MODEL, STATE = "model.safetensors", "config.json", "training.pt"
TOKENIZER = "tokenizer.json"  # training writes it into the folder, unless the text is read as bytes

# Fields of the config that may change when a run is resumed: where and how it computes, and how often it saves.
FREE = ("device", "compile", "kernels", "parallel", "checkpoint_every", "text")


class Interrupted(KeyboardInterrupt):
    """A run that was interrupted and saved; the message says where."""

    def __init__(self, folder: str | os.PathLike, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}, saved in {os.fspath(folder)!r}")
        self.folder, self.step = os.fspath(folder), step


@dataclass
class State:
    """One checkpoint in memory. Tensors are whole (not sharded) and on the CPU.

    Attributes:
        step: steps made.
        config: the fields of its TrainConfig, except the text.
        model_config: the model's sizes.
        text: what `describe` says of the text.
        seconds: how long it has trained so far.
        history: its rows so far.
        order, noise: states of the generators that draw windows and fresh gate rows, uint8.
        weights: the model's, by name.
        optimizer: AdamW's state, {"<what>.<parameter>": tensor}, where what is exp_avg, exp_avg_sq or step.
        counts: state of twell_lab.training.dead.Tracker; empty if dead neurons are not tracked.
        paths: with kernels "auto": {"device", "below": break-evens by layer or None, "layers": path by layer,
            "graphs": state of twell_lab.training.compiled.Compiled, if the run is compiled}; otherwise empty.
    """

    step: int
    config: dict
    model_config: dict
    text: dict
    seconds: float
    history: list[dict]
    order: Tensor
    noise: Tensor
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    counts: dict[str, Tensor]
    paths: dict = field(default_factory=dict)


def describe(text: Text | PreparedText, given, training_size: int) -> dict:
    """Return what a checkpoint says of its text: what the text says of itself, its path and the size of its training
    part.

    given: the config's `text`, of which a path, or the name of a dataset, is kept for the resumption.
    training_size: bytes of the training part."""
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if path is not None and not path.startswith("hf:"):
        path = os.path.abspath(path)  # a resumption may begin in another folder
    return {**text.describe(), "path": path, "training_size": training_size}


def save(folder: str | os.PathLike, state: State, *, keep_older: bool = False) -> Path:
    """Write `state` as a checkpoint in `folder`, whole or not at all, and return the checkpoint's own folder.

    Then the other checkpoints there are removed, unless keep_older. InputError where it can't be written, and where one
    of this step is there; what was written of it is removed then."""
    folder = Path(folder)
    target = folder / f"checkpoint-{state.step:06d}"
    part = target.with_name(target.name + ".part")
    rest = {name: value for name, value in vars(state).items() if name != "weights"}
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        weights = {name: weight.contiguous() for name, weight in state.weights.items()}
        safetensors.torch.save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        (part / MODEL).write_text(json.dumps({"format": MODEL_FORMAT, **state.model_config}, indent=1) + "\n")
        if (folder / TOKENIZER).is_file():  # so that a checkpoint can be copied elsewhere and used without its run
            shutil.copyfile(folder / TOKENIZER, part / TOKENIZER)
        torch.save(rest, part / STATE)
        os.replace(part, target)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise InputError(f"cannot save a checkpoint in {str(folder)!r}: {error}") from None
    for path in () if keep_older else checkpoints(folder):
        if path != target:
            _remove(path)
    return target


def load(folder: str | os.PathLike) -> State:
    """Return the newest checkpoint in `folder`. InputError where there is none, or where it is not whole."""
    path = newest(folder)
    rest = _read(path)
    try:
        return State(**rest, weights=safetensors.torch.load_file(path / WEIGHTS))
    except Exception as error:  # the library raises its own kinds
        raise InputError(f"{WEIGHTS} in the checkpoint {str(path)!r} cannot be read: {error}") from None


def _read(path: Path) -> dict:
    """Return all of a checkpoint's State but the weights."""
    try:
        rest = torch.load(path / STATE, map_location="cpu", weights_only=True)
        kinds = {"step": int, "seconds": float, "history": list, "order": Tensor, "noise": Tensor}
        for name in {one.name for one in fields(State)} - {"weights"}:
            if not isinstance(rest[name], kind := kinds.get(name, dict)):
                raise TypeError(f"{name} is a {type(rest[name]).__name__}; accepted: {kind.__name__}")
        return rest
    except Exception as error:  # of unpickling: errors of any kind
        raise InputError(f"{STATE} in the checkpoint {str(path)!r} cannot be read: {error}") from None


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Return the checkpoints in a folder, by ascending step; of a folder that is one itself, that one alone."""
    folder = Path(folder)
    if (folder / STATE).is_file():
        return [folder]
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def newest(folder: str | os.PathLike) -> Path:
    """Return the folder of the newest checkpoint in `folder`. InputError where there is none."""
    found = checkpoints(folder)
    if not found:
        beside = checkpoints(Path(folder).parent) if Path(folder).name.startswith("checkpoint-") else []
        hint = f"; the newest beside it is {beside[-1].name!r}" if beside else ""
        raise InputError(
            f"there is no checkpoint in {str(folder)!r}{hint}; accepted: the folder that training saved in, or one "
            "of its checkpoints"
        )
    return found[-1]


def home(folder: str | os.PathLike) -> Path:
    """Return the folder that a run saves in, given that or one of its checkpoints. InputError without a checkpoint."""
    found = newest(folder)
    return found.parent if found == Path(folder) else Path(folder)


def text_of(folder: str | os.PathLike) -> dict:
    """Return what the newest checkpoint in a folder says of the text it was trained on (see `describe`); {} where the
    folder has no checkpoint."""
    found = checkpoints(folder)
    return _read(found[-1])["text"] if found else {}


def config_of(folder: str | os.PathLike, **changes) -> TrainConfig:
    """Return the config of the newest checkpoint in `folder`, with `changes`. Its `text` is the path the text had."""
    state = _read(newest(folder))
    if unknown := sorted(set(state["config"]) - {one.name for one in fields(TrainConfig)}):
        raise InputError(f"the checkpoint's config has {', '.join(unknown)}, which this release does not know")
    return TrainConfig(**{**state["config"], "text": state["text"]["path"], **changes})


def check_same(
    state: State, config: TrainConfig, model: ModelConfig, text: Text | PreparedText, training_size: int
) -> None:
    """Raise InputError, naming the field and both values, where the run in `state` began with another config, model or
    text."""
    for name, value in vars(config).items():
        saved = state.config.get(name, getattr(TrainConfig, name))  # early releases lacked some fields
        if name == "tokenizer":  # None and "bytes" name the same one
            saved, value = ("bytes" if one is None else one for one in (saved, value))
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if name not in FREE and saved != value:
            raise InputError(
                f"{name} is {value!r}, and {saved!r} in the checkpoint; accepted: what the run began with "
                f"(what may change: {', '.join(one for one in FREE if one != 'text')}, and where the text lies)"
            )
    tokenizers = [of.get("tokenizer", {}) for of in (text.describe(), state.text)]
    pairs = [("the text's sha256", text.sha256, state.text["sha256"])]
    pairs += [("the bytes of the text's training part", training_size, state.text["training_size"])]
    pairs += [("the text's tokenizer", *(tokenizer.get("sha256") for tokenizer in tokenizers))]
    pairs += [
        (f"the model's {name}", value, state.model_config.get(name, value)) for name, value in asdict(model).items()
    ]
    for what, value, saved in pairs:
        if value != saved:
            raise InputError(
                f"{what} is {value!r} ({text.name}), and {saved!r} ({state.text['name']}) in the checkpoint; accepted: "
                "the text and the model that the run began with, prepared or not as then"
            )


def prepare(folder: str | os.PathLike) -> Path:
    """Return the folder for a new run to save in, made if need be. InputError where it can't be written, or holds a run
    or a model, which the new run would overwrite."""
    folder = writable(folder)
    if found := checkpoints(folder):
        state = _read(found[-1])
        step, steps = state["step"], state["config"].get("steps", TrainConfig.steps)
        holds, resume = f"a run of {steps} steps", ""
        if step < steps:
            holds, resume = f"a run stopped at step {step} of {steps}", "to resume it, or "
        raise InputError(
            f"{str(folder)!r} holds {holds}; accepted: {resume}another folder, or this one once it is empty"
        )
    if (folder / WEIGHTS).exists():
        raise InputError(f"{str(folder)!r} holds a model; accepted: another folder, or this one once it is empty")
    return folder


def tidy(folder: str | os.PathLike, after: int | None = None) -> None:
    """Remove what killed runs left half written in the folder and, where a run goes on from the step `after`, its
    checkpoints of later steps. Only for the process that has the folder's lock."""
    for path in checkpoints(folder):
        if after is not None and int(path.name[11:]) > after:
            _remove(path)
    for left in Path(folder).glob("checkpoint-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    for left in Path(folder).glob(".*.part"):  # of core.write_atomically
        with suppress(OSError):
            left.unlink()


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no half-removed folder ever has a checkpoint's name."""
    part = path.with_name(path.name + ".part")
    with suppress(OSError):
        os.replace(path, part)
        shutil.rmtree(part)


def writable(folder: str | os.PathLike) -> Path:
    """Return the folder, made if need be. InputError where no file can be made in it."""
    try:
        check_folder(folder)
    except RecordError as error:
        raise InputError(f"cannot save in {os.fspath(folder)!r}: {error}") from None
    return Path(folder)
