"""What is kept of a run stays whole or is refused: bits that flip, values of other types, processes that are killed
while they save, two runs that would share a folder."""

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.training.train.harming import flipped, full_at, killed_at, mutations, some_bits, write_json
from tests.training.train.small_runs import broken_off
from twell_lab.app import cli
from twell_lab.core import InputError, TwellError
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import checkpoint, loop
from twell_lab.training import lock as locks
from twell_lab.training.lock import Lock
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


# Bits and values


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors", "config.json"])
def test_no_flipped_bit_is_loaded(saved, tmp_path, name):
    whole = checkpoint.load(saved)
    folder = tmp_path / "checkpoint-000004"
    shutil.copytree(checkpoint.newest(saved), folder)
    content = (folder / name).read_bytes()
    refused = 0
    for at in some_bits(content, 150, seed=len(name)):
        (folder / name).write_bytes(flipped(content, at))
        try:
            assert same(checkpoint.load(tmp_path), whole), at
        except InputError as error:
            assert name in str(error), at
            refused += 1
    assert refused >= 145  # a few flips change nothing: 1e-05 is 1E-05


def test_no_flipped_bit_of_a_model_is_loaded(saved, tmp_path):
    model = LanguageModel.load(checkpoint.newest(saved))
    model.save(tmp_path)
    for name in ("model.safetensors", "config.json"):
        content = (tmp_path / name).read_bytes()
        refused = 0
        for at in some_bits(content, 150, seed=len(name)):
            (tmp_path / name).write_bytes(flipped(content, at))
            try:
                loaded = LanguageModel.load(tmp_path)
            except InputError as error:
                assert str(tmp_path) in str(error)
                refused += 1
            else:  # white space of the JSON, or the name of the digest
                assert loaded.config == model.config and all(
                    map(torch.equal, loaded.parameters(), model.parameters())
                ), (name, at)
        assert refused > 100
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()), "layers": 2**31 - 1})
    )
    with pytest.raises(InputError, match="lack 'layers.2"):  # and is not built first
        LanguageModel.load(tmp_path)


def test_files_from_before_there_were_digests_are_read(saved, tiny, curve, tmp_path):
    whole = checkpoint.load(saved)
    folder = unsealed(saved, tmp_path)
    assert same(checkpoint.load(tmp_path), whole)
    assert all(
        map(
            torch.equal,
            LanguageModel.load(folder).parameters(),
            LanguageModel.load(checkpoint.newest(saved)).parameters(),
        )
    )


def unsealed(saved: Path, home: Path) -> Path:
    """A copy of the newest checkpoint, as it was written before there were digests."""
    import safetensors.torch

    folder = home / "checkpoint-000004"
    shutil.copytree(checkpoint.newest(saved), folder)
    safetensors.torch.save_file(safetensors.torch.load_file(folder / "model.safetensors"), folder / "model.safetensors")
    fields = json.loads((folder / "state.json").read_text())
    assert fields.pop("own_sha256") and fields.pop("files")
    fields["sizes"]["model.safetensors"] = (folder / "model.safetensors").stat().st_size
    write_json(folder / "state.json", fields)
    return folder


@pytest.mark.parametrize("sealed", [True, False], ids=["with digests", "from before"])
def test_no_value_of_another_kind_is_an_error_without_a_name(saved, tiny, tmp_path, monkeypatch, sealed):
    """Every field of state.json, however deep: loaded as it was, resumed, or refused in words."""
    folder = tmp_path / "checkpoint-000004"
    shutil.copytree(checkpoint.newest(saved), folder) if sealed else unsealed(saved, tmp_path)
    whole, content = checkpoint.load(tmp_path), json.loads((folder / "state.json").read_text())
    model = loop.initial_model(tiny())
    monkeypatch.setattr(loop, "initial_model", lambda *_: model)  # making one is half of the time
    monkeypatch.setattr(loop, "_step", stop_here)
    config = tiny(dead_window=60, reinit=0.1, kernels="auto")
    if sealed:
        tried = refused = 0
        for what, changed in islice(mutations(content), 0, None, 2):
            write_json(folder / "state.json", changed)
            tried += 1
            try:
                assert same(checkpoint.load(tmp_path), whole), what
            except TwellError:
                refused += 1
        assert tried > 500 and refused > 0.99 * tried
        return
    content["history"] = content["history"][-1:]
    tried = resumed = 0
    for what, changed in islice(mutations(content), 0, None, 5):  # of 17 values for each field
        write_json(folder / "state.json", changed)
        tried += 1
        for act in (
            lambda: checkpoint.config_of(tmp_path, text=config.text),
            lambda: checkpoint.text_of(tmp_path),
            lambda: checkpoint.prepare(tmp_path),
            lambda: train(config, resume=tmp_path, progress=False),
        ):
            try:
                act()
            except TwellError:
                pass
            except StoppedHere:
                resumed += 1
            except Exception as error:
                raise AssertionError(what) from error
    assert tried > 200 and resumed > 0  # of what is no part of the state: where the text lay, rows before the last


