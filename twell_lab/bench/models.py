"""Any causal language model, dense beside sparse: `model` looks it over and has it measured. `Bench` is the same in
steps, of which `of_size` makes the records of the paper's four sizes; what a step does not need is not made before
it."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from ..analysis import planner
from ..analysis.planner import Plan
from ..analysis.profile import FiringProfile, captured, profile
from ..core import TwellError
from ..formats.twell import VALUE_DTYPES
from ..layers.activations import is_threshold
from ..layers.choice import LOSSY, Choice
from ..layers.find import check_model, feed_forwards, survey
from ..layers.paths import PATHS
from ..layers.probe import raise_all
from ..layers.sparse_ffn import SparseFFN
from ..models.swap import sparsify
from ..models.tiny import ModelConfig, check_whole
from ..ops import clock as timing
from ..records import Record
from . import drawn, rows, training, workloads
from .rows import COMPILED, DENSE, Calls, Entry, need
from .workloads import LONGEST, Causal, Workload

SIZES = drawn.NAMES[-4:]  # the paper's
RECORD = "bench-model"  # what a record of `model`, and of one of these sizes, is called
PLANNED, FOR_GRAPHS = "planned", "planned for graphs"
FORCED = "forced "  # what comes before the name of a path that all layers take
COMPILED_TOO = " compiled"  # what follows the name of a sparse model that is compiled
CACHED = 512  # tokens of each sequence, the new one among them, in a step of decoding
PROFILED, PLANNED_ON, MEASURED = (0.0, 0.25), (0.25, 0.5), (0.5, 1.0)  # parts of a text: what each is for


def model(
    model: nn.Module | ModelConfig | str,
    *,
    tokens: Iterable[int] | None = None,
    batches: Iterable[int] = (1, 8, 64),
    text: Tensor | None = None,
    firing: FiringProfile | str | os.PathLike | None = None,
    plan: Plan | Choice | str | os.PathLike | None = None,
    compiled: bool = False,
    graphs: bool = False,
    training: bool = False,
    seconds: float | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Record:
    """Time a causal language model, dense beside sparse: forwards and steps of decoding with a cache, each with the LM
    head and without it. Copies of the model are swapped. Before any clock starts, results are compared with those of a
    float32 run; of a model with thresholds (CATS, TEAL, FATReLU) each layer is compared with the dense one.

    Args:
        model: one of transformers or this project's, dense and in evaluation mode, as `tl.load` gives it; or sizes: a
            ModelConfig, or a name of twell_lab.training.config, among them the paper's "0.5B", "1B", "1.5B" and "2B".
            Of sizes a Llama with random weights is drawn, in which as large a share of the neurons fires as the paper
            reports (0.5%): rows call it drawn.
        tokens: of each forward: up to the model's context (2,048 at most), or a multiple of it, which is that many
            sequences. By default one sequence.
        batches: of the steps of decoding behind up to 511 tokens; on a GPU each step is also captured as a CUDA graph.
            () for no decoding.
        text: token ids, int64 [length], on which neurons fire as they really do; by default random ones. The first half
            is profiled and planned on, the rest is measured.
        firing: of a drawn model: a profile of a trained one, or the name of a file with one, as whose neurons its own
            then fire, layer by layer at the same relative depth, though independently.
        plan: what the layers do, as for `tl.sparsify`: a Plan, the name of a file with one, a Choice, or the name of a
            path, which all layers take; a lossy one is timed whatever its error. By default the layers are planned
            here, for these numbers of tokens.
        compiled: also time both models under torch.compile.
        graphs: on a GPU, also time forwards of up to 16,384 tokens as CUDA graphs, and a model that is planned for
            these, which is the one that is compiled.
        training: also time a training step on the fewest of `tokens` above 1, dense and as twell-lab train would.
        seconds: for how long each workload is timed on a CPU, by default 1; on a GPU, for how many seconds the energy
            of each path is read, by default 3, where nvidia-ml-py is installed; 0 for no energy.
        device, dtype: of a drawn model; by default a GPU where there is one, and the dtype of ops.clock.dtype_for.
        progress: show a bar on stderr, if that is a terminal.

    Returns:
        A Record with rows of kind "model_forward", "model_decode" (tokens: the batch) and "model_training". Beside what
        rows of layers have: `head`, `tokens_per_ms` or `tokens_per_s` of plain calls, `choice` (what the layers run),
        `error` (of results against a float32 run), `layer_error` (of a layer's output, on average, where a path was
        named), `loss` (of forwards with the head, on a text); on a GPU `peak_bytes`, `gpu_ms` (of the call as a CUDA
        graph: events around a call that waits for the host hold the waiting too), and `mj_per_token` (of graphs where
        there are any). Its notes say under "energy" why there is none, and under "left_out" what does not run here, as
        what cannot be compiled. An interruption (Ctrl-C) ends it with the rows that there are.

    Raises:
        InputError: for a model or an argument that is not accepted, a plan of another model, a path that does not take
            the layers, and a text that is shorter than one batch needs.
        DeviceError, StackError: for a device that is not there, or where transformers is missing.
        WrongResult: where logits are wrong; then there are no rows.
    """
    how = {key: value for key, value in locals().items() if key != "model"}
    rows.check_seconds(seconds)
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    place = timing.present_device(device) if first is None else first.device
    on_gpu, table = place.type == "cuda", list[dict]()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    with torch.random.fork_rng(devices=gpus), torch.cuda.device(place) if on_gpu else nullcontext():
        bench = Bench(model, **how)
        steps = [(bench.label(*key), functools.partial(bench.rows, *key)) for key in bench.works]
        steps += [("training", bench.train)] if training else []
        with tqdm(steps, unit="workload", leave=False, disable=None if progress else True) as bar:
            for done, (label, step) in enumerate(bar):
                bar.set_postfix_str(label, refresh=False)
                try:
                    table += step()
                except torch.OutOfMemoryError as error:
                    what = str(error).partition(". ")[0]
                    bench.left_out[label] = f"it does not fit into the GPU's memory: {what}"
                except KeyboardInterrupt:
                    if not table:
                        raise
                    bench.left_out |= {label: "interrupted" for label, _ in steps[done:]}
                    break
                finally:
                    torch.cuda.empty_cache()
    notes = {"left_out": bench.left_out, "energy": bench.no_energy}
    notes = {name: said for name, said in notes.items() if said}
    return Record.new(RECORD, "a whole model, dense beside sparse", table, notes)


class Bench:
    """A causal language model, and swapped copies of it, which are made when rows of them are asked for. Arguments are
    those of `model`, and left_out: a dict that takes what does not run, and why.

    works: kind, tokens and whether they have the LM head, of all forwards and steps of decoding. sparse: the models
    that follow plans, by path."""

    def __init__(self, subject: nn.Module | ModelConfig | str, *, left_out: dict | None = None, **how: Any) -> None:
        bound = inspect.signature(model).bind(subject, **how)
        bound.apply_defaults()
        asked = SimpleNamespace(**bound.arguments)
        self.left_out: dict[str, str] = {} if left_out is None else left_out
        steps = _counts("batches", asked.batches)
        sizes = drawn.sizes_of(subject) if isinstance(subject, ModelConfig) or subject in drawn.NAMES else None
        if sizes is not None:
            place, vocabulary, context = timing.present_device(asked.device), sizes.vocabulary, sizes.context
            self.about = model_name(subject) if isinstance(subject, str) else "drawn Llama"
            self.about += " firing as profiled" * (asked.firing is not None)
        else:
            self.dense, self.about = _checked(subject, asked), type(subject).__name__
            place = next(subject.parameters()).device
            vocabulary, context = self.dense.vocabulary, self.dense.context
        length = min(context, LONGEST)
        counts = [length] if asked.tokens is None else _counts("tokens", asked.tokens)
        for count in counts:
            fits = count <= length or count % length == 0
            need(fits, f"tokens has {count}", f"up to {length}, or a multiple of it, as sequences")
        need(counts + steps, "tokens and batches are both empty", "at least one number")
        self.cached = min(CACHED, length)
        self.length = min(length, max([*counts, *([self.cached] if steps else [])]))
        _check_text(asked.text, vocabulary, max([*counts, *(batch * self.cached for batch in steps)]), self.length)
        self.compiled, self.graphs = asked.compiled, asked.graphs
        self.seconds = (3.0 if place.type == "cuda" else 1.0) if asked.seconds is None else asked.seconds
        self.meter, self.no_energy = workloads.meter(place)
        if not self.seconds:
            self.meter, self.no_energy = None, self.no_energy or "it was not asked for"
        if self.graphs and place.type != "cuda":
            self.left_out["CUDA graphs"] = f"they need an NVIDIA GPU, and this ran on {place}"
        self.plan = Choice(asked.plan) if isinstance(asked.plan, str) and asked.plan in PATHS.names() else asked.plan
        self.names = [f"{FORCED}{self.plan}" if isinstance(self.plan, Choice) else PLANNED]  # of the sparse models
        if self.plan is None and self.graphs and place.type == "cuda":
            self.names.append(FOR_GRAPHS)
        self.fewest = min((n for n in (*counts, self.length) if n > 1), default=1)
        self.classes = sorted({*counts, *steps})
        torch.manual_seed(0)
        if sizes is not None:
            self.dense = Causal(drawn.fired(sizes, place, asked.dtype, asked.firing))
        self.sparse: dict[str, Causal] = {}
        self.text = None if asked.text is None else asked.text.to(place).long()
        self.device, self.vocabulary = place, vocabulary
        self.layers = feed_forwards(self.dense.model)
        self.cut = [at for at in self.layers if at.cut or at.acts is not None and is_threshold(at.acts)]
        works = [("model_forward", count) for count in counts] + [("model_decode", batch) for batch in steps]
        self.works = [(*work, head) for work in works for head in (True, False)]

    # ---- the inputs ----

    def windows(self, part: tuple[float, float], count: int, length: int) -> Tensor:
        """Return int64 [count, length]: random tokens, or of a text spread evenly over a part of it, overlapping where
        it is short."""
        if self.text is None:
            return torch.randint(0, self.vocabulary, (count, length), device=self.device)
        begin, end = (int(share * len(self.text)) for share in part)
        starts = begin + torch.arange(count, device=self.device) * (end - begin - length) // max(1, count - 1)
        return self.text[starts[:, None] + torch.arange(length, device=self.device)]

    def turns(self, sequences: int, length: int) -> Tensor:
        """Return what is measured: int64 [ROTATED, sequences, length]."""
        taken = self.windows(MEASURED, timing.ROTATED * sequences, length)
        return taken.view(sequences, timing.ROTATED, length).transpose(0, 1)

    # ---- the models ----

    @functools.cached_property
    def firing(self) -> FiringProfile:
        """Return what the dense layers do."""
        windows = self.windows(PROFILED, drawn.windows_of(self.length), self.length)
        return profile(self.dense.model, [windows])

    @functools.cached_property
    def inputs(self) -> workloads.Inputs:
        """Return what enters the dense layers."""
        windows = [self.windows(PROFILED, 1, self.length)]
        return captured(self.dense.model, windows, [layer.name for layer in self.layers], workloads.PLACES)

    def planned(self, name: str) -> Plan:
        """Plan the layers for all numbers of tokens that there will be."""
        windows = self.windows(PLANNED_ON, 2 * drawn.windows_of(self.length), self.length)
        calls, batches = "captured" if name == FOR_GRAPHS else "eager", list(windows.split(max(1, len(windows) // 2)))
        how = {"tokens": self.classes, "batches": batches, "calls": calls, "progress": False}
        return planner.plan(self.firing, self.dense.model, **how)

    def model_of(self, path: str) -> Causal:
        """Return the model that runs on this path, compiled or not; a sparse one is made when it is first asked for."""
        name = path.removesuffix(COMPILED_TOO)
        if path not in (DENSE, COMPILED) and name not in self.sparse:
            twin = copy.deepcopy(self.dense.model).requires_grad_(False)
            self.sparse[name] = Causal(sparsify(twin, self.planned(name) if self.plan is None else self.plan))
        return self.sparse.get(name, self.dense)

    # ---- the rows ----

    def label(self, kind: str, tokens: int, head: bool = True) -> str:
        """Return what a workload is called before it is made."""
        length = min(tokens, self.length)
        name = f"{tokens // length} x {length:,} tokens" if kind == "model_forward" else f"decode step, batch {tokens}"
        return name + " without the LM head" * (not head)

    def work(self, kind: str, tokens: int, head: bool) -> tuple[Workload, Tensor]:
        """Return a workload, and its result in float32, by a copy of the model that is dropped then."""
        if kind == "model_forward":
            length = min(tokens, self.length)
            work = Workload(self.turns(tokens // length, length), head)
        else:
            ids = self.windows(MEASURED, tokens, self.cached)
            work = Workload(ids[None], head, self.dense.keep(ids[:, :-1]))
        same = next(self.dense.model.parameters()).dtype == torch.float32
        return work, work.right(self.dense if same else Causal(copy.deepcopy(self.dense.model).float()))

    @torch.no_grad()
    def rows(self, kind: str, tokens: int, head: bool = True, *, compiled: bool | None = None) -> list[dict]:
        """Return a row for each path of a workload, DENSE first, and each way in which it was timed; [] where the
        model has no such step. compiled: by default as asked for in `model`; what cannot be compiled is left out.
        WrongResult, with nothing timed, where a result is wrong."""
        label = self.label(kind, tokens)
        try:
            work, right = self.work(kind, tokens, head)
        except (AttributeError, TypeError, LookupError, ValueError) as error:  # caches of other kinds
            if kind == "model_forward":
                raise
            self.left_out[label] = f"no step with a static cache: {error}"
            return []
        sparse = [name for name in self.names if tokens <= rows.LARGE or name != FOR_GRAPHS]
        paths = must = [DENSE, *sparse]
        if self.compiled if compiled is None else compiled:  # which takes long: of two plans that for graphs alone
            few = [name for name in sparse if name != PLANNED or FOR_GRAPHS not in sparse]
            paths = [*must, COMPILED, *(f"{name}{COMPILED_TOO}" for name in few)]
            torch._dynamo.reset()  # which compiles a function for eight models at most
        results: dict[str, Tensor] = {}

        def entry(path: str) -> Entry:
            model = self.model_of(path)
            call, said = work.makes(model, "compiled" in path), dict[str, Any]()
            whole: Any = call(0)
            if model is not self.dense:
                said["choice"] = self._choice(model, tokens)
            if self.text is not None and head and whole.shape[1] > 1:
                each = [cross_entropy(row[:-1].float(), own[1:]) for row, own in zip(whole, work.ids[0], strict=True)]
                said["loss"] = round(float(torch.stack(each).mean()), 6)
            result = results[path] = workloads.compared_part(whole)
            off = (result - right).norm()
            said["error"] = round(float(off / right.norm()), 9)
            if path == DENSE:
                return call, said
            slack = workloads.CUT_SLACK if self.cut else workloads.SLACK
            allowed = workloads.MARGIN * (results[DENSE] - right).norm() + slack * right.norm()
            lossy = LOSSY in path or LOSSY in said.get("choice", "")
            if path in self.sparse and (self.cut or path.startswith(FORCED)):
                errors = workloads.layer_errors(self.layers, model.model, self.inputs, tokens)
                if self.cut and not lossy:
                    said["layer_over_allowed"] = workloads.check_cut(errors, f"{label}: {path}")
                elif errors:
                    said["layer_error"] = round(fmean(error for error, _ in errors), 9)
            what = f"{label}: {path}: the {'logits' if head else 'results'}"
            said["error_over_allowed"] = rows.hold(what, float(off / allowed), sys.float_info.max if lossy else 1.0)
            return call, said

        ways = {path: functools.partial(entry, path) for path in paths}
        calls, facts = rows.admit(ways, self.left_out, f"{label}, ", must)
        shared = self.shared(kind, tokens, label) | {"head": head}
        shared |= {} if work.kept is None else {"cached": self.cached}
        return self.measured(calls, shared, facts, label)

    def measured(self, calls: Calls, shared: dict, facts: dict, label: str, captured: bool = True) -> list[dict]:
        """Return the rows of the calls. shared: what all say. captured: whether they are timed as CUDA graphs too,
        where that gains anything; `left_out` says why they can't be, if so."""
        tokens, table = shared["tokens"], list[dict]()
        rounds = 3 if tokens > rows.LARGE else 15  # where the host is waited for, samples vary
        timed = functools.partial(rows.measured, shared, calls, facts, self.seconds, rounds=rounds)
        if captured and tokens <= (rows.LARGE if self.graphs else timing.GRAPH_TOKENS):
            try:
                table = timed(tokens=tokens, graphs=True, compiled=True)
            except RuntimeError as error:
                if isinstance(error, TwellError):
                    raise
                self.left_out[f"{label}, as CUDA graphs"] = rows.first_line(error)
        table = table or timed()
        alone, spent = {row["path"]: row["ms"] for row in table}, dict[str, dict]()
        if self.meter is not None and shared["head"]:  # plain calls wait for the host: of graphs where there are any
            graphs = {path: calls[path.removesuffix(" (graph)")] for path in alone if path not in calls}
            each = {path: timing.graphed(call, inputs=1) for path, call in graphs.items()} or calls
            spent = workloads.energy_facts(self.meter, each, max(1, round(self.seconds)), tokens)
        for row in table:
            path, rate = row["path"], tokens / row["wall_ms"]
            row |= {"tokens_per_s": 1e3 * rate} if shared["kind"] == "model_decode" else {"tokens_per_ms": rate}
            row |= spent.get(path, {})
            if (graph := f"{path} (graph)") in alone:
                row["gpu_ms"] = alone[graph]
        return table

    def shared(self, kind: str, tokens: int, workload: str) -> dict:
        """Return what all rows of one comparison say."""
        up, nnzs = self.layers[0].up.weight, [layer.mean_nnz for layer in self.firing.layers]
        sizes = {"d_model": up.shape[1], "d_ff": up.shape[0], "layers": len(self.layers)}
        sizes |= {"gated": self.layers[0].gate is not None, "nnz": round(fmean(nnzs), 2)}
        sizes["parameters"] = sum(weight.numel() for weight in self.dense.model.parameters())
        said = rows.about(kind, up, f"{self.about}, {workload}", tokens=tokens, **sizes)
        return said | {"nnz_layers": [round(nnz, 1) for nnz in nnzs]}

    def _choice(self, model: Causal, tokens: int) -> str:
        """Return how many layers of a sparse model take which path for so many tokens."""
        plans = [layer.plan for layer in model.model.modules() if isinstance(layer, SparseFFN)]
        choices = [plan if isinstance(plan, Choice) else plan.choice(tokens) for plan in plans]
        taken = Counter(choice.path if choice.hot else str(choice) for choice in choices)
        taken["dense"] += len(self.layers) - len(choices)  # those not swapped, where nothing is faster
        return training.counted(+taken)

    def train(self) -> list[dict]:
        """Return the rows of whole training steps on the fewest tokens of the forwards: dense and on the paths that the
        trainer would choose for the layers."""
        if self.fewest < 2:
            self.left_out["training"] = "a step needs windows of two tokens or more"
            return []
        length = min(self.fewest, self.length)
        ids = self.turns(self.fewest // length, length)
        dense = copy.deepcopy(self.dense.model).train().requires_grad_(True)
        twin = sparsify(copy.deepcopy(dense), "twell")
        choice = training.switch_layers(twin, Causal(twin).reader(), ids[0])
        ways = {path: (of, Causal(of).reader()) for path, of in ((DENSE, dense), (PLANNED, twin))}
        if self.compiled:
            torch._dynamo.reset()
            for path, of in ((COMPILED, dense), (PLANNED + COMPILED_TOO, twin)):
                ways[path] = of, Causal(of).reader(compiled=True)
        calls, facts = training.whole_steps(ways, ids, choice, self.left_out)
        label = f"training step, {len(ids[0])} x {length:,} tokens"
        shared = self.shared("model_training", ids[0].numel(), label) | {"head": True}
        return self.measured(calls, shared, facts, "training", captured=False)


# ---- what is refused ----


def _checked(model, asked: SimpleNamespace) -> Causal:
    """Return the model, if it can be measured as it is. InputError otherwise."""
    named = f"a model, such as tl.load({model!r:.200}), or one of the sizes {', '.join(drawn.NAMES)}"
    need(not isinstance(model, (str, os.PathLike)), f"{model!r:.200} is a name", named)
    check_model(model)
    for name in ("firing", "device", "dtype"):
        need(getattr(asked, name) is None, f"{name} is given, and the model has its own", "a size, as '2B', or None")
    kind = type(model).__name__
    swapped = sum(isinstance(module, SparseFFN) for module in model.modules())
    what = f"{swapped} feed-forward layers of {kind} are swapped already, and it is to be compared with a dense model"
    need(not swapped, what, "tl.densify(model), with plan=... for what the layers did")
    kinds = {(weight.dtype, weight.device) for weight in model.parameters()}
    names = ", ".join(sorted(f"{of} on {place}" for of, place in kinds)) or "no kind"
    fits = all(of in VALUE_DTYPES and place.type != "meta" for of, place in kinds)
    one = fits and len({place for _, place in kinds}) == 1
    need(one, f"{kind} has parameters of {names}", f"{VALUE_DTYPES}, all on one device")
    causal = Causal(model)
    feed_forwards(model)
    raise_all([f"{name}: {reason}" for name, reason in survey(model)[1].items()])
    need(not any(module.training for module in model.modules()), f"{kind} is in training mode", "model.eval()")
    return causal


def _counts(name: str, values) -> list[int]:
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]
    for value in listed:
        check_whole(name, value, 1)
    return list(dict.fromkeys(listed))


