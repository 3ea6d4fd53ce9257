"""Any causal language model, dense beside sparse: `model` looks it over, plans its layers, and has it measured
(twell_lab.bench.workloads). `Bench` is the same in steps, of which recordings are made."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis.plan import Plan
from ..analysis.profile import FiringProfile
from ..core import InputError
from ..formats.twell import VALUE_DTYPES
from ..layers.choice import Choice
from ..layers.find import check_model, feed_forwards, survey
from ..layers.paths import PATHS
from ..layers.probe import raise_all
from ..layers.sparse_ffn import SparseFFN
from ..models.tiny import ModelConfig
from ..ops import clock as timing
from ..records import Record
from . import drawn, rows
from .causal import Causal
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
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes of token ids


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
    float32 run; of a model with thresholds (CATS, TEAL, FATReLU) each layer is compared, too.

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
        graphs: on a GPU, also time forwards of up to 16,384 tokens as CUDA graphs, and a model that is planned for
            these; of two planned models this one is compiled where it runs as a graph.
        training: also time a training step on the fewest of `tokens` above 1, dense and on the paths that `--kernels
            auto` of twell-lab train would choose.
        cached: tokens of each sequence in a step of decoding, the new one among them; by default 512, or the context.
        seconds: for how long each workload is timed on a CPU, by default 1; on a GPU, for how many seconds the energy
            of each path is read, by default 3; 0 for no energy.
        device, dtype: of a drawn model; by default a GPU where there is one, and the dtype of ops.clock.dtype_for.
        progress: show a bar on stderr, if that is a terminal.

    Returns:
        A Record with rows of kind "model_forward" and "model_decode" (tokens: the batch), and "model_training". Beside
        what rows of layers have: `head`, `tokens_per_ms` or `tokens_per_s` of plain calls, `choice` (what the layers
        run), `error` (of logits, or without the head of states, against a float32 run), `error_over_allowed`, of
        thresholds `layer_over_allowed`, `layer_error` (of a layer's output against the dense one's, on average, where
        `paths` were named), `loss` (of forwards with the head, on a text), `weight_bytes`; on a GPU `peak_bytes`, and
        `mj_per_token` with `mj_spread` (of graphs where there are any, since plain calls wait for the host). Its notes
        say under "energy" why there is none, and under "left_out" what does not run here. An interruption (Ctrl-C) ends
        it with the rows that there are by then, if there are any, and the notes name the others.

    Raises:
        InputError: for a model or an argument that is not accepted, a plan of another model, a path that does not take
            the layers, and a text that is shorter than one batch needs.
        DeviceError, StackError: for a device that is not there, or where transformers is missing.
        WrongResult: where logits are wrong; then there are no rows.
    """
    rows.check_seconds(seconds)
    how = {"tokens": tokens, "batches": batches, "text": text, "firing": firing, "plan": plan, "paths": paths}
    how |= {"compiled": compiled, "graphs": graphs, "cached": cached, "seconds": seconds, "dtype": dtype}
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    place = timing.present_device(device) if first is None else first.device
    on_gpu, made = place.type == "cuda", list[dict]()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    with torch.random.fork_rng(devices=gpus), torch.cuda.device(place) if on_gpu else nullcontext():
        bench = Bench(model, device=device, **how)
        steps = [
            (work.label + " without the LM head" * (not work.head), functools.partial(bench.rows, *key))
            for key, work in bench.works.items()
        ]
        steps += [("training", bench.train)] if training else []
        with tqdm(steps, unit="workload", leave=False, disable=None if progress else True) as bar:
            for done, (label, step) in enumerate(bar):
                bar.set_postfix_str(label, refresh=False)
                try:
                    with _if_it_fits(label, bench.left_out):
                        made += step()
                except KeyboardInterrupt:
                    if not made:
                        raise
                    bench.left_out |= {label: "interrupted" for label, _ in steps[done:]}
                    break
    notes: dict[str, object] = {"left_out": bench.left_out} if bench.left_out else {}
    if bench.clocks.no_energy or not bench.clocks.seconds:
        notes["energy"] = bench.clocks.no_energy or "it was not asked for"
    return Record.new("bench-model", "a whole model, dense beside sparse", made, notes)


