"""What the trainer's tests share: one thread, a short text, a run of a few steps."""

import dataclasses

import pytest

from tests.threads import one_thread  # noqa: F401
from tests.training.train.small_runs import text_of
from twell_lab.training.config import TrainConfig
from twell_lab.training.text.source import standard_library

TIMES = ("seconds", "tokens_per_s")  # all else in a history is the same for the same seed


@pytest.fixture(scope="session")
def some_text():
    return text_of(standard_library().tokens[:200_000].numpy().tobytes())


@pytest.fixture(scope="session")
def tiny(some_text):
    """A config of 12 steps of four windows, with changes."""
    sizes = dict(steps=12, batch=4, context=16, d_model=16, layers=2, heads=2, d_ff=32, l1=0.01)
    base = TrainConfig(**sizes, log_every=2, eval_every=4, eval_windows=16, device="cpu", text=some_text)
    return lambda **changes: dataclasses.replace(base, **changes)


@pytest.fixture(scope="session")
def curve():
    return lambda history: [{k: v for k, v in row.items() if k not in TIMES} for row in history]
