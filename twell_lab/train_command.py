"""`twell-lab train`: the options of a training run and what it prints. Imports torch only when it runs."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import InputError
from .files import strict_json
from .options import path, source

EPILOG = """\
on a text of your own, a file or a folder of files:

  twell-lab train --text my-texts --l1 1e-3 --out build/mine
  twell-lab profile build/mine --text my-texts

Ctrl-C, SIGTERM or SIGHUP saves the run and says how to go on; about every five minutes it is saved anyway:

  twell-lab train --resume build/mine

On a GPU, --dtype bfloat16 --compile is several times faster. On two of them:

  torchrun --nproc-per-node 2 -m twell_lab.train --text my-texts --out build/mine

A text of more than a gigabyte is read and encoded once, and training then maps it into memory:

  twell-lab prepare "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" --tokenizer bpe:32768 --out texts/edu
  twell-lab train --config 0.5B --text texts/edu --out build/edu

About a tenth of the text is held out for validation. metrics.jsonl in --out has a line for every --log-every steps."""

# (field of TrainConfig, type, help); a value that is not given leaves the config's own, which the brackets say.
_MODEL = (
    ("d_model", int, "model width [128]"), ("layers", int, "number of layers [4]"), ("heads", int, "attention heads [4]"),
    ("d_ff", int, "feed-forward width [512]"),
    ("activation", str, "relu, or relu2 for its square [relu]"),
    ("tokenizer", str, "what the model reads: bytes, bpe:4096 (a BPE of that size, trained on the text), or a file [bytes]"),
)
_SPARSITY = (
    ("l1", float, "coefficient of the L1 penalty, 0 for none [0]"),
    ("l1_delay", int, "steps without the penalty [0]"),
    ("l1_warmup", int, "steps over which its coefficient then grows to --l1 [0]"),
    ("dead_window", int, "count a neuron silent for this many tokens as dead, 0 to count none [0]"),
    ("reinit", float, "re-initialise the gate rows of dead neurons with this share of fresh numbers; the paper's is 0.1 [0]"),
    ("reinit_sigma", float, "deviation of the fresh numbers [0.02]"),
    ("dead_every", int, "steps between two re-initialisations [100]"),
)
_STEPS = (
    ("steps", int, "optimizer steps [900]"), ("batch", int, "windows a step [8]"),
    ("context", int, "tokens a window [64]"),
    ("accumulate", int, "read the windows of a step in this many parts, to need less memory [1]"),
    ("lr", float, "peak learning rate [2e-3]"), ("warmup", int, "steps up to it [50]"),
    ("weight_decay", float, "of matrices [0.1]"), ("clip", float, "largest norm of the gradient [1]"),
    ("seed", int, "of weights and batches [0]"),
)
_MACHINE = (
    ("device", str, "cpu, cuda, cuda:1 [a GPU where there is one]"),
    ("dtype", str, "float32 or bfloat16, which is torch's autocast [float32]"),
    ("kernels", str, "off: dense layers; sparse: this package's kernels; auto: each layer changes over when it fires little "
                     "enough; both need a GPU and bfloat16, and are torch's operations elsewhere [off]"),
    ("parallel", str, "under torchrun: ddp, or fsdp to shard the model [ddp]"),
)
_REPORTS = (
    ("log_every", int, "steps between two lines of metrics [10]"),
    ("eval_every", int, "steps between two validations [150]"),
    ("eval_windows", int, "windows of held-out text that a validation reads, at most [256]"),
    ("checkpoint_every", int, "steps between two checkpoints in --out; 0: one at the end [about every five minutes]"),
)
CONFIGURATIONS = "1M, 5M, 20M, 60M, 150M, 0.5B, 1B, 1.5B, 2B"  # configurations.NAMES, without importing torch
_GROUPS = (("the model", _MODEL), ("sparsity", _SPARSITY), ("the steps", _STEPS), ("the machine", _MACHINE),
           ("reports", _REPORTS))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Every field of TrainConfig as an option, and where the run is kept."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--text", type=source, metavar="PATH", help="a file or folder, or hf:owner/name for a Hugging Face "
                        "dataset, whose first 100 MB are read unless ?bytes=500e6 follows (at most 1 GiB), or "
                        "what twell-lab prepare made [the source of Python's standard library]")
    parser.add_argument("--out", metavar="DIR", type=path, help="save metrics and checkpoints here, for --resume, and in the "
                        "end the model, for twell-lab profile; a folder that holds another run or model is refused")
    parser.add_argument("--resume", metavar="DIR", type=path, help="go on with the run that was saved there; of its options only "
                        "where and how it computes and --checkpoint-every may change")
    parser.add_argument("--config", metavar="NAME", help=f"sizes, steps and rates to begin from, which every option here "
                        f"overrides: {CONFIGURATIONS}; 'list' says what they are")
    for title, fields in _GROUPS:
        group = parser.add_argument_group(title)
        for name, kind, what in fields:
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=what,
                               metavar={int: "N", float: "X", str: "WORD"}[kind])
        if title == "the model":
            group.add_argument("--plain", action="store_const", const=False, dest="gated",
                               help="plain feed-forward layers instead of gated ones")
        if title == "the machine":
            group.add_argument("--compile", action="store_const", const=True, help="run through torch.compile")


def run(options: argparse.Namespace) -> int:
    """Train, save, and print what came of it; under torchrun only the first process prints."""
    from . import checkpoint, configurations, records
    from .train import TrainConfig, train
    if options.config == "list":
        print(strict_json(configurations.rows(), indent=1) if options.json else configurations.table())
        return 0
    names = [name for _, fields in _GROUPS for name, _, _ in fields] + ["text", "gated", "compile"]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.config is not None:
        given = {**configurations.named(options.config), **given}
    if options.checkpoint_every and not (options.out or options.resume):
        raise InputError(f"--checkpoint-every is {options.checkpoint_every} without --out; accepted: with --out, where they go")
    config = checkpoint.config_of(options.resume, **given) if options.resume else TrainConfig(**given)
    with _warnings_in_one_line():
        result = train(config, out=options.out, resume=options.resume)
    if int(os.environ.get("RANK", "0")):
        return 0
    if options.json:
        print(strict_json(result.summary(), indent=1))
        return 0
    print(records.table([{"layer": i, "density": share, "dead": dead} for i, (share, dead)
                         in enumerate(zip(result.density, result.dead, strict=True))],
                        {"layer": "layer", "density": "density", "dead": "dead neurons"}))
    print(f"train: {result.validation_bits_per_byte:.3f} bits per byte on held-out text, mean nnz "
          f"{result.mean_nnz:.1f} of {config.d_ff}, {result.seconds:.0f} s" +
          (f"; the model is in {options.out or options.resume}" if options.out or options.resume else ""))
    return 0


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Within this context warnings of this package look like its errors, without the line of source."""
    usual, here = warnings.formatwarning, os.path.dirname(__file__)

    def in_one_line(message, category, filename, lineno, line=None) -> str:
        if os.path.dirname(filename) != here:
            return usual(message, category, filename, lineno, line)
        return f"\ntwell-lab: warning: {message}\n"  # the line before it may be a progress bar's

    warnings.formatwarning = in_one_line
    try:
        yield
    finally:
        warnings.formatwarning = usual
