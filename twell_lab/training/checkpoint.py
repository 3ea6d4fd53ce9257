"""Checkpoints of a training run: everything that a run needs to go on as if nothing had happened.

    out/checkpoint-000300/state.json             config, step, random states, history; size and SHA-256 of each file
                                                 and its own SHA-256
                          model.safetensors      weights; with config.json a model that twell-lab profile reads
                          config.json            and tokenizer.json, where it reads no bytes
                          optimizer.safetensors  AdamW's moments and step counts, counts of dead neurons

A checkpoint is written into a folder of another name (checkpoint-000300.part), forced to the disk and then renamed, so
that a folder with a checkpoint's name is always whole. Then the older checkpoints are renamed to .part too, and
removed. Where a step is saved once more, its earlier checkpoint is called checkpoint-000300.old until the new one is
there; until then it is read like any other. Whatever a killed process left half written or half removed ends in .part,
and the next `save` removes it.

torch.distributed.checkpoint would write a file for each process and a pickled index, which only torch reads, and no
digests. Here every process gathers the tensors, and the first one writes two safetensors files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import reprlib
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from ..core import InputError, RecordError, check_folder
from ..models.tiny import FORMAT as MODEL_FORMAT
from ..models.tiny import ModelConfig
from .config import TrainConfig
from .seal import seal, sha256, to_disk, unseal
from .text.prepared import PreparedText
from .text.source import Text

FORMAT = 1  # of state.json; raised when an older reader would misread it
TOKENIZER = "tokenizer.json"  # training writes it into the folder, unless the text is read as bytes
FILES = ("model.safetensors", "optimizer.safetensors", "config.json", TOKENIZER)  # of a checkpoint, beside state.json
OLD = ".old"  # ends the name of a checkpoint whose step is being saved again
# Fields of State that state.json holds as they are.
AS_THEY_ARE = ("step", "seconds", "history", "config", "model_config", "text", "paths")
GENERATORS = ("order", "noise")  # and those that it holds as hexadecimal digits

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
    """What a checkpoint says of its text: what the text says of itself, its path and the size of its training part.

    given: the config's `text`, of which a path, or the name of a dataset, is kept for the resumption.
    training_size: bytes of the training part."""
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if path is not None and not path.startswith("hf:"):
        path = os.path.abspath(path)  # a resumption may begin in another folder
    return {**text.describe(), "path": path, "training_size": training_size}


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints in a folder, by ascending step. Of a folder that is a checkpoint itself, that one alone."""
    folder = Path(folder)
    return [folder] if (folder / "state.json").is_file() else _below(folder)


def _below(folder: Path) -> list[Path]:
    found = [
        path for path in folder.glob("checkpoint-*") if path.name[11:].removesuffix(OLD).isdecimal() and path.is_dir()
    ]
    return sorted(found, key=lambda path: (int(path.name[11:].removesuffix(OLD)), not path.name.endswith(OLD)))


def text_of(folder: str | os.PathLike) -> dict:
    """What the newest checkpoint in a folder says of the text it was trained on (see `describe`); {} where the folder
    has no checkpoint."""
    found = checkpoints(folder)
    return _fields(found[-1])["text"] if found else {}


