"""The rows of a run's history for TensorBoard or Weights & Biases, through their own writers, where they are
installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .text.tokenizer import optional


@contextmanager
def writer(kind: str, folder: str | os.PathLike | None, fields: dict, lead: bool) -> Iterator[Callable[[dict], object]]:
    """A context with a function that takes a row of the history; only the leading process writes.

    kind: as in TrainConfig. folder: the run's, in whose folder tensorboard/ or wandb/ the files go; without one they
    are where the library puts them. fields: of the config, for Weights & Biases. StackError where it is missing."""
    if kind == "tensorboard":
        library = optional("torch.utils.tensorboard", "log 'tensorboard'", "tensorboard")
    elif kind == "wandb":
        library = optional("wandb", "log 'wandb'")
    if kind == "off" or not lead:
        yield lambda row: None
    elif kind == "tensorboard":
        with library.SummaryWriter(None if folder is None else str(Path(folder, "tensorboard"))) as board:
            yield lambda row: [board.add_scalar(name, value, row["step"]) for name, value in numbers(row).items()]
    else:
        with library.init(project="twell-lab", dir=folder, config=fields) as run:
            yield lambda row: run.log(numbers(row), step=row["step"])


def numbers(row: dict) -> dict[str, float]:
    """Return the numbers of a row by name, those of a list with their places: nnz_layers/0. None is left out."""
    found = {}
    for name, value in row.items():
        many = {f"{name}/{place}": one for place, one in enumerate(value)} if isinstance(value, list) else {name: value}
        found |= {key: one for key, one in many.items() if one is not None and key != "step"}
    return found
