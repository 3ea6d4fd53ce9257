"""The trainer on a GPU: the curve of a resumed run, nothing that waits between rows, a loss that is no number, and
every way to compute a step against the plain one."""

import dataclasses
import warnings

import pytest
import torch

from tests.training.train.small_runs import broken_off
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.training import loop as running
from twell_lab.training.config import TrainConfig
from twell_lab.training.loop import train
from twell_lab.training.text.source import standard_library

from .drawn import launched

# Gradients of the embedding are summed in any order on a GPU, so two runs of the same seed differ too: over these 24
# steps the losses of float32 runs are held to 1e-3, those of bfloat16 ones to 2e-2.
FLOAT32, BFLOAT16 = 1e-3, 2e-2


SIZES = dict(steps=24, batch=16, context=128, d_model=128, layers=2, heads=4, d_ff=512)
SMALL = TrainConfig(**SIZES, log_every=4, eval_every=12, eval_windows=16, warmup=4, device="cuda", l1=0.003)


@pytest.fixture(scope="module")
def tiny():
    library = standard_library()
    text = dataclasses.replace(library, tokens=library.tokens[:1_000_000], size=1_000_000, starts=(0,), cut=None)
    return lambda **changes: dataclasses.replace(SMALL, **{"text": text, "dead_window": 4096, **changes})


@pytest.fixture(scope="module")
def plain(tiny):
    return train(tiny(), progress=False)


def close(rows, other, rel):
    assert [row["step"] for row in rows] == [row["step"] for row in other]
    for one, two in zip(rows, other, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=rel), one["step"]
        assert one["nnz"] == pytest.approx(two["nnz"], rel=10 * rel), one["step"]
        assert one["l1_layers"] == pytest.approx(two["l1_layers"], rel=10 * rel), one["step"]


def test_the_first_step_is_the_cpus(tiny, plain):
    close(train(tiny(steps=24, device="cpu"), progress=False, on_step=None).history[:1], plain.history[:1], 1e-5)


def test_a_resumed_run_gives_the_curve_of_the_unbroken_one(tiny, plain, tmp_path):
    broken_off(tiny(), tmp_path, 16)
    result = train(tiny(), resume=tmp_path, progress=False)
    close(result.history, plain.history, FLOAT32)
    assert result.validation_bits_per_byte == pytest.approx(plain.validation_bits_per_byte, rel=FLOAT32)


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_between_rows_wait_for_nothing(tiny, compiled):
    """torch counts what synchronises: between two rows, 20 steps apart, only the reading of the second one does."""
    marks = {}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(
                tiny(steps=60, log_every=20, eval_every=60, compile=compiled, dtype="bfloat16"),
                progress=False,
                on_step=lambda row: marks.update({row["step"]: len(caught)}),
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(each.message) for each in caught[marks[20] : marks[40]]]
    assert 0 < len(waits) < 10 and all("synchronizing" in each for each in waits), waits


def test_a_gradient_that_is_no_number_is_found_at_the_next_row(tiny, monkeypatch):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def poisoned(*arguments, **options):
        calls.append(1)
        return clip(*arguments, **options) * (float("nan") if len(calls) >= 6 else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    with pytest.raises(InputError, match="the norm of its gradient.* at step 8"):
        train(tiny(), progress=False)
    assert len(calls) == 8


LOW = [{}, dict(compile=True)]
LOW += [dict(kernels=kernels, compile=compiled) for kernels in ("sparse", "auto") for compiled in (False, True)]
WAYS = [(way, FLOAT32) for way in (dict(compile=True), dict(accumulate=4), dict(kernels="sparse"))]
WAYS += [(dict(dtype="bfloat16", **way), BFLOAT16) for way in LOW]


@pytest.mark.parametrize("changes, rel", WAYS, ids=str)
def test_every_way_to_compute_a_step(tiny, plain, changes, rel):
    result = train(tiny(**changes), progress=False)
    close(result.history, plain.history, rel)
    assert result.validation_bits_per_byte == pytest.approx(plain.validation_bits_per_byte, rel=rel)


def test_layers_go_over_to_the_kernels_when_they_fire_little_enough(tiny, monkeypatch):
    """By the break-even measured here, which an L1 as large as this takes them below."""
    names = launched(monkeypatch)
    runs, begin = [], running.Run.__init__

    def begun(run, *arguments):
        runs.append(run)
        begin(run, *arguments)

    monkeypatch.setattr(running.Run, "__init__", begun)
    changes = dict(dtype="bfloat16", d_model=512, d_ff=2048, l1=0.1, lr=5e-3, steps=60)
    result = train(tiny(**changes, kernels="auto"), progress=False)
    (run,) = runs
    paths = [layer.module.learning for layer in feed_forwards(run.model)]
    assert all(value > 0 for value in run.switch.below.values())
    below = [
        nnz < 0.5 * limit
        for nnz, limit in zip(result.history[-1]["nnz_layers"], run.switch.below.values(), strict=True)
    ]
    assert any(below), (result.history[-1]["nnz_layers"], run.switch.below)
    assert all(path == "twell" for path, low in zip(paths, below, strict=True) if low), (paths, below)
    assert any(name.startswith("input_gradient") for name in names)
