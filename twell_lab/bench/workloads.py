"""What a whole model is measured on, dense beside sparse: forwards and steps of decoding with a cache, by this
project's models and those of transformers; how their results are looked at; and the energy that they take."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..layers.find import FeedForward, feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..models.generate import cache_name, read_prompt
from ..models.tiny import Keys, LanguageModel
from ..ops import clock as timing
from . import rows
from .rows import need

# A result may be as far from a float32 run as the dense model's in the same dtype, with what two equally good runs may
# differ by chance, and so much of the result's norm; the latter for a model with thresholds, at which two right
# computations keep or drop other values, and for each of its layers; and how far the factor between such a layer's
# output and the dense one's may be from 1. What a drawn model makes of an error in its layers says little of a trained
# one: so rows of a path that was forced have `layer_error` too.
MARGIN, SLACK, CUT_SLACK, CUT_FACTOR = 1.05, 1e-3, 0.25, 0.02
_CHECKED = 4  # sequences of a batch whose results are compared
PLACES = 64  # and tokens of each sequence, and inputs of a layer
LONGEST = 2048  # tokens of a sequence at most


# ---- a model that can be called in these ways ----


class Kept(Keys):
    """The keys and values of all layers. Each call of a step writes its own into the last place, and attends to all: so
    a step can be repeated, captured in a graph, and taken by several models in turn."""

    mask: Tensor

    def decode(self) -> Kept:
        """Be ready for steps, once a prompt was read."""
        keys = self.layers[0][0]
        self.take(torch.tensor([self.room - 1], device=keys.device), self.room)
        self.mask = torch.ones(len(keys), 1, 1, self.room, dtype=torch.bool, device=keys.device)
        return self

    def few(self) -> Kept:
        """Return a float32 copy of those of a few sequences."""
        part = lambda t: t[:_CHECKED].to(torch.float32, copy=True)  # noqa: E731
        return Kept(self.room, [(part(keys), part(values)) for keys, values in self.layers]).decode()


class Causal:
    """A causal language model; how many token numbers there are, and the most tokens of an input, so far as it says.
    Raises InputError for a module that is none."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.ours, config = model, isinstance(model, LanguageModel), getattr(model, "config", None)
        decodes = getattr(model, "can_generate", bool)() and not getattr(config, "is_encoder_decoder", False)
        accepted = "one of transformers with its LM head, or a LanguageModel of this project, as tl.load gives both; "
        accepted += "tl.bench.layer takes a feed-forward layer"
        need(self.ours or decodes, f"{type(model).__name__} is no causal language model", accepted)
        longest = config.context if self.ours else getattr(config, "max_position_embeddings", None)
        self.vocabulary = config.vocabulary if self.ours else len(model.get_input_embeddings().weight)
        self.context = longest or LONGEST

    def reader(self, head: bool = True, *, compiled: bool = False) -> Callable[..., Tensor]:
        """Return a call: ids [batch, tokens] -> logits [batch, tokens, vocabulary], or without the head what that would
        take, [batch, tokens, d_model]. Given a Kept too, ids [batch, 1] are the tokens after it."""
        compile_ = functools.partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda call: call
        if self.ours:
            ours = self.model

            def through(ids: Tensor, kept: Kept | None = None) -> Tensor:
                earlier = (slice(ids.shape[1]),) if kept is None else (kept.places, kept, kept.mask)
                x = ours.read(ids, *earlier)
                return ours.head(x) if head else x

            return compile_(through)
        model = self.model if head else self.model.base_model
        body, cache = compile_(model), cache_name(model)

        def read(ids: Tensor, kept: Kept | None = None) -> Tensor:
            earlier: dict = {}
            if kept is not None:
                earlier = {cache: kept, "attention_mask": kept.mask, "position_ids": kept.places[None]}
            result = body(ids, use_cache=kept is not None, **earlier)
            return result.logits if head else result.last_hidden_state

        return read

    @torch.no_grad()
    def keep(self, ids: Tensor) -> Kept:
        """Return the keys and values of these tokens [batch, tokens], with a place for one more."""
        kept = Kept(ids.shape[1] + 1)
        read_prompt(self.model, ids, None, kept)
        return kept.decode()


# ---- what is run ----


class Workload(NamedTuple):
    """What a model computes: a forward of token ids [turns, sequences, length], in turn; or a step of decoding of their
    last tokens, where keys and values of the others are kept, which all models share. head: up to the logits."""

    ids: Tensor
    head: bool = True
    kept: Kept | None = None

    def makes(self, model: Causal, compiled: bool = False) -> rows.Call:
        """Return a call of this model."""
        read = model.reader(self.head, compiled=compiled)
        if self.kept is None:
            return rows.over(read, [*self.ids])
        last = self.ids[0, :, -1:]
        return lambda turn: read(last, self.kept)

    @torch.no_grad()
    def right(self, exact: Causal) -> Tensor:
        """Return what is compared of the result of a model in float32. InputError where a step of it gives something
        else with a static cache than without."""
        read, some = exact.reader(self.head), self.ids[0, :_CHECKED]
        result, last = read(some), some[:, -1:]
        if self.kept is not None:
            whole = result[:, -1:]
            off = (read(last, exact.keep(some[:, :-1])) - whole).norm()
            kind = type(exact.model).__name__
            what = f"a step of {kind} with a static cache gives something else than its whole sequence"
            need(off <= 1e-2 * whole.norm(), what, "a model whose layers keep all tokens")
            result = read(last, self.kept.few())
        return compared_part(result)


