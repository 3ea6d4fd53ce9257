"""Checkpoints: a killed or interrupted run goes on as if nothing had happened, a save that fails leaves the one before,
and what is damaged, foreign or in use is refused."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from tests.training.train.harming import full_at, killed_at
from tests.training.train.interrupting import wait_for_rows
from tests.training.train.small_runs import ENVIRONMENT, SMALL, Enough, broken_off, options, until
from twell_lab.analysis import switching
from twell_lab.app import cli
from twell_lab.core import LOCK, InputError
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import checkpoint, loop, parallel
from twell_lab.training.loop import initial_model, train

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Everything that has a state of its own: neurons counted and re-initialised, the ramp of l1, parts of a step.
UNFINISHED = ["metrics.jsonl", "tokenizer.json", "training.pt"]  # what is saved of a run that has not ended
FULL = dict(dead_window=60, reinit=0.1, dead_every=3, l1_warmup=2, accumulate=2, l1=1.0, lr=0.08, warmup=2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def same(one: dict, other: dict) -> bool:
    """Whether two checkpoints hold the same, but for what holds times."""

    def equal(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
        return a == b if not isinstance(a, list) else len(a) == len(b) and all(map(equal, a, b))

    return all(equal(one[name], other[name]) for name in one if name not in ("history", "seconds", "config"))


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return train(tiny(**FULL), out=folder, progress=False), folder


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tiny, curve, unbroken, tmp_path):
    broken_off(tiny(**FULL), tmp_path, 8)
    assert checkpoint.load(tmp_path)["step"] == 7 and names(tmp_path) == UNFINISHED
    result = train(tiny(**FULL), resume=tmp_path, progress=False)
    whole, folder = unbroken
    assert any(sum(row["dead_layers"]) for row in whole.history if row["step"] in (6, 9))  # re-initialised after
    assert curve(result.history) == curve(whole.history)
    assert all(map(torch.equal, result.model.parameters(), whole.model.parameters()))
    assert same(checkpoint.load(tmp_path), checkpoint.load(folder))
    assert names(folder) == ["config.json", "metrics.jsonl", "model.safetensors", "tokenizer.json", "training.pt"]
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == whole.history
    assert all(map(torch.equal, LanguageModel.load(folder).parameters(), whole.model.parameters()))
    again = train(tiny(**FULL), resume=tmp_path, progress=False)
    assert curve(again.history) == curve(whole.history) and again.mean_nnz == whole.mean_nnz


def test_more_steps_go_on(tiny, curve, tmp_path):
    first = train(tiny(steps=6), out=tmp_path, progress=False)
    result = train(tiny(steps=12), resume=tmp_path, progress=False)
    assert curve(result.history[: len(first.history)]) == curve(first.history) and result.history[-1]["step"] == 12
    assert result.history[-1]["lr"] < first.history[-1]["lr"] * 2 and checkpoint.load(tmp_path)["step"] == 12
    with pytest.raises(InputError, match="steps is 5; accepted: more than 12"):
        train(tiny(steps=5), resume=tmp_path, progress=False)


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(tiny, curve, tmp_path, some_text):
    """By Ctrl-C in a process of its own, at whatever step it is, and then by SIGTERM in this one."""
    text, out = tmp_path / "text.py", tmp_path / "out"
    text.write_bytes(some_text.tokens.numpy().tobytes())
    config = tiny(text=text, steps=100_000)
    command = [sys.executable, "-m", "twell_lab", "train", "--text", text, "--out", out, *options(config)]
    pipes = dict(env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        wait_for_rows(process, out, 20)
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=600)
    assert process.returncode == 130 and printed == "" and "Traceback" not in told
    assert f"to go on: twell-lab train --resume {out}" in told.splitlines()[-1]
    end = checkpoint.load(out)["step"] + 6
    assert end > 40 and LanguageModel.load(out)

    def terminate(row):
        if row["step"] == end // 2 * 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(checkpoint.Interrupted):
        train(config, resume=out, progress=False, on_step=terminate)
    rows = []
    with pytest.raises(Enough):
        train(config, progress=False, on_step=lambda row: (rows.append(row), until(end)(row)))
    saved = curve(checkpoint.load(out)["history"])
    assert saved[-1]["step"] >= end - 1 and saved == curve(rows)[: len(saved)]


def test_the_first_signal_asks_and_another_ctrl_c_stops_at_once():
    before = [signal.getsignal(number) for number in SIGNALS]
    for first in SIGNALS:
        with loop.stopping(active=True, several=False) as came:
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGTERM)  # `timeout` sends two
            assert came == [first, signal.SIGTERM]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with loop.stopping(active=True, several=True) as came:
            for number in (first, *SIGNALS):
                signal.raise_signal(number)
            assert came == [first, *SIGNALS]
    with loop.stopping(active=False, several=False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert before == [signal.getsignal(number) for number in SIGNALS]


def test_processes_share_their_break_evens(tiny, monkeypatch):
    """Each process measures its own; with different break-evens they could take different paths."""

    class Two(parallel.World):
        def mean(self, values):  # the other one measured 20
            return (values + 20) / 2

    limits = {"layers.0.mlp": 10.0, "layers.1.mlp": 20.0}
    monkeypatch.setattr(switching.Switch, "measure", lambda switch, tokens: limits)
    config = tiny(kernels="auto")
    run = loop.Run(config, initial_model(config), config.text.tokens, Two(torch.device("cpu")))
    for nnz, paths in (([14.0, 30.0], ["dense", "dense"]), ([13.0, 30.0], ["twell", "dense"])):
        run.follow(nnz, [0.0, 0.0])
        assert run.switch.below == {"layers.0.mlp": 15.0, "layers.1.mlp": 20.0}
        assert [layer.module.learning for layer in run.layers] == paths


def test_a_run_goes_on_from_another_working_folder(some_text, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_bytes(some_text.tokens.numpy().tobytes())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--text", "mine.txt", "--steps", "2", *SMALL, "--out", "out"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["train", "--resume", "../out", "--steps", "3"]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("harmed_at", [killed_at, full_at])
def test_a_save_that_fails_anywhere_leaves_a_whole_checkpoint(unbroken, tmp_path, harmed_at):
    older = checkpoint.load(unbroken[1])
    newer = {**older, "step": 13}
    steps, change, harmed = [], 0, True
    while harmed:
        change += 1
        home = tmp_path / str(change)
        home.mkdir()
        checkpoint.save(home, older)
        harmed = harmed_at(change, lambda home=home: checkpoint.save(home, newer))
        there = checkpoint.load(home)
        assert same(there, older) or same(there, newer), change
        steps.append(there["step"])
        checkpoint.save(home, newer)
        assert names(home) == ["training.pt"] and same(checkpoint.load(home), newer)
    assert steps == sorted(steps) and steps[0] == 12 and steps[-1] == 13


class Planted:
    """What an unpickler that trusts its file would run."""

    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("damage", [None, {"planted": Planted()}, [1], {"step": 4}])
def test_a_damaged_checkpoint_is_refused_by_name(unbroken, tmp_path, damage, capsys):
    path = shutil.copy(unbroken[1] / checkpoint.STATE, tmp_path)
    if damage is None:
        os.truncate(path, os.path.getsize(path) // 2)
    else:
        torch.save(damage, path)
    with pytest.raises(InputError, match="training.pt in .* cannot be read"):
        checkpoint.load(tmp_path)
    assert not capsys.readouterr().out


def test_a_second_training_into_a_folder_is_refused(tiny, tmp_path, monkeypatch):
    def second(row):
        for more in ({}, {"resume": tmp_path} if (tmp_path / checkpoint.STATE).exists() else {}):
            before = files(tmp_path)
            with pytest.raises(InputError, match="in use by another training"):
                train(tiny(), **{"out": tmp_path, **more}, progress=False)
            assert files(tmp_path) == before

    monkeypatch.setattr(loop, "SAVE_EVERY", 0)
    train(tiny(), out=tmp_path, progress=False, on_step=second)
    assert checkpoint.load(tmp_path)["step"] == 12 and LOCK not in names(tmp_path)


@pytest.mark.parametrize(
    "seconds, share, saved",
    [(0, 0, [*range(1, 13)]), (0, 10**6, [1, 12]), (300, 0, [12])],  # a save that takes long is not made all the time
)
def test_a_run_is_saved_every_few_minutes(tiny, tmp_path, monkeypatch, seconds, share, saved):
    assert loop.SAVE_EVERY <= 300
    steps, real = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda folder, state: (steps.append(state["step"]), real(folder, state)))
    monkeypatch.setattr(loop, "SAVE_EVERY", seconds)
    monkeypatch.setattr(loop, "SAVE_SHARE", share)
    train(tiny(), out=tmp_path, progress=False)
    assert steps == saved


@pytest.mark.parametrize("name, value", [("lr", 1e-3), ("dead_every", 4), ("d_ff", 48), ("gated", False)])
def test_other_hyper_parameters_are_named_with_both_values(tiny, unbroken, name, value):
    result, folder = unbroken
    was = getattr(result.config, name)
    with pytest.raises(InputError, match=f"^{name} is {value!r}, and {was!r} in the checkpoint"):
        train(tiny(**{**FULL, name: value}), resume=folder, progress=False)


def test_another_text_is_refused_and_bytes_may_be_named(tiny, unbroken, tmp_path):
    (tmp_path / "other.txt").write_text("another text altogether\n" * 5000)
    with pytest.raises(InputError, match="the text's sha256 is .* in the checkpoint"):
        train(tiny(**FULL, text=tmp_path / "other.txt"), resume=unbroken[1], progress=False)
    state = checkpoint.load(unbroken[1])
    checkpoint.check_same(state, tiny(**FULL, tokenizer="bytes"), state["text"])


def test_a_run_or_a_model_is_not_written_over(tiny, unbroken, tmp_path, capsys):
    result, folder = unbroken
    before = files(folder)
    with pytest.raises(InputError, match="holds a run; accepted: to resume"):
        train(tiny(**FULL), out=folder, progress=False)
    assert before == files(folder)
    result.model.save(tmp_path)
    with pytest.raises(InputError, match="holds a model; accepted: .*another"):
        train(tiny(), out=tmp_path, progress=False)
    assert cli.main(["train", "--resume", str(folder), "--lr", "0.5"]) == 2
    assert "lr is 0.5, and 0.08 in the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("resumed", [False, True])
def test_folders_that_cannot_be_used_are_named(tiny, unbroken, tmp_path, resumed):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "metrics" / "metrics.jsonl").mkdir(parents=True)  # a name that is taken, as on a read-only disk
    resume = unbroken[1] if resumed else None
    for out in ("file/folder", "loop", "metrics"):
        with pytest.raises(InputError, match=f"{out}.* cannot be written|cannot save in .*{out}"):
            train(tiny(**FULL, steps=13), out=tmp_path / out, resume=resume, progress=False)
    with pytest.raises(InputError, match="no checkpoint in .*nothing"):
        train(tiny(), resume=tmp_path / "nothing", progress=False)


def test_a_folder_inside_of_the_text_is_refused(tiny, some_text, tmp_path):
    """What is saved there would be read as text when the run is to go on."""
    (tmp_path / "text.py").write_bytes(some_text.tokens.numpy().tobytes())
    for out in (tmp_path, tmp_path / "sub" / "out"):
        with pytest.raises(InputError, match="is inside of the text .*accepted: a folder outside of it"):
            train(tiny(text=tmp_path), out=out, progress=False)
    assert names(tmp_path) == ["text.py"]


@pytest.mark.parametrize("what", ["gradient", "validation", "off", "sparse"])
def test_what_is_not_finite_ends_a_run_and_the_checkpoint_before_stays(tiny, tmp_path, monkeypatch, what):
    """The norm of a gradient, a validation, or a weight with these kernels, whatever the loss is."""
    clip, step, calls = torch.nn.utils.clip_grad_norm_, loop._step, []

    def poisoned(*arguments, **options):
        calls.append(1)
        return clip(*arguments, **options) * (math.nan if len(calls) == 4 else 1)

    def spoil(run, number):
        numbers = step(run, number)
        if number == 4:
            with torch.no_grad():
                run.layers[0].up.weight[3] = math.nan
        return numbers

    if what == "gradient":
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    elif what == "validation":
        monkeypatch.setattr(loop, "bits_per_byte", lambda *_: math.nan)
    else:
        monkeypatch.setattr(loop, "_step", spoil)
    words = {
        "gradient": r"the norm of its gradient at step 4 with lr 0\.002 and l1 0\.01",
        "validation": "nan at step 4",
    }
    monkeypatch.setattr(loop, "SAVE_EVERY", 0)
    monkeypatch.setattr(loop, "SAVE_SHARE", 0)
    config = tiny(steps=6, kernels="off" if what in words else what)
    with pytest.raises(InputError, match=words.get(what, r"not finite in layers\.0\.mlp\.up_proj\.weight")):
        train(config, out=tmp_path, progress=False)
    assert checkpoint.load(tmp_path)["step"] == 3 and names(tmp_path) == UNFINISHED
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_first_step_that_fails_saves_nothing(tiny, tmp_path):
    with pytest.raises(InputError, match="not finite in the loss.* at step 1 .*a lower lr or l1"):
        train(tiny(l1=1e38), out=tmp_path, progress=False)
    assert names(tmp_path) == ["metrics.jsonl", "tokenizer.json"]
