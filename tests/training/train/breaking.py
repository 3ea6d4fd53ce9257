"""A run that ends from within, as if it crashed: it does not get to save itself."""

import pytest

from twell_lab.training.loop import train


class Enough(Exception):
    """Ends a run, raised from its `on_step`."""


def until(step):
    """An `on_step` that ends the run at its first row from this step on."""

    def stop(row):
        if row["step"] >= step:
            raise Enough

    return stop


def broken_off(config, folder, step):
    """Train into the folder until that step, and no further."""
    with pytest.raises(Enough):
        train(config, out=folder, progress=False, on_step=until(step))


def options(config, *names):
    """The options of `twell-lab train` that give these fields their values."""
    return [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]
