"""L1 training: a loop that makes the feed-forward layers of a small language model sparse.

The loss is cross-entropy plus `l1` times the sum over neurons of |h|, averaged over tokens and layers, where h is what
enters the down projection. This is the convention of the published code of arXiv 2603.23198, and of the 2e-5 that it
recommends. The paper's formula averages over neurons as well: there the same pressure takes a coefficient d_ff times
larger. No step waits for a GPU: numbers are read from it only for a row of the history, a checkpoint or a
re-initialisation."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis.profile import profile
from ..analysis.running import vocabulary_of
from ..core import InputError, optional
from ..models.published import folder_of
from ..models.tiny import LanguageModel
from . import checkpoint, parallel, start
from .config import TrainConfig, TrainResult, l1_coefficient, learning_rate
from .objective import bits_per_byte, eval_batch
from .parallel import World
from .run import Run, stopping
from .text.source import check_enough, load_any, spread_windows
from .text.tokenizer import tokenizer_of

SAVE_EVERY = 300.0  # seconds between two checkpoints, at least, unless the config says after how many steps
SAVE_SHARE = 10  # and at least so many times as long as the last one took to save
FRESH = 4  # readings of a text that teach nearly as much as fresh text would (Muennighoff et al., arXiv 2305.16264)
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

    Warns when no neuron fires any more, when the steps read the text more than four times over, and when a run that is
    resumed had made all of its steps. Under torchrun the processes stop together, at the next row of the history.

    Args:
        config: what to train, on what, and how long.
        out: a folder, of this run alone, for the trained model, metrics.jsonl (the rows of the history) and a
            checkpoint. It is saved every `checkpoint_every` steps (or about every five minutes), at the end, and on
            Ctrl-C or SIGTERM, and replaces the one before.
        resume: such a folder: go on from its checkpoint, as if the run had never stopped. The config must be the one it
            began with, but for the fields in checkpoint.FREE; with more `steps`, the learning rate falls along their
            cosine from there on. `out` is that folder unless given.
        progress: show a bar on stderr, where that is a terminal.
        on_step: called with each row of the history as it is made.

    TextError for a text that cannot be read or is too short; DeviceError for a device that is not there; StackError for
    an optional package that is missing; InputError for a model, a checkpoint or an `out` that cannot be used, and where
    a loss or a weight is no finite number: nothing of that is saved. checkpoint.Interrupted, a KeyboardInterrupt, once
    an interrupted run is saved."""
    if not isinstance(config, TrainConfig):
        raise InputError(f"config is a {type(config).__name__}; accepted: a TrainConfig")
    with parallel.joined(config.device) as world, ExitStack() as ending:
        return _train(config, out, resume, progress and world.lead, on_step, world, ending)


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
        model = start.load(config.from_)
        config, tokenizer = start.fitted(config, model), tokenizer_of(folder_of(config.from_), vocabulary_of(model))
    # A resumed run reads the text through the tokenizer it began with: one trained again might differ.
    if state is not None and (own := Path(resume, checkpoint.TOKENIZER)).is_file():
        tokenizer = own
    text = load_any(config.text, tokenizer=tokenizer)
    training, validation = text.split()
    check_enough(training, validation, config.batch, config.context)
    described = {**text.describe(), "path": checkpoint.lasting(config.text), "training_size": training.size}
    if state is not None:
        checkpoint.check_same(state, config, described)
    if world.lead:
        _warn_of_much(config, len(training.tokens), 0 if state is None else state["step"])
    run = Run(config, initial_model(config, text.vocabulary) if model is None else model, training.tokens, world)
    if state is not None:
        run.restore(state)
    goes_on = resume is not None and (out is None or os.path.realpath(out) == os.path.realpath(resume))
    out = resume if out is None else out
    writers: list[Callable[[dict], object]] = []

    def begin_to_write() -> None:
        opened = checkpoint.opened(out, config.text, text.tokenizer, run.history, new=not goes_on)
        file = ending.enter_context(opened)
        writers.append(lambda row: print(json.dumps(row), file=file, flush=True))

    if out is not None:
        world.led(begin_to_write)
    if board is not None and world.lead:
        writers.append(_writer(board, out, checkpoint.fields_of(config), ending))
    if on_step is not None:
        writers.append(on_step)
    held_out = spread_windows(validation.tokens, config.eval_windows, config.context).to(world.device)
    lengths = validation.tokenizer.lengths.to(world.device)
    per_token = training.size / len(training.tokens)  # bytes
    silent = not world.lead  # whether it was said that no neuron fires
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
            numbers = _step(run, step)
            # Several processes must agree to stop, and that it is time to save. Agreeing takes a message between them,
            # so they do it only at the rows of the history, which take one anyway.
            agree = world.size == 1 or logged
            stop = agree and world.any(bool(signals))
            if (every := config.checkpoint_every) is None:
                in_turn = out is not None and agree and world.any(time.perf_counter() >= due)
            else:
                in_turn = every > 0 and step % every == 0
            saved = out is not None and (last or stop or in_turn)
            if logged or revive or saved:
                run.check(step)
            run.step = step
            if revive:
                run.revive()
            bar.update()
            if logged:
                row = _row(run, step, numbers)
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
                    _warn(
                        f"step {step}: no neuron fires in any of the {config.layers} layers of {config.d_ff} in this "
                        f"batch (cross-entropy {row['ce']:.3f}) and none gets a gradient: with l1 {config.l1:g} the "
                        "penalty has switched them off; a smaller l1, a longer l1_warmup, or reinit may help"
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
    model = initial_model(config, text.vocabulary)
    model.load_state_dict(run.weights())
    model.to(world.device).eval()
    if out is not None:
        world.led(lambda: start.save(model, out, config.from_))
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
        text={**text.describe(), "training_size": training.size, "validation_size": validation.size},
        seconds=run.seconds,
        tokens=config.steps * config.batch * config.context,
    )


