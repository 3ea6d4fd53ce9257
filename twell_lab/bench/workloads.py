"""What a whole model is measured on, dense beside sparse: forwards, steps of decoding with a cache, steps of training.

Before any clock starts, results are compared: those of a sparse model may be no further from a float32 run than those
of the dense model in the same dtype are (MARGIN, SLACK). Rows are of kind "model_forward", "model_decode"
(tokens: the batch) and "model_training" (see twell_lab.records), with the time of the device and of plain calls. Those
of the first two kinds say how far results are from that float32 run, `error`, as a share of its norm; of a text with
all its logits also the `loss`, the cross-entropy of the next token in nats. What a drawn model makes of an error in
its layers says little of a trained one: so rows of a path that was forced have `layer_error` too, how far the output of
a layer is off on average, and what a lossy path's `error` comes to is seen beside the dense model's own. On a
GPU `gpu_ms`, beside the times of plain calls, is the time of the same call as a CUDA graph: events around a call that
waits for the host hold the waiting too.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any

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
from ..layers.paths.path import Converted
from ..layers.sparse_ffn import SparseFFN
from ..layers.terms import DENSE as LEARNS_DENSE
from ..layers.terms import layer_terms
from ..models.swap import sparsify
from ..ops import clock as timing
from . import drawn, energy, rows
from .causal import Causal, Head
from .rows import COMPILED, DENSE
from .training import L1

PLANNED, FOR_GRAPHS = "planned", "planned for graphs"
FORCED = "forced "  # what comes before the name of a path that all layers take
COMPILED_TOO = " compiled"  # what follows the name of a sparse model that is compiled
# What is allowed: the dense model's own error, with what two equally good runs may differ by chance, and so much of the
# result's norm.
MARGIN, SLACK = 1.05, 1e-3
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
        """int64 [count, length]. Of a text windows are spread evenly over the part; they overlap where it is short."""
        if self.text is None:
            return torch.randint(0, self.vocabulary, (count, length), device=self.device)
        here = self.part(part)
        starts = torch.arange(count, device=self.device) * (len(here) - length) // max(1, count - 1)
        return here[starts[:, None] + torch.arange(length, device=self.device)]

    def part(self, part: tuple[float, float]) -> Tensor:
        """int64 [tokens]: this part of the text."""
        assert self.text is not None
        size = len(self.text)
        return self.text[int(part[0] * size) : int(part[1] * size)].to(self.device)

    def inputs(self, sequences: int, length: int) -> Tensor:
        """Return what is measured: int64 [ROTATED, sequences, length]."""
        found = self.windows(self.MEASURED, timing.ROTATED * sequences, length)
        return found.view(sequences, timing.ROTATED, length).transpose(0, 1)


@dataclass
class Workload:
    """Something that a model computes, again and again.

    Attributes:
        kind: of the rows.
        sequences, length: of its inputs; in a step of decoding the last token of each alone is computed.
        tokens: what the rows call tokens.
        label: what the rows call it.
        head: whether the LM head is part of it.
        makes: (model, compiled) -> a call that takes the number of its turn.
        few: the same on a few of the inputs, to be compared, for the model in float32.
        says: what else the rows say.
        read: token ids [sequences, length] of a text, whose loss the results of the first turn have; or None.
    """

    kind: str
    sequences: int
    length: int
    tokens: int
    label: str
    head: bool
    makes: Callable[[Causal, bool], Callable[[int], Tensor]]
    few: Callable[[Causal], Tensor]
    says: dict
    read: Tensor | None = None
    right: Tensor | None = None  # the result of the model in float32

    def expect(self, exact: Causal | None) -> Workload:
        """Keep what the model in float32 gives, to compare others with."""
        assert exact is not None  # Models.exact, before it is dropped
        self.right = compared_part(self.few(exact)[:_CHECKED]).float()
        return self


def forward(tokens: Tokens, sequences: int, length: int, head: Head) -> Workload:
    """A forward of so many sequences; head: as in causal.Causal.reader."""
    ids = tokens.inputs(sequences, length)

    def makes(model: Causal, compiled: bool):
        read = model.reader(head, compiled=compiled)
        return lambda turn: read(ids[turn % len(ids)])

    few = lambda model: model.reader(head)(ids[0][:_CHECKED])  # noqa: E731
    label = f"{sequences} x {length:,} tokens"
    read = ids[0] if head == "all" and tokens.text is not None and length > 1 else None
    return Workload("model_forward", sequences, length, sequences * length, label, head != "none", makes, few, {}, read)


def decode(
    tokens: Tokens, dense: Causal, batch: int, cached: int, heads: Iterable[bool] = (True, False)
) -> list[Workload]:
    """A step of decoding, with the head and without it: the last of `cached` tokens of each of `batch` sequences, with
    the others in a static cache, which all models share. Where a model gives something else with such a cache than
    without, `Workload.expect` raises an InputError."""
    ids = tokens.windows(tokens.MEASURED, batch, cached)
    kept, last = dense.keep(ids[:, :-1]), ids[:, -1:]

    def makes(model: Causal, compiled: bool, head: bool):
        step = model.stepper(head, compiled=compiled)
        return lambda turn: step(last, kept)

    def few(model: Causal, head: bool) -> Tensor:
        dtype = next(model.model.parameters()).dtype
        step, some = model.stepper(head), ids[:_CHECKED]
        whole = model.reader("last" if head else "none")(some)[:, -1:]
        if not (step(some[:, -1:], model.keep(some[:, :-1])) - whole).norm() <= 1e-2 * whole.norm():
            raise InputError(
                f"a step of {type(model.model).__name__} with a static cache gives something else than its whole "
                "sequence; accepted: a model whose layers keep all tokens"
            )
        return step(some[:, -1:], kept.part(slice(_CHECKED), dtype))

    label, says = f"decode step, batch {batch}", {"cached": cached}
    return [
        Workload(
            "model_decode", batch, cached, batch, label, head, partial(makes, head=head), partial(few, head=head), says
        )
        for head in heads
    ]


def compared_part(result: Tensor) -> Tensor:
    """The part of a result [batch, tokens, n] that is compared: some tokens of each sequence."""
    places = torch.linspace(0, result.shape[1] - 1, min(_PLACES, result.shape[1]), device=result.device).long()
    return result[:, places]


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
        sparse: the models that follow plans, by path.
        seconds: how long each plan took, by path.
        off: of paths that were forced, how far a layer's output is from the dense layer's on average, as a share of its
            norm, on rows that the dense layers are given.
    """

    def __init__(self, dense: Causal, tokens: Tokens, about: str, length: int) -> None:
        self.dense, self.tokens, self.about, self.length = dense, tokens, about, length
        first = next(dense.model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.layers = feed_forwards(dense.model)
        same = self.dtype == torch.float32
        self.exact: Causal | None = dense if same else Causal(copy.deepcopy(dense.model).float())
        self.firing = profile(dense.model, [tokens.windows(tokens.PROFILED, drawn.windows_of(length), length)])
        self.nnzs = [layer.mean_nnz for layer in self.firing.layers]
        self.seconds: dict[str, float] = {}
        self.sparse: dict[str, Causal] = {}
        self.off: dict[str, float] = {}

    def plan(self, classes: Iterable[int], *, for_graphs: bool = False) -> None:
        """Plan the layers for these token counts, and swap those of a copy."""
        on_gpu, name = self.device.type == "cuda", FOR_GRAPHS if for_graphs else PLANNED
        seen = self.tokens.windows(self.tokens.PLANNED_ON, 2 * drawn.windows_of(self.length), self.length)
        rows.drain()
        start = time.perf_counter()
        made = planner.plan(
            self.firing,
            self.dense.model,
            tokens=sorted(set(classes)),
            batches=list(seen.split(max(1, len(seen) // 2))),
            calls="captured" if for_graphs and on_gpu else "eager",
            progress=False,
        )
        rows.drain()
        self.seconds[name] = time.perf_counter() - start
        self.follow(name, made)

    def force(self, path: str, classes: Iterable[int]) -> str:
        """Have the layers of a copy take this path, whatever it is worth; returns what rows call that. On one that
        splits neurons, with as many hot ones in each of these classes of token counts as should be fastest.

        Raises a TwellError where layers do not take the path."""
        if not PATHS[path].splits:
            self.follow(name := f"{FORCED}{(choice := Choice(path))}", choice)
        else:
            self.follow(name := f"{FORCED}{path}", self._split(path, max(classes)))
        self.judge(name)
        return name

    def judge(self, name: str) -> None:
        """Put into `off` how far the layers of this sparse model are off, where they can be called by themselves."""
        if (off := self._layers_off(self.sparse[name])) is not None:
            self.off[name] = off

    def _split(self, path: str, tokens: int) -> Plan:
        """A plan of this path, with the number of hot neurons that is predicted to be best for so many tokens."""
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

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Return what each dense layer is given, by its name: [tokens, d_model]."""
        names = [layer.name for layer in self.layers]
        return captured(self.dense.model, [self.tokens.windows(self.tokens.PROFILED, 1, self.length)], names, _PLACES)

    @torch.no_grad()
    def _layers_off(self, model: Causal) -> float | None:
        """None where a layer cannot be called by itself."""
        off = []
        for dense, sparse in zip(self.layers, feed_forwards(model.model), strict=True):
            if isinstance(sparse.module, SparseFFN) and not sparse.module.registered:
                return None
            x = self.inputs[dense.name]
            right = dense.module(x).double()
            off.append((sparse.module(x).double() - right).norm() / right.norm().clamp(min=1e-30))
        return float(torch.stack(off).mean())

    def follow(self, name: str, plan) -> None:
        """Swap the layers of a copy by this plan (whatever `sparsify` takes) and call it so."""
        swapped = sparsify(copy.deepcopy(self.dense.model).requires_grad_(False), plan)
        self.sparse[name] = Causal(swapped)

    def model_of(self, path: str) -> Causal:
        """The model that runs on this path, compiled or not."""
        if path in (DENSE, COMPILED):
            return self.dense
        return self.sparse[path.removesuffix(COMPILED_TOO)]

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
            "nnz_layers": [round(each, 1) for each in self.nnzs],
            "layers": len(self.layers),
            "parameters": sum(each.numel() for each in self.dense.model.parameters()),
            "workload": f"{self.about}, {workload}",
        }

    def facts(self, tokens: int) -> dict[str, dict]:
        """Return what the rows of each path say of its weights, and of what each layer does with so many tokens."""
        found: dict[str, dict] = {DENSE: {"weight_bytes": weight_bytes(self.dense.model)}}
        found[COMPILED] = {}
        for name, model in self.sparse.items():
            plans = [each.plan for each in model.model.modules() if isinstance(each, SparseFFN)]
            told = [each if isinstance(each, Choice) else each.choice(tokens) for each in plans]
            taken = Counter(each.path if each.hot else str(each) for each in told)
            if len(told) < len(self.layers):
                taken["dense"] += len(self.layers) - len(told)  # not swapped: nothing is faster
            found[name] = {"weight_bytes": weight_bytes(model.model), "choice": _counted(taken)}
            found[name] |= {"layer_error": round(self.off[name], 9)} if name in self.off else {}
            found[name + COMPILED_TOO] = {"choice": _counted(taken)}
        return found


def _counted(taken: Counter[str]) -> str:
    return ", ".join(f"{count} {path}" for path, count in sorted(taken.items()))


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's parameters and buffers, and of the forms of weights that its sparse layers compute
    with, each piece of memory once."""
    forms = [
        path.form(layer, layer.weights())
        for layer in model.modules()
        if isinstance(layer, SparseFFN)
        for _, choice in layer.choices
        if isinstance(path := PATHS[choice.path], Converted)
    ]
    tensors = [*model.parameters(), *model.buffers(), *_tensors(forms, set())]
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(thing: Any, passed: set[int]) -> Iterator[Tensor]:
    """The tensors in containers, objects and what functions close over; `passed` has the ids of what was looked at."""
    if isinstance(thing, Tensor):
        if thing.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (thing.crow_indices(), thing.col_indices(), thing.values())
        elif thing.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (thing.ccol_indices(), thing.row_indices(), thing.values())
        elif is_traceable_wrapper_subclass(thing):  # torch's 2:4 tensors, which have no memory of their own
            yield from _tensors([getattr(thing, name) for name in thing.__tensor_flatten__()[0]], passed)
        else:
            yield thing
    elif id(thing) not in passed and not isinstance(thing, (type, ModuleType, TwellError)):
        passed.add(id(thing))
        parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (tuple, list)) else ()
        closed = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        bound = (thing.func, thing.args, thing.keywords) if isinstance(thing, partial) else ()
        for part in (*parts, *closed, *bound, *getattr(thing, "__dict__", {}).values()):
            yield from _tensors(part, passed)


# ---- the rows ----


class Clocks:
    """How calls are timed, and what else is read of them.

    Args:
        device: they run on.
        seconds: on a CPU, how long all calls of a workload are timed; on a GPU, for how many seconds the energy of each
            is read; 0 for no energy.
        graphs: replay CUDA graphs for many tokens too.
        compiled: and of compiled calls.
        rounds: samples of each call on a GPU; by default fewer where a call takes long.
        watched: whether peak memory and energy are read too, on a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        seconds: float = 0.0,
        *,
        graphs: bool = False,
        compiled: bool = False,
        rounds: int | None = None,
        watched: bool = False,
    ) -> None:
        self.device, self.seconds, self.graphs, self.compiled, self.rounds = device, seconds, graphs, compiled, rounds
        self.watched = watched and device.type == "cuda"
        self.meter, self.no_energy = energy.meter(device) if watched else (None, "")

    def time(
        self, calls: rows.Calls, tokens: int, label: str, left_out: dict[str, str] | None, captured: bool = True
    ) -> tuple[dict[str, list[float]], rows.Bursts]:
        """The samples of the device, and bursts of plain calls, by the name of the call. On a GPU calls are captured as
        graphs too, for few tokens always. left_out: why they cannot be, or do not fit into the memory, if so; without
        it, that is an error."""
        if self.device.type == "cpu":
            return rows.clock_cpu(calls, self.seconds)
        rounds = self.rounds or (3 if tokens > rows.LARGE else 10)
        if captured:
            try:
                return rows.clock_gpu(calls, tokens, graphs=self.graphs, compiled=self.compiled, rounds=rounds)
            except RuntimeError as error:
                if left_out is None or isinstance(error, TwellError):
                    raise
                left_out[f"{label}, as CUDA graphs"] = f"{str(error).strip().partition(chr(10))[0]:.200}"
        return rows.clock_gpu(calls, max(tokens, timing.GRAPH_TOKENS + 1), rounds=rounds)

    def peak(self, path: str, calls: rows.Calls) -> dict:
        """The peak memory of this path, which a row says where it is no graph."""
        if not self.watched or path.endswith(" (graph)"):
            return {}
        return {"peak_bytes": timing.peak_bytes(calls[path])}

    def reads_energy(self, path: str, tokens: int) -> bool:
        """Return whether the energy of this path is read, if any is."""
        return True

    def energy(self, paths: Iterable[str], calls: rows.Calls, tokens: int) -> dict[str, dict]:
        """Return what the row of each path says of its energy; tokens: those that a call computes."""
        if not self.watched or not self.seconds or self.meter is None:
            return {}
        timed = {}
        for path in [each for each in paths if self.reads_energy(each, tokens)]:
            name, graph, _ = path.partition(" (graph)")
            timed[path] = timing.graphed(calls[name], inputs=1) if graph else calls[name]
        found = energy.millijoules(self.meter, timed, rows.drain, max(1, round(self.seconds)))
        return {path: energy.facts(each, tokens) for path, each in found.items()}


def is_compiled(path: str) -> bool:
    """Return whether the model of this path runs under torch.compile."""
    return path == COMPILED or path.endswith(COMPILED_TOO)


Judged = Callable[[Workload, str], dict]  # of a path: what its row says of the checks, or timing.WrongResult


@torch.no_grad()
def workload_rows(
    models: Models,
    work: Workload,
    paths: Iterable[str],
    clocks: Clocks,
    left_out: dict[str, str] | None = None,
    judge: Judged | None = None,
) -> list[dict]:
    """A row for each path, and each way in which it was timed. left_out: where a model cannot be compiled, why is kept
    there, and its rows are missing; without it, that is an error. judge: what says whether paths that are not lossy are
    right, in place of the errors of a few tokens, where these say nothing (bench.cut_checks)."""
    calls: rows.Calls = {path: work.makes(models.model_of(path), is_compiled(path)) for path in paths}
    facts = _check(calls, work, models.facts(work.tokens), left_out, judge)
    shared = models.shared(work.kind, work.tokens, work.label)
    timed = clocks.time(calls, work.tokens, work.label, left_out)
    return _rows(shared, calls, facts, clocks, timed, {"head": work.head, **work.says})


def _rows(shared: dict, calls: rows.Calls, facts: dict, clocks: Clocks, timed: tuple, says: dict) -> list[dict]:
    tokens, decodes = shared["tokens"], shared["kind"] == "model_decode"
    found = rows.table(shared, timed[0], facts, timed[1])
    alone = {row["path"].removesuffix(" (graph)"): row["ms"] for row in found if row["path"].endswith(" (graph)")}
    for row in found:
        path, rate = row["path"], tokens / row["wall_ms"]
        row |= says | ({"tokens_per_s": 1e3 * rate} if decodes else {"tokens_per_ms": rate})
        row |= {"gpu_ms": alone[path]} if path in alone else {}
        row |= clocks.peak(path, calls)
    if says["head"]:
        spent = clocks.energy([row["path"] for row in found], calls, tokens)
        for row in found:
            row |= spent.get(row["path"], {})
    return found


def _check(
    calls: dict, work: Workload, facts: dict[str, dict], left_out: dict[str, str] | None, judge: Judged | None = None
) -> dict[str, dict]:
    """Compare the results of all calls with float32. Returns the facts of those that ran, with their error and loss,
    and the ratio of error to what is allowed. Raises timing.WrongResult where a path that is not lossy exceeds that,
    and where one that is gives what is no number.
    """
    assert work.right is not None  # Workload.expect came before
    right, found = work.right, {}
    for name, result in _first(calls, work.label, left_out):
        found[name] = compared_part(result[:_CHECKED]).float()
        if work.read is not None:
            facts[name] = facts.get(name, {}) | {"loss": round(_loss(result, work.read), 6)}
    allowed = MARGIN * (found[DENSE] - right).norm() + SLACK * right.norm()
    for name, result in found.items():
        off = (result - right).norm()
        facts[name] = facts.get(name, {}) | {"error": round(float(off / right.norm()), 9)}
        if name != DENSE:
            ratio = float(off / allowed)
            lossy = LOSSY in name or LOSSY in facts[name].get("choice", "")
            if judge is not None and not lossy:
                try:
                    facts[name] |= judge(work, name)
                except timing.WrongResult as error:
                    raise timing.WrongResult(f"{work.label}: {name}: {error}: nothing was timed") from None
                continue
            if not ratio <= (sys.float_info.max if lossy else 1.0):
                raise timing.WrongResult(
                    f"{work.label}: {name}: the {'logits' if work.head else 'results'} are off by {ratio:.3g} times "
                    "what is allowed: nothing was timed"
                )
            facts[name]["error_over_allowed"] = round(ratio, 4)
    return {name: facts.get(name, {}) for name in calls}


def _loss(logits: Tensor, ids: Tensor) -> float:
    """The mean cross-entropy of the next token, in nats, of logits [sequences, length, vocabulary]."""
    each = [nn.functional.cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(logits, ids, strict=True)]
    return float(torch.stack(each).mean())


@torch.no_grad()
def right_ones(models: Models, work: Workload, paths: Iterable[str], left_out: dict[str, str]) -> list[str]:
    """Those of these paths that give what they should, so that one that does not, or that torch's kernels refuse,
    keeps no other from being timed; why the others do not is put into `left_out`."""
    found, dense = [], work.makes(models.dense, False)(0)  # computed once, for all
    for path in paths:
        calls: rows.Calls = {DENSE: lambda turn: dense, path: work.makes(models.model_of(path), False)}
        try:
            _check(calls, work, models.facts(work.tokens), None)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TwellError) as error:  # timing.WrongResult among them
            left_out[f"{models.about}, {work.label}, {path}"] = f"{str(error).partition(chr(10))[0]:.200}"
        else:
            found.append(path)
    return found


def _first(calls: dict, label: str, left_out: dict[str, str] | None) -> Iterator[tuple[str, Tensor]]:
    """The name and the first result of each call. What cannot be compiled is taken out of `calls`, and why is put into
    `left_out`; without one it is an error."""
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
    """Whole training steps of the model, dense and on the paths that `switching` chooses for its layers: the loss with
    L1, backward, and AdamW with a learning rate of zero, so that every step is the same. left_out: as for
    workload_rows."""
    length = min(tokens, models.length)
    ids = models.tokens.inputs(tokens // length, length)
    dense = copy.deepcopy(models.dense.model).train().requires_grad_(True)
    twin = sparsify(copy.deepcopy(dense), "twell")
    with layer_terms(twin) as terms:
        Causal(twin).reader()(ids[0])
    Switch(twin).see(terms)
    layers = [each.module for each in feed_forwards(twin)]
    learns = Counter("dense" if each.learning == LEARNS_DENSE else "twell" for each in layers)
    calls = {DENSE: _step(dense, ids), PLANNED: _step(twin, ids)}
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
