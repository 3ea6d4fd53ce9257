"""A training run in progress: what changes from step to step (Run), how that is saved and restored, and Stop, which
handles the signals that end a run."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import torch
from torch import Tensor, nn

from ..analysis.switching import Switch
from ..core import InputError
from ..layers.find import feed_forwards, firing_layers
from ..layers.terms import LayerTerm
from ..models.swap import densify, sparsify
from ..ops.checks import all_finite
from ..ops.clock import device_name
from . import checkpoint, dead, parallel
from .compiled import Compiled
from .config import TrainConfig
from .objective import Objective
from .parallel import World
from .text.source import random_windows

RESIDENT = 2**31  # bytes of tokens that are copied to the device; more stay where they are
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW stores of each weight, beside its step


class Run:
    """The model being trained and everything beside it that a step changes.

    objective: the model's Objective; joined: the same, inside DDP where that is used; measure: the same once more,
    compiled where that is asked for, which is what a step calls."""

    def __init__(self, config: TrainConfig, model: nn.Module, tokens: Tensor, world: World) -> None:
        self.config, self.world = config, world
        self.model = model.to(world.device)
        self.switch: Switch | None = None
        if config.kernels != "off":
            sparsify(model, "twell")
            for layer in feed_forwards(model):
                layer.module.learn("dense" if config.kernels == "auto" else "twell")
            self.switch = Switch(model) if config.kernels == "auto" else None
        self.sharded = world.size > 1 and config.parallel == "fsdp"
        if self.sharded:
            parallel.shard(model, world)
        self.objective = Objective(model)
        self.joined: nn.Module = self.objective
        if world.size > 1 and not self.sharded:
            self.joined = parallel.replicate(self.objective, world)
        self.graphs: Compiled | None = None
        if config.compile and self.switch is not None:
            self.graphs = Compiled(self.objective, self.joined, whole=not self.sharded)
        self.measure = self.graphs or (torch.compile(self.joined) if config.compile else self.joined)
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
        counted = self.layers if config.dead_window else []
        widths = [len(layer.pattern.weight) for layer in counted]
        self.silent = [torch.zeros(width, dtype=torch.int64, device=world.device) for width in widths]
        # The first step that failed, its loss and the norm of its gradient; zeros until then.
        self.failed = torch.zeros(3, dtype=torch.float64, device=world.device)
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
        tokens = self.config.batch * self.config.context
        for layer, silent in zip(self.layers, self.silent):
            fired = parallel.whole((layer.pattern.weight.grad != 0).any(1))
            silent.add_(tokens).masked_fill_(fired, 0)

    def dead(self) -> list[Tensor]:
        """Return for each layer, bool [d_ff], which neurons have been silent for the whole window."""
        return [silent >= self.config.dead_window for silent in self.silent]

    def revive(self) -> None:
        """Re-initialise the gate rows of the neurons that are dead now (see twell_lab.training.dead)."""
        for layer, silent in zip(self.layers, self.dead(), strict=True):
            dead.reinitialise(layer, silent, self.config.reinit, self.config.reinit_sigma, self.noise)

    def note(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Note the first step whose loss, or norm of the gradient, is not finite, without waiting for the device."""
        loss, norm = loss.double(), parallel.whole(norm).double()
        now = torch.stack([torch.full_like(loss, step), loss, norm])
        self.failed = torch.where((loss + norm).isfinite() | (self.failed[0] > 0), self.failed, now)

    def check(self, step: int) -> None:
        """Raise InputError if a step up to this one failed in any process, or a weight is not finite, which the loss
        does not show where a kernel skips the neuron. Every process calls it. Reads the device once."""
        finite = all_finite([parallel.local(weight) for weight in self.parameters.values()])
        failed, loss, norm, fine = torch.cat([self.failed, finite.double()[None]]).tolist()
        if self.world.any(bool(failed) or not fine):
            broken = [name for name, weight in self.parameters.items() if not all_finite([parallel.local(weight)])]
            what = f"the norm of the loss's gradient is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
            raise self.diverged(
                what if failed else f"values are not finite in {', '.join(broken)}", int(failed or step)
            )

    def diverged(self, what: str, step: int) -> InputError:
        """Return the error of a run of which `what` came about at a step."""
        return InputError(
            f"{what} at step {step} with lr {self.config.lr} and l1 {self.config.l1}: training diverged; a lower lr "
            f"{'or l1 ' if self.config.l1 else ''}is the first thing to try"
        )

    def follow(self, *numbers: list[float]) -> None:
        """Let each layer choose between the dense path and the kernels. numbers: nnz, lost, light and heavy of a
        LayerTerm, each by layer."""
        terms = [LayerTerm(layer.name, None, *values) for layer, *values in zip(self.layers, *numbers, strict=True)]
        if self.switch.below is None:
            # Processes measure different break-evens, and must all take the same path: they share the mean.
            parts = self.config.accumulate * self.world.size
            found = self.switch.measure(self.config.batch * self.config.context // parts)
            values = torch.tensor(list(found.values()), dtype=torch.float64, device=self.world.device)
            self.switch.below = dict(zip(found, self.world.mean(values).tolist(), strict=True))
        changes = self.switch.see(terms)
        if self.graphs is not None:
            left = (self.config.steps - self.step) * self.config.accumulate
            self.graphs.follow(tuple(layer.module.learning for layer in self.layers), bool(changes), self.step, left)

    def state(self, text: dict) -> checkpoint.State:
        """Return everything for a checkpoint; every process must call it. text: what checkpoint.describe says."""
        optimizer = {
            f"{what}.{name}": parallel.whole(value).cpu()
            for name, weight in self.parameters.items()
            for what, value in self.optimizer.state.get(weight, {}).items()
        }
        return checkpoint.State(
            step=self.step,
            config=checkpoint.fields_of(self.config),
            text=text,
            seconds=self.seconds,
            history=self.history,
            order=self.order.get_state(),
            noise=self.noise.get_state(),
            weights=self.weights(),
            optimizer=optimizer,
            silent=[silent.cpu() for silent in self.silent],
            paths=self._paths(),
        )

    def _paths(self) -> dict:
        if self.switch is None:
            return {}
        layers = {layer.name: layer.module.learning for layer in self.layers}
        graphs = {} if self.graphs is None else {"graphs": self.graphs.state_dict()}
        return {"device": device_name(self.world.device), "below": self.switch.below, "layers": layers, **graphs}

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights, whole, on the CPU."""
        return {name: parallel.whole(value).cpu().contiguous() for name, value in self.model.state_dict().items()}

    def restore(self, state: checkpoint.State) -> None:
        """Go on from a checkpoint of the same config."""
        for name, weight in self.parameters.items():
            parallel.put(weight, state.weights[name])
            self.optimizer.state[weight] = {"step": state.optimizer[f"step.{name}"].to(weight.device, copy=True)}
            for what in MOMENTS:
                self.optimizer.state[weight][what] = moment = torch.zeros_like(weight, requires_grad=False)
                parallel.put(moment, state.optimizer[f"{what}.{name}"])
        self.order.set_state(state.order)
        self.noise.set_state(state.noise)
        self.silent = [silent.to(self.world.device, copy=True) for silent in state.silent]
        if self.switch is not None and state.paths:
            for layer in self.layers:
                layer.module.learn(state.paths["layers"][layer.name])
            # On another kind of device the break-evens are measured again.
            if not self.world.any(state.paths["device"] != device_name(self.world.device)):
                self.switch.below = state.paths["below"]
        if self.graphs is not None:
            if "graphs" in state.paths:
                self.graphs.load_state_dict(state.paths["graphs"])
            else:  # nothing says when a layer changed its path last
                self.graphs.changed_at = state.step
        self.step, self.seconds, self.history = state.step, state.seconds, list(state.history)

    def trained_model(self, fresh: Callable[[], nn.Module]) -> nn.Module:
        """Return the model as it is handed back: dense layers, whole weights, no hooks; in evaluation mode.

        fresh: makes one to hold the weights that FSDP2 sharded, or whose layers were compiled one by one."""
        self.objective.hooks.close()
        if not self.sharded and self.graphs is None:
            return densify(self.model).eval()
        model = fresh()
        model.load_state_dict(self.weights())
        return model.to(self.world.device).eval()


class Stop:
    """A context in which Ctrl-C and SIGTERM (from a cluster's scheduler) let a run save itself: they set `asked`.

    Another Ctrl-C stops at once, but not one of `several` processes: they must agree to stop, and the terminal, and
    torchrun too, send it to each of them. active: False leaves the signals alone, for a run that is not saved."""

    def __init__(self, active: bool, several: bool) -> None:
        self.several, self.asked = several, False
        main = threading.current_thread() is threading.main_thread()
        self.numbers = (signal.SIGINT, signal.SIGTERM) if active and main else ()

    def __enter__(self) -> Stop:
        self.old = {number: signal.signal(number, self._note) for number in self.numbers}
        return self

    def __exit__(self, *raised) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before, self.asked = self.asked, True
        if before and number == signal.SIGINT and not self.several:
            raise KeyboardInterrupt
        if not before and not self.several:
            # In `2>&1 | tee log` the same Ctrl-C has ended tee; or a line is being printed at this moment.
            with suppress(OSError, RuntimeError):
                print("\nstopping after this step, to save it; interrupt again to stop at once", file=sys.stderr)