class Bench:
    """A causal language model, its swapped copies, and what they are measured on. Arguments are those of `model`, and

        about: what rows call the model, by default the name of its type.
        left_out: a dict that takes what does not run, and why.

    Attributes:
        works: the forwards and steps of decoding by kind, tokens and whether they have the LM head.
    """

    def __init__(
        self,
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
        cached: int | None = None,
        seconds: float | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        about: str = "",
        left_out: dict[str, str] | None = None,
    ) -> None:
        self.left_out: dict[str, str] = {} if left_out is None else left_out
        asked, steps = _paths(paths), _counts("batches", batches)
        sizes = None
        if _is_drawn(model):
            place = timing.present_device(device)
            dtype = dtype or timing.dtype_for(place)
            if dtype not in VALUE_DTYPES:
                raise InputError(f"dtype is {dtype!r:.80}; bfloat16, float16 and float32 are accepted")
            firing = FiringProfile.load(firing) if isinstance(firing, (str, os.PathLike)) else firing
            if not isinstance(firing, FiringProfile | None):
                raise InputError(f"firing is a {type(firing).__name__}; a FiringProfile or a file's name is accepted")
            sizes = drawn.sizes_of(model)
            drawn.check_room(sizes, place, dtype, (3 if graphs else 2) + len(asked))
            name = f"{model} " if isinstance(model, str) else ""
            about = about or f"drawn {name}Llama{' firing as profiled' * (firing is not None)}"
            vocabulary, length = sizes.vocabulary, min(sizes.context, LONGEST)
        else:
            if firing is not None:
                raise InputError("firing is given, and the model has its own; accepted: a size, such as '2B', or None")
            causal = Causal(_checked(model, device, dtype))
            place, about = next(model.parameters()).device, about or type(model).__name__
            vocabulary, length = causal.vocabulary, min(causal.context, LONGEST)
        counts = [length] if tokens is None else _counts("tokens", tokens)
        if wrong := [count for count in counts if count > length and count % length]:
            raise InputError(f"tokens has {wrong[0]}; up to {length} are accepted, or a multiple of it, as sequences")
        cached = min(CACHED, length) if cached is None else cached
        if isinstance(cached, bool) or not isinstance(cached, int) or not 2 <= cached <= length:
            raise InputError(f"cached is {cached!r:.80}; a whole number from 2 to {length}, the context, is accepted")
        if not counts + steps:
            raise InputError("tokens and batches are both empty; at least one number is accepted")
        longest = min(length, max([*counts, *([cached] if steps else [])]))
        _check_text(text, vocabulary, max([*counts, *(batch * cached for batch in steps)]), longest)
        on_gpu = place.type == "cuda"
        self.clocks = Clocks(
            place, (3.0 if on_gpu else 1.0) if seconds is None else seconds, graphs=graphs, watched=True
        )
        if graphs and not on_gpu:
            self.left_out["CUDA graphs"] = f"they need an NVIDIA GPU, and this ran on {place}"
        self.compiled, self.fewest, self.classes = (
            compiled,
            min((n for n in (*counts, longest) if n > 1), default=1),
            {*counts, *steps},
        )
        torch.manual_seed(0)
        dense = causal if sizes is None else Causal(drawn.fired(sizes, place, dtype, firing))
        self.models = Models(dense, Tokens(vocabulary, place, None if text is None else text.long()), about, longest)
        self.works: dict[tuple[str, int, bool], Workload] = {}
        self._expect(counts, steps, cached)
        if plan is None:
            self.models.plan(self.classes)
            if graphs and on_gpu:
                self.models.plan(self.classes, for_graphs=True)
        elif isinstance(plan, str) and plan in PATHS.names():
            self.models.force(plan, self.classes)
        else:
            self.models.follow(f"{FORCED}{plan}" if isinstance(plan, Choice) else PLANNED, plan)
        for name in asked:
            self.models.force(name, self.classes)

    def _expect(self, counts: list[int], batches: list[int], cached: int) -> None:
        """Make the workloads, with what the model in float32 gives, which is dropped then."""
        models = self.models
        for count in counts:
            for head in (True, False):
                with _if_it_fits(f"{count:,} tokens", self.left_out):
                    length = min(count, models.length)
                    self._add(forward(models.tokens, count // length, length, head))
        for batch in batches:
            with _if_it_fits(label := f"decode step, batch {batch}", self.left_out):
                try:
                    for work in decode(models.tokens, models.dense, batch, cached):
                        self._add(work)
                except (AttributeError, TypeError, LookupError, ValueError) as error:  # caches of other kinds
                    self.left_out[label] = f"no step with a static cache: {error}"
        models.exact = None

    def _add(self, work: Workload) -> None:
        self.works[work.kind, work.tokens, work.head] = work.expect(self.models.exact)

    def rows(self, kind: str, tokens: int, head: bool = True, *, compiled: bool | None = None) -> list[dict]:
        """Return the rows of a workload, [] where it was left out. compiled: as for `model`, by default as asked for
        there."""
        if (work := self.works.get((kind, tokens, head))) is None:
            return []
        few = tokens <= rows.LARGE
        sparse = [name for name in self.models.sparse if few or name != FOR_GRAPHS]
        ways = [DENSE, *sparse]
        if self.compiled if compiled is None else compiled:  # which takes long: of two plans that for graphs alone
            ways += [
                COMPILED,
                *(f"{name}{COMPILED_TOO}" for name in sparse if name != PLANNED or FOR_GRAPHS not in sparse),
            ]
        return workload_rows(self.models, work, ways, self.clocks, self.left_out)

    def train(self, tokens: int | None = None) -> list[dict]:
        """Return the rows of a training step on so many tokens, by default the fewest of the forwards."""
        count = self.fewest if tokens is None else tokens
        if count < 2:
            self.left_out["training"] = "a step needs windows of two tokens or more"
            return []
        return training_rows(self.models, count, self.clocks, self.left_out, compiled=self.compiled)

    def plan_rows(self) -> list[dict]:
        """Return how long plans of the model take from a profile on: made once more, when all kernels are compiled."""
        classes, made = sorted(self.classes), []
        shared = self.models.shared("model_plan", classes[-1], f"plan of {len(classes)} token classes")
        for name in (name for name in (PLANNED, FOR_GRAPHS) if name in self.models.sparse):
            _, seconds = self.models.planned(classes, name == FOR_GRAPHS)
            made.append(rows.row(shared, "plan" + name.removeprefix(PLANNED), [1e3 * seconds], classes=classes))
        return made


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


# ---- what is refused ----


def _is_drawn(model) -> bool:
    return isinstance(model, ModelConfig) or isinstance(model, str) and model in drawn.NAMES


def _checked(model, device, dtype) -> nn.Module:
    """Return the model, if it can be measured as it is. InputError otherwise."""
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        sizes = ", ".join(drawn.NAMES)
        raise InputError(
            f"{name!r:.200} is a name; accepted: a model, such as tl.load({name!r:.200}), or one of the sizes {sizes}"
        )
    check_model(model)
    kind = type(model).__name__
    if swapped := sum(isinstance(module, SparseFFN) for module in model.modules()):
        raise InputError(
            f"{swapped} feed-forward layers of {kind} are swapped already, and it is to be compared with a dense "
            "model; accepted: tl.densify(model), with plan=... for what the layers did"
        )
    kinds = {f"{weight.dtype} on {weight.device}" for weight in model.parameters()}
    sound = all(weight.dtype in VALUE_DTYPES and not weight.is_meta for weight in model.parameters())
    if not sound or len({weight.device for weight in model.parameters()}) != 1:
        raise InputError(
            f"{kind} has parameters of {', '.join(sorted(kinds)) or 'no kind'}; accepted: bfloat16, float16 and "
            "float32, all on one device"
        )
    Causal(model)
    first = next(model.parameters())
    place = first.device if device is None else timing.present_device(device)
    if place.type != first.device.type or place.index not in (None, first.device.index):
        raise InputError(f"device is {place}, and the model's is {first.device}: move it first; None is accepted")
    if dtype not in (None, first.dtype):
        raise InputError(f"dtype is {dtype}, and the model's is {first.dtype}: convert it first; None is accepted")
    feed_forwards(model)
    raise_all([f"{name}: {reason}" for name, reason in survey(model)[1].items()])
    if any(module.training for module in model.modules()):
        raise InputError(f"{kind} is in training mode; accepted: model.eval()")
    return model


def _paths(names) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    for name in listed:
        if name not in PATHS.names():
            raise InputError(f"paths has {name!r:.80}; accepted: {', '.join(map(repr, PATHS.names()))}")
    return list(dict.fromkeys(listed))


def _counts(name: str, values) -> list[int]:
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise InputError(f"{name} has {value!r:.80}; whole numbers from 1 up are accepted")
    return list(dict.fromkeys(listed))


def _check_text(text, vocabulary: int, most: int, length: int) -> None:
    """InputError for a text that is none, or too short for the largest workload."""
    if text is None:
        return
    if not isinstance(text, Tensor) or text.dim() != 1 or text.is_meta or text.dtype not in _WHOLE:
        what = f"{text.dtype} {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
        raise InputError(f"text is {what}; accepted: token ids as a tensor [length] of whole numbers")
    if len(text) < (needed := max(2 * most, 4 * length)):
        raise InputError(
            f"text has {len(text):,} tokens, fewer than one batch needs: the largest workload takes {most:,}, and "
            f"as many others are profiled; accepted: {needed:,} or more, or smaller tokens and batches"
        )
    if not 0 <= int(text.min()) <= int(text.max()) < vocabulary:
        wrong = int(text.min()) if text.min() < 0 else int(text.max())
        raise InputError(f"text has the token {wrong}; accepted: token numbers from 0 to {vocabulary - 1}")
