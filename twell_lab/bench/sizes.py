"""The record of one of the paper's four sizes: a drawn Llama of that shape, dense beside planned, in what `bench.model`
measures: forwards, steps of decoding and a training step; plain calls, CUDA graphs and compiled; with the LM head and
without it. In steps, so that a recording may end early and keep what it has: what says most comes first.

A forward of many sequences takes so long that a graph would gain nothing: none is captured."""

from __future__ import annotations

import functools

import torch

from . import drawn, llama, rows
from .drawn import Shape
from .workloads import Clocks, Models, training_rows

SIZES = drawn.NAMES[-4:]  # the paper's
RECORD = "bench-model"  # what the record is called, as that of `twell-lab bench model` is
BATCHES = (1, 8, 64)


def model_name(size: str) -> str:
    """Return what rows call the model, as those of `bench.model` do."""
    return f"drawn {size} Llama"


def sections(size: str, shape: Shape | None = None) -> rows.Sections:
    """The steps of the record of this size, as in bench.inference; the models are made when the first step needs them.
    shape: another one than this size has."""
    here = drawn.shape_of(size) if shape is None else shape
    each = functools.partial
    many, classes = here.sequences, (*BATCHES, here.context, here.sequences * here.context)
    models = functools.cache(lambda: llama.recorded(here, model_name(size), classes))

    def forward(sequences: int, **how) -> list[dict]:
        return llama.prefill_rows(models(), sequences, **how)

    def step(batch: int, **how) -> list[dict]:
        return llama.decode_rows(models(), batch, here.cached, **how)

    return {
        "many sequences": [each(forward, many, head="all")],
        "decode": [each(step, batch) for batch in BATCHES],
        "one sequence": [each(forward, 1, head="all", graphs=True)],
        "without the LM head": [
            each(forward, many, head="none"),
            *(each(step, batch, head=False) for batch in BATCHES),
            each(forward, 1, head="none", graphs=True),
        ],
        "training step": [lambda: _learns(models())],
        # Compiling takes longest, of many sequences most: a step is begun where there is time for one like the last.
        "compiled": [
            *(each(step, batch, compiled=True) for batch in BATCHES),
            *(each(forward, count, head="all", compiled=True) for count in (1, many)),
        ],
    }


def _learns(models: Models) -> list[dict]:
    """The rows of a training step on one sequence."""
    clocks = Clocks(torch.device(models.device), llama.ENERGY, watched=True)
    return training_rows(models, models.length, clocks)
