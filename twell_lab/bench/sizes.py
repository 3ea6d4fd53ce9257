"""The record of one of the paper's four sizes: a drawn Llama of that shape, dense beside sparse, by `bench.model`'s
steps, what says most first, so that a recording may end early and keep what it has."""

from __future__ import annotations

import functools

from . import drawn, rows
from .models import Bench

SIZES = drawn.NAMES[-4:]  # the paper's
RECORD = "bench-model"  # what the record is called, as that of `twell-lab bench model` is
BATCHES, SEQUENCES = (1, 8, 64), 64


def model_name(size: str) -> str:
    """Return what rows call the model, as those of `bench.model` do."""
    return f"drawn {size} Llama"


def sections(size: str, left_out: dict[str, str], sequences: int = SEQUENCES, **how) -> rows.Sections:
    """Return the steps of the record of this size; the models are made when the first step needs them. sequences: of
    the longest forward. how: as for `bench.model`."""
    context, part = drawn.sizes_of(size).context, functools.partial
    many = sequences * context
    defaults = {"tokens": (context, many), "batches": BATCHES, "compiled": True, "graphs": True}
    bench = functools.cache(lambda: Bench(size, left_out=left_out, **{**defaults, **how}))

    def step(kind: str, tokens: int, head: bool = True, **how) -> list[dict]:
        return bench().rows(kind, tokens, head, **{"compiled": None if head else False, **how})

    forward, decode = part(step, "model_forward"), part(step, "model_decode")
    return {
        "many sequences": [part(forward, many, compiled=False, alone=True)],  # planned for them alone: they come soon
        "decode, one sequence": [part(decode, 1)],
        "one sequence": [part(forward, context)],
        "decode": [part(decode, batch) for batch in BATCHES[1:]],
        "plan": [lambda: bench().plan_rows()],
        "training step": [lambda: bench().train()],
        "without the LM head": [
            part(forward, many, False),
            *(part(decode, batch, False) for batch in BATCHES),
            part(forward, context, False),
        ],
        "many sequences, compiled": [part(forward, many)],  # which takes longest
    }
