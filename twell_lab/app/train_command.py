"""`twell-lab train`, and `twell-lab prepare`, which encodes a text for it. Imports torch only when one of them runs."""

from __future__ import annotations

import argparse
import os
import shlex

from ..core import InputError
from .options import given
from .terminal import Answer

EPILOG = """\
examples:

  twell-lab train --text my-texts --l1 1e-3 --out build/mine
  twell-lab train --resume build/mine
  twell-lab train --from build/mine --text other-texts --out build/further
  twell-lab prepare "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" \\
    --tokenizer bpe:32768 --out texts/edu
  torchrun --nproc-per-node 2 -m twell_lab train --config 0.5B \\
    --text texts/edu --dtype bfloat16 --compile --out build/edu

Ctrl-C, SIGTERM and every five minutes save the run; about a tenth of the text
is held out for validation; metrics.jsonl in --out has a line for every
--log-every steps. --from takes a model of this project, or a Llama with ReLU of
transformers. On a GPU, --dtype bfloat16 --compile is several times faster."""


def train(options: argparse.Namespace) -> Answer | None:
    """Train, save the run, and report the result; under torchrun only the first process reports."""
    from .. import records
    from ..training import checkpoint, presets
    from ..training.config import TrainConfig
    from ..training.loop import train

    if options.config == "list":
        return Answer(presets.rows(), presets.table())
    asked = given(options, TrainConfig)
    if options.config is not None:
        asked = {**presets.of(options.config), **asked}
    if asked.get("activation") == "relu2" and options.resume is None and asked.get("from_") is None:
        asked.setdefault("gated", False)  # sparse layers compute the square in plain layers alone
    if options.checkpoint_every and not (options.out or options.resume):
        raise InputError(
            f"--checkpoint-every is {options.checkpoint_every} without --out; accepted: with --out, for the checkpoints"
        )
    config = checkpoint.config_of(options.resume, **asked) if options.resume else TrainConfig(**asked)
    result = train(config, out=options.out, resume=options.resume)
    if int(os.environ.get("RANK", "0")):
        return None
    layers = enumerate(zip(result.density, result.dead, strict=True))
    rows = [{"layer": number, "density": share, "dead neurons": dead} for number, (share, dead) in layers]
    where = options.out or options.resume
    return Answer(
        result.summary(),
        f"{records.table(rows, {key: key for key in rows[0]})}\n"
        f"train: {result.validation_bits_per_byte:.3f} bits per byte on held-out "
        f"text, mean nnz {result.mean_nnz:.1f} of {result.config.d_ff}, {result.seconds:.0f} s"
        + (f"; the model is in {where}" if where else ""),
    )


def prepare(options: argparse.Namespace) -> Answer:
    from tqdm import tqdm

    from ..training.text.prepared import prepare

    with tqdm(unit="B", unit_scale=True, leave=False, disable=None) as bar:
        on_bytes = lambda size: bar.update(size - bar.n)  # noqa: E731
        text = prepare(options.text, options.out, tokenizer=options.tokenizer, on_bytes=on_bytes)
    training, validation = (len(part.tokens) for part in text.split())
    return Answer(
        {**text.describe(), "training_tokens": training, "validation_tokens": validation},
        f"prepare: {text.size:,} bytes of {text.name} as {len(text.tokens):,} {text.tokenizer.unit}, {validation:,} "
        f"of them held out; twell-lab train --text {shlex.quote(str(options.out))} reads them",
    )
