"""What a training run is told (TrainConfig), also by a name (`named`) or in a file (`of`), its learning rate at each
step, and what it returns (TrainResult)."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from ..core import InputError, optional, read_file
from ..models.tiny import LanguageModel, ModelConfig
from .text.source import Text

# The least and the largest value of the fields that are numbers; between whole ones, whole numbers alone.
_FROM_1 = "steps batch context log_every eval_every eval_windows accumulate dead_every".split()
_RANGES: dict[str, tuple[float, float]] = dict.fromkeys(_FROM_1, (1, 2**63 - 1))
_RANGES |= dict.fromkeys("warmup l1_delay l1_warmup dead_window seed".split(), (0, 2**63 - 1))
_RANGES |= dict.fromkeys(("lr", "clip"), (sys.float_info.min, sys.float_info.max))
_RANGES |= {
    "weight_decay": (0.0, sys.float_info.max),
    "l1": (0.0, torch.finfo(torch.float32).max),
    "reinit": (0.0, 1.0),
}


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and how long. A wrong value raises InputError that names the field.

    The fields below are also the options of `twell-lab train`, whose help is read from here.

    What it begins with:
        from_: a folder of a model to train further, or its name on the Hub: one of this project, or one of transformers
            that is like Llama with a ReLU (twell_lab.relufy makes one). Sizes and tokenizer are its own.

    The text:
        text: a file (of .jsonl with ?field=text behind it), a folder, what twell-lab prepare made, or hf:owner/name for
            a Hugging Face dataset, of which 100 MB are read unless ?bytes=500e6 follows (at most 1 GiB); unless named,
            the source of Python's standard library.

    The model:
        d_model: model width.
        layers: number of layers.
        heads: attention heads.
        d_ff: feed-forward width.
        gated: gated feed-forward layers; if not, plain ones.
        activation: relu, or relu2 for its square, which sparse layers compute in plain layers alone: there `twell-lab
            train` makes those.
        tokenizer: what the model reads the text as: bytes, bpe:4096 (a BPE of that size, trained on the text), or a
            tokenizer's file; unless named, what the text comes with, or bytes.

    Sparsity:
        l1: coefficient of the penalty (see twell_lab.training.loop); 0 trains without.
        l1_delay: steps without the penalty.
        l1_warmup: steps over which its coefficient then grows linearly to l1.
        dead_window: a neuron that has not fired for this many tokens counts as dead; 0 does not track neurons.
        reinit: every dead_every steps the gate rows of dead neurons get this share (0.1 in the paper) of fresh normal
            numbers; 0 leaves them dead. Needs a dead_window.
        dead_every: steps between two re-initialisations.

    The steps:
        steps: optimizer steps.
        batch: windows a step.
        context: tokens a window (bytes, unless the text has a tokenizer of its own).
        accumulate: the windows of a step are read in this many parts, one after the other, to need less memory.
        lr: AdamW's peak learning rate, which then falls along a cosine to a tenth.
        warmup: steps over which it is reached linearly.
        weight_decay: AdamW's, of matrices alone.
        clip: the largest norm of the gradient.
        seed: of the weights and of the order of the text. On a CPU, the same seed (and number of threads) gives the
            same curve bit for bit.

    The machine:
        device: cpu, cuda, cuda:1; unless named, a GPU where there is one.
        dtype: float32, or bfloat16: torch's autocast, the weights stay float32.
        kernels: off trains the dense layers; sparse trains through this package's kernels; auto lets each layer go over
            to them when it fires little enough. Both need a GPU and bfloat16, and are torch's operations elsewhere.
        parallel: under torchrun, ddp keeps the whole model on each process, fsdp a share of it.
        compile: run forward and loss through torch.compile, with kernels auto layer by layer.

    Reports:
        log_every: steps between two rows of the history, which are the lines of metrics.jsonl.
        eval_every: steps between two validations.
        eval_windows: how many windows of the held-out text a validation and the profile read, at most.
        log: writes the rows for tensorboard (into the run's folder) or wandb as well, whose package has to be there.
    """

    l1: float = 0.0
    steps: int = 900
    batch: int = 8
    context: int = 64
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    d_ff: int = 512
    gated: bool = True
    lr: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    device: str | None = None
    text: str | PathLike | Text | None = None
    tokenizer: str | PathLike | None = None
    log_every: int = 10
    eval_every: int = 150
    eval_windows: int = 256
    activation: Literal["relu", "relu2"] = "relu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    accumulate: int = 1
    l1_delay: int = 0
    l1_warmup: int = 0
    dead_window: int = 0
    dead_every: int = 100
    reinit: float = 0.0
    kernels: Literal["off", "auto", "sparse"] = "off"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    from_: str | PathLike | None = None
    log: Literal["off", "tensorboard", "wandb"] = "off"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainConfig).items():
            value, accepted = getattr(self, name), getattr(kind, "__name__", kind)
            if get_origin(kind) is Literal:
                right, accepted = value in get_args(kind), " or ".join(map(repr, get_args(kind)))
            elif name in _RANGES:
                least, most = _RANGES[name]
                whole = isinstance(least, int)
                number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
                right = number and least <= value <= most
                accepted = f"a {'whole ' if whole else ''}number from {least:g} to {most:g}"
            else:
                right = isinstance(value, kind)
            if not right:
                raise InputError(f"{name} is {value!r:.80}; accepted: {accepted}")
        if self.kernels != "off" and self.activation != "relu" and self.gated:
            raise InputError(
                f"kernels is {self.kernels!r} with activation {self.activation!r} in gated layers; accepted: kernels "
                "'off', or activation 'relu', or plain layers (gated=False), which sparse layers compute"
            )
        if self.reinit and not self.dead_window:
            raise InputError(f"reinit is {self.reinit} with dead_window 0; accepted: a dead_window from 1 up")
        if self.from_ is None:
            self.model()
        elif self.tokenizer is not None:
            raise InputError(f"tokenizer is {self.tokenizer!r} with from_; accepted: None, as the model has its own")

    def model(self, vocabulary: int = 256) -> ModelConfig:
        """Return the sizes of the model to train. vocabulary: the text's; 256 for bytes."""
        names = ("d_model", "layers", "heads", "d_ff", "context", "gated", "activation")
        return ModelConfig(vocabulary, **{name: getattr(self, name) for name in names})


