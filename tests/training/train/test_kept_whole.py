"""What is kept of a run stays whole or is refused: processes that are killed while they save, full disks, damaged files,
two runs that would share a folder."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.training.train.harming import full_at, killed_at
from tests.training.train.small_runs import broken_off
from twell_lab.app import cli
from twell_lab.core import LOCK, InputError
from twell_lab.training import checkpoint, loop
from twell_lab.training.loop import train

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """A folder with a checkpoint after step 4 of 12, of a run with a state of every kind but a tokenizer's."""
    folder = tmp_path_factory.mktemp("saved")
    broken_off(tiny(dead_window=60, reinit=0.1, kernels="auto", checkpoint_every=4), folder, 6)
    return folder


def same(one: checkpoint.State, other: checkpoint.State) -> bool:
    def equal(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict) and any(isinstance(value, torch.Tensor) for value in a.values()):
            return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
        return json.dumps(a) == json.dumps(b)

    return all(equal(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one))


# Killed


@posix
@pytest.mark.parametrize("harmed_at", [killed_at, full_at])
def test_a_save_that_fails_anywhere_leaves_a_whole_checkpoint(saved, tmp_path, harmed_at):
    older = checkpoint.load(saved)
    newer = dataclasses.replace(older, step=5, seconds=2.0)
    seen, change, harmed = [], 0, True
    while harmed:
        change += 1
        home = tmp_path / str(change)
        checkpoint.save(home, older)
        harmed = harmed_at(change, lambda: checkpoint.save(home, newer))
        found = checkpoint.load(home)
        assert same(found, older) or same(found, newer), change
        seen.append(found.step)
        checkpoint.tidy(home)  # as the run goes on, or is resumed
        last = dataclasses.replace(newer, step=6)
        checkpoint.save(home, last)
        assert [path.name for path in home.iterdir()] == ["checkpoint-000006"] and same(checkpoint.load(home), last)
    assert seen == sorted(seen) and seen[0] == 4 and seen[-1] == 5 and len(seen) > 4


@posix
def test_a_run_that_goes_on_from_an_earlier_step_drops_the_later_ones(saved, tmp_path):
    state, change, harmed = checkpoint.load(saved), 0, True
    while harmed:
        change += 1
        home = tmp_path / str(change)
        for step in (5, 9, 12):
            checkpoint.save(home, dataclasses.replace(state, step=step), keep_older=True)
        harmed = killed_at(change, lambda: checkpoint.tidy(home, after=5))
        assert same(checkpoint.load(home / "checkpoint-000005"), dataclasses.replace(state, step=5))
        found = checkpoint.load(home)
        assert same(found, dataclasses.replace(state, step=found.step))
    assert [path.name for path in home.iterdir()] == ["checkpoint-000005"] and change > 2
    with pytest.raises(InputError, match="cannot save a checkpoint"):  # nothing ever replaces a checkpoint
        checkpoint.save(home, dataclasses.replace(state, step=5))
    assert checkpoint.load(home).step == 5


def test_what_was_left_half_written_goes_when_the_run_goes_on(tiny, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-000008.part").mkdir()
    (tmp_path / ".0123456789ab.part").write_text("half")
    (tmp_path / "mine.part").write_text("not of a training")
    train(tiny(dead_window=60, reinit=0.1, kernels="auto"), resume=tmp_path, progress=False)
    held = ["checkpoint-000012", "config.json", "metrics.jsonl", "mine.part", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == held


class Planted:
    """What an unpickler that trusts its file would run."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.STATE])
@pytest.mark.parametrize("damage", ["truncated", "removed", "overwritten", "planted", "a list", "less"])
def test_a_damaged_checkpoint_is_refused_by_name(saved, tmp_path, name, damage, capsys):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    path = checkpoint.newest(tmp_path) / name
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage in ("truncated", "overwritten"):
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"\xff" * 64 + content[64:])
    else:
        torch.save({"planted": Planted(), "a list": [1], "less": {"step": 4}}[damage], path)
    with pytest.raises(InputError, match=f"{name} in the checkpoint .* cannot be read"):
        checkpoint.load(tmp_path)
    assert not capsys.readouterr().out


# Two at a time


def test_a_second_training_into_a_folder_is_refused(tiny, tmp_path):
    seen = []

    def second(row):
        for more in ({}, {"resume": tmp_path} if checkpoint.checkpoints(tmp_path) else {}):
            before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
            with pytest.raises(InputError, match="in use by another training; accepted: another folder, or this one"):
                train(tiny(), **{"out": tmp_path, **more}, progress=False)
            assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != LOCK} == {
                path: time for path, time in before.items() if path.name != LOCK
            }
        seen.append(row["step"])

    result = train(tiny(checkpoint_every=2), out=tmp_path, progress=False, on_step=second)
    assert seen == [row["step"] for row in result.history] and checkpoint.load(tmp_path).step == 12
    assert LOCK not in [path.name for path in tmp_path.iterdir()]


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tiny, tmp_path):
    script = (
        "import os, sys\nfrom twell_lab.core import locked_folder\n"
        "with locked_folder(sys.argv[1], 'training'):\n    os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path]).returncode == 9 and (tmp_path / LOCK).exists()
    train(tiny(steps=2), out=tmp_path, progress=False)
    assert checkpoint.load(tmp_path).step == 2 and not (tmp_path / LOCK).exists()


# How often


def test_a_run_is_saved_every_few_minutes_and_resumed_bit_for_bit(tiny, curve, tmp_path, monkeypatch):
    assert loop.SAVE_EVERY <= 300 and tiny().checkpoint_every is None
    steps, real = [], checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda folder, state, **more: (steps.append(state.step), real(folder, state, **more))[1]
    )
    whole = train(tiny(), out=tmp_path / "whole", progress=False)
    assert steps == [12]
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "SAVE_SHARE", 0.0)
    broken_off(tiny(), tmp_path / "often", 8)
    assert steps == [12, 1, 2, 3, 4, 5, 6, 7]
    assert curve(train(tiny(), resume=tmp_path / "often", progress=False).history) == curve(whole.history)
    steps.clear()
    train(tiny(checkpoint_every=0), out=tmp_path / "never", progress=False)
    train(tiny(checkpoint_every=5), out=tmp_path / "fifth", progress=False)
    assert steps == [12, 5, 10, 12]
    steps.clear()
    monkeypatch.setattr(loop, "SAVE_SHARE", 10**6)  # a save that takes long is not made all the time
    train(tiny(), out=tmp_path / "slow", progress=False)
    assert steps == [1, 12]


def test_a_wrong_interval_is_named(tiny, capsys, tmp_path):
    for value in (-1, 1.5, True, "5"):
        with pytest.raises(InputError, match="^checkpoint_every is .*; accepted: a whole number from 0 up, or None"):
            tiny(checkpoint_every=value)
    assert cli.main(["train", "--out", str(tmp_path), "--checkpoint-every", "-1"]) == 2
