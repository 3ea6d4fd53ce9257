"""L1 training: a plain loop that makes the feed-forward layers of a small language model sparse.

The loss is cross-entropy plus `l1` times the sum over neurons of |h|, averaged over tokens and layers, where
h is what enters the down projection. This is the convention of the published code of "Sparser, Faster,
Lighter Transformer Language Models" (arXiv 2603.23198), whose 2e-5 is meant so; the paper's formula averages
over neurons as well, so the same pressure takes a coefficient d_ff times larger there.

Nothing in a step waits for the device: numbers are read where a row of the history is made, and only there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .errors import DeviceError, InputError
from .model import LanguageModel
from .objective import (  # noqa: F401  (names that others import from here)
    EVAL_BATCH,
    Objective,
    bits_per_byte,
    cross_entropy,
    hidden_activations,
    l1_penalty,
    mean_nnz,
)
from .profile import profile
from .text import Text, check_enough, load, spread_windows
from .train_config import TrainConfig, TrainResult, l1_coefficient, learning_rate


def train(config: TrainConfig, *, progress: bool = True,
          on_step: Callable[[dict], None] | None = None) -> TrainResult:
    """Train a model from scratch, validate it, and count which of its neurons fire.

    progress: show a bar on stderr, where tqdm is installed.
    on_step: called with each row of the history as it is made.

    Raises TextError for a text that can't be read or is too short for the batch, DeviceError for a device
    that is not there, and InputError when the loss stops being a number.
    """
    device = _device(config.device)
    whole = config.text if isinstance(config.text, Text) else load(config.text)
    training, validation = whole.split()
    check_enough(training, validation, config.batch, config.context)
    model = initial_model(config).to(device)
    optimizer = _optimizer(model, config)
    order = Order(training.data, config, device)
    held_out = spread_windows(validation.data, config.eval_windows, config.context).to(device)
    objective = Objective(model)
    measure = torch.compile(objective) if config.compile else objective
    weight = torch.zeros((), device=device) if config.l1 else None  # the penalty's, as a tensor: no new graph for it
    history: list[dict] = []
    start = time.perf_counter()
    lap, lap_step = start, 0
    with _bar(config, progress) as bar:
        for step in range(1, config.steps + 1):
            last = step == config.steps
            validate = last or step % config.eval_every == 0
            logged = validate or step == 1 or step % config.log_every == 0
            lr = learning_rate(config, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if weight is not None:
                weight.fill_(l1_coefficient(config, step))
            parts = []
            for windows in order.next().chunk(config.accumulate):
                with _autocast(config, device):
                    # Counting in a compiled graph is all but free, and a second graph is not.
                    loss, *numbers = measure(windows, weight, logged or config.compile)
                (loss / config.accumulate if config.accumulate > 1 else loss).backward()
                parts.append([loss.detach(), *numbers])
            nn.utils.clip_grad_norm_(model.parameters(), config.clip, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            if not logged:
                continue
            row = {"step": step, **_read(parts), "lr": lr}
            if not math.isfinite(row["loss"]):
                raise InputError(f"the loss is {row['loss']} at step {step} with lr {config.lr} and l1 "
                                 f"{config.l1}: training diverged; a lower lr is the first thing to try")
            now = time.perf_counter()
            row["tokens_per_s"] = (step - lap_step) * config.batch * config.context / (now - lap)
            if validate:
                with _autocast(config, device):
                    row["val_bits_per_byte"] = bits_per_byte(model, held_out)
            lap, lap_step = time.perf_counter(), step
            row["seconds"] = lap - start
            history.append(row)
            bar.set_postfix(loss=f"{row['loss']:.3f}", nnz=f"{row['nnz']:.0f}",
                            tokens_s=f"{row['tokens_per_s']:,.0f}", refresh=False)
            if on_step is not None:
                on_step(row)
    seconds = time.perf_counter() - start
    objective.remove()
    with _autocast(config, device):
        firing = profile(model, (windows[:, :-1] for windows in held_out.split(EVAL_BATCH)))
    model.eval()
    return TrainResult(
        model=model, config=config, history=history,
        validation_bits_per_byte=history[-1]["val_bits_per_byte"],
        mean_nnz=sum(layer.mean_nnz for layer in firing.layers) / len(firing.layers),
        density=[layer.density for layer in firing.layers], dead=[layer.dead for layer in firing.layers],
        text={**whole.describe(), "training_size": training.size, "validation_size": validation.size},
        seconds=seconds, tokens=config.steps * config.batch * config.context)


def initial_model(config: TrainConfig, vocabulary: int = 256) -> LanguageModel:
    """The model before its first step, on the CPU: the same weights for the same seed, wherever it trains."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return LanguageModel(config.model(vocabulary))


