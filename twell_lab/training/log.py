"""The rows of a run's history for TensorBoard or Weights & Biases, through their own writers, where they are
installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .text.tokenizer import optional


def library(kind: str):
    """Return the package that writes for TrainConfig's `log`, None for "off". StackError where it is missing."""
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    return optional(modules[kind], f"log {kind!r}", kind) if kind in modules else None


@contextmanager
def writer(kind: str, package, folder: str | os.PathLike | None, fields: dict, lead: bool) -> Iterator[Callable]:
    """A context with a function that takes a row of the history; only the leading process writes.

    package: from `library`. folder: the run's, in which the files get a folder of their own; without one they are where
    the library puts them. fields: of the config, for Weights & Biases."""
    if package is None or not lead:
        yield lambda row: None
    elif kind == "tensorboard":
        with package.SummaryWriter(None if folder is None else str(Path(folder, "tensorboard"))) as board:
            yield lambda row: [board.add_scalar(name, value, row["step"]) for name, value in numbers(row).items()]
    else:
        with package.init(project="twell-lab", dir=folder, config=fields) as run:
            yield lambda row: run.log(numbers(row), step=row["step"])


def numbers(row: dict) -> dict[str, float]:
    """Return the numbers of a row by name, those of a list with their places: nnz_layers/0. None is left out."""
    flat: dict = {}
    for name, value in row.items():
        flat |= {f"{name}/{at}": one for at, one in enumerate(value)} if isinstance(value, list) else {name: value}
    return {name: value for name, value in flat.items() if value is not None and name != "step"}