# The configurations that have a name: the values of _FIELDS. From 0.5B they are the paper's (arXiv 2603.23198, appendix
# B, and its published code), but for four things: the learning rate falls to a tenth instead of 0, rotary positions
# turn by the usual base of 10,000 instead of 100,000, head and embedding are two matrices instead of one, and the
# tokenizer is a BPE of 32,768 entries trained on the text, instead of one of 49,152. The smaller ones are this
# project's. Their L1 is a place to begin: at d_model 768 and d_ff 2048, after 1000 steps, 3e-4 left 103 neurons firing
# at a token and 1e-3 left 28. Other texts and lengths of training need another L1.
_FIELDS = "layers d_model d_ff heads context batch accumulate steps lr warmup l1 eval_every".split()
_NAMED = {
    "1M": (4, 128, 512, 4, 64, 8, 1, 900, 2e-3, 50, 2e-3, 150),
    "5M": (6, 256, 704, 4, 256, 32, 1, 2000, 2e-3, 100, 1e-3, 500),
    "20M": (6, 512, 1408, 8, 512, 32, 1, 4000, 1e-3, 200, 3e-4, 500),
    "60M": (8, 768, 2048, 12, 512, 64, 1, 5000, 1e-3, 300, 3e-4, 500),
    "150M": (14, 768, 2048, 12, 1024, 128, 4, 10_000, 1e-3, 600, 1e-4, 500),
    "0.5B": (8, 2048, 5632, 32, 2048, 512, 64, 10_000, 1e-3, 600, 2e-5, 1000),
    "1B": (18, 2048, 5632, 32, 2048, 512, 64, 20_000, 1e-3, 600, 2e-5, 1000),
    "1.5B": (28, 2048, 5632, 32, 2048, 512, 64, 30_000, 1e-3, 600, 2e-5, 1000),
    "2B": (38, 2048, 5632, 32, 2048, 512, 64, 40_000, 1e-3, 600, 2e-5, 1000),
}
NAMES, BPE = tuple(_NAMED), 32_768