def _check_text(text, vocabulary: int, most: int, length: int) -> None:
    """Raise InputError for a text that is none, or too short for the largest workload."""
    if text is None:
        return
    what = f"{text.dtype} {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
    whole = isinstance(text, Tensor) and not (text.is_meta or text.is_floating_point() or text.is_complex())
    ids = whole and text.dim() == 1 and text.dtype != torch.bool
    need(ids, f"text is {what}", "token ids as a tensor [length] of whole numbers")
    needed = max(2 * most, 4 * length)
    takes = f"the largest workload takes {most:,}, and as many others are profiled"
    what = f"text has {len(text):,} tokens, fewer than one batch needs: {takes}"
    need(len(text) >= needed, what, f"{needed:,} or more, or smaller tokens and batches")
    wrong = [token for token in (int(text.min()), int(text.max())) if not 0 <= token < vocabulary]
    need(not wrong, f"text has the token {[*wrong, ''][0]}", f"token numbers from 0 to {vocabulary - 1}")


# ---- the records of the paper's sizes, dense beside sparse ----

BATCHES, SEQUENCES = (1, 8, 64), 64


def model_name(size: str) -> str:
    """Return what rows call the drawn model of a size."""
    return f"drawn {size} Llama"


def of_size(size: str, left_out: dict[str, str], sequences: int = SEQUENCES, **how: Any) -> rows.Sections:
    """Return the steps of the record of this size, what says most first; the models are made when the first step needs
    them. sequences: of the longest forward. how: as for `model`."""
    context = drawn.sizes_of(size).context
    many = sequences * context
    defaults = {"tokens": (context, many), "batches": BATCHES, "compiled": True, "graphs": True}
    bench = functools.cache(lambda: Bench(size, left_out=left_out, **{**defaults, **how}))

    def step(kind: str, tokens: int, head: bool = True, compiled: bool | None = None) -> list[dict]:
        return bench().rows(f"model_{kind}", tokens, head, compiled=compiled if head else False)

    bare = [("forward", many), *(("decode", batch) for batch in BATCHES), ("forward", context)]
    return {
        "many sequences": rows.steps(step, ["forward"], [many], [True], [False]),
        "decode, one sequence": rows.steps(step, ["decode"], [1]),
        "one sequence": rows.steps(step, ["forward"], [context]),
        "decode": rows.steps(step, ["decode"], BATCHES[1:]),
        "training step": [lambda: bench().train()],
        "without the LM head": [functools.partial(step, *work, False) for work in bare],
        "many sequences, compiled": rows.steps(step, ["forward"], [many]),  # which takes longest
    }
