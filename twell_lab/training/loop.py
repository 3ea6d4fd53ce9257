"""L1 training: a loop that makes the feed-forward layers of a small language model sparse.

The loss is cross-entropy plus `l1` times the sum over neurons of |h|, averaged over tokens and layers, where h is what
enters the down projection. This is the convention of the published code of arXiv 2603.23198, and of the 2e-5 that it
recommends; by the paper's formula, a mean over neurons, the same pressure takes a coefficient d_ff times larger. No
step waits for a GPU, but for a row of the history, a checkpoint or a re-initialisation."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from ..analysis.profile import profile
from ..analysis.running import vocabulary_of
from ..analysis.switching import Switch
from ..core import InputError, optional
from ..layers.find import feed_forwards, firing_layers
from ..layers.terms import LayerTerm
from ..models.published import folder_of
from ..models.swap import sparsify
from ..models.tiny import LanguageModel
from ..ops.checks import all_finite
from . import checkpoint, parallel
from .config import TrainConfig, TrainResult, learning_rate
from .objective import Objective, Silence, bits_per_byte, eval_batch, l1_coefficient
from .parallel import World
from .text.source import check_enough, load, random_windows, spread_windows
from .text.tokenizer import tokenizer_of

SAVE_EVERY, SAVE_SHARE = 300.0, 10  # between two checkpoints: at least these seconds, and times what saving one took
WRITERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # for TrainConfig's `log`
_BAR = "{desc}: {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def train(
    config: TrainConfig,
    *,
    out: str | os.PathLike | None = None,
    resume: str | os.PathLike | None = None,
    progress: bool = True,
    on_step: Callable[[dict], None] | None = None,
) -> TrainResult:
    """Train a model, from scratch or further (`from_`), validate it, and count which of its neurons fire.

    Warns when no neuron fires any more. Under torchrun the processes stop together, at the next row of the history.

    Args:
        config: what to train, on what, and how long.
        out: a folder, of this run alone, for the trained model, metrics.jsonl (the rows of the history) and a
            checkpoint, saved about every five minutes, at the end, and on Ctrl-C or SIGTERM.
        resume: such a folder: go on from its checkpoint, as if the run had never stopped. The config must be the one it
            began with, but for the fields in checkpoint.FREE; with more `steps`, the learning rate falls along their
            cosine from there on. `out` is that folder unless given.
        progress: show a bar on stderr, where that is a terminal.
        on_step: called with each row of the history as it is made.

    TextError for a text that cannot be read or is too short; DeviceError for a device that is not there; StackError for
    a package that is missing; InputError for a model, a checkpoint or an `out` that cannot be used, and where a loss or
    a weight is no finite number, before it is saved. checkpoint.Interrupted, a KeyboardInterrupt, once an interrupted
    run is saved."""
    if not isinstance(config, TrainConfig):
        raise InputError(f"config is a {type(config).__name__}; accepted: a TrainConfig")
    with parallel.joined(config.device) as world, ExitStack() as ending:
        return _train(config, out, resume, progress and world.rank == 0, on_step, world, ending)


def _train(config: TrainConfig, out, resume, progress: bool, on_step, world: World, ending: ExitStack) -> TrainResult:
    if config.batch % (config.accumulate * world.size):
        raise InputError(
            f"batch is {config.batch} with accumulate {config.accumulate} and {world.size} processes; accepted: "
            f"a multiple of {config.accumulate * world.size}, so that each part has as many windows"
        )
    board = optional(WRITERS[config.log], f"log {config.log!r}", config.log) if config.log in WRITERS else None
    state = None if resume is None else checkpoint.load(resume)
    model, tokenizer = None, config.tokenizer
    if config.from_ is not None:
        model = checkpoint.load_model(config.from_)
        config = checkpoint.fitted(config, model)
        tokenizer = tokenizer_of(folder_of(config.from_), vocabulary_of(model))
    if resume is not None:
        tokenizer = Path(resume, checkpoint.TOKENIZER)  # one trained again might differ
    text = load(config.text, tokenizer=tokenizer)
    training, validation = text.split()
    check_enough(training, validation, config.batch, config.context)
    described = {**text.describe(), "training_size": training.size, "validation_size": validation.size}
    if state is not None:
        checkpoint.check_same(state, config, described)
    vocabulary = text.tokenizer.vocabulary
    run = Run(config, initial_model(config, vocabulary) if model is None else model, training.tokens, world)
    if state is not None:
        run.restore(state)
    out, writers = resume if out is None else out, list[Callable[[dict], object]]()
    if out is not None:
        new = resume is None or os.path.realpath(out) != os.path.realpath(resume)
        opened = checkpoint.opened(out, text, config.text, run.history, new)
        world.led(lambda: writers.append(ending.enter_context(opened)))
    if board is not None and world.rank == 0:
        writers.append(_writer(board, out, checkpoint.fields_of(config), ending))
    writers += [] if on_step is None else [on_step]
    held_out = spread_windows(validation.tokens, config.eval_windows, config.context).to(world.device)
    lengths = validation.tokenizer.lengths.to(world.device)
    per_token = training.size / len(training.tokens)  # bytes
    silent = world.rank > 0  # whether it was said that no neuron fires
    lap, lap_step = time.perf_counter(), run.step
    begun, due = lap - run.seconds, lap + SAVE_EVERY
    shown = dict(desc=f"l1 {config.l1:g}", bar_format=_BAR, disable=not progress or None)
    with (
        tqdm(total=config.steps, initial=run.step, **shown) as bar,
        stopping(out is not None, world.size > 1) as signals,
    ):
        for step in range(run.step + 1, config.steps + 1):
            last = step == config.steps
            validate = last or step % config.eval_every == 0
            logged = validate or step == 1 or step % config.log_every == 0
            revive = config.reinit > 0 and step % config.dead_every == 0
            facts = _step(run, step)
            # Several processes must agree to stop, and that it is time to save. Agreeing takes a message between them,
            # so they do it only at the rows of the history, which take one anyway.
            agree = world.size == 1 or logged
            stop = agree and world.any(bool(signals))
            in_turn = out is not None and agree and world.any(time.perf_counter() >= due)
            saved = out is not None and (last or stop or in_turn)
            if logged or revive or saved:
                run.check(step)
            run.step = step
            if revive:
                run.silence.revive(config.dead_window, config.reinit)
            bar.update()
            if logged:
                row = _row(run, step, facts)
                row["tokens_per_s"] = (step - lap_step) * config.batch * config.context / (time.perf_counter() - lap)
                if validate:
                    # Compiling a validation would take longer than running it.
                    with autocast(config.dtype, world.device), torch.compiler.set_stance("force_eager"):
                        row["val_bits_per_byte"] = bits_per_byte(run.model, held_out, lengths)
                    run.terms.clear()
                    if not math.isfinite(row["val_bits_per_byte"]):
                        raise run.diverged(f"the held-out loss is {row['val_bits_per_byte']}", step)
                if not (silent or row["nnz"]):
                    silent = True
                    warnings.warn(
                        f"step {step}: no neuron fires in any of the {config.layers} layers of {config.d_ff} (cross-"
                        f"entropy {row['ce']:.3f}) and none gets a gradient: with l1 {config.l1:g} the penalty has "
                        "switched them off; a smaller l1, a longer l1_warmup, or reinit may help",
                        stacklevel=3,
                    )
                lap, lap_step = time.perf_counter(), step
                row["seconds"] = lap - begun
                if world.device.type == "cuda":
                    row["peak_bytes"] = torch.cuda.max_memory_allocated(world.device)
                run.history.append(row)
                bits = row["ce"] / math.log(2) / per_token
                bar.set_postfix_str(f"{bits:.3f} bits per byte, nnz {row['nnz']:.0f}", refresh=False)
                for write in writers:
                    write(row)
            run.seconds = time.perf_counter() - begun
            if saved:
                before = time.perf_counter()
                state = run.state(described)
                world.led(lambda: checkpoint.save(out, state))
                took = time.perf_counter() - before
                lap += took
                due = time.perf_counter() + max(SAVE_EVERY, SAVE_SHARE * took)
            if stop and not last:
                break
    # Dense layers and whole weights, without hooks and compiled parts: another model, with the weights of this one.
    model = initial_model(config, vocabulary)
    model.load_state_dict(whole(run.model.state_dict()))
    model.to(world.device).eval()
    if out is not None:
        world.led(lambda: checkpoint.save_model(model, out, config.from_))
    if run.step < config.steps:
        raise checkpoint.Interrupted(out, run.step, config.steps)
    with autocast(config.dtype, world.device):
        firing = profile(model, (windows[:, :-1] for windows in held_out.split(eval_batch(model, held_out))))
    return TrainResult(
        model=model,
        config=config,
        history=run.history,
        validation_bits_per_byte=run.history[-1]["val_bits_per_byte"],
        mean_nnz=sum(layer.mean_nnz for layer in firing.layers) / len(firing.layers),
        density=[layer.density for layer in firing.layers],
        dead=[layer.dead for layer in firing.layers],
        text=described,
        seconds=run.seconds,
        tokens=config.steps * config.batch * config.context,
    )


class Run:
    """A training run in progress: the model, and what changes from step to step.

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
        if world.size > 1 and config.parallel == "fsdp":
            parallel.shard(model, world)
        self.joined: nn.Module = (objective := Objective(model))
        self.terms = objective.terms
        if world.size > 1 and config.parallel == "ddp":
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
        self.tokens = tokens
        self.order, noise = (torch.Generator().manual_seed(config.seed) for _ in range(2))
        self.silence = Silence(self.layers if config.dead_window else [], noise)
        self.last: dict[str, Tensor] = {}
        self.step, self.seconds = 0, 0.0
        self.history: list[dict] = []

    def windows(self) -> Tensor:
        """Return this process's windows of the next step: int64 [n, context + 1] on the device, without waiting. Each
        process draws those of all."""
        windows = random_windows(self.tokens, self.config.batch, self.config.context, self.order)
        windows = windows.chunk(self.world.size)[self.world.rank]
        pinned = windows.pin_memory() if self.world.device.type == "cuda" else windows
        return pinned.to(self.world.device, non_blocking=True)

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
            "noise": self.silence.generator.get_state(),
            "weights": whole(self.model.state_dict()),
            "optimizer": {name: whole(self.optimizer.state[weight]) for name, weight in self.parameters.items()},
            "silent": [silent.cpu() for silent in self.silence.silent],
        }

    def restore(self, state: dict) -> None:
        """Go on from a checkpoint of the same config. With kernels "auto", layers are dense until the next row."""
        for name, weight in self.parameters.items():
            parallel.put(weight, state["weights"][name])
            saved = state["optimizer"][name]
            moments = {what: torch.zeros_like(weight if value.dim() else value) for what, value in saved.items()}
            self.optimizer.state[weight] = {what: value.to(weight.device) for what, value in moments.items()}
            for what, value in saved.items():
                parallel.put(self.optimizer.state[weight][what], value)
        self.order.set_state(state["order"])
        self.silence.generator.set_state(state["noise"])
        for silent, saved in zip(self.silence.silent, state["silent"]):
            silent.copy_(saved)
        self.step, self.seconds, self.history = state["step"], state["seconds"], list(state["history"])


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return these tensors as a checkpoint has them, on the CPU; every process must call it."""
    return {name: parallel.whole(value).cpu().contiguous() for name, value in tensors.items()}


@contextmanager
def stopping(active: bool, several: bool) -> Iterator[list[int]]:
    """A context in which Ctrl-C and SIGTERM (from a cluster's scheduler) let a run save itself: with the list of those
    that came.

    Another Ctrl-C stops at once, but not one of `several` processes: they must agree to stop, and the terminal, and
    torchrun too, send it to each of them. active: False leaves the signals alone, for a run that is not saved."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1 and not several:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError, RuntimeError):  # as where Ctrl-C has ended tee, or a line is being printed
                print("\nstopping after this step, to save it; interrupt again to stop at once", file=sys.stderr)

    main = threading.current_thread() is threading.main_thread()
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM) if active and main}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _step(run: Run, step: int) -> list[Tensor]:
    """One optimizer step. Returns what Objective gave for each part of its windows, without gradients."""
    config, parts, facts = run.config, run.config.accumulate, []
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    if run.l1 is not None:
        run.l1.fill_(l1_coefficient(config.l1, config.l1_delay, config.l1_warmup, step))
    for number, windows in enumerate(run.windows().chunk(parts), start=1):
        # Gradients are averaged over processes where the last part has its own.
        if isinstance(run.joined, nn.parallel.DistributedDataParallel):
            run.joined.require_backward_grad_sync = number == parts  # what DDP's context no_sync sets
        elif hasattr(run.model, "set_requires_gradient_sync"):
            run.model.set_requires_gradient_sync(number == parts)
        with autocast(config.dtype, run.world.device):
            loss, of_part = run.measure(windows, run.l1)
        (loss / parts).backward()
        facts.append(of_part)
    run.silence.count(config.batch * config.context)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.clip, foreach=True)
    run.last = {"the loss": sum(of_part[0] for of_part in facts), "the norm of its gradient": norm}
    run.optimizer.step()
    run.optimizer.zero_grad()
    return facts


