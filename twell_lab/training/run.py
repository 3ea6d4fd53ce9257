"""A training run in progress: what changes from step to step (Run), and how that is saved and restored.

Beside it: Guard, which keeps the last good state of a run that diverges, and Stop, which handles the signals that end
one."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import asdict
from types import FrameType

import torch
from torch import Tensor, nn

from ..analysis.switching import Switch
from ..core import InputError
from ..layers.find import feed_forwards, firing_layers
from ..layers.sparse_ffn import SparseFFN
from ..layers.terms import LayerTerm
from ..models.swap import sparsify
from ..models.tiny import LanguageModel, check_shapes
from ..ops.checks import all_finite
from . import checkpoint, dead, parallel
from .compiled import Compiled
from .config import TrainConfig
from .objective import Objective
from .parallel import World
from .text.source import random_windows

RESIDENT = 2**31  # bytes of tokens that are copied to the device
GRACE = 20.0  # seconds in which several processes agree to stop; torchrun kills them after 30
FRESH = 4  # readings of a text that teach nearly as much as fresh text would (Muennighoff et al., arXiv 2305.16264)


class Order:
    """Which windows each step reads, drawn by a CPU generator of the config's seed: the same ones on every device.

    Tokens of at most RESIDENT bytes are copied to the device. More tokens stay where they are, and the windows of each
    step are copied. Nothing here waits for the device.
    """

    def __init__(self, data: Tensor, config: TrainConfig, device: torch.device) -> None:
        self.data = data.to(device) if data.nbytes <= RESIDENT else data
        self.device, self.batch, self.context = device, config.batch, config.context
        self.generator = torch.Generator().manual_seed(config.seed)

    def next(self) -> Tensor:
        """The windows of one step: int64 [batch, context + 1] on the device."""
        windows = random_windows(self.data, self.batch, self.context, self.generator)
        if self.device.type == "cuda" and not windows.is_cuda:
            windows = windows.pin_memory().to(self.device, non_blocking=True)
        return windows


class Run:
    """The model being trained and everything beside it that a step changes.

    model: the LanguageModel itself. objective: its Objective; joined: the same, inside DDP where that is used;
    measure: the same once more, compiled where that is asked for, which is what a step calls.
    """

    def __init__(self, config: TrainConfig, model: LanguageModel, tokens: Tensor, world: World) -> None:
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
        self.optimizer = _optimizer(model, config)
        self.order = Order(tokens, config, world.device)
        self.noise = torch.Generator().manual_seed(config.seed)
        self.tracker = dead.Tracker(self.layers, config.dead_window) if config.dead_window else None
        self.guard = Guard(self)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict] = []

    def see_dead(self, tokens: int) -> None:
        """Count which neurons fired in a step of so many tokens, after its backward pass: those whose gate row has a
        gradient other than zero."""
        fired = [parallel.whole((layer.pattern.weight.grad != 0).any(1)) for layer in self.layers]
        self.tracker.see(fired, tokens)

    def revive(self) -> None:
        """Re-initialise the gate rows of the neurons that are dead now (see twell_lab.training.dead)."""
        for layer, silent in zip(self.layers, self.tracker.dead(), strict=True):
            dead.reinitialise(layer, silent, self.config.reinit, self.config.reinit_sigma, self.noise)

    def follow(self, *numbers: list[float]) -> None:
        """Let each layer choose between the dense path and the kernels, with kernels "auto".

        numbers: nnz, lost, light and heavy of a LayerTerm, each by layer."""
        terms = [LayerTerm(layer.name, None, *each) for layer, *each in zip(self.layers, *numbers, strict=True)]
        if self.switch.below is None:
            # Processes measure different break-evens, and must all take the same path: they share the mean.
            found = self.switch.measure(
                self.config.batch * self.config.context // (self.config.accumulate * self.world.size)
            )
            values = torch.tensor(list(found.values()), dtype=torch.float64, device=self.world.device)
            self.switch.below = dict(zip(found, self.world.mean(values).tolist(), strict=True))
        changes = self.switch.see(terms)
        if self.graphs is not None:
            left = (self.config.steps - self.step) * self.config.accumulate
            self.graphs.follow(tuple(layer.module.learning for layer in self.layers), bool(changes), self.step, left)

    def state(self, text: dict) -> checkpoint.State:
        """Everything for a checkpoint; every process must call it. text: what checkpoint.describe says."""
        config = {
            name: str(value) if name == "tokenizer" and value is not None else value
            for name, value in vars(self.config).items()
            if name != "text"
        }
        optimizer = {
            f"{what}.{name}": parallel.whole(value).cpu()
            for name, weight in self.parameters.items()
            for what, value in self.optimizer.state.get(weight, {}).items()
        }
        return checkpoint.State(
            step=self.step,
            config=config,
            model_config=asdict(self.model.config),
            text=text,
            seconds=self.seconds,
            history=self.history,
            order=self.guard.order_state,
            noise=self.noise.get_state(),
            weights=self.weights(),
            optimizer=optimizer,
            counts=self.tracker.state_dict() if self.tracker else {},
            paths=self._paths(),
        )

    def _paths(self) -> dict:
        if self.switch is None:
            return {}
        layers = {layer.name: layer.module.learning for layer in self.layers}
        graphs = {} if self.graphs is None else {"graphs": self.graphs.state_dict()}
        return {"device": self._device_name(), "below": self.switch.below, "layers": layers, **graphs}

    def _device_name(self) -> str:
        device = self.world.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def weights(self) -> dict[str, Tensor]:
        """The model's weights, whole, on the CPU."""
        return {name: parallel.whole(value).cpu() for name, value in self.model.state_dict().items()}

    def restore(self, state: checkpoint.State) -> None:
        """Go on from a checkpoint of the same config. InputError for tensors of another model."""
        shapes = {name: tuple(weight.shape) for name, weight in self.parameters.items()}
        check_shapes("the checkpoint's weights", state.weights, shapes)
        moments = {f"{what}.{name}": shape for name, shape in shapes.items() for what in ("exp_avg", "exp_avg_sq")}
        moments |= {f"step.{name}": () for name in shapes}
        check_shapes("the checkpoint's optimizer states", state.optimizer, moments if state.step else {})
        for name, weight in self.parameters.items():
            parallel.put(weight, state.weights[name])
            if state.step:
                kept = {"step": state.optimizer[f"step.{name}"].to(weight.device, torch.float32)}
                for what in ("exp_avg", "exp_avg_sq"):
                    kept[what] = torch.zeros_like(weight, requires_grad=False)
                    parallel.put(kept[what], state.optimizer[f"{what}.{name}"])
                self.optimizer.state[weight] = kept
        self.order.generator.set_state(state.order)
        self.noise.set_state(state.noise)
        if self.tracker is not None:
            self.tracker.load_state_dict(state.counts)
        if self.switch is not None and state.paths:
            if state.paths["layers"].keys() != (names := {layer.name for layer in self.layers}):
                raise InputError(
                    f"the checkpoint has paths of {sorted(state.paths['layers'])}; accepted: of {sorted(names)}"
                )
            for layer in self.layers:
                layer.module.learn(state.paths["layers"][layer.name])
            # On another kind of device the break-evens are measured again.
            if not self.world.any(state.paths["device"] != self._device_name()):
                self.switch.below = state.paths["below"]
        if self.graphs is not None:
            if "graphs" in state.paths:
                self.graphs.load_state_dict(state.paths["graphs"])
            else:  # nothing says when a layer changed its path last
                self.graphs.changed_at = state.step
        self.step, self.seconds, self.history = state.step, state.seconds, list(state.history)

    def trained_model(self) -> LanguageModel:
        """The model as it is handed back: dense layers, whole weights, no hooks."""
        self.objective.remove()
        if not self.sharded and not any(isinstance(module, SparseFFN) for module in self.model.modules()):
            return self.model
        with torch.random.fork_rng(devices=[]):  # drawing weights, overwritten below, is not to move torch's generator
            made = LanguageModel(self.model.config)
        made.load_state_dict(self.weights())
        return made.to(self.world.device)


