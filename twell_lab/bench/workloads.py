"""What a whole model is measured on, dense beside sparse: forwards and steps of decoding with a cache, by this
project's models and those of transformers; how their results are looked at; and the clocks, with the energy.

Before any clock starts, results are compared: those of a sparse model may be no further from a float32 run than those
of the dense model in the same dtype are (MARGIN, SLACK). Where layers have thresholds, at which two right computations
keep or drop other values, each layer and the whole model may be off by CUT_SLACK. What a drawn model makes of an error
in its layers says little of a trained one: so rows of a path that was forced have `layer_error` too. On a GPU `gpu_ms`,
beside the times of plain calls, is the time of the same call as a CUDA graph: events around a call that waits for the
host hold the waiting too."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core import TwellError
from ..layers.find import FeedForward, feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..models.generate import cache_name, read_prompt
from ..models.tiny import Keys, LanguageModel
from ..ops import clock as timing
from . import rows
from .rows import Calls, need

# What is allowed: the dense model's own error, with what two equally good runs may differ by chance, and so much of the
# result's norm; the latter for a model with thresholds, and for each of its layers, of few rows that keep few values;
# and how far the factor between such a layer's output and the dense one's may be from 1.
MARGIN, SLACK, CUT_SLACK, CUT_FACTOR = 1.05, 1e-3, 0.25, 0.02
_CHECKED = 4  # sequences of a batch whose results are compared
PLACES = 64  # and tokens of each sequence, and inputs of a layer


# ---- a model that can be called in these ways ----

Called = Callable[..., Tensor]


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

    def part(self, some: slice, dtype: torch.dtype) -> Kept:
        """Return a copy of some of the sequences, in this dtype."""
        layers = [(keys[some].to(dtype, copy=True), values[some].to(dtype, copy=True)) for keys, values in self.layers]
        return Kept(self.room, layers).decode()


class Causal:
    """A causal language model. Raises InputError for a module that is none."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.ours = model, isinstance(model, LanguageModel)
        if not self.ours:
            embedded = getattr(model, "get_output_embeddings", None)
            speaks = callable(embedded) and embedded() is not None and getattr(model, "can_generate", lambda: False)()
            encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            accepted = (
                "one of transformers with its LM head, or a LanguageModel of this project, as tl.load gives both; "
            )
            accepted += "tl.bench.layer takes a feed-forward layer"
            need(speaks and not encodes, f"{type(model).__name__} is no causal language model", accepted)

    @property
    def sizes(self) -> tuple[int, int]:
        """Return how many token numbers there are, and the most tokens of an input, so far as the model says."""
        config = self.model.config
        if self.ours:
            return config.vocabulary, config.context
        context = getattr(config, "max_position_embeddings", None) or 2048
        return self.model.get_input_embeddings().weight.shape[0], context

    def reader(self, head: bool = True, *, compiled: bool = False) -> Called:
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


class Tokens:
    """Where the inputs come from: token ids of a text, [length], or random ones. Of a text, the first quarter is
    profiled, the second is what plans are timed on, and the rest is what is measured."""

    PROFILED, PLANNED_ON, MEASURED = (0.0, 0.25), (0.25, 0.5), (0.5, 1.0)

    def __init__(self, vocabulary: int, device: torch.device, text: Tensor | None = None) -> None:
        self.vocabulary, self.device, self.text = vocabulary, device, text

    def windows(self, part: tuple[float, float], count: int, length: int) -> Tensor:
        """Return int64 [count, length]; of a text spread evenly over the part, overlapping where it is short."""
        if self.text is None:
            return torch.randint(0, self.vocabulary, (count, length), device=self.device)
        here = self.text[int(part[0] * len(self.text)) : int(part[1] * len(self.text))].to(self.device)
        starts = torch.arange(count, device=self.device) * (len(here) - length) // max(1, count - 1)
        return here[starts[:, None] + torch.arange(length, device=self.device)]

    def inputs(self, sequences: int, length: int) -> Tensor:
        """Return what is measured: int64 [ROTATED, sequences, length]."""
        taken = self.windows(self.MEASURED, timing.ROTATED * sequences, length)
        return taken.view(sequences, timing.ROTATED, length).transpose(0, 1)


