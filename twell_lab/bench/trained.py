"""The record of a model that is trained, not drawn, from its first step to its speed: one with L1 of the paper's 0.5B
shape, through the sparse kernels once they pay, and its dense twin, which begins with the same weights and reads the
same text in the same order without L1. Both are then measured by `bench.model`'s steps on text that was held out, where
their own neurons fire: forwards have the loss, before and after the layers are swapped.

The model is trained for minutes, and its loss says what such a model is worth."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..core import finite
from ..training import sweep
from ..training.config import TrainConfig
from ..training.presets import named
from ..training.text import source
from . import rows
from .models import Bench

RUN = "trained"  # the kind of a training's row
L1, TWIN = "trained with L1", "dense twin"  # what rows call the two
_LAST = 0.2  # of the steps: `nnz_moved` says by how much the neurons that fire moved in them
_LATE = 0.25  # the last share of a run's rows: its median time of a step


def _config() -> TrainConfig:
    """Return the paper's 0.5B, with bytes as tokens and windows half as long: attention is the only part of a step that
    is cheaper for it, and the sequences have twice as many first tokens. L1 is five times the paper's: it has a three
    hundredth of the tokens to silence the model."""
    fields = {**named("0.5B"), "tokenizer": None, "context": 1024, "batch": 32, "accumulate": 1, "steps": 1100}
    fields |= {"warmup": 100, "l1": 1e-4, "kernels": "auto", "checkpoint_every": 0, "device": "cuda"}
    return TrainConfig(**fields | {"log_every": 10, "eval_every": 250, "eval_windows": 256})


@dataclass(frozen=True)
class Shape:
    """The model to train, and the sizes to measure. config: of the model with L1. sequences: of its whole context, in
    forwards. batches, cached, seconds: as for `bench.model`."""

    config: TrainConfig = field(default_factory=_config)
    sequences: tuple[int, ...] = (2, 32)
    batches: tuple[int, ...] = (1, 16)
    cached: int = 512
    seconds: float = 2.0


def small() -> Shape:
    """Return a shape for a CPU: half a minute on two cores."""
    sizes = {"d_model": 64, "layers": 2, "heads": 2, "d_ff": 512, "context": 64}
    config = TrainConfig(**sizes, batch=16, steps=120, warmup=10, l1=2e-3, kernels="auto", device="cpu")
    config = replace(config, log_every=5, eval_every=60, eval_windows=64)
    return Shape(config, sequences=(2, 16), batches=(1, 4), cached=32, seconds=0.5)


def run_rows(name: str, config: TrainConfig, models: dict[str, nn.Module]) -> list[dict]:
    """Train a model, and put it into `models` as it is measured: in evaluation mode, bfloat16 on a GPU. Returns a row:
    what sweep.run returns, with the history's `ms` a step, `nnz_moved`, and `total_seconds`, from the drawing of
    weights to the count of who fires."""
    start, text = time.perf_counter(), source.standard_library()
    facts, result = sweep.run(name, replace(config, text=text))
    dtype = torch.bfloat16 if config.device == "cuda" else torch.float32
    models[name] = result.model.to(dtype).eval().requires_grad_(False)
    del result, facts["label"], facts["bytes"]
    torch.compiler.reset()  # gives back what the training held
    gc.collect()
    history, tokens = facts["history"], config.batch * config.context
    history["ms"] = [float(f"{1e3 * tokens / rate:.5g}") for rate in history["tokens_per_s"]]
    late = history["ms"][-max(1, round(_LATE * len(history["ms"]))) :]
    sizes = {"tokens": tokens, "read": facts.pop("tokens"), "nnz": facts["mean_nnz"], **rows.sizes_of(config)}
    workload = f"training step, {config.batch} x {config.context:,} tokens, {text.name}"
    shared = rows.about(RUN, next(models[name].parameters()), workload, **sizes) | {"dtype": config.dtype}
    facts |= {"firing": facts.pop("layers"), "steps": config.steps}
    facts |= {"nnz_moved": round(sweep.settled(facts, _LAST), 5)}
    facts["total_seconds"] = round(time.perf_counter() - start, 2)
    return [finite(rows.row(facts | shared, f"{name}, kernels {config.kernels}", late))]


def sections(left_out: dict[str, str], shape: Shape) -> rows.Sections:
    """Return the steps of the record. The twin is not trained where less time is left than the model with L1 took."""
    config, models, part = shape.config, dict[str, nn.Module](), functools.partial
    configs = {L1: config, TWIN: replace(config, l1=0.0, kernels="off")}
    counts = [count * config.context for count in shape.sequences]

    @functools.cache
    def bench(name: str) -> Bench:
        own = {"paths": ("twell",), "graphs": config.device == "cuda"} if name == L1 else {}
        held_out = source.standard_library().split()[1].tokens
        how = {"text": held_out, "cached": shape.cached, "seconds": shape.seconds, "left_out": left_out, **own}
        return Bench(models[name], tokens=counts, batches=shape.batches, about=name, **how)

    def step(name: str, kind: str, tokens: int) -> list[dict]:
        return bench(name).rows(kind, tokens) if name in models else []

    return {
        "training": [part(run_rows, name, own, models) for name, own in configs.items()],
        "decode": [part(step, L1, "model_decode", batch) for batch in shape.batches],
        "forward": [part(step, L1, "model_forward", count) for count in counts],
        "training step": [lambda: bench(L1).train(counts[-1])],
        TWIN: [part(step, TWIN, "model_forward", counts[-1]), part(step, TWIN, "model_decode", shape.batches[-1])],
    }


def notes() -> dict:
    """Return what the record says of its text and its words."""
    text = source.standard_library()
    return {
        "text": text.describe(),
    }