def save(folder: str | os.PathLike, state: State, *, keep_older: bool = False) -> Path:
    """Write `state` as a checkpoint in `folder`, whole or not at all, and return the checkpoint's own folder.

    Then the other checkpoints there are removed, unless keep_older. InputError where it can't be written; what was
    written of it is removed then."""
    from safetensors import SafetensorError

    folder = Path(folder)
    target = folder / f"checkpoint-{state.step:06d}"
    part = target.with_name(target.name + ".part")
    fields = {name: getattr(state, name) for name in AS_THEY_ARE}
    fields |= {name: getattr(state, name).numpy().tobytes().hex() for name in GENERATORS}
    extra = {**state.optimizer, **{f"counts.{name}": value for name, value in state.counts.items()}}
    model_config = {"format": MODEL_FORMAT, **state.model_config}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        part.mkdir()
        for name, tensors in (("model", state.weights), ("optimizer", extra)):
            whole = {key: value.contiguous() for key, value in tensors.items()}
            safetensors.torch.save_file(whole, part / f"{name}.safetensors")
        (part / "config.json").write_text(json.dumps(model_config, indent=1, allow_nan=False) + "\n")
        if (folder / TOKENIZER).is_file():  # so that a checkpoint can be copied elsewhere and used without its run
            shutil.copyfile(folder / TOKENIZER, part / TOKENIZER)
        written = sorted(part.iterdir())
        sizes = {path.name: path.stat().st_size for path in written}
        sums = {path.name: sha256(path) for path in written}
        (part / "state.json").write_bytes(seal({"format": FORMAT, "sizes": sizes, "files": sums, **fields}))
        for path in (*part.iterdir(), part):
            to_disk(path)
        before = target.with_name(target.name + OLD)
        if target.exists():  # the same step was saved before, and reached again from an older checkpoint
            if before.exists():
                _remove(before)
            target.rename(before)
        part.rename(target)
        to_disk(folder)
        if before.exists():
            _remove(before)
        for path in () if keep_older else _below(folder):
            if path != target:
                _remove(path)
    except (OSError, ValueError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise InputError(f"cannot save a checkpoint in {str(folder)!r}: {error}") from None
    return target


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no half-removed folder ever has a checkpoint's name."""
    part = path.with_name(path.name + ".part")
    with suppress(OSError):
        path.rename(part)
    shutil.rmtree(part, ignore_errors=True)


def load(folder: str | os.PathLike) -> State:
    """The newest checkpoint in `folder`. InputError names what is missing, truncated, altered or of another format.

    A checkpoint written before there were digests is read without comparing any, but its values are checked."""
    path = newest(folder)
    fields = _fields(path)
    tensors = {}
    for name, size in fields["sizes"].items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise InputError(f"the checkpoint {str(path)!r} cannot be read: {error}") from None
        if len(content) != size:
            raise InputError(
                f"{name} in the checkpoint {str(path)!r} has {len(content)} bytes where {size} were written: "
                f"it is {'truncated, or ' if len(content) < size else ''}another file; accepted: a whole checkpoint"
            )
        if "files" in fields and (found := hashlib.sha256(content).hexdigest()) != fields["files"][name]:
            raise InputError(
                f"{name} in the checkpoint {str(path)!r} was altered after it was written: its SHA-256 is {found}, and "
                f"{fields['files'][name]} is noted in state.json; accepted: a whole checkpoint"
            )
        if name.endswith(".safetensors"):
            try:
                tensors[name] = safetensors.torch.load(content)
            except Exception as error:  # the library raises its own kinds
                raise InputError(f"{name} in the checkpoint {str(path)!r} is damaged: {error}") from None
    optimizer = tensors["optimizer.safetensors"]
    counts = {name[7:]: optimizer.pop(name) for name in list(optimizer) if name.startswith("counts.")}
    states = {}
    for name in GENERATORS:
        try:
            states[name] = torch.frombuffer(bytearray.fromhex(fields[name]), dtype=torch.uint8)
            torch.Generator().set_state(states[name])
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"{name} in state.json of the checkpoint {str(path)!r} is no state of a generator: {error}"
            ) from None
    return State(
        **{name: fields[name] for name in AS_THEY_ARE},
        **states,
        weights=tensors["model.safetensors"],
        optimizer=optimizer,
        counts=counts,
    )


def newest(folder: str | os.PathLike) -> Path:
    """The folder of the newest checkpoint in `folder`. InputError where there is none."""
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
    """The folder that a run saves in, given that or one of its checkpoints. InputError where there is no checkpoint."""
    found = newest(folder)
    return found.parent if found == Path(folder) else Path(folder)


