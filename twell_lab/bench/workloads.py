"""What a whole model is measured on, dense beside sparse: forwards, steps of decoding with a cache, steps of training.

Before any clock starts, results are compared: those of a sparse model may be no further from a float32 run than those
of the dense model in the same dtype are (MARGIN, SLACK); with thresholds each layer is compared (cut_checks), and the
whole may be off by CUT_SLACK. Rows are of kind "model_forward", "model_decode" (tokens: the batch) and "model_training"
(see twell_lab.records), with the time of the device and of plain calls. `error` says how far results are from the
float32 run, as a share of its norm, and `loss` the cross-entropy of the next token in nats, of a text with all its
logits. What a drawn model makes of an error in its layers says little of a trained one: so rows of a path that was
forced have `layer_error` too, how far the output of a layer is off on average. On a GPU `gpu_ms`, beside the times of
plain calls, is the time of the same call as a CUDA graph: events around a call that waits for the host hold the waiting
too."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..analysis import costs, planner
from ..analysis.plan import Plan
from ..analysis.profile import captured, profile
from ..analysis.switching import Switch
from ..core import InputError, TwellError
from ..layers.choice import LOSSY, Choice, LayerPlan
from ..layers.find import feed_forwards
from ..layers.paths import PATHS
from ..layers.sparse_ffn import SparseFFN
from ..layers.terms import DENSE as LEARNS_DENSE
from ..layers.terms import layer_terms
from ..models.swap import sparsify
from ..ops import clock as timing
from . import drawn, energy, rows
from .causal import Causal
from .cut_checks import has_thresholds, worst_layer
from .rows import COMPILED, DENSE
from .training import L1

PLANNED, FOR_GRAPHS = "planned", "planned for graphs"
FORCED = "forced "  # what comes before the name of a path that all layers take
COMPILED_TOO = " compiled"  # what follows the name of a sparse model that is compiled
# What is allowed: the dense model's own error, with what two equally good runs may differ by chance, and so much of the
# result's norm.
MARGIN, SLACK = 1.05, 1e-3
CUT_SLACK = 0.25  # the latter for a model with thresholds, whose layers are compared one by one
_CHECKED = 4  # sequences of a batch whose logits are compared
_PLACES = 64  # and tokens of each sequence


# ---- what is run ----


class Tokens:
    """Where the inputs come from: token ids of a text, [length], or None for random ones. Of a text, the first quarter
    is profiled, the second is what plans are timed on, and the rest is what is measured."""

    PROFILED, PLANNED_ON, MEASURED = (0.0, 0.25), (0.25, 0.5), (0.5, 1.0)

    def __init__(self, vocabulary: int, device: torch.device, text: Tensor | None = None) -> None:
        self.vocabulary, self.device, self.text = vocabulary, device, text

    def windows(self, part: tuple[float, float], count: int, length: int) -> Tensor:
        """Return int64 [count, length]. Of a text windows are spread evenly over the part; they overlap where it is
        short."""
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
    """Something that a model computes, again and again.

    Attributes:
        kind, tokens, label: what the rows say of it.
        head: whether the LM head is part of it.
        makes: (model, compiled) -> a call that takes the number of its turn.
        few: the same on a few of the inputs, to be compared, for the model in float32.
        says: what else the rows say.
        read: token ids [sequences, length] of a text, whose loss the results of the first turn have; or None.
        right: the result of the model in float32.
    """

    kind: str
    tokens: int
    label: str
    head: bool
    makes: Callable[[Causal, bool], Callable[[int], Tensor]]
    few: Callable[[Causal], Tensor]
    says: dict
    read: Tensor | None = None
    right: Tensor | None = None

    @torch.no_grad()
    def expect(self, exact: Causal | None) -> Workload:
        """Keep what the model in float32 gives, to compare others with."""
        assert exact is not None  # Models.exact, before it is dropped
        self.right = compared_part(self.few(exact)).float()
        return self


def forward(tokens: Tokens, sequences: int, length: int, head: bool = True) -> Workload:
    """Return a forward of so many sequences, with the head or without it."""
    ids = tokens.inputs(sequences, length)

    def makes(model: Causal, compiled: bool):
        read = model.reader(head, compiled=compiled)
        return lambda turn: read(ids[turn % len(ids)])

    few = lambda model: model.reader(head)(ids[0][:_CHECKED])  # noqa: E731
    read = ids[0] if head and tokens.text is not None and length > 1 else None
    label = f"{sequences} x {length:,} tokens"
    return Workload("model_forward", sequences * length, label, head, makes, few, {}, read)


@torch.no_grad()
def decode(
    tokens: Tokens, dense: Causal, batch: int, cached: int, heads: Iterable[bool] = (True, False)
) -> list[Workload]:
    """Return a step of decoding, with the head and without it: the last of `cached` tokens of each of `batch`
    sequences, with the others in a static cache, which all models share. Where a model gives something else with such a
    cache than without, `Workload.expect` raises an InputError."""
    ids = tokens.windows(tokens.MEASURED, batch, cached)
    kept, last = dense.keep(ids[:, :-1]), ids[:, -1:]

    def makes(model: Causal, compiled: bool, head: bool):
        step = model.stepper(head, compiled=compiled)
        return lambda turn: step(last, kept)

    def few(model: Causal, head: bool) -> Tensor:
        dtype = next(model.model.parameters()).dtype
        step, some = model.stepper(head), ids[:_CHECKED]
        whole = model.reader(head)(some)[:, -1:]
        if not (step(some[:, -1:], model.keep(some[:, :-1])) - whole).norm() <= 1e-2 * whole.norm():
            raise InputError(
                f"a step of {type(model.model).__name__} with a static cache gives something else than its whole "
                "sequence; accepted: a model whose layers keep all tokens"
            )
        return step(some[:, -1:], kept.part(slice(_CHECKED), dtype))

    label, says, part = f"decode step, batch {batch}", {"cached": cached}, functools.partial
    return [
        Workload("model_decode", batch, label, head, part(makes, head=head), part(few, head=head), says)
        for head in heads
    ]


def compared_part(result: Tensor) -> Tensor:
    """Return the part of a result [batch, tokens, n] that is compared: some tokens of a few sequences."""
    places = torch.linspace(0, result.shape[1] - 1, min(_PLACES, result.shape[1]), device=result.device).long()
    return result[:_CHECKED, places]


# ---- the models ----


class Models:
    """A dense model, and what is compared with it.

    Args:
        dense: in evaluation mode, dense throughout.
        tokens: its inputs.
        about: what the rows call it, before the workload.
        length: of the windows that are profiled and planned on.

    Attributes:
        exact: a copy in float32, to compare results with, which may be dropped (None) once all was expected; a model in
            float32 is its own.
        cut: the layers with thresholds.
        sparse: the models that follow plans, by path.
        off: of paths that were forced, how far a layer's output is from the dense layer's on average, as a share of its
            norm, on rows that the dense layers are given.
    """

    def __init__(self, dense: Causal, tokens: Tokens, about: str, length: int) -> None:
        self.dense, self.tokens, self.about, self.length = dense, tokens, about, length
        first = next(dense.model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.layers = feed_forwards(dense.model)
        self.cut = [layer for layer in self.layers if has_thresholds(layer)]
        same = self.dtype == torch.float32
        self.exact: Causal | None = dense if same else Causal(copy.deepcopy(dense.model).float())
        self.firing = profile(dense.model, [tokens.windows(tokens.PROFILED, drawn.windows_of(length), length)])
        self.nnzs = [layer.mean_nnz for layer in self.firing.layers]
        self.sparse: dict[str, Causal] = {}
        self.off: dict[str, float] = {}

    def planned(self, classes: Iterable[int], for_graphs: bool) -> tuple[Plan, float]:
        """Plan the layers for these token counts; returns the plan, and how many seconds it took."""
        windows = self.tokens.windows(self.tokens.PLANNED_ON, 2 * drawn.windows_of(self.length), self.length)
        rows.drain()
        start = time.perf_counter()
        plan = planner.plan(
            self.firing,
            self.dense.model,
            tokens=sorted(set(classes)),
            batches=list(windows.split(max(1, len(windows) // 2))),
            calls="captured" if for_graphs and self.device.type == "cuda" else "eager",
            progress=False,
        )
        rows.drain()
        return plan, time.perf_counter() - start

    def plan(self, classes: Iterable[int], *, for_graphs: bool = False) -> None:
        """Plan the layers for these token counts, and swap those of a copy."""
        self.follow(FOR_GRAPHS if for_graphs else PLANNED, self.planned(classes, for_graphs)[0])

    def force(self, path: str, classes: Iterable[int]) -> str:
        """Have the layers of a copy take this path, whatever it is worth; returns what rows call that. On one that
        splits neurons, with as many hot ones as should be fastest for the most tokens. Raises a TwellError where layers
        do not take the path."""
        if PATHS[path].splits:
            self.follow(name := f"{FORCED}{path}", self._split(path, max(classes)))
        else:
            self.follow(name := f"{FORCED}{(choice := Choice(path))}", choice)
        if (off := self._layers_off(self.sparse[name])) is not None:
            self.off[name] = off
        return name

    def _split(self, path: str, tokens: int) -> Plan:
        """Return a plan of this path, with the number of hot neurons that should be fastest for so many tokens."""
        rates = costs.measure_rates(self.device, self.dtype)
        layers = []
        for layer in self.firing.layers:
            firing = costs.Firing.of(layer)
            choices = [Choice(path, hot) for hot in PATHS[path].sizes(layer.d_ff)]
            if not choices:
                raise InputError(f"{layer.name!r} has {layer.d_ff} neurons, too few for the path {path!r} to split")
            us = [costs.predict(choice, firing, rates, tokens, self.dtype.itemsize)["total"] for choice in choices]
            layers.append(LayerPlan.forced(layer, choices[us.index(min(us))]))
        return Plan(layers, rates.device, rates.dtype, rates.as_dict())

    @torch.no_grad()
    def _layers_off(self, model: Causal) -> float | None:
        """Return what `off` says of a model; None where a layer cannot be called by itself."""
        swapped = feed_forwards(model.model)
        if not all(layer.module.registered for layer in swapped if isinstance(layer.module, SparseFFN)):
            return None
        windows = [self.tokens.windows(self.tokens.PROFILED, 1, self.length)]
        inputs = captured(self.dense.model, windows, [layer.name for layer in self.layers], _PLACES)
        off = []
        for dense, sparse in zip(self.layers, swapped, strict=True):
            right = dense.module(inputs[dense.name]).double()
            off.append((sparse.module(inputs[dense.name]).double() - right).norm() / right.norm().clamp(min=1e-30))
        return float(torch.stack(off).mean())

    def follow(self, name: str, plan) -> None:
        """Swap the layers of a copy by this plan (whatever `sparsify` takes) and call it so."""
        self.sparse[name] = Causal(sparsify(copy.deepcopy(self.dense.model).requires_grad_(False), plan))

    def model_of(self, path: str) -> Causal:
        """Return the model that runs on this path, compiled or not."""
        return self.dense if path in (DENSE, COMPILED) else self.sparse[path.removesuffix(COMPILED_TOO)]

    def shared(self, kind: str, tokens: int, workload: str) -> dict:
        """Return what all rows of one comparison say."""
        first = self.layers[0]
        return {
            "kind": kind,
            "device": timing.device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens": tokens,
            "d_model": first.up.weight.shape[1],
            "d_ff": first.up.weight.shape[0],
            "gated": first.gate is not None,
            "nnz": round(sum(self.nnzs) / len(self.nnzs), 2),
            "nnz_layers": [round(nnz, 1) for nnz in self.nnzs],
            "layers": len(self.layers),
            "parameters": sum(weight.numel() for weight in self.dense.model.parameters()),
            "workload": f"{self.about}, {workload}",
        }

    def facts(self, tokens: int) -> dict[str, dict]:
        """Return what the rows of each path say of its weights, and of what each layer does with so many tokens."""
        facts: dict[str, dict] = {DENSE: {"weight_bytes": weight_bytes(self.dense.model)}, COMPILED: {}}
        for name, model in self.sparse.items():
            plans = [layer.plan for layer in model.model.modules() if isinstance(layer, SparseFFN)]
            choices = [plan if isinstance(plan, Choice) else plan.choice(tokens) for plan in plans]
            taken = Counter(choice.path if choice.hot else str(choice) for choice in choices)
            if len(choices) < len(self.layers):
                taken["dense"] += len(self.layers) - len(choices)  # not swapped: nothing is faster
            facts[name + COMPILED_TOO] = {"choice": _counted(taken)}
            facts[name] = {"weight_bytes": weight_bytes(model.model), "choice": _counted(taken)}
            facts[name] |= {"layer_error": round(self.off[name], 9)} if name in self.off else {}
        return facts


def _counted(taken: Counter[str]) -> str:
    return ", ".join(f"{count} {path}" for path, count in sorted(taken.items()))


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's parameters and buffers, and of the forms of weights that its sparse layers compute
    with, each piece of memory once."""
    sizes: dict[int, int] = {}
    forms = [form for layer in model.modules() if isinstance(layer, SparseFFN) for form in layer.forms.values()]
    queue, passed = [*model.parameters(), *model.buffers(), *forms], set()
    while queue:
        thing = queue.pop()
        if id(thing) in passed or isinstance(thing, (type, ModuleType, TwellError)):
            continue
        passed.add(id(thing))
        if isinstance(thing, FunctionType):
            queue += thing.__closure__ or ()
        elif not isinstance(thing, Tensor):
            queue += gc.get_referents(thing)
        elif thing.layout in (torch.sparse_csr, torch.sparse_bsr):
            queue += (thing.crow_indices(), thing.col_indices(), thing.values())
        elif is_traceable_wrapper_subclass(thing):  # torch's 2:4 tensors, which have no memory of their own
            queue += [getattr(thing, name) for name in thing.__tensor_flatten__()[0]]
        else:
            sizes[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(sizes.values())


# ---- the rows ----


class Clocks:
    """How calls are timed, and what else is read of them.

    Args:
        device: they run on.
        seconds: on a CPU, how long all calls of a workload are timed; on a GPU, for how many seconds the energy of each
            is read; 0 for no energy.
        graphs: replay CUDA graphs for up to rows.LARGE tokens; without it for few tokens alone. With more, a call takes
            so long that a graph gains nothing.
        watched: whether peak memory and energy are read too, on a GPU.
    """

    def __init__(
        self, device: torch.device, seconds: float = 0.0, *, graphs: bool = False, watched: bool = False
    ) -> None:
        self.device, self.seconds, self.graphs = device, seconds, graphs
        self.watched = watched and device.type == "cuda"
        self.meter, self.no_energy = energy.meter(device) if watched else (None, "")

    def time(
        self, calls: rows.Calls, tokens: int, label: str, left_out: dict[str, str] | None, captured: bool = True
    ) -> tuple[dict[str, list[float]], rows.Bursts]:
        """Return the samples of the device, and bursts of plain calls, by the name of the call. left_out: why they
        cannot be captured as graphs, if so; without it, that is an error."""
        if self.device.type == "cpu":
            return rows.clock_cpu(calls, self.seconds)
        rounds = 3 if tokens > rows.LARGE else 15  # where the host is waited for, samples vary
        if captured and tokens <= (rows.LARGE if self.graphs else timing.GRAPH_TOKENS):
            try:
                return rows.clock_gpu(calls, tokens, graphs=True, compiled=True, rounds=rounds)
            except RuntimeError as error:
                if left_out is None or isinstance(error, TwellError):
                    raise
                left_out[f"{label}, as CUDA graphs"] = f"{str(error).strip().partition(chr(10))[0]:.200}"
        return rows.clock_gpu(calls, max(tokens, timing.GRAPH_TOKENS + 1), rounds=rounds)

    def spent(self, paths: list[str], calls: rows.Calls, tokens: int) -> dict[str, dict]:
        """Return what the row of each path says of its energy; tokens: those that a call computes. Plain calls wait for
        the host, and so does their energy: it is read of graphs, where there are any."""
        if not self.watched or not self.seconds or self.meter is None:
            return {}
        timed = {}
        for path in [path for path in paths if path.endswith("(graph)")] or paths:
            name, graph, _ = path.partition(" (graph)")
            timed[path] = timing.graphed(calls[name], inputs=1) if graph else calls[name]
        return energy.energy_facts(self.meter, timed, rows.drain, max(1, round(self.seconds)), tokens)


@torch.no_grad()
def workload_rows(
    models: Models, work: Workload, paths: Iterable[str], clocks: Clocks, left_out: dict[str, str] | None = None
) -> list[dict]:
    """Return a row for each path, and each way in which it was timed. left_out: where a model cannot be compiled, why
    is put there, and its rows are missing; without it, that is an error. Raises timing.WrongResult, before anything is
    timed, where a result is wrong."""
    compiled = lambda path: path == COMPILED or path.endswith(COMPILED_TOO)  # noqa: E731
    calls: rows.Calls = {path: work.makes(models.model_of(path), compiled(path)) for path in paths}
    facts = _check(models, work, calls, left_out)
    timed = clocks.time(calls, work.tokens, work.label, left_out)
    shared = models.shared(work.kind, work.tokens, work.label)
    return _rows(shared, calls, facts, clocks, timed, {"head": work.head, **work.says})


def _rows(shared: dict, calls: rows.Calls, facts: dict, clocks: Clocks, timed: tuple, says: dict) -> list[dict]:
    tokens, decodes = shared["tokens"], shared["kind"] == "model_decode"
    made = rows.table(shared, timed[0], facts, timed[1])
    paths = [row["path"] for row in made]
    alone = {row["path"].removesuffix(" (graph)"): row["ms"] for row in made if row["path"].endswith(" (graph)")}
    spent = clocks.spent(paths, calls, tokens) if says["head"] else {}
    for row in made:
        path, rate = row["path"], tokens / row["wall_ms"]
        row |= says | ({"tokens_per_s": 1e3 * rate} if decodes else {"tokens_per_ms": rate}) | spent.get(path, {})
        row |= {"gpu_ms": alone[path]} if path in alone else {}
        if clocks.watched and path in calls:
            row["peak_bytes"] = timing.peak_bytes(calls[path])
    return made


@torch.no_grad()
def variant_rows(
    kind: str, label: str, models: dict[str, Causal], facts: dict[str, dict], tokens: Tokens, batch: int, **how
) -> list[dict]:
    """Return rows of this kind of a step of decoding, of models that compute different things, with what their rows say
    (`facts`); `rows.DENSE` is one of them, and they are models of this project of the same sizes. how: `cached` as for
    `decode`, the mean `nnz` of the rows, and the `seconds` that a CPU is timed."""
    dense = models[DENSE].model
    (work,) = decode(tokens, models[DENSE], batch, how["cached"], (True,))
    calls: rows.Calls = {name: work.makes(model, False) for name, model in models.items()}
    samples, bursts = Clocks(tokens.device, how["seconds"]).time(calls, batch, work.label, None)
    shared = {
        "kind": kind,
        "device": timing.device_name(tokens.device),
        "dtype": str(next(dense.parameters()).dtype).removeprefix("torch."),
        "tokens": batch,
        **{name: getattr(dense.config, name) for name in ("d_model", "d_ff", "gated", "layers")},
        "parameters": sum(weight.numel() for weight in dense.parameters()),
        "nnz": round(how["nnz"], 2),
        "workload": label.format(work.label),
    }
    return [row | work.says for row in rows.table(shared, samples, facts, bursts)]


def _check(models: Models, work: Workload, calls: rows.Calls, left_out: dict[str, str] | None) -> dict[str, dict]:
    """Compare the results of all calls with float32. Returns the facts of those that ran, with their error and loss,
    and the ratio of error to what is allowed. Raises timing.WrongResult where a path that is not lossy exceeds that,
    and where one that is gives what is no number."""
    assert work.right is not None  # Workload.expect came before
    right, facts, results = work.right, models.facts(work.tokens), {}
    for name, result in _first(calls, work.label, left_out):
        results[name] = compared_part(result).float()
        if work.read is not None:
            facts[name]["loss"] = round(_loss(result, work.read), 6)
    slack = CUT_SLACK if models.cut else SLACK
    allowed = MARGIN * (results[DENSE] - right).norm() + slack * right.norm()
    for name, result in results.items():
        off = (result - right).norm()
        facts[name]["error"] = round(float(off / right.norm()), 9)
        if name == DENSE:
            continue
        ratio, lossy = float(off / allowed), LOSSY in name or LOSSY in facts[name].get("choice", "")
        if not ratio <= (sys.float_info.max if lossy else 1.0):
            raise timing.WrongResult(
                f"{work.label}: {name}: the {'logits' if work.head else 'results'} are off by {ratio:.3g} times "
                "what is allowed: nothing was timed"
            )
        facts[name]["error_over_allowed"] = round(ratio, 4)
        if models.cut and name in models.sparse and not lossy:
            try:
                worst = worst_layer(models.cut, models.sparse[name].model, lambda: calls[DENSE](0))
            except timing.WrongResult as error:
                raise timing.WrongResult(f"{work.label}: {name}: {error}") from None
            if worst is not None:
                facts[name]["layer_over_allowed"] = round(worst, 4)
    return facts


def _loss(logits: Tensor, ids: Tensor) -> float:
    """Return the mean cross-entropy of the next token, in nats, of logits [sequences, length, vocabulary]."""
    losses = [nn.functional.cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(logits, ids, strict=True)]
    return float(torch.stack(losses).mean())


def _first(calls: dict, label: str, left_out: dict[str, str] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the first result of each call. What cannot be compiled is taken out of `calls`, and why is put
    into `left_out`; without one it is an error."""
    if any("compiled" in name for name in calls):
        torch._dynamo.reset()  # which compiles a function for eight models at most
    for name in list(calls):
        try:
            result = calls[name](0)
        except Exception as error:  # dynamo and the compilers behind it raise their own kinds
            if left_out is None or "compiled" not in name or isinstance(error, torch.OutOfMemoryError):
                raise
            left_out[f"{label}, {name}"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            del calls[name]
        else:
            yield name, result


def training_rows(
    models: Models, tokens: int, clocks: Clocks, left_out: dict[str, str] | None = None, *, compiled: bool = False
) -> list[dict]:
    """Return rows of whole training steps, dense and on the paths that `switching` chooses for the layers: the loss
    with L1, backward, and AdamW with a learning rate of zero, so that every step is the same. left_out: as for
    workload_rows."""
    length = min(tokens, models.length)
    ids = models.tokens.inputs(tokens // length, length)
    dense = copy.deepcopy(models.dense.model).train().requires_grad_(True)
    twin = sparsify(copy.deepcopy(dense), "twell")
    with layer_terms(twin) as terms:
        Causal(twin).reader()(ids[0])
    Switch(twin).see(terms)
    layers = [layer.module for layer in feed_forwards(twin)]
    learns = Counter("dense" if layer.learning == LEARNS_DENSE else "twell" for layer in layers)
    calls: rows.Calls = {DENSE: _step(dense, ids), PLANNED: _step(twin, ids)}
    if compiled:
        calls |= {COMPILED: _step(dense, ids, True), PLANNED + COMPILED_TOO: _step(twin, ids, True)}
    losses = {name: float(loss) for name, loss in _first(calls, "training", left_out)}
    if not max(losses.values()) - min(losses.values()) <= 0.02 * abs(losses[DENSE]):
        raise timing.WrongResult(f"training: the losses differ: {losses}; nothing was timed")
    facts: dict[str, dict] = {name: {"loss": round(loss, 4)} for name, loss in losses.items()}
    for name in set(calls) - {DENSE, COMPILED}:
        facts[name]["choice"] = _counted(learns)
    shared = models.shared("model_training", ids[0].numel(), f"training step, {len(ids[0])} x {length:,} tokens")
    timed = clocks.time(calls, ids[0].numel(), "training", None, captured=False)
    return _rows(shared, calls, facts, clocks, timed, {"head": True})


def _step(model: nn.Module, ids: Tensor, compiled: bool = False) -> Callable[[int], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=ids.is_cuda)
    read = Causal(model).reader(compiled=compiled)

    def step(turn: int) -> Tensor:
        windows = ids[turn % len(ids)]
        with layer_terms(model) as terms:
            logits = read(windows)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())
        loss = loss + L1 * sum(term.l1 for term in terms) / len(terms)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
