"""Any causal language model, dense beside sparse: `model` looks it over, plans its layers, and has it measured
(twell_lab.bench.workloads)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis.plan import Plan
from ..analysis.profile import FiringProfile
from ..core import InputError
from ..formats.twell import VALUE_DTYPES
from ..layers.choice import Choice
from ..layers.find import check_model, feed_forwards, survey
from ..layers.parts import parts_of
from ..layers.paths import PATHS
from ..layers.probe import raise_all
from ..layers.sparse_ffn import SparseFFN
from ..models.tiny import ModelConfig
from ..ops import clock as timing
from ..records import Record
from . import drawn
from .causal import Causal
from .cut_checks import Judge, has_thresholds
from .forward import _check_seconds
from .rows import COMPILED, DENSE
from .workloads import (
    COMPILED_TOO,
    FOR_GRAPHS,
    FORCED,
    PLANNED,
    Clocks,
    Models,
    Tokens,
    Workload,
    decode,
    forward,
    training_rows,
    workload_rows,
)

CACHED = 512  # tokens of each sequence, the new one among them, in a step of decoding
LONGEST = 2048  # tokens of a sequence at most
_QUANTISED = ("quant", "bitsandbytes", "awq", "gptq", "torchao", "fp8")  # in the names of modules of such layers


def model(
    model: nn.Module | ModelConfig | str,
    *,
    tokens: Iterable[int] | None = None,
    batches: Iterable[int] = (1, 8, 64),
    text: Tensor | None = None,
    firing: FiringProfile | str | os.PathLike | None = None,
    plan: Plan | Choice | str | os.PathLike | None = None,
    paths: Iterable[str] = (),
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

    The model itself stays as it is; copies are swapped. Before any clock starts, logits are compared with those of a
    float32 run. Of a model with thresholds (CATS, TEAL, FATReLU) a few tokens say little: there, as many are compared
    as it takes, and each layer (twell_lab.bench.cut_checks).

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
        firing: of a drawn model: a profile of another, trained one, or the name of a file with one. Its neurons then
            fire as often as the profiled ones do, layer by layer at the same relative depth, though independently.
        plan: what the layers do, as for `tl.sparsify`: a Plan, the name of a file with one, a Choice, or the name of a
            path. By default the layers are planned here, for these numbers of tokens.
        paths: names of paths, each of which all layers of one more copy of the model take. No error of a lossy one is
            too large: rows have it, and of a text the loss, beside those of the dense model.
        compiled: also time both models under torch.compile. What cannot be compiled is left out; the notes say why.
        graphs: on a GPU, also time forwards as CUDA graphs, and a model that is planned for these.
        training: also time a training step on the fewest of `tokens`, dense and on the paths that `--kernels auto` of
            twell-lab train would choose.
        cached: tokens of each sequence in a step of decoding, the new one among them; by default 512, or the context.
        seconds: for how long each workload is timed on a CPU, by default 1; on a GPU, for how many seconds the energy
            of each path is read, by default 3; 0 for no energy.
        device, dtype: of a drawn model; by default a GPU where there is one, and the dtype of ops.clock.dtype_for.
        progress: show a bar on stderr, if that is a terminal.

    Returns:
        A Record with rows of kind "model_forward" and "model_decode" (tokens: the batch), and "model_training". Beside
        what rows of layers have: `head`, `tokens_per_ms` or `tokens_per_s` of plain calls, `choice` (what the layers
        run), `error` (of logits, or without the head of states, against a float32 run), `error_over_allowed`,
        of thresholds `layer_over_allowed` and how many tokens or sequences were compared,
        `layer_error` (of a layer's output against the dense one's, on average, where `paths` were named), `loss` (of
        forwards with the head, on a text), `weight_bytes`; on a GPU `peak_bytes` and `mj_per_token` with `mj_spread`.
        Its notes say under "energy" why there is none, and under "left_out" what does not run here. An interruption
        (Ctrl-C) ends it with the rows that there are by then, if there are any, and the notes name the others.

    Raises:
        InputError: for a model or an argument that is not accepted, a plan of another model, a path that does not take
            the layers, and a text that is shorter than one batch needs.
        DeviceError, StackError: for a device that is not there, or where transformers is missing.
        WrongResult: where logits are wrong; then nothing is timed.
    """
    _check_seconds(0.0 if seconds is None else seconds)
    counts, steps = None if tokens is None else _counts("tokens", tokens), _counts("batches", batches)
    asked = _paths(paths)
    subject = _subject(model, device, dtype, firing, copies=(3 if graphs else 2) + len(asked))
    length, place = subject.length, subject.device
    counts = [length] if counts is None else counts
    if wrong := [count for count in counts if count > length and count % length]:
        raise InputError(f"tokens has {wrong[0]}; up to {length} are accepted, or a multiple of it, as sequences")
    held = min(CACHED, length) if cached is None else cached
    if isinstance(held, bool) or not isinstance(held, int) or not 2 <= held <= length:
        raise InputError(f"cached is {held!r:.80}; a whole number from 2 to {length}, the context, is accepted")
    if not counts + steps:
        raise InputError("tokens and batches are both empty; at least one number is accepted")
    longest = min(length, max([*counts, *([held] if steps else [])]))
    source = _tokens(subject, text, max([*counts, *(batch * held for batch in steps)]), longest)
    on_gpu = place.type == "cuda"
    seconds = (3.0 if on_gpu else 1.0) if seconds is None else seconds
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    with torch.random.fork_rng(devices=gpus), torch.cuda.device(place) if on_gpu else nullcontext():
        torch.manual_seed(0)
        dense = subject.make()
        given = None if plan is None else _plan_of(plan, feed_forwards(dense.model))
        clocks, left_out = Clocks(place, seconds, graphs=graphs, watched=True), {}
        if graphs and not on_gpu:
            left_out["CUDA graphs"] = f"they need an NVIDIA GPU, and this ran on {place}"
        models = Models(dense, source, subject.about, longest)
        works = _workloads(models, counts, steps, held, left_out)
        judge = Judge(models) if any(map(has_thresholds, models.layers)) else None
        models.exact = None
        if given is not None:
            models.follow(PLANNED if isinstance(given, Plan) else f"{FORCED}{given}", given)
        else:
            models.plan({*counts, *steps})
            if graphs and on_gpu:
                models.plan({*counts, *steps}, for_graphs=True)
        for each in asked:
            models.force(each, {*counts, *steps})
        ways = [DENSE, *models.sparse]
        if compiled:
            ways += [COMPILED, *(f"{name}{COMPILED_TOO}" for name in models.sparse if name != FOR_GRAPHS)]
        made: list[tuple[str, Callable[[], list[dict]]]] = [
            (
                work.label + ("" if work.head else " without the LM head"),
                functools.partial(workload_rows, models, work, ways, clocks, left_out, judge),
            )
            for work in works
        ]
        if training:
            fewest = min([*counts, longest])
            made.append(("training", lambda: training_rows(models, fewest, clocks, left_out, compiled=compiled)))
        found: list[dict] = []
        with tqdm(made, unit="workload", leave=False, disable=None if progress else True) as bar:
            for done, (label, rows_of) in enumerate(bar):
                bar.set_postfix_str(label, refresh=False)
                try:
                    with _if_it_fits(label, left_out):
                        found += rows_of()
                except KeyboardInterrupt:
                    if not found:
                        raise
                    left_out |= {each: "interrupted" for each, _ in made[done:]}
                    break
    notes: dict[str, object] = {"left_out": left_out} if left_out else {}
    if clocks.no_energy or not seconds:
        notes["energy"] = clocks.no_energy or "it was not asked for"
    return Record.new("bench-model", "a whole model, dense beside sparse", found, notes)