def config_of(folder: str | os.PathLike, **changes) -> TrainConfig:
    """The config of the newest checkpoint in `folder`, with `changes`. Its `text` is the path that the text had."""
    fields = _fields(newest(folder))
    known = {each.name for each in dataclasses.fields(TrainConfig)}
    if unknown := sorted(set(fields["config"]) - known):
        raise InputError(f"the checkpoint's config has {', '.join(unknown)}, which this release does not know")
    return TrainConfig(**{**fields["config"], "text": fields["text"]["path"], **changes})


def check_same(
    state: State, config: TrainConfig, model: ModelConfig, text: Text | PreparedText, training_size: int
) -> None:
    """InputError naming the field and both values where the run in `state` began with another config, model or text."""
    for name, value in vars(config).items():
        saved = state.config.get(name, getattr(TrainConfig, name))  # early releases lacked some fields
        if name == "tokenizer":  # None and "bytes" name the same one
            saved, value = ("bytes" if each is None else each for each in (saved, value))
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if name not in FREE and saved != value:
            raise InputError(
                f"{name} is {value!r}, and {saved!r} in the checkpoint; accepted: what the run began with "
                f"(what may change: {', '.join(each for each in FREE if each != 'text')}, and where the text lies)"
            )
    if state.text["sha256"] != text.sha256:
        raise InputError(
            f"the text's sha256 is {text.sha256!r} ({text.name}), and {state.text['sha256']!r} "
            f"({state.text['name']}) in the checkpoint; accepted: the text the run began with"
        )
    held = state.text.get("training_size", training_size)
    if held != training_size:  # a text is split at another place once it is prepared
        raise InputError(
            f"the text's training part has {training_size} bytes, and {held} in the checkpoint; accepted: the text as "
            "the run read it, prepared or not"
        )
    saved, mine = (each.get("tokenizer", {}) for each in (state.text, text.describe()))
    if saved.get("sha256") != mine.get("sha256"):
        raise InputError(f"the text's tokenizer is {mine}, and {saved} in the checkpoint; accepted: the same")
    if state.step >= config.steps and not _number((state.history or [{}])[-1].get("val_bits_per_byte")):
        raise InputError(
            f"the checkpoint is of the last step, {state.step}, and its history does not end with val_bits_per_byte; "
            "accepted: a checkpoint as it was written"
        )
    for name, value in asdict(model).items():
        if (saved := state.model_config.get(name, value)) != value:
            raise InputError(f"the model's {name} is {value!r}, and {saved!r} in the checkpoint; accepted: the same")


def prepare(folder: str | os.PathLike) -> Path:
    """The folder for a new run to save in, made if need be. InputError where it can't be written, or holds a run or a
    model, which the new run would overwrite."""
    folder = writable(folder)
    if found := checkpoints(folder):
        fields = _fields(found[-1])
        step, steps = fields["step"], fields["config"].get("steps", TrainConfig.steps)
        holds, resume = (
            (f"a run stopped at step {step} of {steps}", "to resume it, or ")
            if step < steps
            else (f"a run of {steps} steps", "")
        )
        raise InputError(
            f"{str(folder)!r} holds {holds}; accepted: {resume}another folder, or this one once it is empty"
        )
    if (folder / "model.safetensors").exists():
        raise InputError(f"{str(folder)!r} holds a model; accepted: another folder, or this one once it is empty")
    return folder


