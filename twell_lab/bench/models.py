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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis import planner
from ..analysis.planner import Plan
from ..analysis.profile import FiringProfile, captured, profile
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
from .rows import COMPILED, DENSE, Entry, need
from .workloads import Causal, Clocks, Tokens, Workload, compared_part, layer_errors

SIZES = drawn.NAMES[-4:]  # the paper's
RECORD = "bench-model"  # what a record of `model`, and of one of these sizes, is called
PLANNED, FOR_GRAPHS = "planned", "planned for graphs"
FORCED = "forced "  # what comes before the name of a path that all layers take
COMPILED_TOO = " compiled"  # what follows the name of a sparse model that is compiled
CACHED = 512  # tokens of each sequence, the new one among them, in a step of decoding
LONGEST = 2048  # tokens of a sequence at most
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes of token ids


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
    cached: int | None = None,
    seconds: float | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Record:
    """Time a causal language model, dense beside sparse: forwards and steps of decoding with a cache, each with the LM
    head and without it, and steps of training. On a GPU also peak memory, and energy where nvidia-ml-py is installed.

    Copies of the model are swapped. Before any clock starts, results are compared with those of a float32 run; of a
    model with thresholds (CATS, TEAL, FATReLU) each layer is compared with the dense one.

    Args:
        model: one of transformers or this project's, dense and in evaluation mode, as `tl.load` gives it; or sizes: a
            ModelConfig, or a name of twell_lab.training.presets, among them the paper's "0.5B", "1B", "1.5B" and "2B".
            Of sizes a Llama with random weights is drawn, in which as large a share of the neurons fires as the paper
            reports (0.5%): rows call it drawn.
        tokens: of each forward: up to the model's context (2,048 at most), or a multiple of it, which is that many
            sequences. By default one sequence.
        batches: of the steps of decoding; on a GPU each step is also captured as a CUDA graph. () for no decoding.
        text: token ids, int64 [length], on which neurons fire as they really do; by default random ones. The first half
            is profiled and planned on, the rest is measured.
        firing: of a drawn model: a profile of a trained one, or the name of a file with one, as whose neurons its own
            then fire, layer by layer at the same relative depth, though independently.
        plan: what the layers do, as for `tl.sparsify`: a Plan, the name of a file with one, a Choice, or the name of a
            path, which all layers take: rows have its error, which of a lossy one is never too large, and of a text the
            loss. By default the layers are planned here, for these numbers of tokens.
        compiled: also time both models under torch.compile. What cannot be compiled is left out; the notes say why.
        graphs: on a GPU, also time forwards of up to 16,384 tokens as CUDA graphs, and a model that is planned for
            these, which is the one that is compiled.
        training: also time a training step on the fewest of `tokens` above 1, dense and as twell-lab train would.
        cached: tokens of each sequence in a step of decoding, the new one among them; by default 512, or the context.
        seconds: for how long each workload is timed on a CPU, by default 1; on a GPU, for how many seconds the energy
            of each path is read, by default 3; 0 for no energy.
        device, dtype: of a drawn model; by default a GPU where there is one, and the dtype of ops.clock.dtype_for.
        progress: show a bar on stderr, if that is a terminal.

    Returns:
        A Record with rows of kind "model_forward" and "model_decode" (tokens: the batch), and "model_training". Beside
        what rows of layers have: `head`, `tokens_per_ms` or `tokens_per_s` of plain calls, `choice` (what the layers
        run), `error` (of results against a float32 run), `layer_error` (of a layer's output, on average, where a path
        was named), `loss` (of forwards with the head, on a text); on a GPU `peak_bytes`, and `mj_per_token` (of graphs
        where there are any). Its notes say under "energy" why there is none, and under "left_out" what does not run
        here. An interruption (Ctrl-C) ends it with the rows that there are.

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
                except KeyboardInterrupt:
                    if not table:
                        raise
                    bench.left_out |= {label: "interrupted" for label, _ in steps[done:]}
                    break
    notes: dict[str, object] = {"left_out": bench.left_out} if bench.left_out else {}
    if bench.clocks.no_energy or not bench.clocks.seconds:
        notes["energy"] = bench.clocks.no_energy or "it was not asked for"
    return Record.new(RECORD, "a whole model, dense beside sparse", table, notes)


class Bench:
    """A causal language model, and swapped copies of it, which are made when rows of them are asked for. Arguments are
    those of `model`, and about: what rows call the model, by default the name of its type; left_out: a dict that takes
    what does not run, and why.

    works: kind, tokens and whether they have the LM head, of all forwards and steps of decoding. sparse: the models
    that follow plans, by path."""

    def __init__(
        self, subject: nn.Module | ModelConfig | str, *, about: str = "", left_out: dict | None = None, **how: Any
    ) -> None:
        bound = inspect.signature(model).bind(subject, **how)
        bound.apply_defaults()
        asked = SimpleNamespace(**bound.arguments)
        self.left_out: dict[str, str] = {} if left_out is None else left_out
        steps = _counts("batches", asked.batches)
        if isinstance(subject, ModelConfig) or isinstance(subject, str) and subject in drawn.NAMES:
            sizes = drawn.sizes_of(subject)
            place = timing.present_device(asked.device)
            make = _drawing(sizes, place, asked.dtype, asked.firing)
            name = model_name(subject) if isinstance(subject, str) else "drawn Llama"
            about = about or name + " firing as profiled" * (asked.firing is not None)
            vocabulary, context = sizes.vocabulary, sizes.context
        else:
            dense = _checked(subject, asked)
            make, place = lambda: dense, next(dense.model.parameters()).device
            about, (vocabulary, context) = about or type(subject).__name__, dense.sizes
        length = min(context, LONGEST)
        counts = [length] if asked.tokens is None else _counts("tokens", asked.tokens)
        for count in counts:
            fits = count <= length or count % length == 0
            need(fits, f"tokens has {count}", f"up to {length}, or a multiple of it, as sequences")
        (self.cached,) = _counts("cached", min(CACHED, length) if asked.cached is None else asked.cached, 2, length)
        need(counts + steps, "tokens and batches are both empty", "at least one number")
        self.length = min(length, max([*counts, *([self.cached] if steps else [])]))
        _check_text(asked.text, vocabulary, max([*counts, *(batch * self.cached for batch in steps)]), self.length)
        on_gpu, plan = place.type == "cuda", asked.plan
        seconds = (3.0 if on_gpu else 1.0) if asked.seconds is None else asked.seconds
        self.clocks = Clocks(place, seconds, graphs=asked.graphs)
        if asked.graphs and not on_gpu:
            self.left_out["CUDA graphs"] = f"they need an NVIDIA GPU, and this ran on {place}"
        self.compiled, self.about = asked.compiled, about
        plan = Choice(plan) if isinstance(plan, str) and plan in PATHS.names() else plan
        # What the sparse models do, by what rows call them.
        self.plans: dict[str, Callable[[], Any]] = {
            f"{FORCED}{plan}" if isinstance(plan, Choice) else PLANNED: lambda: plan
        }
        if plan is None:
            names = (PLANNED, FOR_GRAPHS)[: 1 + (asked.graphs and on_gpu)]
            self.plans = {name: functools.partial(self.planned, name) for name in names}
        self.fewest = min((n for n in (*counts, self.length) if n > 1), default=1)
        self.classes = sorted({*counts, *steps})
        torch.manual_seed(0)
        self.dense = make()
        self.tokens = Tokens(vocabulary, place, None if asked.text is None else asked.text.long())
        self.layers = feed_forwards(self.dense.model)
        self.cut = [at for at in self.layers if at.cut or at.acts is not None and is_threshold(at.acts)]
        works = [("model_forward", count) for count in counts] + [("model_decode", batch) for batch in steps]
        self.works = [(*work, head) for work in works for head in (True, False)]
        self.sparse: dict[str, Causal] = {}

    # ---- the models ----

    @functools.cached_property
    def firing(self) -> FiringProfile:
        """Return what the dense layers do."""
        windows = self.tokens.windows(Tokens.PROFILED, drawn.windows_of(self.length), self.length)
        return profile(self.dense.model, [windows])

    @functools.cached_property
    def inputs(self) -> workloads.Inputs:
        """Return what enters the dense layers."""
        windows = [self.tokens.windows(Tokens.PROFILED, 1, self.length)]
        return captured(self.dense.model, windows, [layer.name for layer in self.layers], workloads.PLACES)

    def ready(self, tokens: int) -> list[str]:
        """Return what rows call the sparse models that take so many tokens; what is not there yet is made."""
        names = [name for name in self.plans if tokens <= rows.LARGE or name != FOR_GRAPHS]
        for name in names:
            if name not in self.sparse:
                model = copy.deepcopy(self.dense.model).requires_grad_(False)
                self.sparse[name] = Causal(sparsify(model, self.plans[name]()))
        return names

    def planned(self, name: str) -> Plan:
        """Plan the layers for all numbers of tokens that there will be."""
        windows = self.tokens.windows(Tokens.PLANNED_ON, 2 * drawn.windows_of(self.length), self.length)
        calls, batches = "captured" if name == FOR_GRAPHS else "eager", list(windows.split(max(1, len(windows) // 2)))
        how = {"tokens": self.classes, "batches": batches, "calls": calls, "progress": False}
        return planner.plan(self.firing, self.dense.model, **how)

    def model_of(self, path: str) -> Causal:
        """Return the model that runs on this path, compiled or not."""
        return self.dense if path in (DENSE, COMPILED) else self.sparse[path.removesuffix(COMPILED_TOO)]

    # ---- the rows ----

    def label(self, kind: str, tokens: int, head: bool = True) -> str:
        """Return what a workload is called before it is made."""
        length = min(tokens, self.length)
        name = f"{tokens // length} x {length:,} tokens" if kind == "model_forward" else f"decode step, batch {tokens}"
        return name + " without the LM head" * (not head)

    def work(self, kind: str, tokens: int, head: bool = True) -> Workload | None:
        """Return a workload, with the result of a copy of the model in float32, which is dropped then; a model in
        float32 is its own. None where the model has no such step."""
        try:
            if kind == "model_forward":
                length = min(tokens, self.length)
                work = workloads.forward(self.tokens, tokens // length, length, head)
            else:
                work = workloads.decode(self.tokens, self.dense, tokens, self.cached, head)
            same = next(self.dense.model.parameters()).dtype == torch.float32
            with torch.no_grad():
                right = work.few(self.dense if same else Causal(copy.deepcopy(self.dense.model).float()))
            work.right = compared_part(right)
            return work
        except (AttributeError, TypeError, LookupError, ValueError) as error:  # caches of other kinds
            if kind == "model_forward":
                raise
            self.left_out[self.label(kind, tokens)] = f"no step with a static cache: {error}"
            return None

    def rows(self, kind: str, tokens: int, head: bool = True, *, compiled: bool | None = None) -> list[dict]:
        """Return the rows of a workload, [] where it is left out. compiled: by default as asked for in `model`."""
        with self._if_it_fits(self.label(kind, tokens, head)):
            if (work := self.work(kind, tokens, head)) is None:
                return []
            ways = [DENSE, *(sparse := self.ready(tokens))]
            if self.compiled if compiled is None else compiled:  # which takes long: of two plans that for graphs alone
                few = [name for name in sparse if name != PLANNED or FOR_GRAPHS not in sparse]
                ways += [COMPILED, *(f"{name}{COMPILED_TOO}" for name in few)]
            return self.measure(work, ways, self.clocks)
        return []

    @torch.no_grad()
    def measure(self, work: Workload, paths: Iterable[str], clocks: Clocks) -> list[dict]:
        """Return a row for each path of a workload, DENSE first, and each way in which it was timed. WrongResult, with
        nothing timed, where a result is wrong; what cannot be compiled is left out."""
        results: dict[str, Tensor] = {}
        ways = {path: functools.partial(self._entry, work, path, results) for path in paths}
        if any("compiled" in path for path in ways):
            torch._dynamo.reset()  # which compiles a function for eight models at most
        must = [path for path in ways if "compiled" not in path]
        calls, facts = rows.admit(ways, self.left_out, f"{work.label}, ", must)
        shared = self.shared(work.kind, work.tokens, work.label) | {"head": work.head, **work.says}
        return clocks.measure(calls, shared, facts, work.label, self.left_out)

    def shared(self, kind: str, tokens: int, workload: str) -> dict:
        """Return what all rows of one comparison say."""
        up, nnzs = self.layers[0].up.weight, [layer.mean_nnz for layer in self.firing.layers]
        sizes = {"d_model": up.shape[1], "d_ff": up.shape[0], "layers": len(self.layers)}
        sizes |= {"gated": self.layers[0].gate is not None, "nnz": round(fmean(nnzs), 2)}
        sizes["parameters"] = sum(weight.numel() for weight in self.dense.model.parameters())
        said = rows.about(kind, up, f"{self.about}, {workload}", tokens=tokens, **sizes)
        return said | {"nnz_layers": [round(nnz, 1) for nnz in nnzs]}

    def _entry(self, work: Workload, path: str, results: dict[str, Tensor]) -> Entry:
        """Return the call of a path, and what its rows say of what each layer does, of its error and loss. The result
        is compared with float32, and put into `results`, which has the dense model's."""
        call, right = work.makes(self.model_of(path), "compiled" in path), work.right
        assert right is not None
        whole, said = call(0), self._of_path(path, work.tokens)
        result = results[path] = compared_part(whole)
        if work.read is not None:
            said["loss"] = round(workloads.next_token_loss(whole, work.read), 6)
        off = (result - right).norm()
        said["error"] = round(float(off / right.norm()), 9)
        if path == DENSE:
            return call, said
        slack = workloads.CUT_SLACK if self.cut else workloads.SLACK
        allowed = workloads.MARGIN * (results[DENSE] - right).norm() + slack * right.norm()
        lossy = LOSSY in path or LOSSY in said.get("choice", "")
        if path in self.sparse and (self.cut or path.startswith(FORCED)):
            errors = layer_errors(self.layers, self.sparse[path].model, self.inputs, work.tokens)
            if self.cut and not lossy:
                said["layer_over_allowed"] = workloads.check_cut(errors, f"{work.label}: {path}")
            elif errors:
                said["layer_error"] = round(fmean(error for error, _ in errors), 9)
        what = f"{work.label}: {path}: the {'logits' if work.head else 'results'}"
        said["error_over_allowed"] = rows.hold(what, float(off / allowed), sys.float_info.max if lossy else 1.0)
        return call, said

    def _of_path(self, path: str, tokens: int) -> dict:
        """Return what the rows of a path say of what each layer does with so many tokens."""
        if path in (DENSE, COMPILED):
            return {}
        plans = [layer.plan for layer in self.model_of(path).model.modules() if isinstance(layer, SparseFFN)]
        choices = [plan if isinstance(plan, Choice) else plan.choice(tokens) for plan in plans]
        taken = Counter(choice.path if choice.hot else str(choice) for choice in choices)
        if len(choices) < len(self.layers):
            taken["dense"] += len(self.layers) - len(choices)  # not swapped: nothing is faster
        return {"choice": training.counted(taken)}

    def train(self, tokens: int | None = None) -> list[dict]:
        """Return the rows of whole training steps on so many tokens, by default the fewest of the forwards: dense and
        on the paths that the trainer would choose for the layers."""
        count = self.fewest if tokens is None else tokens
        if count < 2:
            self.left_out["training"] = "a step needs windows of two tokens or more"
            return []
        with self._if_it_fits("training"):
            length = min(count, self.length)
            ids = self.tokens.inputs(count // length, length)
            dense = copy.deepcopy(self.dense.model).train().requires_grad_(True)
            twin = sparsify(copy.deepcopy(dense), "twell")
            choice = training.switch_layers(twin, Causal(twin).reader(), ids[0])
            named = {DENSE: (dense, False), PLANNED: (twin, False)}
            if self.compiled:
                named |= {COMPILED: (dense, True), PLANNED + COMPILED_TOO: (twin, True)}
                torch._dynamo.reset()
            ways = {path: (model, Causal(model).reader(compiled=how)) for path, (model, how) in named.items()}
            calls, facts = training.whole_steps(ways, ids, choice, self.left_out)
            label = f"training step, {len(ids[0])} x {length:,} tokens"
            shared = self.shared("model_training", ids[0].numel(), label) | {"head": True}
            return self.clocks.measure(calls, shared, facts, "training", self.left_out, captured=False)
        return []

    @contextmanager
    def _if_it_fits(self, label: str) -> Iterator[None]:
        """Leave out what does not fit into the GPU's memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.left_out[label] = f"it does not fit into the GPU's memory: {str(error).partition('. ')[0]}"
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


# ---- what is refused ----


def _drawing(sizes: ModelConfig, place: torch.device, dtype, firing) -> Callable[[], Causal]:
    """Return what draws a model, if there is room for it and its sparse copy."""
    dtype = dtype or timing.dtype_for(place)
    need(dtype in VALUE_DTYPES, f"dtype is {dtype!r:.80}", "bfloat16, float16 and float32")
    firing = FiringProfile.load(firing) if isinstance(firing, (str, os.PathLike)) else firing
    kind = type(firing).__name__
    need(isinstance(firing, FiringProfile | None), f"firing is a {kind}", "a FiringProfile or a file's name")
    if place.type == "cpu":  # a GPU says what does not fit
        drawn.check_room(sizes, dtype, 2)
    return lambda: Causal(drawn.fired(sizes, place, dtype, firing))


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


def _counts(name: str, values, least: int = 1, most: int = 2**31 - 1) -> list[int]:
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]
    for value in listed:
        check_whole(name, value, least, most)
    return list(dict.fromkeys(listed))


def _check_text(text, vocabulary: int, most: int, length: int) -> None:
    """Raise InputError for a text that is none, or too short for the largest workload."""
    if text is None:
        return
    what = f"{text.dtype} {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
    ids = isinstance(text, Tensor) and text.dim() == 1 and not text.is_meta and text.dtype in _WHOLE
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

    def step(kind: str, tokens: int, head: bool, compiled: bool | None = None) -> list[dict]:
        return bench().rows(f"model_{kind}", tokens, head, compiled=compiled if head else False)

    return {
        "many sequences": rows.steps(step, ["forward"], [many], [True], [False]),
        "decode, one sequence": rows.steps(step, ["decode"], [1], [True]),
        "one sequence": rows.steps(step, ["forward"], [context], [True]),
        "decode": rows.steps(step, ["decode"], BATCHES[1:], [True]),
        "training step": [lambda: bench().train()],
        "without the LM head": [
            *rows.steps(step, ["forward"], [many], [False]),
            *rows.steps(step, ["decode"], BATCHES, [False]),
            *rows.steps(step, ["forward"], [context], [False]),
        ],
        "many sequences, compiled": rows.steps(step, ["forward"], [many], [True]),  # which takes longest
    }
