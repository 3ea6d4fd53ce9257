"""The rows of a run's history for TensorBoard or Weights & Biases, through their own writers, where these are there."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from .text.tokenizer import optional

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def writer(package, folder: str | os.PathLike | None, fields: dict, ending: ExitStack) -> Callable[[dict], None]:
    """Return a function that takes a row of the history. What it writes to is closed with `ending`.

    package: from `library`. folder: the run's, or None. fields: of the config, for Weights & Biases."""
    if hasattr(package, "SummaryWriter"):
        board = ending.enter_context(package.SummaryWriter(None if folder is None else Path(folder, "tensorboard")))
        return lambda row: [board.add_scalar(name, value, row["step"]) for name, value in _numbers(row).items()]
    run = ending.enter_context(package.init(project="twell-lab", dir=folder, config=fields))
    return lambda row: run.log(_numbers(row), step=row["step"])


def library(kind: str):
    """Return the package that writes for TrainConfig's `log`, None for "off". StackError where it is missing."""
    return optional(MODULES[kind], f"log {kind!r}", kind) if kind in MODULES else None


def _numbers(row: dict) -> dict[str, float]:
    """Return the numbers of a row by name, those of a list with their places: nnz_layers/0. None is left out."""
    flat: dict = {}
    for name, value in row.items():
        flat |= {f"{name}/{at}": one for at, one in enumerate(value)} if isinstance(value, list) else {name: value}
    return {name: value for name, value in flat.items() if value is not None and name != "step"}
