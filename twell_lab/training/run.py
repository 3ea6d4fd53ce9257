"""A training run in progress: what changes from step to step (Run), how that is saved and restored, and the signals
that end a run (stopping)."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.switching import Switch
from ..core import InputError
from ..layers.find import feed_forwards, firing_layers
from ..layers.terms import LayerTerm
from ..models.swap import sparsify
from ..ops.checks import all_finite
from . import checkpoint, dead, parallel
from .config import TrainConfig
from .objective import Objective
from .parallel import World
from .text.source import random_windows

RESIDENT = 2**31  # bytes of tokens that are copied to the device; more stay where they are


class Run:
    """The model being trained and everything beside it that a step changes.

    joined: the model's Objective, inside DDP where that is used; measure: the same, compiled where that is asked for,
    which is what a step calls. last: loss and norm of the gradient of the last step, by name."""

    def __init__(self, config: TrainConfig, model: nn.Module, tokens: Tensor, world: World) -> None:
        self.config, self.world = config, world
        self.model = model.to(world.device)
        self.switch: Switch | None = None
        if config.kernels != "off":
            sparsify(model, "twell")
            for layer in feed_forwards(model):
                layer.module.learn("dense" if config.kernels == "auto" else "twell")
            self.switch = Switch(model) if config.kernels == "auto" else None
        if sharded := world.size > 1 and config.parallel == "fsdp":
            parallel.shard(model, world)
        objective = Objective(model)
        self.joined: nn.Module = objective
        self.terms = objective.terms
        if world.size > 1 and not sharded:
            ids = [world.device.index] if world.device.type == "cuda" else None
            self.joined = nn.parallel.DistributedDataParallel(objective, device_ids=ids)
        self.measure = self.joined
        if config.compile and self.switch is not None:
            # A change of a path is another graph. Compiled one by one, all layers on the same path share a graph; of a
            # whole model, torch compiles eight combinations of paths and no more. The cross-entropy alone makes copies
            # of the scores, which take gigabytes in float32 where the vocabulary is large.
            for block in parallel.blocks(model):
                block.compile()
            objective.of_scores = torch.compile(F.cross_entropy)
        elif config.compile:
            self.measure = torch.compile(self.joined)
        # The penalty's coefficient is a tensor: so one compiled graph serves all its values.
        self.l1 = torch.zeros((), device=world.device) if config.l1 else None
        self.layers = firing_layers(model)
        self.parameters = dict(model.named_parameters())
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        others = [weight for weight in model.parameters() if weight.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.tokens = tokens.to(world.device) if tokens.nbytes <= RESIDENT else tokens
        self.order, self.noise = (torch.Generator().manual_seed(config.seed) for _ in range(2))
        widths = [len(layer.pattern.weight) for layer in self.layers] if config.dead_window else []
        self.silent = [torch.zeros(width, dtype=torch.int64, device=world.device) for width in widths]
        self.last: dict[str, Tensor] = {}
        self.step, self.seconds = 0, 0.0
        self.history: list[dict] = []

    def windows(self) -> Tensor:
        """Return this process's windows of the next step: int64 [n, context + 1] on the device, without waiting.
        A CPU generator draws those of all processes: the same ones on every device."""
        windows = random_windows(self.tokens, self.config.batch, self.config.context, self.order)
        if self.world.device.type == "cuda" and not windows.is_cuda:
            windows = windows.pin_memory().to(self.world.device, non_blocking=True)
        return self.world.share(windows)

    def count_silent(self) -> None:
        """Count the tokens since each neuron fired, after a step's backward pass: those fired whose gate row has a
        gradient other than zero."""
        for layer, silent in zip(self.layers, self.silent):
            fired = parallel.whole((layer.pattern.weight.grad != 0).any(1))
            silent.add_(self.config.batch * self.config.context).masked_fill_(fired, 0)

    def dead(self) -> list[Tensor]:
        """Return for each layer, bool [d_ff], which neurons have been silent for the whole window."""
        return [silent >= self.config.dead_window for silent in self.silent]

    def revive(self) -> None:
        """Re-initialise the gate rows of the neurons that are dead now."""
        for layer, silent in zip(self.layers, self.dead(), strict=True):
            dead.reinitialise(layer, silent, self.config.reinit, self.config.reinit_sigma, self.noise)

    def check(self, step: int) -> None:
        """Raise InputError unless loss, gradient and every weight are finite in all processes, which all must call it.
        A weight that is not finite need not show in the loss: kernels skip neurons. Reads the device once."""
        values = {name: parallel.local(value) for name, value in {**self.last, **self.parameters}.items()}
        if self.world.any(not all_finite([*values.values()])):
            broken = [name for name, value in values.items() if not all_finite([value])]
            raise self.diverged(f"values are not finite in {', '.join(broken[:3])}", step)

    def diverged(self, what: str, step: int) -> InputError:
        return InputError(
            f"{what} at step {step} with lr {self.config.lr} and l1 {self.config.l1}: training diverged; a lower lr "
            f"{'or l1 ' if self.config.l1 else ''}is the first thing to try"
        )

    def follow(self, *numbers: list[float]) -> None:
        """Let each layer choose between the dense path and the kernels. numbers: nnz, lost, light and heavy of a
        LayerTerm, each by layer."""
        assert self.switch is not None
        terms = [LayerTerm(layer.name, None, *values) for layer, *values in zip(self.layers, *numbers, strict=True)]
        if self.switch.below is None:
            # Processes measure different break-evens, and must all take the same path: they share the mean.
            parts = self.config.accumulate * self.world.size
            limits = self.switch.measure(self.config.batch * self.config.context // parts)
            values = torch.tensor(list(limits.values()), dtype=torch.float64, device=self.world.device)
            self.switch.below = dict(zip(limits, self.world.mean(values).tolist(), strict=True))
        self.switch.see(terms)

    def state(self, text: dict) -> dict:
        """Return a checkpoint (see checkpoint.FIELDS), on the CPU; every process must call it."""
        return {
            "step": self.step,
            "config": checkpoint.fields_of(self.config),
            "text": text,
            "seconds": self.seconds,
            "history": self.history,
            "order": self.order.get_state(),
            "noise": self.noise.get_state(),
            "weights": self.weights(),
            "optimizer": {
                name: {what: parallel.whole(value).cpu() for what, value in self.optimizer.state[weight].items()}
                for name, weight in self.parameters.items()
            },
            "silent": [silent.cpu() for silent in self.silent],
        }

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights, whole, on the CPU; every process must call it."""
        return {name: parallel.whole(value).cpu().contiguous() for name, value in self.model.state_dict().items()}

    def restore(self, state: dict) -> None:
        """Go on from a checkpoint of the same config. With kernels "auto", layers are dense until the next row."""
        for name, weight in self.parameters.items():
            parallel.put(weight, state["weights"][name])
            moments = dict(state["optimizer"][name])
            step = moments.pop("step").to(weight.device, copy=True)
            self.optimizer.state[weight] = {"step": step, **{what: torch.zeros_like(weight) for what in moments}}
            for what, value in moments.items():
                parallel.put(self.optimizer.state[weight][what], value)
        self.order.set_state(state["order"])
        self.noise.set_state(state["noise"])
        self.silent = [silent.to(self.world.device, copy=True) for silent in state["silent"]]
        self.step, self.seconds, self.history = state["step"], state["seconds"], list(state["history"])


@contextmanager
def stopping(active: bool, several: bool) -> Iterator[list[int]]:
    """A context in which Ctrl-C and SIGTERM (from a cluster's scheduler) let a run save itself: with the list of those
    that came.

    Another Ctrl-C stops at once, but not one of `several` processes: they must agree to stop, and the terminal, and
    torchrun too, send it to each of them. active: False leaves the signals alone, for a run that is not saved."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if several:
            return
        if len(came) > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        if len(came) == 1:
            with suppress(OSError, RuntimeError):  # as where Ctrl-C has ended tee, or a line is being printed
                print("\nstopping after this step, to save it; interrupt again to stop at once", file=sys.stderr)

    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM) if active and main}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
