"""The record of a model that is trained, not drawn, from its first step to its speed: one with L1 of the paper's 0.5B
shape, through the sparse kernels once they pay, and its dense twin, which begins with the same weights and reads the
same text in the same order without L1.

The model with L1 is then measured as bench.workloads measures models, on text that was held out: its own neurons fire,
the first tokens of each sequence included. Both have their loss there, and answer questions (bench.choices), before and
after the layers are swapped.

The model is trained for minutes. Its loss says what such a model is worth: the notes hold what compressors make of the
same text."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import profile
from ..core import TwellError, finite
from ..models.thresholds import LossChange
from ..ops import clock
from ..training import sweep
from ..training.config import TrainConfig
from ..training.presets import named
from ..training.text import source
from . import rows
from .causal import Causal
from .choices import Answers, Questions, answer
from .rows import DENSE
from .workloads import (
    FOR_GRAPHS,
    FORCED,
    PLANNED,
    Clocks,
    Models,
    Tokens,
    Workload,
    decode,
    forward,
    right_ones,
    training_rows,
    workload_rows,
)

RUN, QUALITY = "trained", "trained_quality"  # kinds of rows, beside those of workloads
TWIN, TWELL = "dense twin", f"{FORCED}twell"
LAST = 0.2  # of the steps, in which the neurons that fire are to move by less than SETTLED
SETTLED = 0.05
LATE = 0.25  # the last share of a run's rows: its median time of a step
LEAST = 20  # steps of a twin, or it is left out
_SLOWER = 1.05  # the twin's steps may take so much longer than predicted


class TrainingFailed(TwellError, RuntimeError):
    """The model with L1 could not be trained, so there is nothing to measure."""


class LeftOut(RuntimeError):
    """A step of the record failed; the others go on without it."""


def _config() -> TrainConfig:
    """The paper's 0.5B, with bytes as tokens and windows half as long: attention is the only part of a step that is
    cheaper for it, and the sequences have twice as many first tokens. L1 is five times the paper's: it has a three
    hundredth of the tokens to silence the model."""
    fields = {**named("0.5B"), "tokenizer": None, "context": 1024, "batch": 32, "accumulate": 1, "steps": 1100}
    fields |= {"warmup": 100, "l1": 1e-4, "kernels": "auto", "checkpoint_every": 0, "device": "cuda"}
    return TrainConfig(**fields | {"log_every": 10, "eval_every": 250, "eval_windows": 256})


@dataclass(frozen=True)
class Shape:
    """What is trained, and what is measured of it.

    config: of the model with L1. forwards: numbers of sequences of its whole context. batches, cached: of steps of
    decoding. windows: of held-out text, of which losses are taken, `together` at once. questions: their number, and the
    tokens of a context and of an option. seconds: of energy, or of each workload on a CPU. reserve: seconds that the
    twin leaves to the rest."""

    config: TrainConfig = field(default_factory=_config)
    forwards: tuple[int, ...] = (2, 32)
    batches: tuple[int, ...] = (1, 16)
    cached: int = 512
    windows: int = 256
    together: int = 32
    questions: tuple[int, int, int] = (800, 192, 16)
    seconds: float = 2.0
    reserve: float = 130.0


def small() -> Shape:
    """For a CPU: half a minute on two cores."""
    sizes = {"d_model": 64, "layers": 2, "heads": 2, "d_ff": 512, "context": 64}
    config = TrainConfig(**sizes, batch=16, steps=120, warmup=10, l1=2e-3, kernels="auto", device="cpu")
    return Shape(
        config=replace(config, log_every=5, eval_every=60, eval_windows=64),
        forwards=(2, 16),
        batches=(1, 4),
        cached=32,
        windows=64,
        questions=(200, 40, 8),
        seconds=0.5,
        reserve=10.0,
    )


class Trained:
    """Both models and what is measured of them, in the order of `sections`.

    Args:
        shape: of all of it.
        seconds: what there is time for: the twin makes fewer steps rather than take it from the rest, and its row says
            so.

    Attributes:
        models: by name, DENSE for the one with L1 and TWIN, as they are measured: in evaluation mode, bfloat16 on a
            GPU.
        left_out: paths and workloads that were not measured, and why.
    """

    def __init__(self, shape: Shape, seconds: float) -> None:
        self.shape, self.end = shape, time.perf_counter() + seconds
        self.device = torch.device(shape.config.device or "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.text = source.standard_library()
        self.held_out: Tensor = self.text.split()[1].tokens
        self.models: dict[str, nn.Module] = {}
        self.left_out: dict[str, str] = {}
        self.run: dict = {}
        self.seen: dict[str, tuple[Tensor, Answers]] = {}

    # ---- training ----

    def train(self) -> list[dict]:
        """Train the model with L1. Raises TrainingFailed, whatever went wrong."""
        config = self.shape.config
        try:
            self.run = self._trained(DENSE, f"L1 {config.l1:g}, kernels {config.kernels}", config)
        except Exception as error:
            raise TrainingFailed(f"{type(error).__name__}: {error}") from error
        return finite([self.run])

    def train_twin(self) -> list[dict]:
        """Train the twin, for as many steps as there is time for; its learning rate falls over these."""
        config, steps = self.shape.config, self._steps()
        cut = f"{steps:,} of {config.steps:,} steps, for want of time" if steps < config.steps else ""
        if steps < LEAST:
            raise LeftOut(f"there is time for {max(0, steps)} of {config.steps:,} steps, and {LEAST} are the least")
        fewer = replace(config, l1=0.0, kernels="off", steps=steps, warmup=min(config.warmup, steps // 2))
        row = self._trained(TWIN, f"{TWIN}, kernels off{f', {cut}' if cut else ''}", fewer)
        return [row | ({"cut": cut} if cut else {})]

    def _steps(self) -> int:
        """Return how many steps the twin can make, from what the model with L1 took before its layers changed their
        paths."""
        run, history = self.run, self.run["history"]
        counts = [after - before for before, after in zip(history["step"], history["step"][1:])]
        stepping = sum(count * ms for count, ms in zip(counts, history["ms"][1:]))  # the first step compiles
        once = run["total_seconds"] - stepping / 1e3
        each = _SLOWER * statistics.median(history["ms"][1:6]) / 1e3
        left = self.end - time.perf_counter() - self.shape.reserve - once
        return min(self.shape.config.steps, math.floor(left / each))

    def _trained(self, name: str, path: str, config: TrainConfig) -> dict:
        """Train one of the two and keep it. Its row: what sweep.run returns, with the history's `ms` a step,
        `nnz_moved` (by how much the neurons firing moved over the last fifth; `nnz_last`: between which values), `read`
        (tokens in all) and `total_seconds` (from the drawing of weights to the count of who fires)."""
        start = time.perf_counter()
        found, result = sweep.run(path, replace(config, text=self.text))
        self.models[name] = result.model.to(self.dtype).eval().requires_grad_(False)
        del result
        _tidy()
        del found["label"], found["bytes"]
        read = found.pop("tokens")
        history, tokens = found["history"], config.batch * config.context
        history["ms"] = [float(f"{1e3 * tokens / rate:.5g}") for rate in history["tokens_per_s"]]
        late = history["ms"][-max(1, round(LATE * len(history["ms"]))) :]
        last = [nnz for step, nnz in zip(history["step"], history["nnz"]) if step > (1 - LAST) * config.steps]
        moved = sweep.settled(found, LAST)
        shared = self._shared(
            RUN, tokens, f"training step, {config.batch} x {config.context:,} tokens", found["mean_nnz"]
        )
        return rows.row(
            shared,
            path,
            late,
            firing=found.pop("layers"),
            **found,
            steps=config.steps,
            read=read,
            nnz_moved=round(moved, 5),
            nnz_last=[min(last), max(last)],
            settled=abs(moved) < SETTLED,
            total_seconds=round(time.perf_counter() - start, 2),
        )

    def _shared(self, kind: str, tokens: int, workload: str, nnz: float) -> dict:
        sizes = self.shape.config
        return {
            "kind": kind,
            "device": clock.device_name(self.device),
            "dtype": sizes.dtype if kind == RUN else str(self.dtype).removeprefix("torch."),
            "tokens": tokens,
            "d_model": sizes.d_model,
            "d_ff": sizes.d_ff,
            "gated": sizes.gated,
            "layers": sizes.layers,
            "nnz": round(nnz, 2),
            "workload": f"{workload}, {self.text.name}",
        }

    # ---- speed ----

    def _model(self, name: str) -> nn.Module:
        if name not in self.models:
            raise LeftOut(f"{name}: it was not trained")
        return self.models[name]

    @functools.cached_property
    def sparse(self) -> Models:
        """The model with L1, planned for plain calls and for graphs, and with every layer on TwELL."""
        return self._planned(DENSE, "trained with L1", forced=True)

    @functools.cached_property
    def twin(self) -> Models:
        """The twin, planned for plain calls."""
        return self._planned(TWIN, TWIN, forced=False)

    def _planned(self, name: str, about: str, forced: bool) -> Models:
        shape, model = self.shape, self._model(name)
        context = shape.config.context
        tokens = Tokens(model.config.vocabulary, self.device, self.held_out.long())
        found = Models(Causal(model), tokens, about, context)
        classes = {*shape.batches, *(count * context for count in shape.forwards)}
        ways: dict[str, Callable[[], object]] = {PLANNED: lambda: found.plan(classes)}
        if forced:
            ways[FOR_GRAPHS] = lambda: found.plan(classes, for_graphs=True)
            ways[TWELL] = lambda: found.force("twell", classes)
        for path, make in ways.items():
            if path == FOR_GRAPHS and self.device.type == "cpu":
                continue
            try:
                make()
            except Exception as error:
                self.left_out[f"{about}, {path}"] = _said(error)
        return found

    def _works(self, models: Models, work: Workload) -> list[dict]:
        """The rows of a workload: dense, and on the paths whose results are right."""
        with torch.no_grad():
            work.expect(models.exact)
        paths = right_ones(models, work, models.sparse, self.left_out)
        clocks = _Clocks(self.device, self.shape.seconds, graphs=work.tokens <= rows.LARGE, watched=True)
        return workload_rows(models, work, [DENSE, *paths], clocks, self.left_out)

    def decode_rows(self, batch: int) -> list[dict]:
        """A step of decoding of the model with L1, as plain calls and as graphs."""
        models = self.sparse
        (work,) = decode(models.tokens, models.dense, batch, self.shape.cached, (True,))
        return self._works(models, work)

    def forward_rows(self, sequences: int) -> list[dict]:
        """Prefill of the model with L1."""
        return self._works(self.sparse, forward(self.sparse.tokens, sequences, self.shape.config.context, "all"))

    def step_rows(self) -> list[dict]:
        """A training step of the model with L1 as it is now."""
        clocks = Clocks(self.device, self.shape.seconds, watched=True)
        return training_rows(self.sparse, max(self.shape.forwards) * self.shape.config.context, clocks, self.left_out)

    def twin_rows(self) -> list[dict]:
        """Prefill and a step of decoding of the twin."""
        models, shape = self.twin, self.shape
        found = self._works(models, forward(models.tokens, max(shape.forwards), shape.config.context, "all"))
        (work,) = decode(models.tokens, models.dense, max(shape.batches), shape.cached, (True,))
        return found + self._works(models, work)

    # ---- what the models are worth ----

    @functools.cached_property
    def questions(self) -> Questions:
        """Drawn from the held-out text."""
        return Questions.draw(self.held_out, *self.shape.questions)

    def quality_rows(self, name: str) -> list[dict]:
        """Loss and answers of one model on held-out text: DENSE, TWIN, or a path on which the layers of the model with
        L1 were swapped. ms: a batch of windows, with its loss. Beside the model with L1 before it was swapped:
        `loss_change` (low, mean, high; nats a token) and `answers_changed`."""
        if name in (DENSE, TWIN):
            return self._quality(name, Causal(self._model(name)))
        if name in self.sparse.sparse:
            return self._quality(name, self.sparse.sparse[name])
        raise LeftOut(f"{name}: {self.left_out.get(f'{self.sparse.about}, {name}', 'there is no such model')}")

    @torch.no_grad()
    def _quality(self, name: str, causal: Causal) -> list[dict]:
        shape, read = self.shape, causal.reader("all")
        windows = source.spread_windows(self.held_out, shape.windows, shape.config.context).to(self.device)
        losses, samples = [], []
        read(windows[: shape.together, :-1])
        for some in windows.split(shape.together):
            rows.drain()
            start = time.perf_counter()
            logits = read(some[:, :-1]).float()
            each = F.cross_entropy(logits.transpose(1, 2), some[:, 1:], reduction="none").mean(1)
            rows.drain()
            samples.append(1e3 * (time.perf_counter() - start))
            losses.append(each.double().cpu())
        self.seen[name] = mine = torch.cat(losses), answer(read, self.questions, self.device)
        base = self.seen.get(DENSE, mine)
        change = LossChange.of(base[0], mine[0], shape.config.context)
        firing = profile(self._model(TWIN if name == TWIN else DENSE), windows[:, :-1].split(shape.together))
        nnz = sum(layer.mean_nnz for layer in firing.layers) / len(firing.layers)
        where = f"{len(windows)} held-out windows of {shape.config.context:,} tokens"
        facts = {
            "loss": round(change.thresholded, 6),
            "bits_per_byte": round(change.thresholded / math.log(2), 6),
            "loss_change": [round(each, 6) for each in (change.low, change.change, change.high)],
            **mine[1].facts(),
            "answers_changed": mine[1].changed(base[1]),
            "heavy_first": firing.heavy_first,
        }
        tokens = shape.together * shape.config.context
        return [rows.row(self._shared(QUALITY, tokens, where, nnz), name, samples, **facts)]

    # ---- the record ----

    def sections(self) -> rows.Sections:
        """The steps of the record, as in bench.inference. But for the training with L1, without which there is nothing
        to measure, what fails is left out."""
        shape, each = self.shape, functools.partial
        quality = [each(self.quality_rows, name) for name in (DENSE, PLANNED, TWELL)]
        found: rows.Sections = {
            "training with L1": [self.train],
            "training the dense twin": [_alone(self.train_twin)],
            "loss and answers": [_alone(step) for step in quality],
            "loss and answers, dense twin": [_alone(each(self.quality_rows, TWIN))],
            "decode": [_alone(each(self.decode_rows, batch)) for batch in shape.batches],
            "forward": [_alone(each(self.forward_rows, count)) for count in shape.forwards],
            "training step": [_alone(self.step_rows)],
            "dense twin": [_alone(self.twin_rows)],
        }
        return found

    def notes(self) -> dict:
        """Return what the record says of its text and its words."""
        seen, held_out = self.text.split()
        return {
            "text": self.text.describe(),
            "training_size": seen.size,
            "validation_size": held_out.size,
            "compressors": sweep.compressors(held_out),
            "convention": "the loss is cross-entropy plus L1 times the sum over neurons of |h|, averaged over tokens "
            "and layers",
            "settled": f"nnz_moved is sweep.settled of the last {LAST:.0%} of the steps: the mean of the last third of "
            f"the history's rows there over that of the first third, minus 1; settled where it is below {SETTLED:.0%}",
        }


class _Clocks(Clocks):
    """Clocks that read the energy of steps of decoding as graphs, and of forwards of many tokens: where plain calls of
    few tokens wait for the host, so does their energy."""

    def reads_energy(self, path: str, tokens: int) -> bool:
        return tokens > rows.LARGE or path.endswith("(graph)") and tokens <= clock.GRAPH_TOKENS


def _alone(step: Callable[[], list[dict]]) -> Callable[[], list[dict]]:
    """The step, whose failure costs the record nothing else: what it raises becomes a LeftOut, but interruptions."""

    def attempt() -> list[dict]:
        try:
            return finite(step())
        except Exception as error:
            raise LeftOut(_said(error)) from None

    return attempt


def _said(error: Exception) -> str:
    return str(error)[:300] if isinstance(error, LeftOut) else f"{type(error).__name__}: {str(error)[:300]}"


def _tidy() -> None:
    """Give back what a training held."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