# ---- what is looked at before the clocks ----


def compared_part(result: Tensor) -> Tensor:
    """Return what is compared of a result [batch, tokens, n], float32: some tokens of a few sequences."""
    places = torch.linspace(0, result.shape[1] - 1, min(PLACES, result.shape[1]), device=result.device).long()
    return result[:_CHECKED, places].float()


Inputs = dict[str, Tensor]  # what enters a model's layers, [n, d_model] by name (analysis.profile.captured)


@torch.no_grad()
def layer_errors(layers: list[FeedForward], model: nn.Module, inputs: Inputs, tokens: int) -> list[tuple[float, float]]:
    """Return `output_errors` of each swapped layer of `model` that can be called by itself, for so many tokens at a
    time. layers: of the dense model."""
    errors = []
    for dense, sparse in zip(layers, feed_forwards(model), strict=True):
        if isinstance(sparse.module, SparseFFN) and sparse.module.registered:
            x = inputs[dense.name]
            y = torch.cat([sparse.module(part) for part in x.split(tokens)])
            errors.append(output_errors(y, dense.module(x)))
    return errors


def output_errors(y: Tensor, right: Tensor) -> tuple[float, float]:
    """Return the norm of the difference as a share of the right one's norm, and how far the factor between both, by
    least squares, is from 1."""
    y, right = y.double(), right.double()
    norm = right.norm().clamp(min=1e-30)
    return float((y - right).norm() / norm), abs(float((y * right).sum() / norm**2) - 1)


def check_cut(errors: list[tuple[float, float]], label: str) -> float:
    """Return the largest of `layer_errors` over what is allowed of layers with thresholds; WrongResult above 1. Values
    near a threshold fall on either side of it, by rounding: each adds to the difference, and hardly to the factor."""
    off = [max(error / CUT_SLACK, factor / CUT_FACTOR) for error, factor in errors]
    return rows.hold(f"{label}: a layer", float(torch.tensor([0.0, *off]).max()))


# ---- the energy that calls take, by a GPU's own counter (NVML): all that the board takes, idle or not ----

WARM, ENERGY = 0.5, 1.0  # seconds of calls before a measurement of energy, and of the measurement, at least
_CHUNK = 0.02  # seconds of calls between two looks at the counter
_STILL = 2.0  # seconds after which a counter that has not moved counts as standing still

Meter = Callable[[], float]  # millijoules since the driver was loaded


def meter(device: torch.device) -> tuple[Meter | None, str]:
    """Return the energy counter of a device, and "", or None and why there is none."""
    if device.type != "cuda":
        return None, "it is read on an NVIDIA GPU alone"
    try:
        import pynvml
    except ImportError:
        return None, "it needs nvidia-ml-py: pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
        # By its own name: CUDA_VISIBLE_DEVICES numbers the GPUs anew for CUDA, not for NVML.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (pynvml.NVMLError, AttributeError) as error:
        return None, f"NVML says: {error}"
    return functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle), ""


def energy_facts(read: Meter, calls: rows.Calls, samples: int, tokens: int) -> dict[str, dict]:
    """Return what the row of each call says of its energy: median, spread and samples of millijoules a token; {} where
    the counter stands still. Calls take turns, there and back: a GPU that grows warmer takes more for the same work.
    tokens: that a call computes."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(samples):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            if (one := millijoules(read, calls[name])) is None:
                return {}
            taken[name].append(round(one / tokens, 6))
    return {
        name: dict(zip(("mj_per_token", "mj_spread"), timing.quartiles(sample)), mj_samples=sample)
        for name, sample in taken.items()
    }


def millijoules(read: Meter, call: rows.Call) -> float | None:
    """Return the millijoules of one call, over ENERGY at least; None where the counter stands still. The counter moves
    every few hundredths of a second, so a measurement begins and ends where it moves."""
    rows.drain()
    start = time.perf_counter()
    call(0)
    rows.drain()
    many, moved = max(1, round(_CHUNK / max(1e-6, time.perf_counter() - start))), list[float]()
    for seconds in (WARM, ENERGY):
        start, made, before, now = time.perf_counter(), 0, read(), None
        while (passed := time.perf_counter() - start) < seconds or now == before:
            if passed > seconds + _STILL:
                return None
            before = before if now is None else now
            for turn in range(many):
                call(turn)
            rows.drain()
            made, now = made + many, read()
        moved.append(now)
    return (moved[1] - moved[0]) / made
