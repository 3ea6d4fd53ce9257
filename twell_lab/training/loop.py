"""L1 training: a loop that makes the feed-forward layers of a small language model sparse.

The loss is cross-entropy plus `l1` times the sum over neurons of |h|, averaged over tokens and layers, where
h is what enters the down projection. This is the convention of the published code of "Sparser, Faster,
Lighter Transformer Language Models" (arXiv 2603.23198), and of the 2e-5 that it recommends. The paper's formula
averages over neurons as well: there the same pressure takes a coefficient d_ff times larger.

No step waits for a GPU: numbers are read from it only for a row of the history, a checkpoint or a re-initialisation.

    torchrun --nproc-per-node 2 -m twell_lab train --steps 1000 --out build/model

trains on two GPUs the model that `twell-lab train` with the same options trains on one (twell_lab.training.parallel).
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..analysis.profile import profile
from ..core import InputError, RecordError, locked_folder, write_atomically
from ..models.tiny import LanguageModel
from . import checkpoint, parallel
from .config import TrainConfig, TrainResult
from .objective import bits_per_byte, eval_batch
from .parallel import World
from .run import Diverged, Run, Stop, warn_if_repeated, warn_if_silent
from .schedule import l1_coefficient, learning_rate
from .text.load import load_any
from .text.source import BYTES, check_apart, check_enough, spread_windows

SAVE_EVERY = 300.0  # seconds between two checkpoints, at least, unless the config says after how many steps
SAVE_SHARE = 10  # and at least so many times as long as the last one took to save


def train(
    config: TrainConfig,
    *,
    out: str | os.PathLike | None = None,
    resume: str | os.PathLike | None = None,
    progress: bool = True,
    on_step: Callable[[dict], None] | None = None,
) -> TrainResult:
    """Train a model from scratch, validate it, and count which of its neurons fire.

    Warns when no neuron fires any more, when the steps read the text more than four times over, and when a run that is
    resumed had made all of its steps.

    Args:
        config: what to train, on what, and how long.
        out: a folder for the trained model, metrics.jsonl (the rows of the history) and checkpoints. A checkpoint is
            saved every `checkpoint_every` steps (or about every five minutes), at the end, where the loss is no finite
            number, and on Ctrl-C or SIGTERM; each replaces the one before. Under torchrun, the processes stop
            together, at the next row of the history. Only one run at a time trains into a folder.
        resume: such a folder, or a checkpoint in it: go on from there, as if the run had never stopped. The config
            must be the one it began with, but for the fields in checkpoint.FREE. `out` is that folder unless given.
        progress: show a bar on stderr, where that is a terminal.
        on_step: called with each row of the history as it is made.

    Returns:
        The model, the history of its training, and what it does on held-out text.

    Raises:
        TextError: for a text that cannot be read or is too short for the batch.
        DeviceError: for a device that is not there, and for more processes than GPUs.
        InputError: where the loss is no finite number; for a config that is no TrainConfig; for a checkpoint that is
            not whole, or of another model or config; for an `out` that holds a run or a model, that another
            process is training into, or that lies in the folder of the text.
        checkpoint.Interrupted: a KeyboardInterrupt, once an interrupted run is saved.
    """
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
    home = None if resume is None else checkpoint.home(resume)
    # A resumed run reads the text through the tokenizer it began with: one trained again might differ.
    kept = home is not None and (home / checkpoint.TOKENIZER).is_file()
    whole = load_any(config.text, tokenizer=home / checkpoint.TOKENIZER if kept else config.tokenizer)
    training, validation = whole.split()
    check_enough(training, validation, config.batch, config.context)
    if world.lead:
        warn_if_repeated(config, len(training.tokens))
    run = Run(config, initial_model(config, whole.vocabulary), training.tokens, world)
    described = checkpoint.describe(whole, config.text, training.size)
    # Whether the run goes on in the folder it began in.
    goes_on = home is not None and (out is None or os.path.realpath(out) == os.path.realpath(home))
    out = home if goes_on else out

    def claim() -> None:
        if not goes_on:
            check_apart(out, config.text)
        ending.enter_context(locked_folder(checkpoint.writable(out), "training"))
        checkpoint.tidy(out)

    if out is not None:
        world.led(claim)
    if home is not None:
        state = checkpoint.load(resume)
        checkpoint.check_same(state, config, run.model.config, whole, training.size)
        run.restore(state)
        if world.lead and state.step >= config.steps:
            warnings.warn(
                f"all {config.steps} steps of the run in {os.fspath(resume)!r} had been made: there is nothing left "
                "to train, and only its neurons are counted again",
                stacklevel=3,
            )
    held_out = spread_windows(validation.tokens, config.eval_windows, config.context).to(world.device)
    lengths = validation.tokenizer.lengths.to(world.device)
    per_token = training.size / len(training.tokens)  # bytes
    metrics = _Metrics()

    def begin() -> None:
        if goes_on:
            checkpoint.tidy(out, after=run.step)
        else:
            checkpoint.prepare(out)
            (Path(out) / checkpoint.TOKENIZER).unlink(missing_ok=True)  # of a run that ended before it saved anything
            if whole.tokenizer != BYTES:
                whole.tokenizer.save(Path(out) / checkpoint.TOKENIZER)
        metrics.open(Path(out) / "metrics.jsonl", run.history)

    def save(keep_older: bool = False) -> None:
        state = run.state(described)
        world.led(lambda: checkpoint.save(out, state, keep_older=keep_older))

    if out is not None:
        world.led(begin)
    saved = run.step if goes_on else None  # the step of this run's last checkpoint in `out`
    warned = not world.lead
    start = time.perf_counter() - run.seconds
    lap, lap_step = time.perf_counter(), run.step
    due = lap + SAVE_EVERY
    try:
        with (
            tqdm(
                total=config.steps,
                initial=run.step,
                desc=f"l1 {config.l1:g}",
                bar_format="{desc}: {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
                disable=not progress or None,
            ) as bar,
            Stop(out is not None, world.size > 1) as stop,
        ):
            for step in range(run.step + 1, config.steps + 1):
                last = step == config.steps
                validate = last or step % config.eval_every == 0
                logged = validate or step == 1 or step % config.log_every == 0
                revive = config.reinit > 0 and step % config.dead_every == 0
                numbers = _step(run, step, logged)
                # Several processes must agree to stop, and that it is time to save. Agreeing takes a message between
                # them, so they do it only at the rows of the history, which take one anyway.
                agree = world.size == 1 or logged
                if stopping := agree and world.any(stop.asked):
                    stop.agreed.set()
                if (every := config.checkpoint_every) is None:
                    in_turn = out is not None and agree and world.any(time.perf_counter() >= due)
                else:
                    in_turn = every > 0 and step % every == 0
                keep = out is not None and (last or stopping or in_turn)
                if logged or revive or keep:
                    run.guard.check()
                run.step = step
                if revive:
                    run.revive()
                bar.update()
                if logged:
                    row = _row(run, step, numbers)
                    row["tokens_per_s"] = (
                        (step - lap_step) * config.batch * config.context / (time.perf_counter() - lap)
                    )
                    if validate:
                        # Compiling a validation would take longer than running it.
                        with autocast(config.dtype, world.device), torch.compiler.set_stance("force_eager"):
                            row["val_bits_per_byte"] = bits_per_byte(run.model, held_out, lengths)
                        if not math.isfinite(row["val_bits_per_byte"]):
                            raise Diverged(config, step, row["val_bits_per_byte"], math.nan)
                    warned = warned or warn_if_silent(row, config)
                    lap, lap_step = time.perf_counter(), step
                    row["seconds"] = lap - start
                    if world.device.type == "cuda":
                        row["peak_bytes"] = torch.cuda.max_memory_allocated(world.device)
                    run.history.append(row)
                    metrics.write(row)
                    bits = row["ce"] / math.log(2) / per_token
                    bar.set_postfix_str(f"{bits:.3f} bits per byte, nnz {row['nnz']:.0f}", refresh=False)
                    if on_step is not None:
                        on_step(row)
                run.seconds = time.perf_counter() - start
                if keep:
                    before = time.perf_counter()
                    save()
                    saved = step
                    took = time.perf_counter() - before
                    lap += took
                    due = time.perf_counter() + max(SAVE_EVERY, SAVE_SHARE * took)
                if stopping and not last:
                    raise checkpoint.Interrupted(out, step, config.steps)
        model = run.trained_model()
        with autocast(config.dtype, world.device):
            firing = profile(model, (windows[:, :-1] for windows in held_out.split(eval_batch(model, held_out))))
        model.eval()
        if out is not None:
            world.led(lambda: model.save(out))
    except Diverged as error:
        # Broken weights are not saved: an earlier checkpoint may hold good ones.
        if out is None or error.broken:
            raise
        if run.step and run.step != saved:
            save(keep_older=saved is not None)  # this run's older checkpoint may be the better one to go on from
        where = (
            f"in {os.fspath(out)!r}, and resuming it leads there again: begin anew in another folder"
            if run.step
            else "the one it began with"
        )
        raise InputError(f"{error}; the last good state, after step {run.step}, is {where}") from None
    except KeyboardInterrupt as error:  # a second Ctrl-C, or one after the last step
        if isinstance(error, checkpoint.Interrupted) or saved is None:
            raise
        raise checkpoint.Interrupted(out, saved, config.steps) from None
    finally:
        metrics.close()
    return TrainResult(
        model=model,
        config=config,
        history=run.history,
        validation_bits_per_byte=run.history[-1]["val_bits_per_byte"],
        mean_nnz=sum(layer.mean_nnz for layer in firing.layers) / len(firing.layers),
        density=[layer.density for layer in firing.layers],
        dead=[layer.dead for layer in firing.layers],
        text={**whole.describe(), "training_size": training.size, "validation_size": validation.size},
        seconds=run.seconds,
        tokens=config.steps * config.batch * config.context,
    )


def _step(run: Run, step: int, count: bool) -> list[list[Tensor]]:
    """One optimizer step. Returns what Objective gave for each part of its windows, without gradients. Unless `count`,
    the numbers by layer may be empty."""
    config, world, parts = run.config, run.world, run.config.accumulate
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    coefficient = l1_coefficient(config, step)
    if run.l1 is not None:
        run.l1.fill_(coefficient)
    # Compiled, one graph serves all steps, and counting is all but free in it.
    l1 = run.l1 if coefficient or config.compile else None
    run.guard.begin(step)
    numbers = []
    for number, windows in enumerate(world.share(run.order.next()).chunk(parts), start=1):
        parallel.sync_gradients(run.joined, run.model, number == parts)
        with autocast(config.dtype, world.device):
            loss, *others = run.measure(windows, l1, count or config.compile)
        (loss / parts).backward()
        numbers.append([loss.detach(), *others])
    if run.tracker is not None:
        run.see_dead(config.batch * config.context)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), config.clip, foreach=True)
    run.guard.see(step, sum(each[0] for each in numbers) / parts, norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return numbers


def _row(run: Run, step: int, numbers: list[list[Tensor]]) -> dict:
    """A row of the history, averaged over the parts of the step and over processes. Takes one transfer from the device,
    and one more for the dead. Layers that choose their path by how many neurons fire do so here."""
    loss, terms, l1, nnz, *others = (torch.stack(each).mean(0) for each in zip(*numbers, strict=True))
    values = run.world.mean(torch.cat([loss[None], terms, nnz.mean()[None], l1, nnz, *others])).tolist()
    l1s, nnzs, losts, lights, heavies = (values[at : at + len(nnz)] for at in range(4, len(values), len(nnz)))
    row = {
        "step": step,
        **dict(zip(("loss", "ce", "l1_term", "nnz"), values)),
        "nnz_layers": nnzs,
        "l1_layers": l1s,
        "dead_layers": None,
        "lr": learning_rate(run.config, step),
    }
    if not math.isfinite(row["loss"]):  # with several processes the guard looks at the gradients alone
        raise Diverged(run.config, step, row["loss"], math.nan)
    if run.tracker is not None:
        row["dead_layers"] = torch.stack([silent.sum() for silent in run.tracker.dead()]).tolist()
    if run.config.kernels != "off":
        row["lost_layers"] = losts
    if run.switch is not None:
        with autocast(run.config.dtype, run.world.device):
            run.follow(nnzs, losts, lights, heavies)
    return row


def initial_model(config: TrainConfig, vocabulary: int = 256) -> LanguageModel:
    """The model before its first step, on the CPU: the same weights for the same seed, wherever it trains."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        return LanguageModel(config.model(vocabulary))


