"""Checkpoints of a training run: everything that a run needs to go on as if nothing had happened.

    out/checkpoint-000300/state.json             config, step, random states, history
                          model.safetensors      weights; with config.json a model that twell-lab profile reads
                          config.json            and tokenizer.json, where it reads no bytes
                          optimizer.safetensors  AdamW's moments and step counts, counts of dead neurons

A checkpoint is written under another name, forced to the disk and then renamed, so a folder of this name is whole. Once
it is there the ones before it are removed. What a process that was killed left half written, the next `save` removes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .errors import InputError
from .model import FORMAT as MODEL_FORMAT
from .model import ModelConfig, _safetensors
from .prepared import PreparedText
from .text import Text
from .train_config import TrainConfig

FORMAT = 1  # of state.json; raised when an older reader would misread it
TOKENIZER = "tokenizer.json"  # training writes it into the folder, unless the text is read as bytes

# What may differ between a run and its resumption: where and how it computes, and how often it saves.
FREE = ("device", "compile", "kernels", "parallel", "checkpoint_every", "text")


class Interrupted(KeyboardInterrupt):
    """A run that was interrupted and saved; the message says where."""

    def __init__(self, folder: str | os.PathLike, step: int, steps: int) -> None:
        super().__init__(f"stopped after step {step} of {steps}, saved in {os.fspath(folder)!r}")
        self.folder, self.step = os.fspath(folder), step


@dataclass
class State:
    """One checkpoint in memory. Tensors are whole (not sharded) and on the CPU.

    step: steps made. config: what the run was told, but for its text: `text` says which (its name, sha256 and size, and
    the path where there is one). seconds: trained so far. order, noise: states of the generators of windows and of fresh
    gate rows, uint8. optimizer: {"<what>.<parameter>": tensor}. counts: of twell_lab.dead.Tracker; empty if not tracked.
    paths: of kernels "auto": {"device", "below": break-evens by layer or None, "layers": path by layer, "graphs": compiling.Compiled's
        if it is compiled}; otherwise empty.
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
    """What a checkpoint says of its text. given: the config's `text`; only a path is kept, for the resumption. training_size:
    bytes of its training part."""
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if path is not None and not path.startswith("hf:"):
        path = os.path.abspath(path)  # a resumption may begin in another folder
    return {**text.describe(), "path": path, "training_size": training_size}


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints in a folder, by step, ascending; a folder that is one itself is the only one."""
    folder = Path(folder)
    if (folder / "state.json").is_file():
        return [folder]
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def text_of(folder: str | os.PathLike) -> dict:
    """What the newest checkpoint in a folder says of the text it was trained on (see `describe`); {} where there is none."""
    found = checkpoints(folder)
    return _fields(found[-1])["text"] if found else {}


def save(folder: str | os.PathLike, state: State, *, keep_older: bool = False) -> Path:
    """Write `state` below `folder`, whole or not at all; returns its folder. Then the other checkpoints there are removed,
    unless keep_older. InputError where it can't be written; nothing of it is left behind then."""
    safetensors = _safetensors()
    from safetensors import SafetensorError

    folder = Path(folder)
    target = folder / f"checkpoint-{state.step:06d}"
    part = target.with_name(target.name + ".part")
    fields = {name: value for name, value in vars(state).items() if not isinstance(value, (Tensor, dict))}
    fields |= {name: getattr(state, name) for name in ("config", "model_config", "text", "paths")}
    fields |= {name: getattr(state, name).numpy().tobytes().hex() for name in ("order", "noise")}
    extra = {**state.optimizer, **{f"counts.{name}": value for name, value in state.counts.items()}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("checkpoint-*.part"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
        for name, tensors in (("model", state.weights), ("optimizer", extra)):
            safetensors.save_file({key: value.contiguous() for key, value in tensors.items()}, part / f"{name}.safetensors")
        (part / "config.json").write_bytes(_json({"format": MODEL_FORMAT, **state.model_config}))
        if (folder / TOKENIZER).is_file():  # so that a checkpoint taken elsewhere still reads its text as it was trained
            shutil.copyfile(folder / TOKENIZER, part / TOKENIZER)
        sizes = {path.name: path.stat().st_size for path in part.iterdir()}
        (part / "state.json").write_bytes(_json({"format": FORMAT, "sizes": sizes, **fields}))
        for path in (*part.iterdir(), part):
            _to_disk(path)
        older = [path for path in checkpoints(folder) if path != target]
        if target.exists():  # the same step, reached again from an older checkpoint: it goes only once the new one is there
            before = target.with_name(target.name + ".old.part")
            target.rename(before)
            part.rename(target)
            shutil.rmtree(before, ignore_errors=True)
        else:
            part.rename(target)
        _to_disk(folder)
        for path in () if keep_older else older:
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise InputError(f"cannot save a checkpoint in {str(folder)!r}: {error}") from None
    return target


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlast a power cut."""
    if not path.is_dir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        return
    with suppress(OSError):  # some systems open no folders, some file systems cannot wait for one
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load(folder: str | os.PathLike) -> State:
    """The newest checkpoint in `folder`. InputError names what is missing, truncated or of another format."""
    safetensors = _safetensors()
    path = newest(folder)
    fields = _fields(path)
    tensors = {}
    for name, size in fields["sizes"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise InputError(f"the checkpoint {str(path)!r} cannot be read: {error}") from None
        if len(content) != size:
            raise InputError(f"{name} in the checkpoint {str(path)!r} has {len(content)} bytes where {size} were written: "
                             f"it is {'truncated, or ' if len(content) < size else ''}another file; accepted: a whole checkpoint")
        if name.endswith(".safetensors"):
            try:
                tensors[name] = safetensors.load(content)
            except Exception as error:  # the library raises its own kinds
                raise InputError(f"{name} in the checkpoint {str(path)!r} is damaged: {error}") from None
    optimizer = tensors["optimizer.safetensors"]
    counts = {name[7:]: optimizer.pop(name) for name in list(optimizer) if name.startswith("counts.")}
    plain = {name: fields[name] for name in ("step", "config", "model_config", "text", "seconds", "history")}
    states = {name: torch.frombuffer(bytearray.fromhex(fields[name]), dtype=torch.uint8) for name in ("order", "noise")}
    return State(**plain, **states, weights=tensors["model.safetensors"], optimizer=optimizer, counts=counts,
                 paths=fields.get("paths", {}))


def newest(folder: str | os.PathLike) -> Path:
    """The newest checkpoint's own folder; InputError where there is none."""
    found = checkpoints(folder)
    if not found:
        raise InputError(f"there is no checkpoint in {str(folder)!r}; accepted: the folder that training saved in, or one "
                         "of its checkpoints")
    return found[-1]


def home(folder: str | os.PathLike) -> Path:
    """The folder that a run saves in, given that or one of its checkpoints. InputError where there is no checkpoint."""
    found = newest(folder)
    return found.parent if found == Path(folder) else Path(folder)


def config_of(folder: str | os.PathLike, **changes) -> TrainConfig:
    """The config of the newest checkpoint in `folder`, its text named by the path it had, with `changes`."""
    fields = _fields(newest(folder))
    known = {each.name for each in dataclasses.fields(TrainConfig)}
    if unknown := sorted(set(fields["config"]) - known):
        raise InputError(f"the checkpoint's config has {', '.join(unknown)}, which this release does not know")
    return TrainConfig(**{**fields["config"], "text": fields["text"]["path"], **changes})


def check_same(state: State, config: TrainConfig, model: ModelConfig, text: Text | PreparedText, training_size: int) -> None:
    """InputError naming the field and both values unless `config` and `text` go on with the run in `state`."""
    for name, value in vars(config).items():
        saved = state.config.get(name, _default(name))
        if name == "tokenizer":  # two names of one
            saved, value = ("bytes" if each is None else each for each in (saved, value))
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if name not in FREE and saved != value:
            raise InputError(f"{name} is {value!r}, and {saved!r} in the checkpoint; accepted: what the run began with "
                             f"(what may change: {', '.join(each for each in FREE if each != 'text')}, and where the text lies)")
    for name in ("sha256", "size"):
        if state.text[name] != getattr(text, name):
            raise InputError(f"the text's {name} is {getattr(text, name)!r} ({text.name}), and {state.text[name]!r} "
                             f"({state.text['name']}) in the checkpoint; accepted: the text the run began with")
    if (held := state.text.get("training_size", training_size)) != training_size:  # a text and what was prepared of it are cut apart
        raise InputError(f"the text's training part has {training_size} bytes, and {held} in the checkpoint; accepted: the text as "
                         "the run read it, prepared or not")
    saved, mine = (each.get("tokenizer", {}) for each in (state.text, text.describe()))
    if saved.get("sha256") != mine.get("sha256"):
        raise InputError(f"the text's tokenizer is {mine}, and {saved} in the checkpoint; accepted: the same")
    for name, value in asdict(model).items():
        if (saved := state.model_config.get(name, value)) != value:
            raise InputError(f"the model's {name} is {value!r}, and {saved!r} in the checkpoint; accepted: the same")


def prepare(folder: str | os.PathLike) -> Path:
    """The folder to save in, made if need be. InputError if it can't be written, or holds a run or a model, which would be
    lost, or mixed with this one."""
    folder = writable(folder)
    if found := checkpoints(folder):
        fields = _fields(found[-1])
        step, steps = fields["step"], fields["config"]["steps"]
        holds, resume = (f"a run stopped at step {step} of {steps}", "to resume it, or ") if step < steps else (f"a run of {steps} steps", "")
        raise InputError(f"{str(folder)!r} holds {holds}; accepted: {resume}another folder, or this one once it is empty")
    if (folder / "model.safetensors").exists():
        raise InputError(f"{str(folder)!r} holds a model; accepted: another folder, or this one once it is empty")
    return folder


def check_apart(folder: str | os.PathLike, text) -> None:
    """InputError where what is saved in `folder` would be part of the text, a folder too: it could not be resumed, as its
    text would be another one by then. text: the config's."""
    if not isinstance(text, (str, os.PathLike)) or not os.path.isdir(text):
        return
    inner, outer = Path(folder).resolve(), Path(text).resolve()
    if inner.is_relative_to(outer) and not any(part.startswith(".") for part in inner.relative_to(outer).parts):
        raise InputError(f"{str(folder)!r} is inside of the text {str(text)!r}, which what is saved there would change; "
                         "accepted: a folder outside of it, or one whose name begins with a dot")


def writable(folder: str | os.PathLike) -> Path:
    """The folder, made if need be. InputError where no file can be made in it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".twell-lab.part"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot save in {str(folder)!r}: {error}") from None
    return folder


def _fields(path: Path) -> dict:
    try:
        fields = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"state.json in the checkpoint {str(path)!r} cannot be read: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise InputError(f"state.json in the checkpoint {str(path)!r} is not of format {FORMAT}, the one read")
    wanted = {"sizes", *(each.name for each in dataclasses.fields(State))} - {"weights", "optimizer", "counts", "paths"}
    if missing := sorted(wanted - fields.keys()):
        raise InputError(f"state.json in the checkpoint {str(path)!r} lacks {', '.join(missing)}")
    return fields


def _default(name: str):
    return next(each.default for each in dataclasses.fields(TrainConfig) if each.name == name)


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