def tidy(folder: str | os.PathLike) -> None:
    """Remove what killed processes left half written in the folder. Only for the process that has its lock."""
    for left in Path(folder).glob("checkpoint-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    for name in (*FILES, "metrics.jsonl"):
        with suppress(OSError):
            (Path(folder) / f"{name}.part").unlink()


def writable(folder: str | os.PathLike) -> Path:
    """The folder, made if need be. InputError where no file can be made in it."""
    try:
        check_folder(folder)
    except RecordError as error:
        raise InputError(f"cannot save in {os.fspath(folder)!r}: {error}") from None
    return Path(folder)


def _fields(path: Path) -> dict:
    """What state.json of a checkpoint holds, each field checked. InputError where it can't be read, was altered, lacks
    a field or has a value that cannot be."""
    where = f"state.json in the checkpoint {str(path)!r}"
    try:
        fields = unseal((path / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be read: {error}") from None
    if fields.get("format") != FORMAT or isinstance(fields["format"], bool):
        raise InputError(f"{where} is not of format {FORMAT}, the one read")
    fields.setdefault("paths", {})  # which checkpoints of early releases lack
    if missing := sorted({"sizes", *AS_THEY_ARE, *GENERATORS} - fields.keys()):
        raise InputError(f"{where} lacks {', '.join(missing)}")
    for name, (fits, accepted) in _ACCEPTED.items():
        if name in fields and not fits(fields[name]):
            raise InputError(f"{name} in {where} is {reprlib.repr(fields[name])}; accepted: {accepted}")
    if fields.get("files", fields["sizes"]).keys() != fields["sizes"].keys():
        raise InputError(
            f"{where} names {sorted(fields['files'])} and sizes of {sorted(fields['sizes'])}; accepted: the same files"
        )
    known = {each.name for each in dataclasses.fields(TrainConfig)} - {"text"}
    try:  # TrainConfig checks each value
        TrainConfig(**{name: value for name, value in fields["config"].items() if name in known})
    except InputError as error:
        raise InputError(f"the config in {where} is not valid: {error}") from None
    return fields


def _whole(value, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _a_text(value) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("sha256"), str)
        and _whole(value.get("size"))
        and isinstance(value.get("path", 0), (str, type(None)))
        and _whole(value.get("training_size", 0))
        and isinstance(value.get("tokenizer", {}), dict)
    )


def _paths(value) -> bool:
    """Whether it is what State.paths says."""
    if not isinstance(value, dict) or not value:
        return value == {}
    layers, below = value.get("layers"), value.get("below", False)
    return (
        isinstance(value.get("device"), str)
        and isinstance(layers, dict)
        and all(path in ("dense", "twell") for path in layers.values())
        and (
            below is None
            or isinstance(below, dict)
            and below.keys() >= layers.keys()
            and all(map(_number, below.values()))
        )
        and ("graphs" not in value or _graphs(value["graphs"]))
    )


def _graphs(value) -> bool:
    """Whether it is what Compiled.state_dict (twell_lab.training.compiled) gives."""
    return (
        isinstance(value, dict)
        and _whole(value.get("changed_at"))
        and isinstance(value.get("whole"), bool)
        and isinstance(several := value.get("combinations"), list)
        and all(isinstance(each, list) and all(isinstance(path, str) for path in each) for each in several)
    )


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


# What state.json may hold in each field: a test of the value, and the same in words. The values in "config" are checked
# by TrainConfig.
_ACCEPTED = {
    "sizes": (
        lambda it: isinstance(it, dict) and {*FILES[:2]} <= it.keys() <= {*FILES} and all(map(_whole, it.values())),
        "a number of bytes for each file of a checkpoint",
    ),
    "files": (
        lambda it: isinstance(it, dict) and all(isinstance(each, str) for each in it.values()),
        "a SHA-256 for each file",
    ),
    "step": (_whole, "a whole number from 0 up"),
    "seconds": (_number, "a finite number"),
    "config": (lambda it: isinstance(it, dict), "fields of TrainConfig"),
    "model_config": (lambda it: isinstance(it, dict), "fields of ModelConfig"),
    "text": (_a_text, "name, sha256 and size of a text, and where it lies"),
    "history": (
        lambda it: isinstance(it, list) and all(isinstance(row, dict) and _whole(row.get("step"), 1) for row in it),
        "rows with a step",
    ),
    "order": (lambda it: isinstance(it, str), "hexadecimal digits"),
    "noise": (lambda it: isinstance(it, str), "hexadecimal digits"),
    "paths": (_paths, "a path for each layer"),
}