def autocast(dtype: str, device: torch.device):
    """A context that computes in a config's `dtype`. For float32 it does nothing, and leaves a caller's autocast on."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


class _Metrics:
    """metrics.jsonl: one row of the history a line, written as soon as it is made. Until `open`, `write` does nothing.

    Where no more can be written (a full disk), `write` warns once and writes nothing from then on: the checkpoints hold
    the rows as well.
    """

    def __init__(self) -> None:
        self.file = None

    def open(self, path: Path, history: list[dict]) -> None:
        """Begin the file anew, with the rows that a resumed run has made so far."""
        try:
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in history))
            self.file = open(path, "ab", buffering=0)
        except (RecordError, OSError) as error:
            raise InputError(f"cannot write {str(path)!r}: {error}") from None

    def write(self, row: dict) -> None:
        if self.file is None:
            return
        line, at = (json.dumps(row) + "\n").encode(), self.file.tell()
        try:
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(at)  # no half of a row
            warnings.warn(
                f"step {row['step']}: {self.file.name} takes no more rows: {error}; training goes on, and the "
                "checkpoints hold them",
                stacklevel=3,
            )
            self.close()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


# TrainConfig's defaults, with l1=2e-3 (the preset 1M) and without. Measured on 2026-11-21 on an AMD EPYC (Zen 5), with
# torch 2.13.0 and the standard library of Python 3.11.7: 461 kB read, 16 kB of held-out text. Seeds 0, 1, 2:
#   l1                       0                       2e-3
#   bits per byte            2.294 2.269 2.259       2.292 2.273 2.280
#   mean nnz of 512          137   134   143         18.5  17.9  19.7
#   dead neurons of 2048     0     0     0           66    58    63
# A step takes 60 ms on one core, 37 to 46 on two idle ones. Tried beside it (seed 0, l1=0), in bits per byte:
#   600 steps of 8 windows of 128   2.322   the same 614 kB as 1200 steps of 8 windows of 64: 2.185
#   lr 4e-3 instead of 2e-3         2.330   instead of 2.322, and a density of 20% instead of 31%
#   embedding begins at 0.02, not 1 2.525   instead of 2.322 (the last two at 8 windows of 128)
#   l1=3e-3                         2.306   and nnz 11.6, 142 dead
#   3 layers, 1000 steps            2.265   2.296 with l1=2e-3, nnz 19; 48 s of one core
# So small a model, trained on so little text, says nothing about what L1 costs a large one. One token takes its layers
# longer sparse than dense, which is why the tour trains fewer and wider ones:
#
# What the tour trains: once like this, once with l1=0. On the same machine, on 2026-11-22, in bfloat16 (246 kB read), a
# step takes 61 ms on two idle cores, and 147 in float32. Seed 0, 256 windows held out: bits per byte, and who fires in
# each layer:
#   2 layers of 256 x 4096, 480 steps      2.581, 15 and 18    l1=0: 2.671, 1384 and 547
#   l1=5e-4, lr 3e-3                       2.650, 20 and 17    lr 1e-3: 2.594, 49 and 69
#   1 layer, 1100 steps, l1=5e-4           2.480, 33           the same time
#   1 layer, 780 steps of 4 windows        2.825, 32           the same time in float32
# Dense and TwELL layers at one token, in us, nnz 24: 128 x 2048 67 and 126, 128 x 4096 121 and 148, 256 x 2048 112 and
# 143, 256 x 4096 220 and 183. With less than about a million weights in a matrix TwELL takes longer.
TOUR = TrainConfig(d_model=256, layers=2, d_ff=4096, l1=1e-3, steps=480, eval_every=160, eval_windows=128)