@dataclass
class Workload:
    """Something that a model computes. kind, tokens, label, head: what rows say of it; `says` what else they do.
    inputs: what the model is given, in turn. few: computes the same on a few of them, to be compared; right: what it
    gives of the model in float32. read: token ids [sequences, length] of a text, whose loss the first results have."""

    kind: str
    tokens: int
    label: str
    head: bool
    inputs: list[tuple]
    few: Callable[[Causal], Tensor]
    says: dict = field(default_factory=dict)
    read: Tensor | None = None
    right: Tensor | None = None

    def makes(self, model: Causal, compiled: bool = False) -> rows.Call:
        """Return a call of this model."""
        read = model.reader(self.head, compiled=compiled)
        return rows.over(lambda given: read(*given), self.inputs)


def forward(tokens: Tokens, sequences: int, length: int, head: bool = True) -> Workload:
    """Return a forward of so many sequences, with the head or without it."""
    ids = tokens.inputs(sequences, length)
    few = lambda model: model.reader(head)(ids[0][:_CHECKED])  # noqa: E731
    read = ids[0] if head and tokens.text is not None and length > 1 else None
    label, inputs = f"{sequences} x {length:,} tokens", [(some,) for some in ids]
    return Workload("model_forward", sequences * length, label, head, inputs, few, read=read)


@torch.no_grad()
def decode(tokens: Tokens, dense: Causal, batch: int, cached: int, head: bool = True) -> Workload:
    """Return a step of decoding: the last of `cached` tokens of each of `batch` sequences, with the others in a static
    cache, which all models share. Its `few` raises InputError where a model gives something else with such a cache than
    without."""
    ids = tokens.windows(tokens.MEASURED, batch, cached)
    kept = dense.keep(ids[:, :-1])

    def few(model: Causal) -> Tensor:
        dtype = next(model.model.parameters()).dtype
        step, some = model.reader(head), ids[:_CHECKED]
        whole = step(some)[:, -1:]
        off = (step(some[:, -1:], model.keep(some[:, :-1])) - whole).norm()
        what = (
            f"a step of {type(model.model).__name__} with a static cache gives something else than its whole sequence"
        )
        need(off <= 1e-2 * whole.norm(), what, "a model whose layers keep all tokens")
        return step(some[:, -1:], kept.part(slice(_CHECKED), dtype))

    inputs, label = [(ids[:, -1:], kept)], f"decode step, batch {batch}"
    return Workload("model_decode", batch, label, head, inputs, few, {"cached": cached})


# ---- what is looked at before the clocks ----


def compared_part(result: Tensor) -> Tensor:
    """Return what is compared of a result [batch, tokens, n], float32: some tokens of a few sequences."""
    places = torch.linspace(0, result.shape[1] - 1, min(PLACES, result.shape[1]), device=result.device).long()
    return result[:_CHECKED, places].float()


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    """Return the mean cross-entropy of the next token, in nats, of logits [sequences, length, vocabulary]."""
    losses = [nn.functional.cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(logits, ids, strict=True)]
    return float(torch.stack(losses).mean())


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

ENERGY = 1.0  # seconds of a measurement of energy, at least
WARM = 0.5  # seconds of calls before each measurement
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


