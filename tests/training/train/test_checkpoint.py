"""Checkpoints: a killed or interrupted run goes on as if nothing had happened; what is damaged or foreign is
refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.training.train.small_runs import Enough, broken_off, options, until
from twell_lab.app import cli
from twell_lab.core import InputError
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import checkpoint
from twell_lab.training import run as running
from twell_lab.training.loop import train

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Everything that has a state of its own: neurons counted and re-initialised, the ramp of l1, parts of a step.
FULL = dict(dead_window=60, reinit=0.1, dead_every=3, l1_warmup=2, accumulate=2, l1=1.0, lr=0.08, warmup=2)


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return train(tiny(**FULL), out=folder, progress=False), folder


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tiny, curve, unbroken, tmp_path):
    broken_off(tiny(**FULL, checkpoint_every=5), tmp_path, 8)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-000005"]
    result = train(tiny(**FULL), resume=tmp_path, progress=False)
    whole, folder = unbroken
    assert any(
        sum(row["dead_layers"]) for row in whole.history if row["step"] in (6, 9)
    )  # rows were re-initialised after
    assert curve(result.history) == curve(whole.history)
    assert all(map(torch.equal, result.model.parameters(), whole.model.parameters()))
    mine, other = checkpoint.load(tmp_path), checkpoint.load(folder)
    for name in ("optimizer", "counts", "weights"):
        mine_, other_ = getattr(mine, name), getattr(other, name)
        assert mine_.keys() == other_.keys() and all(torch.equal(mine_[key], other_[key]) for key in mine_), name
    assert torch.equal(mine.order, other.order) and torch.equal(mine.noise, other.noise)
    with pytest.warns(
        UserWarning, match="^all 12 steps of the run in .* had been made: there is nothing left to train"
    ):
        again = train(tiny(**FULL), resume=tmp_path, progress=False)
    assert curve(again.history) == curve(whole.history) and again.mean_nnz == whole.mean_nnz


@pytest.mark.filterwarnings("ignore:100000 steps")
def test_a_run_that_was_killed_goes_on_bit_for_bit(tiny, curve, tmp_path, some_text):
    """SIGKILL, from outside, at whatever point it happens to be."""
    text = tmp_path / "text.py"
    text.write_bytes(some_text.data.numpy().tobytes())
    config = tiny(text=text, steps=100_000, checkpoint_every=5)
    sizes = options(
        config,
        *("steps", "batch", "context", "d_model", "layers", "heads", "d_ff", "log_every", "eval_every"),
        *("eval_windows", "device", "l1", "checkpoint_every"),
    )
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-m", "twell_lab", "train", "--text", text, "--out", out, *sizes],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as killed:
        wait_for_rows(out, 20, killed)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
    saved = checkpoint.load(out).step
    same_as_unbroken(config, out, saved, curve)

    # The same run again, interrupted this time: it saves itself, and says how to go on.
    for number in SIGNALS:
        (out / "metrics.jsonl").unlink()
        with subprocess.Popen(
            [sys.executable, "-m", "twell_lab", "train", "--resume", out],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as stopped:
            wait_for_rows(out, saved // 2 + 20, stopped)
            stopped.send_signal(number)
            printed, said = stopped.communicate(timeout=600)
        assert stopped.returncode == 130 and printed == ""
        assert said.splitlines()[-1].startswith("twell-lab: stopped after step ") and "Traceback" not in said
        assert said.splitlines()[-1].endswith(f"to go on: python -m twell_lab train --resume {out}")
        before, saved = saved, checkpoint.load(out).step
        assert saved > before and len((out / "metrics.jsonl").read_text().splitlines()) >= saved // 2
        same_as_unbroken(config, out, saved, curve)


@pytest.mark.filterwarnings("ignore:100000 steps")
def test_a_run_whose_reader_is_gone_is_saved_all_the_same(tiny, tmp_path, some_text):
    """As in `twell-lab train ... 2>&1 | tee log`: Ctrl-C ends the tee, too."""
    (tmp_path / "text.py").write_bytes(some_text.data.numpy().tobytes())
    config, out = tiny(), tmp_path / "out"
    sizes = options(config, "batch", "context", "d_model", "layers", "heads", "d_ff", "log_every")
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "twell_lab",
            "train",
            "--text",
            tmp_path / "text.py",
            "--out",
            out,
            "--steps=100000",
            *sizes,
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as stopped:
        wait_for_rows(out, 20, stopped)
        stopped.stdout.close()
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait() == 130
    assert checkpoint.load(out).step >= 20


def wait_for_rows(out: Path, rows: int, process) -> None:
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 600
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < rows:
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.01)


def same_as_unbroken(config, folder, step, curve) -> None:
    seen = {}
    for name, resume in (("resumed", folder), ("unbroken", None)):
        seen[name] = [] if resume is None else list(checkpoint.load(folder).history)
        with pytest.raises(Enough):
            train(
                config,
                resume=resume,
                out=None if resume is None else folder.with_name(f"other-{step}"),
                progress=False,
                on_step=lambda row, rows=seen[name]: (rows.append(row), until(step + 6)(row)),
            )
    assert curve(seen["resumed"]) == curve(seen["unbroken"])
    assert seen["resumed"][-1]["step"] >= step + 6


def test_what_a_folder_holds_after_a_run(unbroken, tiny):
    result, folder = unbroken
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-000012",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
    ]
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == result.history
    for saved in (folder, folder / "checkpoint-000012"):
        assert all(map(torch.equal, LanguageModel.load(saved).parameters(), result.model.parameters()))
    assert checkpoint.config_of(folder, text=result.config.text) == result.config


def test_the_first_signal_asks_and_another_ctrl_c_stops_at_once():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for first in SIGNALS:
        with running.Stop(active=True, patient=False) as stop:
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
            assert stop.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with running.Stop(active=True, patient=True) as stop:
            for number in (first, *SIGNALS):
                signal.raise_signal(number)
            assert stop.asked
        with running.Stop(active=False, patient=False) as stop, pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert before == {number: signal.getsignal(number) for number in SIGNALS}


@pytest.mark.parametrize("waits", ["in Python", "in C, where no handler runs"])
def test_one_of_several_processes_ends_where_the_others_do_not_answer(waits):
    """As when one of them has failed: torchrun sends SIGTERM to the others, which wait for it."""
    wait = (
        "time.sleep(60)"
        if waits == "in Python"
        else (
            "import ctypes; mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock; "
            "lock(mutex); lock(mutex)"
        )
    )
    script = (
        "import time\nfrom twell_lab.training import run as running\nrunning.GRACE = 0.5\n"
        f"with running.Stop(active=True, patient=True):\n    print('there', flush=True)\n    {wait}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout.readline() == "there\n"
        waiting.send_signal(signal.SIGTERM)
        said = waiting.communicate()[1]
    assert waiting.returncode == 128 + signal.SIGTERM
    assert (
        "told to stop by SIGTERM, and the other processes did not agree to stop within 0.5 s" in said
        and "Traceback" not in said
    )


# What is refused


@pytest.mark.parametrize(
    "name, value",
    [
        ("lr", 1e-3),
        ("l1", 0.0),
        ("dead_every", 4),
        ("steps", 13),
        ("seed", 1),
        ("d_ff", 48),
        ("batch", 8),
        ("dtype", "bfloat16"),
        ("gated", False),
        ("log_every", 1),
    ],
)
def test_other_hyper_parameters_are_named_with_both_values(tiny, unbroken, name, value):
    result, folder = unbroken
    was = getattr(result.config, name)
    with pytest.raises(InputError, match=f"^{name} is {value!r}, and {was!r} in the checkpoint"):
        train(tiny(**{**FULL, name: value}), resume=folder, progress=False)


def test_another_text_is_named(tiny, unbroken, tmp_path):
    (tmp_path / "other.txt").write_text("another text altogether\n" * 5000)
    with pytest.raises(InputError, match=r"sha256 is .*other\.txt.*standard library.*in the checkpoint"):
        train(tiny(**FULL, text=tmp_path / "other.txt"), resume=unbroken[1], progress=False)


def test_a_checkpoint_of_another_shape_is_refused_by_the_tensors_name(tiny, unbroken, tmp_path):
    name = "layers.1.mlp.up_proj.weight"
    for part, key in (("weights", name), ("optimizer", f"exp_avg.{name}")):
        state = checkpoint.load(unbroken[1])
        tensors = getattr(state, part)
        tensors[key] = tensors[key][:30]
        checkpoint.save(tmp_path / part, state)
        with pytest.raises(
            InputError, match=rf"{name} has shape \[30, 16\] in the checkpoint.* and \[32, 16\] in this model"
        ):
            train(tiny(**FULL), resume=tmp_path / part, progress=False)
        del tensors[key]
        checkpoint.save(tmp_path / f"{part} lacking", state)
        with pytest.raises(InputError, match=f"lack '.*{name}'"):
            train(tiny(**FULL), resume=tmp_path / f"{part} lacking", progress=False)


def test_bytes_may_be_named_when_a_run_that_reads_them_goes_on(tiny, unbroken):
    config = tiny(**FULL)
    assert config.tokenizer is None
    checkpoint.check_same(
        checkpoint.load(unbroken[1]),
        tiny(**FULL, tokenizer="bytes"),
        config.model(),
        config.text,
        config.text.split()[0].size,
    )


def test_an_unfinished_run_is_not_written_over(tiny, tmp_path, capsys):
    broken_off(tiny(checkpoint_every=5), tmp_path, 8)
    with pytest.raises(InputError, match="holds a run stopped at step 5 of 12; accepted: to resume it"):
        train(tiny(), out=tmp_path, progress=False)
    assert cli.main(["train", "--resume", str(tmp_path), "--lr", "0.5"]) == 2
    assert "lr is 0.5, and 0.002 in the checkpoint" in capsys.readouterr().err


def test_a_finished_run_or_a_model_is_not_written_over(tiny, unbroken, tmp_path):
    """Nor mixed: a run stopped early would leave the old model beside its own checkpoint."""
    result, folder = unbroken
    held = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(
        InputError, match="holds a run of 12 steps; accepted: another folder, or this one once it is empty"
    ):
        train(tiny(**FULL), out=folder, progress=False)
    assert held == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result.model.save(tmp_path)
    with pytest.raises(InputError, match="holds a model; accepted: another folder"):
        train(tiny(), out=tmp_path, progress=False)


def test_folders_that_cannot_be_used_are_named(tiny, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot save in .*file"):
        train(tiny(), out=tmp_path / "file" / "folder", progress=False)
    with pytest.raises(InputError, match="no checkpoint in .*nothing"):
        train(tiny(), resume=tmp_path / "nothing", progress=False)


# A loss that is no number


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read when a row is made"])
def test_a_loss_that_is_no_number_leaves_the_state_of_the_step_before(tiny, tmp_path, monkeypatch, late):
    """Late, as on a GPU: the optimizer is told by a flag to do nothing, and the failure is found at the next row."""
    broken_off(tiny(checkpoint_every=4, log_every=4), tmp_path / "good", 4)
    good = checkpoint.checkpoints(tmp_path / "good")
    if not good:  # the exception came first; the next row is step 8
        broken_off(tiny(checkpoint_every=4, log_every=4), tmp_path / "good", 8)
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def poisoned(*arguments, **options):
        calls.append(1)
        return clip(*arguments, **options) * (float("nan") if len(calls) == 5 else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    if late:

        def init(guard, run, first=running.Guard.__init__):
            first(guard, run)
            guard.waits, run.optimizer.found_inf = False, guard.broken

        monkeypatch.setattr(running.Guard, "__init__", init)
    with pytest.raises(InputError, match=r"gradient is nan at step 5 with lr 0\.002 and l1 0\.01.*after step 4, is in"):
        train(tiny(log_every=4), out=tmp_path / "bad", progress=False)
    assert len(calls) == (8 if late else 5)
    kept, wanted = checkpoint.load(tmp_path / "bad"), checkpoint.load(tmp_path / "good")
    assert kept.step == wanted.step == 4 and torch.equal(kept.order, wanted.order)
    for part in ("weights", "optimizer"):
        assert all(torch.equal(value, getattr(wanted, part)[name]) for name, value in getattr(kept, part).items())