def named(name: str) -> dict:
    """Return the fields of TrainConfig that make this configuration: `TrainConfig(**named("60M"), text=...)`, in a new
    dict. InputError for a name that is not in NAMES."""
    if name not in NAMES:
        raise InputError(f"there is no configuration {name!r}; accepted: {', '.join(NAMES)}, or a file of YAML or JSON")
    fields, size = {**dict(zip(_FIELDS, _NAMED[name])), "weight_decay": 0.1, "clip": 1.0}, NAMES.index(name)
    fields |= {"dtype": "bfloat16"} if size >= NAMES.index("20M") else {}
    fields |= {"compile": True} if size >= NAMES.index("60M") else {}
    return fields | ({"tokenizer": f"bpe:{BPE}"} if size >= NAMES.index("150M") else {})


def of(name: str) -> dict:
    """Return the fields of TrainConfig of a configuration of this name (`named`), or that a YAML or JSON file holds.

    In a file, names may have the dashes of the command's options. InputError for a name that is neither, a file that
    can't be read, and an entry that is no field; StackError for YAML without PyYAML."""
    if name in NAMES or not os.path.isfile(name):
        return named(name)
    parse = json.loads if name.endswith(".json") else optional("yaml", "a configuration in YAML", "pyyaml").safe_load
    try:
        entries = parse(read_file(name, 2**20).decode())
    except Exception as error:  # of PyYAML: errors of its own kind
        raise InputError(f"cannot read the configuration {name!r}: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise InputError(f"the configuration {name!r} holds a {type(entries).__name__}; accepted: `name: value` lines")
    kinds, values = get_type_hints(TrainConfig), {}
    for key, value in entries.items():
        field = "from_" if key == "from" else str(key).replace("-", "_")
        if field not in kinds:
            raise InputError(f"{key!r} in {name!r} is no option; accepted: {', '.join(kinds)}")
        if kinds[field] is float and isinstance(value, str):  # YAML takes 1e-3, without a point, for a string
            with suppress(ValueError):
                value = float(value)
        values[field] = value
    return values


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate at a step, counted from 1: lr, times a linear warm-up, times a cosine from 1 to 0.1."""
    warm = min(1.0, step / config.warmup) if config.warmup else 1.0
    return config.lr * warm * (0.55 + 0.45 * math.cos(math.pi * (step - 1) / config.steps))


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and how it got there.

    model: on the device it was trained on, in evaluation mode; with `from_` of the kind that it started from.
    validation_bits_per_byte: cross-entropy on held-out text at the end. mean_nnz: how many neurons fire at a token of
    it, averaged over tokens and layers; density: their share, and dead: how many never fire on it, by layer. text:
    name, sha256 and size in bytes of the whole text, and the sizes of its parts. seconds: wall time of the loop.
    tokens: how many it was trained on.

    history: one dict for the first step, the last, every `log_every` and every `eval_every` steps: step (from 1), loss,
    ce (nats a token), l1_term (what the penalty adds to the loss), nnz (mean over tokens and layers), nnz_layers and
    l1_layers (mean over tokens of the neurons with h != 0 and of the sum of |h|, by layer), dead_layers (neurons that
    have not fired within dead_window tokens; None if not tracked), lost_layers (the share of tokens that the sparse
    kernels had to finish densely; where they may run), lr, tokens_per_s (since the row before, validations left out),
    seconds (since the start), on a GPU peak_bytes (the most memory that this process has had there), and where the
    model was validated val_bits_per_byte."""

    model: LanguageModel
    config: TrainConfig
    history: list[dict]
    validation_bits_per_byte: float
    mean_nnz: float
    density: list[float]
    dead: list[int]
    text: dict
    seconds: float
    tokens: int

    def summary(self) -> dict:
        """Return everything but the weights, ready for JSON, without any path of this machine."""
        config = {name: value for name, value in vars(self.config).items() if name != "text"}
        config |= {name: Path(config[name]).name for name in ("tokenizer", "from_") if config[name] is not None}
        rest = {name: value for name, value in vars(self).items() if name not in ("model", "config")}
        return {"config": config, "parameters": sum(weight.numel() for weight in self.model.parameters()), **rest}
