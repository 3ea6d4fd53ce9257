"""Trainings that are killed with SIGKILL, after some time or before their n-th change of a file, and that then go on.
Nothing that was saved may be lost, nothing half written may be read, nothing may be left behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import torch

from tests.nightly.attack.harness import forked, home
from tests.training.conftest import TIMES
from tests.training.train.harming import before_change
from twell_lab.training import checkpoint
from twell_lab.training.config import TrainConfig

LEFT = (".part", ".old", "building-", ".tmp")


def config(text: Path) -> TrainConfig:
    sizes = {"steps": 14, "batch": 4, "context": 16, "d_model": 16, "layers": 2, "heads": 2, "d_ff": 32, "l1": 0.01}
    rows = {"log_every": 2, "eval_every": 7, "eval_windows": 8}
    return TrainConfig(**sizes, **rows, device="cpu", text=str(text))


@cache
def text() -> Path:
    path = home() / "text.txt"
    path.write_text("".join(f"line {i * i % 7919} of a text with {i % 31} numbers in it\n" for i in range(4000)))
    return path


def curve(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def train_here(out: str, text: str, resume: bool, count: int, said: str) -> None:
    """In a process that may be killed, train, and note in the file `said` each step whose checkpoint was saved, and at
    the end the result."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    from twell_lab.training import loop  # loaded before anything is counted

    loop.SAVE_EVERY = loop.SAVE_SHARE = 0  # a checkpoint after each step
    if count:
        before_change(count, lambda: os.kill(os.getpid(), signal.SIGKILL))
    real = checkpoint.save

    def save(folder, state):
        real(folder, state)
        _note(said, f"saved {state['step']}")

    checkpoint.save = save
    try:
        result = loop.train(config(Path(text)), progress=False, **({"resume": out} if resume else {"out": out}))
    except BaseException as error:
        _note(said, f"failed {type(error).__name__}: {error}")
        os._exit(1)
    weights = b"".join(weight.numpy().tobytes() for weight in result.model.state_dict().values())
    end = {"rows": curve(result.history), "weights": hashlib.sha256(weights).hexdigest()}
    _note(said, "done " + json.dumps(end))
    os._exit(0)


def _note(said: str, line: str) -> None:
    with open(said, "a") as file:
        file.write(line.replace("\n", " ") + "\n")


@cache
def unbroken() -> dict:
    """The result of a run that nothing disturbs: the rows of its history and a digest of its weights."""
    out, said = home() / "unbroken", home() / "unbroken.said"
    _run(train_here, str(out), str(text()), False, 0, str(said))
    lines = said.read_text().splitlines()
    assert lines[-1].startswith("done "), lines[-1]
    return json.loads(lines[-1].removeprefix("done "))


def _run(target, *arguments, after: float | None = None) -> int | None:
    """The exit code of target(*arguments) in a process of its own, killed after so many seconds."""
    process = forked(target, *arguments)
    if after is not None:
        process.join(after)
        process.kill()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("not done within 120 s")
    return process.exitcode


def check_training(r: Random, counts: Counter) -> None:
    """One run, killed once or more often, and resumed until it is done."""
    whole = unbroken()
    folder = Path(tempfile.mkdtemp(dir=home()))
    out, said = folder / "out", folder / "said"
    newest, resume = 0, False
    for attempt in range(8):
        last = attempt >= r.choice((1, 1, 2, 3))
        at = 0 if last or r.random() < 0.3 else r.choice((r.randint(1, 12), r.randint(1, 12), r.randint(1, 150)))
        after = None if last or at else r.uniform(0.0, 0.7)
        before = newest
        code = _run(train_here, str(out), str(text()), resume, at, str(said), after=after)
        lines = said.read_text().splitlines() if said.exists() else []
        told = max([0, *(int(line.split()[1]) for line in lines if line.startswith("saved "))])
        how = f"attempt {attempt}, {'resumed' if resume else 'begun'}, killed " + (
            f"before change {at}" if at else f"after {after} s"
        )
        assert not (lines and lines[-1].startswith("failed ")), f"{how}: {lines[-1]}"
        if code == 0:
            break
        assert code == -signal.SIGKILL, f"{how}: exit status {code}"
        counts["kills"] += 1
        counts["before a change of a file" if at else "at a moment"] += 1
        resume = (out / checkpoint.STATE).exists()
        newest = checkpoint.load(out)["step"] if resume else 0
        assert newest >= max(told, before), (
            f"{how}: the checkpoint of step {max(told, before)} was there, and now step {newest}'s is"
        )
    else:
        raise AssertionError("the run was never left to end")
    done = json.loads(lines[-1].removeprefix("done "))
    assert done == whole, f"killed and resumed, the run came to something else after {how}"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert curve(rows) == whole["rows"]
    nothing_left(out)
    shutil.rmtree(folder)
    counts["checked"] += 1


def nothing_left(folder: Path) -> None:
    found = (path for path in folder.rglob("*") if not path.name.startswith("."))  # temporary files may stay
    left = [str(path.relative_to(folder)) for path in found if any(mark in path.name for mark in LEFT)]
    assert not left, f"left behind: {left}"