class Order:
    """Which windows each step reads: text.random_windows, without waiting for the device.

    The positions come from a CPU generator of the config's seed, so that every device reads the same windows.
    """

    def __init__(self, data: Tensor, config: TrainConfig, device: torch.device) -> None:
        self.data = data.to(device)
        self.count, self.context = config.batch, config.context
        self.generator = torch.Generator().manual_seed(config.seed)
        self.offsets = torch.arange(config.context + 1, device=device)

    def next(self) -> Tensor:
        """The windows of one step: int64 [batch, context + 1] on the device."""
        starts = torch.randint(self.data.numel() - self.context, (self.count, 1), generator=self.generator)
        if self.data.is_cuda:
            starts = starts.pin_memory().to(self.data.device, non_blocking=True)
        return self.data[starts + self.offsets].long()


def _read(parts: list[list[Tensor]]) -> dict:
    """The numbers of a row, averaged over the parts of a step: one transfer from the device."""
    loss, terms, l1, nnz = (torch.stack(each).mean(0) if len(parts) > 1 else each[0]
                            for each in zip(*parts, strict=True))
    layers = len(nnz)
    values = torch.cat([loss[None], terms, nnz.mean()[None], l1, nnz]).tolist()
    return {"loss": values[0], "ce": values[1], "l1_term": values[2], "nnz": values[3],
            "nnz_layers": values[4 + layers:], "l1_layers": values[4:4 + layers], "dead_layers": None}


def _autocast(config: TrainConfig, device: torch.device):
    # Not torch.autocast(enabled=False): that would switch off a caller's own.
    return torch.autocast(device.type, torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


def _optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def _device(name: str | None) -> torch.device:
    """The device to train on; DeviceError where it is not there."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise DeviceError(f"device {name!r} is not there: {error}; accepted here: "
                          f"{'cpu, cuda' if torch.cuda.is_available() else 'cpu'}") from None
    return device


class _NoBar:
    """Stands in where no progress is wanted, or tqdm is not installed."""

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *raised) -> None:
        pass

    def update(self) -> None:
        pass

    def set_postfix(self, **values) -> None:
        pass


def _bar(config: TrainConfig, progress: bool):
    try:
        from tqdm import tqdm  # not tqdm.auto: its notebook form stores widget state
    except ImportError:
        progress = False
    return tqdm(total=config.steps, desc=f"training, l1 {config.l1:g}", unit="step") if progress else _NoBar()


# What the tour trains: once like this, once with l1=0. Measured on 2026-11-21 on an AMD EPYC (Zen 5), torch
# 2.13.0, the standard library of Python 3.11.7; 461 kB read, 16 kB of held-out text. Seeds 0, 1, 2:
#   l1                       0                       2e-3
#   bits per byte            2.294 2.269 2.259       2.292 2.273 2.280
#   mean nnz of 512          137   134   143         18.5  17.9  19.7
#   dead neurons of 2048     0     0     0           66    58    63
# A step takes 60 ms on one core, 37 to 46 on two that have nothing else to do. Chosen from (seed 0, l1=0):
#   600 steps of 8 windows of 128   2.322   the same 614 kB as 1200 steps of 8 windows of 64: 2.185
#   lr 4e-3 instead of 2e-3         2.330   instead of 2.322, and a density of 20% instead of 31%
#   embedding begins at 0.02, not 1 2.525   instead of 2.322 (the last two at 8 windows of 128)
#   l1=3e-3                         2.306   and nnz 11.6, 142 dead
#   3 layers, 1000 steps            2.265   2.296 with l1=2e-3, nnz 19; 48 s of one core
# So small a model, read so little, says nothing about what L1 costs a large one.
TOUR = TrainConfig(l1=2e-3)
