"""`twell-lab train`: its options, and what it prints. Imports torch only when the command is asked for."""

from __future__ import annotations

import argparse
import os

from ..core import InputError
from .options import given
from .terminal import Answer

EPILOG = """\
on a text of your own, a file or a folder of files:

  twell-lab train --text my-texts --l1 1e-3 --out build/mine
  twell-lab profile build/mine --text my-texts

Ctrl-C or SIGTERM saves the run and says how to go on. It is also saved
about every five minutes:

  twell-lab train --resume build/mine

A model that is there, of this project or a Llama with ReLU of transformers, is
trained further:

  twell-lab train --from build/mine --text other-texts --out build/further

On a GPU, --dtype bfloat16 --compile is several times faster. On two of them:

  torchrun --nproc-per-node 2 -m twell_lab train --text my-texts \\
    --out build/mine

A text of more than a gigabyte is read and encoded once, and training then maps
it into memory:

  twell-lab prepare "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" \\
    --tokenizer bpe:32768 --out texts/edu
  twell-lab train --config 0.5B --text texts/edu --out build/edu

About a tenth of the text is held out for validation. metrics.jsonl in --out has
a line for every --log-every steps."""


def run(options: argparse.Namespace) -> Answer | None:
    """Train, save the run, and report the result; under torchrun only the first process reports."""
    from .. import records
    from ..training import checkpoint, presets
    from ..training.config import TrainConfig
    from ..training.loop import train

    if options.config == "list":
        return Answer(presets.rows(), presets.table())
    told = given(options, TrainConfig)
    if options.config is not None:
        told = {**presets.of(options.config), **told}
    if told.get("activation") == "relu2" and options.resume is None and told.get("from_") is None:
        told.setdefault("gated", False)  # sparse layers compute the square in plain layers alone
    if options.checkpoint_every and not (options.out or options.resume):
        raise InputError(
            f"--checkpoint-every is {options.checkpoint_every} without --out; accepted: with --out, for the checkpoints"
        )
    config = checkpoint.config_of(options.resume, **told) if options.resume else TrainConfig(**told)
    result = train(config, out=options.out, resume=options.resume)
    if int(os.environ.get("RANK", "0")):
        return None
    table = records.table(
        [
            {"layer": i, "density": share, "dead": dead}
            for i, (share, dead) in enumerate(zip(result.density, result.dead, strict=True))
        ],
        {"layer": "layer", "density": "density", "dead": "dead neurons"},
    )
    where = options.out or options.resume
    return Answer(
        result.summary(),
        f"{table}\ntrain: {result.validation_bits_per_byte:.3f} bits per byte on held-out "
        f"text, mean nnz {result.mean_nnz:.1f} of {result.config.d_ff}, {result.seconds:.0f} s"
        + (f"; the model is in {where}" if where else ""),
    )