class StoppedHere(Exception):
    """The run goes on from what it read."""


def stop_here(run, *_):
    run.state({"name": "", "sha256": "", "size": 0, "path": None})
    raise StoppedHere


def test_a_file_of_another_checkpoint_is_refused(saved, tiny, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    broken_off(tiny(dead_window=60, reinit=0.1, kernels="auto", checkpoint_every=4, seed=1), tmp_path / "other", 6)
    shutil.copy(checkpoint.newest(tmp_path / "other") / "optimizer.safetensors", checkpoint.newest(tmp_path))
    with pytest.raises(
        InputError, match="optimizer.safetensors in the checkpoint .* was altered after it was written: its SHA-256"
    ):
        checkpoint.load(tmp_path)


# Killed


@posix
def test_a_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(saved, tmp_path):
    state = checkpoint.load(saved)
    older, newer = dataclasses.replace(state, seconds=1.0), dataclasses.replace(state, seconds=2.0)
    for step in (4, 5):  # the same step again, and the next one
        seen, change = [], 0
        while True:
            change += 1
            home = tmp_path / f"{step}-{change}"
            checkpoint.save(home, older)
            killed = killed_at(change, lambda: checkpoint.save(home, dataclasses.replace(newer, step=step)))
            found = checkpoint.load(home)
            assert same(found, older) or same(found, dataclasses.replace(newer, step=step)), change
            seen.append(found.seconds)
            last = dataclasses.replace(newer, step=6)
            checkpoint.save(home, last)  # as the run goes on, or is resumed
            assert [path.name for path in home.iterdir()] == ["checkpoint-000006"] and same(checkpoint.load(home), last)
            shutil.rmtree(home)
            if not killed:
                break
        assert seen == sorted(seen) and seen[0] == 1.0 and seen[-1] == 2.0 and len(seen) > 15


@posix
def test_a_disk_that_is_full_at_any_moment_leaves_a_whole_checkpoint(saved, tmp_path):
    state, change, done = checkpoint.load(saved), 0, False
    while not done:
        change += 1
        home = tmp_path / str(change)
        checkpoint.save(home, state)
        done = not full_at(change, lambda: checkpoint.save(home, dataclasses.replace(state, seconds=2.0)))
        assert same(dataclasses.replace(checkpoint.load(home), seconds=state.seconds), state)
        checkpoint.save(home, state)
        assert [path.name for path in home.iterdir()] == ["checkpoint-000004"]
        shutil.rmtree(home)
    assert change > 15


@posix
def test_a_step_saved_again_and_killed_twice_is_still_there(saved, tmp_path):
    """Killed between the two names, and again wherever the next save may be."""
    state = checkpoint.load(saved)
    for change in range(1, 60):
        home = tmp_path / str(change)
        checkpoint.save(home, state)
        (home / "checkpoint-000004").rename(home / "checkpoint-000004.old")
        assert same(checkpoint.load(home), state) and checkpoint.home(home / "checkpoint-000004.old") == home
        killed = killed_at(change, lambda: checkpoint.save(home, state))
        assert same(checkpoint.load(home), state)
        killed_at(max(1, change - 9), lambda: checkpoint.save(home, state))
        assert same(checkpoint.load(home), state)
        shutil.rmtree(home)
        if not killed:
            return
    raise AssertionError("no save came to its end")


@posix
def test_an_older_checkpoint_that_is_half_removed_is_not_read(saved, tmp_path):
    """One of a later step: the run was resumed from an earlier one."""
    state, done, change = checkpoint.load(saved), False, 0
    while not done:
        change += 1
        home = tmp_path / str(change)
        checkpoint.save(home, dataclasses.replace(state, step=9))
        done = not killed_at(change, lambda: checkpoint.save(home, dataclasses.replace(state, step=5)))
        found = checkpoint.load(home)
        assert same(found, dataclasses.replace(state, step=found.step))


def test_what_was_left_half_written_goes_when_the_run_goes_on(tiny, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-000008.part").mkdir()
    for name in (
        "model.safetensors.part",
        "config.json.part",
        "tokenizer.json.part",
        "metrics.jsonl.part",
        "mine.part",
    ):
        (tmp_path / name).write_text("half")
    train(tiny(dead_window=60, reinit=0.1, kernels="auto"), resume=tmp_path, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000012",
        "config.json",
        "metrics.jsonl",
        "mine.part",
        "model.safetensors",
    ]


# Two at a time


def test_a_second_training_into_a_folder_is_refused_by_the_owners_name(tiny, tmp_path):
    seen = []

    def second(row):
        for more in ({}, {"resume": tmp_path} if checkpoint.checkpoints(tmp_path) else {}):
            before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
            with pytest.raises(
                InputError,
                match=f"in use by another training, process {os.getpid()} on {socket.gethostname()!r}, since "
                ".*; accepted: another folder, or this one once that has ended$",
            ):
                train(tiny(), **{"out": tmp_path, **more}, progress=False)
            assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        seen.append(row["step"])

    result = train(tiny(checkpoint_every=2), out=tmp_path, progress=False, on_step=second)
    assert seen == [row["step"] for row in result.history] and checkpoint.load(tmp_path).step == 12
    assert locks.NAME not in [path.name for path in tmp_path.iterdir()]


@posix
def test_the_lock_of_a_process_that_was_killed_is_taken_over(tiny, tmp_path):
    gone = multiprocessing.get_context("fork").Process(target=lambda: (Lock(tmp_path, "training").take(), os._exit(9)))
    gone.start()
    gone.join()
    assert json.loads((tmp_path / locks.NAME).read_text())["pid"] == gone.pid
    train(tiny(steps=2), out=tmp_path, progress=False)
    assert checkpoint.load(tmp_path).step == 2 and not (tmp_path / locks.NAME).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "one"}', b'{"pid": 1}', b"\xff\xfe", b"[" * 4096])
def test_a_lock_that_nobody_holds_and_says_nothing_is_taken_over(tmp_path, content):
    (tmp_path / locks.NAME).write_bytes(content)
    lock = Lock(tmp_path, "training")
    lock.take()
    assert json.loads((tmp_path / locks.NAME).read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / locks.NAME).exists()


def owner(**changes) -> dict:
    mine = {"pid": os.getpid(), "started": locks._started(os.getpid()), "host": socket.gethostname()}
    return {**mine, "since": "2026-01-02 03:04:05", **changes}


def test_the_lock_of_another_machine_is_refused_and_says_what_to_do(tiny, tmp_path):
    write_json(tmp_path / locks.NAME, owner(pid=77, host="node-7"))
    said = (
        f"another training, process 77 on 'node-7', since 2026-.*; if it was killed, remove "
        f".*{re.escape(locks.NAME)}' and try again$"
    )
    with pytest.raises(InputError, match=said):
        train(tiny(), out=tmp_path, progress=False)
    (tmp_path / locks.NAME).unlink()
    Lock(tmp_path, "training").take()


@posix
def test_where_the_system_has_no_locks_the_process_is_looked_up(tmp_path, monkeypatch):
    """Its number, and when it began: another one may have got the number since."""

    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    lock = Lock(tmp_path, "training")
    lock.take()
    with pytest.raises(InputError, match=f"process {os.getpid()} on .*if it was killed, remove"):
        Lock(tmp_path, "training").take()
    lock.release()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for there in (
        owner(pid=ended.pid),
        owner(pid=2**40),
        *([owner(started="1")] if locks._started(os.getpid()) else []),
    ):
        write_json(tmp_path / locks.NAME, there)
        lock.take()
        lock.release()


@posix
def test_of_many_that_begin_at_once_one_has_the_folder(tmp_path):
    write_json(tmp_path / locks.NAME, owner(pid=2**22 + 1))  # of one that was killed
    context = multiprocessing.get_context("fork")
    inside, most, ready = context.Value("i"), context.Value("i"), context.Barrier(6)

    def contend():
        ready.wait()
        for _ in range(150):
            lock = Lock(tmp_path, "training")
            try:
                lock.take()
            except InputError:
                continue
            with inside.get_lock():
                inside.value += 1
                most.value = max(most.value, inside.value)
            with inside.get_lock():
                inside.value -= 1
            lock.release()

    several = [context.Process(target=contend) for _ in range(6)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert [each.exitcode for each in several] == [0] * 6 and most.value == 1
    assert not (tmp_path / locks.NAME).exists()


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