def _step(run: Run, step: int) -> list[list[Tensor]]:
    """One optimizer step. Returns what Objective gave for each part of its windows, without gradients."""
    config, parts = run.config, run.config.accumulate
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    if run.l1 is not None:
        run.l1.fill_(l1_coefficient(config.l1, config.l1_delay, config.l1_warmup, step))
    numbers = []
    for number, windows in enumerate(run.windows().chunk(parts), start=1):
        parallel.sync_gradients(run.joined, run.model, number == parts)
        with autocast(config.dtype, run.world.device):
            loss, *others = run.measure(windows, run.l1)
        (loss / parts).backward()
        numbers.append([loss.detach(), *others])
    run.count_silent()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.clip, foreach=True)
    run.last = {"the loss": sum(part[0] for part in numbers) / parts, "the norm of its gradient": norm}
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


def _row(run: Run, step: int, numbers: list[list[Tensor]]) -> dict:
    """A row of the history, averaged over the parts of the step and over processes: one transfer from the device, and
    one for the dead. Layers that choose their path by how many neurons fire do so here."""
    loss, terms, l1, nnz, *others = (torch.stack(part).mean(0) for part in zip(*numbers, strict=True))
    values = run.world.mean(torch.cat([loss[None], terms, nnz.mean()[None], l1, nnz, *others])).tolist()
    l1s, nnzs, losts, lights, heavies = (values[at : at + len(nnz)] for at in range(4, len(values), len(nnz)))
    row = {
        "step": step,
        **dict(zip(("loss", "ce", "l1_term", "nnz"), values)),
        "nnz_layers": nnzs,
        "l1_layers": l1s,
        "dead_layers": torch.stack([dead.sum() for dead in run.dead()]).tolist() if run.silent else None,
        "lr": learning_rate(run.config, step),
    }
    if run.config.kernels != "off":
        row["lost_layers"] = losts
    if run.switch is not None:
        with autocast(run.config.dtype, run.world.device):
            run.follow(nnzs, losts, lights, heavies)
    return row


def _writer(package, folder, fields: dict, ending: ExitStack) -> Callable[[dict], object]:
    """Return a function that takes a row of the history for TensorBoard or Weights & Biases, which `ending` closes. The
    numbers of a list have their places in their names: nnz_layers/0. fields: of the config."""

    def numbers(row: dict) -> dict[str, float]:
        flat: dict = {}
        for name, value in row.items():
            flat |= {f"{name}/{at}": one for at, one in enumerate(value)} if isinstance(value, list) else {name: value}
        return {name: value for name, value in flat.items() if value is not None and name != "step"}

    if hasattr(package, "SummaryWriter"):
        board = ending.enter_context(package.SummaryWriter(None if folder is None else Path(folder, "tensorboard")))
        return lambda row: [board.add_scalar(name, value, row["step"]) for name, value in numbers(row).items()]
    run = ending.enter_context(package.init(project="twell-lab", dir=folder, config=fields))
    return lambda row: run.log(numbers(row), step=row["step"])


def initial_model(config: TrainConfig, vocabulary: int = 256) -> nn.Module:
    """Return the model before its first step, on the CPU: the one that it starts from, or the same weights for the same
    seed, wherever it trains."""
    if config.from_ is not None:
        return start.load(config.from_)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return LanguageModel(config.model(vocabulary))


def autocast(dtype: str, device: torch.device):
    """A context that computes in a config's `dtype`. For float32 it does nothing, and leaves a caller's autocast on."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def _warn_of_much(config: TrainConfig, tokens: int, made: int) -> None:
    asked = config.steps * config.batch * config.context
    if asked > FRESH * tokens:
        _warn(
            f"{config.steps} steps of {config.batch} windows of {config.context} tokens read a text of {tokens:,} "
            f"training tokens {asked / tokens:,.0f} times over; past about {FRESH} times it has little more to give"
        )
    if made >= config.steps:
        _warn(f"all {config.steps} steps of the run had been made: its neurons are counted anew; more steps go on")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)  # of who called `train`


# The tour's model. For one token, few wide layers gain more by being sparse than many narrow ones do.
TOUR = TrainConfig(d_model=256, layers=2, d_ff=4096, l1=1e-3, steps=480, eval_every=160, eval_windows=128)
