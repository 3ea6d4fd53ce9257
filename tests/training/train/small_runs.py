"""Small runs for the tests of training: their options on a command line, and how to end one from within, as if it
crashed, so that it does not get to save itself."""

import hashlib
import itertools
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from twell_lab.training import loop
from twell_lab.training.config import TrainConfig
from twell_lab.training.loop import train
from twell_lab.training.text.source import Text

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
# The smallest model, whatever it is trained on.
SMALL = "--d-model=16 --heads=2 --layers=1 --d-ff=32 --eval-windows=4 --device=cpu".split()


def text_of(*files, name="some"):
    """The Text of these files as bytes."""
    raw, starts = bytearray().join(files), tuple(itertools.accumulate(map(len, files[:-1]), initial=0))
    data = torch.frombuffer(raw, dtype=torch.uint8)
    return Text(name, hashlib.sha256(raw).hexdigest(), len(raw), data, starts=starts)


class Enough(Exception):
    """Ends a run, raised from its `on_step`."""


def until(step):
    """An `on_step` that ends the run at its first row from this step on."""

    def stop(row):
        if row["step"] >= step:
            raise Enough

    return stop


def broken_off(config, folder, step):
    """Train until the row of this step, with a checkpoint after each step before it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
        patch.setattr(loop, "SAVE_EVERY", 0)
        patch.setattr(loop, "SAVE_SHARE", 0)
        train(config, out=folder, progress=False, on_step=until(step))


@contextmanager
def hidden_values(model):
    """A context with a list of what enters the down projection of each layer of ours, [..., d_ff], when it runs."""
    hidden = []
    keep = lambda module, inputs: hidden.append(inputs[0])  # noqa: E731
    hooks = [layer.mlp.down_proj.register_forward_pre_hook(keep) for layer in model.layers]
    yield hidden
    for hook in hooks:
        hook.remove()


def options(config):
    """The options of `twell-lab train` for all but the text that differs from its defaults."""
    usual = vars(TrainConfig())
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in vars(config).items()
        if value != usual[name] and name != "text"
    ]