@contextmanager
def _if_it_fits(label: str, left_out: dict[str, str]) -> Iterator[None]:
    """Leave out what does not fit into the GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        left_out[label] = f"it does not fit into the GPU's memory: {str(error).partition('. ')[0]}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.no_grad()
def _workloads(
    models: Models, counts: list[int], batches: list[int], cached: int, left_out: dict[str, str]
) -> list[Workload]:
    """The forwards and steps of decoding, each with and without the head, and with what they should give."""
    found: list[Workload] = []
    for count in counts:
        for head in ("all", "none"):
            with _if_it_fits(f"{count:,} tokens", left_out):
                each = min(count, models.length)
                found.append(forward(models.tokens, count // each, each, head).expect(models.exact))
    for batch in batches:
        with _if_it_fits(label := f"decode step, batch {batch}", left_out):
            try:
                steps = decode(models.tokens, models.dense, batch, cached)
                found += [work.expect(models.exact) for work in steps]
            except (AttributeError, TypeError, LookupError, ValueError) as error:  # caches of other kinds
                left_out[label] = f"no step with a static cache: {error}"
    return found


class _Subject(NamedTuple):
    """What is to be measured, before it is built: what rows call it, where it is, how long its sequences are, how many
    token numbers it has, and the dense model."""

    about: str
    device: torch.device
    length: int
    vocabulary: int
    make: Callable[[], Causal]


def _subject(model, device, dtype, firing, copies: int) -> _Subject:
    """copies: of the model that will be in memory at once, to be refused where there is no room for them."""
    if dtype is not None and dtype not in VALUE_DTYPES:
        raise InputError(f"dtype is {dtype!r:.80}; torch.bfloat16, float16 and float32 are accepted, or None")
    if not isinstance(model, ModelConfig) and not (isinstance(model, str) and model in drawn.NAMES):
        causal = _checked(model)
        if firing is not None:
            raise InputError("firing is given, and the model has its own; accepted: a size, such as '2B', or None")
        first = next(model.parameters())
        place = first.device if device is None else timing.present_device(device)
        for name, told, own in (("device", place, first.device), ("dtype", dtype or first.dtype, first.dtype)):
            if told != own and (name == "dtype" or told.type != own.type or told.index is not None):
                raise InputError(f"{name} is {told}, and the model's is {own}: move it first; None is accepted")
        length = min(causal.context, LONGEST)
        return _Subject(type(model).__name__, first.device, length, causal.vocabulary, lambda: causal)
    place = timing.present_device(device)
    dtype = dtype or timing.dtype_for(place)
    if isinstance(firing, (str, os.PathLike)):
        firing = FiringProfile.load(firing)
    if firing is not None and not isinstance(firing, FiringProfile):
        raise InputError(f"firing is a {type(firing).__name__}; a FiringProfile or the name of a file is accepted")
    shape = drawn.shape_of(model, str(place))
    drawn.check_room(shape, dtype, copies)
    named = f"{model} " if isinstance(model, str) else ""
    about = f"drawn {named}Llama{' firing as profiled' * (firing is not None)}"
    make = lambda: Causal(drawn.fired(shape, dtype, firing))  # noqa: E731
    return _Subject(about, place, min(shape.context, LONGEST), shape.vocabulary, make)


def _checked(model) -> Causal:
    """The model, if it can be measured as it is. InputError otherwise."""
    if isinstance(model, (str, os.PathLike)):
        raise InputError(
            f"{os.fspath(model)!r:.200} is a name; accepted: a model, such as tl.load({os.fspath(model)!r:.200}), or "
            f"one of the sizes {', '.join(drawn.NAMES)}"
        )
    check_model(model)
    for name, module in model.named_modules():
        where = type(module).__module__.lower()
        if any(word in where for word in _QUANTISED) and not where.startswith("twell_lab"):
            raise InputError(
                f"{name} is a {type(module).__name__}, a quantised module; accepted: a model in bfloat16, float16 or "
                "float32, loaded without quantisation"
            )
    swapped = sum(isinstance(module, SparseFFN) for module in model.modules())
    if swapped:
        raise InputError(
            f"{swapped} feed-forward layers of {type(model).__name__} are swapped already, and it is to be compared "
            "with a dense model; accepted: tl.densify(model), with plan=... for what the layers did"
        )
    weights = dict(model.named_parameters())
    if not weights:
        raise InputError(f"{type(model).__name__} has no parameters; accepted: a causal language model")
    devices = {weight.device for weight in weights.values()}
    for name, weight in weights.items():
        if weight.is_meta:
            raise InputError(f"{name} is on the device meta, without values; accepted: a model with its weights")
        if weight.dtype not in VALUE_DTYPES:
            raise InputError(f"{name} is {weight.dtype}; bfloat16, float16 and float32 are accepted")
    if len(devices) > 1:
        raise InputError(f"the model is on {', '.join(sorted(map(str, devices)))}; one device is accepted")
    causal = Causal(model)
    if any(module.training for module in model.modules()):
        raise InputError(f"{type(model).__name__} is in training mode; accepted: model.eval()")
    try:
        feed_forwards(model)
    except InputError as error:
        raise InputError(f"{error}{_density(causal)}") from None
    raise_all([f"{name}: {reason}" for name, reason in survey(model)[1].items()])
    return causal


@torch.no_grad()
def _density(causal: Causal) -> str:
    """Return what share of a model's activations is not zero: what to add where none of its layers has a ReLU. "" where
    that cannot be counted."""
    found: list[tuple[float, int]] = []
    acts = {id(parts.acts): parts.acts for each in causal.model.modules() if (parts := parts_of(each))}
    seen = [
        act.register_forward_hook(lambda _, __, out: found.append((out.count_nonzero().item(), out.numel())))
        for act in acts.values()
        if isinstance(act, nn.Module)
    ]
    device = next(causal.model.parameters()).device
    try:
        causal.reader("none")(torch.randint(0, causal.vocabulary, (1, min(256, causal.context)), device=device))
    finally:
        for hook in seen:
            hook.remove()
    if not found:
        return ""
    share = sum(count for count, _ in found) / sum(size for _, size in found)
    return f". Of its activations {share:.1%} are not zero, and those alone could be left out"


def _plan_of(plan, layers: list) -> Plan | Choice:
    """Return what the layers are told; files are read, and refused if they are of another model."""
    if isinstance(plan, str) and plan in PATHS.names() and not PATHS[plan].splits:
        plan = Choice(plan)
    elif isinstance(plan, os.PathLike) or isinstance(plan, str) and os.path.exists(plan):
        plan = Plan.load(plan)
    if isinstance(plan, Plan):
        plan.check_model(layers)
    elif isinstance(plan, Choice):
        for found in layers:
            plan.check(found.up.weight.shape[0])
    else:
        raise InputError(
            f"plan is {plan!r:.200}; accepted: a Plan or the name of a file that holds one, the name of "
            f"a path ({', '.join(map(repr, PATHS.names()))}), a Choice, or None"
        )
    return plan


def _paths(names) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    for each in listed:
        if each not in PATHS.names():
            raise InputError(f"paths has {each!r:.80}; accepted: {', '.join(map(repr, PATHS.names()))}")
    return list(dict.fromkeys(listed))


def _counts(name: str, values) -> list[int]:
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, int) or not 1 <= each < 2**31:
            raise InputError(f"{name} has {each!r:.80}; whole numbers from 1 up are accepted")
    return list(dict.fromkeys(listed))


def _tokens(subject: _Subject, text, most: int, length: int) -> Tokens:
    """The inputs; InputError for a text that is none, or too short for the largest workload."""
    if text is not None:
        if not isinstance(text, Tensor) or text.dim() != 1 or text.dtype.is_floating_point or text.dtype == torch.bool:
            what = f"{text.dtype} {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
            raise InputError(f"text is {what}; accepted: token ids as a tensor [length] of whole numbers")
        if len(text) < (needed := max(2 * most, 4 * length)):
            raise InputError(
                f"text has {len(text):,} tokens, fewer than one batch needs: the largest workload takes {most:,}, and "
                f"as many others are profiled; accepted: {needed:,} or more, or smaller tokens and batches"
            )
        if not 0 <= int(text.min()) <= int(text.max()) < subject.vocabulary:
            wrong = int(text.min()) if text.min() < 0 else int(text.max())
            raise InputError(f"text has the token {wrong}; accepted: token numbers from 0 to {subject.vocabulary - 1}")
        text = text.long()
    return Tokens(subject.vocabulary, subject.device, text)