def _row(run: Run, step: int, facts: list[Tensor]) -> dict:
    """A row of the history, averaged over the parts of the step and over processes: one transfer from the device, and
    one for the dead. Layers that choose their path by how many neurons fire do so here."""
    config, layers = run.config, len(run.layers)
    loss, ce, l1_term, *values = run.world.mean(torch.stack(facts).mean(0)).tolist()
    l1s, nnzs, *others = (values[at : at + layers] for at in range(0, len(values), layers))
    dead = [dead.sum() for dead in run.silence.dead(config.dead_window)]
    row = {
        "step": step,
        "loss": loss,
        "ce": ce,
        "l1_term": l1_term,
        "nnz": sum(nnzs) / layers,
        "nnz_layers": nnzs,
        "l1_layers": l1s,
        "dead_layers": torch.stack(dead).tolist() if dead else None,
        "lr": learning_rate(config, step),
    }
    if config.kernels != "off":
        row["lost_layers"] = others[0]
    if run.switch is not None:
        with autocast(config.dtype, run.world.device):
            run.follow(nnzs, *others)
    return row


def _writer(package, folder, fields: dict, ending: ExitStack) -> Callable[[dict], None]:
    """Return a function that takes a row of the history for TensorBoard or Weights & Biases, which `ending` closes. The
    numbers of a list have their places in their names: nnz_layers/0. fields: of the config."""
    if board := hasattr(package, "SummaryWriter"):
        writer = package.SummaryWriter(None if folder is None else Path(folder, "tensorboard"))
    else:
        writer = package.init(project="twell-lab", dir=folder, config=fields)
    ending.enter_context(writer)

    def write(row: dict) -> None:
        lists = {name: values for name, values in row.items() if isinstance(values, list)}
        numbers = {f"{name}/{at}": value for name, values in lists.items() for at, value in enumerate(values)}
        numbers |= {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
        if board:
            for name, value in numbers.items():
                writer.add_scalar(name, value, row["step"])
        else:
            writer.log(numbers, step=row["step"])

    return write


def initial_model(config: TrainConfig, vocabulary: int = 256) -> nn.Module:
    """Return the model before its first step, on the CPU: the one that it starts from, or the same weights for the same
    seed, wherever it trains."""
    if config.from_ is not None:
        return checkpoint.load_model(config.from_)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return LanguageModel(config.model(vocabulary))


def autocast(dtype: str, device: torch.device):
    """A context that computes in a config's `dtype`. For float32 it does nothing, and leaves a caller's autocast on."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


# The tour's model. For one token, few wide layers gain more by being sparse than many narrow ones do.
TOUR = TrainConfig(d_model=256, layers=2, d_ff=4096, l1=1e-3, steps=480, eval_every=160, eval_windows=128)