class Guard:
    """Keeps the last good state: from the first step on whose loss or gradient is not finite, no weight changes.

    On a GPU a flag on the device, the one that torch's GradScaler uses, has the optimizer do nothing, so that no step
    waits; `check` reads what happened. On a CPU, and where FSDP2 shards the weights, each step is checked at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.waits = run.sharded or run.world.device.type == "cpu"
        self.broken = torch.zeros((), device=run.world.device)
        self.first = torch.zeros(3, dtype=torch.float64, device=run.world.device)  # step, loss, norm of the gradient
        self.before: dict[int, Tensor] = {}  # state of the order's generator before each step since the last check
        if not self.waits:
            run.optimizer.found_inf = self.broken  # type: ignore[attr-defined]  # fused AdamW reads it

    @property
    def order_state(self) -> Tensor:
        """The state of the order's generator from which the step after run.step draws its windows."""
        return self.before.get(self.run.step + 1, self.run.order.generator.get_state())

    def begin(self, step: int) -> None:
        self.before[step] = self.run.order.generator.get_state()

    def see(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Called between the backward pass and the optimizer's step. loss: this process's. norm: of the gradient of all
        processes."""
        norm = parallel.whole(norm)
        # Several processes must agree. They do on the norm, which is not finite where a loss is not in any of them.
        finite = torch.isfinite(norm) if self.run.world.size > 1 else torch.isfinite(norm) & torch.isfinite(loss)
        if self.waits:
            if not finite.item():
                self.fail(step, loss.item(), norm.item())
            return
        now = torch.stack([torch.full_like(self.first[0], step), loss.double(), norm.double()])
        self.first.copy_(torch.where(finite | (self.broken != 0), self.first, now))
        self.broken.copy_(torch.where(finite, self.broken, 1.0))

    def check(self) -> None:
        """Raise Diverged if a step since the last check failed, or a weight is not finite now, which the loss does not
        show where a kernel skips the neuron. Reads the device once."""
        finite = all_finite([parallel.local(weight) for weight in self.run.parameters.values()])
        *failed, finite = torch.cat([self.first, finite.double()[None]]).tolist()
        if not self.waits and failed[0]:
            self.fail(int(failed[0]), *failed[1:])
        if self.run.world.any(not finite):
            broken = [name for name, weight in self.run.parameters.items() if not all_finite([parallel.local(weight)])]
            raise Diverged(self.run.config, self.run.step + 1, broken=tuple(broken) or ("a weight in another process",))
        self.before.clear()

    def fail(self, step: int, loss: float, norm: float) -> None:
        self.run.step = step - 1  # the last step whose weights are good
        raise Diverged(self.run.config, step, loss, norm)


class Diverged(InputError):
    """The loss or its gradient is not finite, and the run is as the step before left it. Or weights are not finite:
    `broken` holds their names then, and is empty otherwise."""

    def __init__(
        self, config: TrainConfig, step: int, loss: float = 0.0, norm: float = 0.0, broken: tuple[str, ...] = ()
    ) -> None:
        what = f"the norm of the loss's gradient is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        what = f"values that are not finite in {', '.join(broken)}" if broken else what
        self.broken = broken
        super().__init__(
            f"{what} at step {step} with lr {config.lr} and l1 {config.l1}: training diverged; a lower lr "
            f"{'or l1 ' if config.l1 else ''}is the first thing to try"
        )


class Stop:
    """A context in which Ctrl-C and SIGTERM (from a cluster's scheduler) let a run save itself before it stops.

    The first signal sets `asked`, and the run is to stop after its step. Another Ctrl-C stops at once.

    active: False leaves the signals alone, for a run that is not saved.
    patient: for one of several processes. No Ctrl-C stops such a process at once, since the terminal sends it to each
        of them, and so does torchrun. They must agree to stop; the training loop sets `agreed` when they have. Where
        one of them has ended, the others would wait for it forever: so a process that was asked to stop, and whose
        `agreed` is not set within GRACE seconds, ends without saving."""

    def __init__(self, active: bool, patient: bool) -> None:
        self.active = active and threading.current_thread() is threading.main_thread()
        self.patient, self.asked = patient, False
        self.agreed = threading.Event()

    def __enter__(self) -> Stop:
        if self.active:
            self.old = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
            if self.patient:
                self._watch()
        return self

    def __exit__(self, *raised) -> None:
        self.agreed.set()
        if self.active:
            for number, handler in self.old.items():
                signal.signal(number, handler)
            if self.patient:
                signal.set_wakeup_fd(self.woken)
                os.close(self.writer)
                self.watcher.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        before, self.asked = self.asked, True
        if self.patient:
            return
        if before and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not before:
            # In `2>&1 | tee log` the same Ctrl-C has ended tee; or a line is being printed at this moment.
            with suppress(OSError, RuntimeError):
                print("\nstopping after this step, to save it; interrupt again to stop at once", file=sys.stderr)

    def _watch(self) -> None:
        """Have a thread see the first signal: while the main thread waits inside of torch, Python's handlers do not
        run."""
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.woken = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)

        def watch() -> None:
            while (seen := os.read(reader, 1)) and seen[0] not in self.old:
                pass
            if seen and not self.agreed.wait(GRACE):
                with suppress(OSError):
                    os.write(
                        2,
                        f"\ntwell-lab: told to stop by {signal.Signals(seen[0]).name}, and the other processes did "
                        f"not agree to stop within {GRACE:g} s: process {os.getpid()} ends without saving\n".encode(),
                    )
                os._exit(128 + seen[0])
            os.close(reader)

        self.watcher = threading.Thread(target=watch, daemon=True)
        self.watcher.start()


def warn_if_silent(row: dict, config: TrainConfig) -> bool:
    """Warn, with the numbers, where no neuron of any layer fires any more. Returns whether it warned."""
    if row["nnz"] > 0:
        return False
    warnings.warn(
        f"step {row['step']}: no neuron fires in any of the {config.layers} layers of {config.d_ff} in this batch "
        f"(mean nnz 0, cross-entropy {row['ce']:.3f}); with l1 {config.l1:g} the penalty has switched them all off, "
        "and what does not fire gets no gradient; a smaller l1"
        f"{' or a longer l1_warmup' if config.reinit else ', a longer l1_warmup or reinit'} may help",
        stacklevel=4,
    )
    return True


def warn_if_repeated(config: TrainConfig, tokens: int) -> None:
    """Warn, with the numbers, where a run reads a text of `tokens` training tokens more than FRESH times over."""
    asked = config.steps * config.batch * config.context
    if asked > FRESH * tokens:
        warnings.warn(
            f"{config.steps} steps of {config.batch} windows of {config.context} tokens read a text of {tokens:,} "
            f"training tokens {asked / tokens:,.0f} times over; past about {FRESH} times it has little more to "
            "give: a longer text or fewer steps would do better",
            stacklevel=4,
        )


def _optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