def energy_facts(
    read: Meter, calls: Mapping[str, Callable], wait: Callable[[], object], samples: int, tokens: int
) -> dict[str, dict]:
    """Return what the row of each call says of its energy: median, spread and samples of millijoules a token; {} where
    the counter stands still. Calls take turns, there and back: a GPU that grows warmer takes more for the same work.
    wait: returns once the device has finished. tokens: that a call computes."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(samples):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            if (one := millijoules(read, calls[name], wait)) is None:
                return {}
            taken[name].append(round(one / tokens, 6))
    return {
        name: dict(zip(("mj_per_token", "mj_spread"), timing.quartiles(sample)), mj_samples=sample)
        for name, sample in taken.items()
    }


def millijoules(read: Meter, call: Callable[[int], object], wait: Callable[[], object]) -> float | None:
    """Return the millijoules of one call, over ENERGY at least; None where the counter stands still. The counter moves
    every few hundredths of a second, so a measurement begins and ends where it moves."""
    wait()
    start = time.perf_counter()
    call(0)
    wait()
    many = max(1, round(_CHUNK / max(1e-6, time.perf_counter() - start)))

    def until_it_moves(seconds: float) -> tuple[int, float]:
        """Call for so many seconds at least; returns how many calls, 0 where the counter stands still, and where it
        is."""
        start, made, before = time.perf_counter(), 0, read()
        while True:
            for turn in range(many):
                call(turn)
            wait()
            made, now, passed = made + many, read(), time.perf_counter() - start
            if now != before and passed >= seconds:
                return made, now
            if now == before and passed > seconds + _STILL:
                return 0, now
            before = now

    (_, first), (made, last) = until_it_moves(WARM), until_it_moves(ENERGY)
    return (last - first) / made if made else None


# ---- the rows ----


class Clocks:
    """How calls of a whole model are timed, and what else is read of them. seconds: on a CPU, how long all calls of a
    workload are timed; on a GPU, for how many seconds the energy of each is read; 0 for no energy. graphs: replay CUDA
    graphs for up to rows.LARGE tokens, beyond which a graph gains nothing; without it for few tokens alone."""

    def __init__(self, device: torch.device, seconds: float, *, graphs: bool = False) -> None:
        self.device, self.seconds, self.graphs = device, seconds, graphs
        self.meter, self.no_energy = meter(device)

    def time(
        self, calls: Calls, tokens: int, label: str, left_out: dict[str, str], captured: bool = True
    ) -> tuple[rows.Samples, rows.Bursts]:
        """Time the calls as rows.clocked does. left_out: takes why they cannot be captured as graphs, if so."""
        rounds = 3 if tokens > rows.LARGE else 15  # where the host is waited for, samples vary
        clocked = functools.partial(rows.clocked, calls, self.device, self.seconds, rounds=rounds)
        captured = captured and self.device.type == "cuda"
        if captured and tokens <= (rows.LARGE if self.graphs else timing.GRAPH_TOKENS):
            try:
                return clocked(tokens=tokens, graphs=True, compiled=True)
            except RuntimeError as error:
                if isinstance(error, TwellError):
                    raise
                left_out[f"{label}, as CUDA graphs"] = rows.first_line(error)
        return clocked()

    def spent(self, paths: list[str], calls: Calls, tokens: int) -> dict[str, dict]:
        """Return what the row of each path says of its energy. Plain calls wait for the host, and so does their energy:
        it is read of graphs, where there are any."""
        if not self.seconds or self.meter is None:
            return {}
        timed = {}
        for path in [path for path in paths if path.endswith("(graph)")] or paths:
            name, graph, _ = path.partition(" (graph)")
            timed[path] = timing.graphed(calls[name], inputs=1) if graph else calls[name]
        return energy_facts(self.meter, timed, rows.drain, max(1, round(self.seconds)), tokens)

    def measure(
        self, calls: Calls, shared: dict, facts: dict, label: str, left_out: dict[str, str], captured: bool = True
    ) -> list[dict]:
        """Time the calls; returns their rows. shared: what all say; the others: as for `time`."""
        tokens, decodes = shared["tokens"], shared["kind"] == "model_decode"
        samples, bursts = self.time(calls, tokens, label, left_out, captured)
        table = rows.table(shared, samples, facts, bursts)
        spent = self.spent([row["path"] for row in table], calls, tokens) if shared["head"] else {}
        alone = {row["path"]: row["ms"] for row in table}
        for row in table:
            path, rate = row["path"], tokens / row["wall_ms"]
            row |= ({"tokens_per_s": 1e3 * rate} if decodes else {"tokens_per_ms": rate}) | spent.get(path, {})
            if (graph := f"{path} (graph)") in alone:
                row["gpu_ms"] = alone[graph]
            if self.device.type == "cuda" and path in calls:
                row["peak_bytes"] = timing.peak_bytes(calls[path])
        return table
