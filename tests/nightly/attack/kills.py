"""Trainings, preparations and saves that are killed with SIGKILL, after some time or before their n-th change of a file,
and that then go on. Nothing that was saved may be lost, nothing half written may be read, nothing may be left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import torch

from tests.nightly.attack.harness import PLACE, forked
from twell_lab import core, records
from twell_lab.analysis.planner import Plan
from twell_lab.analysis.profile import FiringProfile, profile
from twell_lab.core import TwellError
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training import checkpoint
from twell_lab.training.config import TrainConfig
from twell_lab.training.text import source
from twell_lab.training.text.source import BYTES
from twell_lab.training.text.tokenizer import load as load_tokenizer

EVENTS = tuple("open os.rename os.mkdir os.remove os.rmdir os.unlink shutil.rmtree shutil.copyfile os.truncate".split())
TIMES = ("seconds", "tokens_per_s")  # all else in a history is the same for the same seed
LEFT = (".part", ".old", "building-", ".tmp")


def config(text: Path) -> TrainConfig:
    sizes = {"steps": 14, "batch": 4, "context": 16, "d_model": 16, "layers": 2, "heads": 2, "d_ff": 32, "l1": 0.01}
    rows = {"log_every": 2, "eval_every": 7, "eval_windows": 8}
    return TrainConfig(**sizes, **rows, device="cpu", text=str(text))


@cache
def _home() -> Path:
    return Path(tempfile.mkdtemp(dir=os.environ.get(PLACE)))


@cache
def _text() -> Path:
    path = _home() / "text.txt"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text("".join(f"line {i * i % 7919} of a text with {i % 31} numbers in it\n" for i in range(4000)))
        part.replace(path)
    return path


# ---- in the process that is killed ----


def _die_before(count: int, folder: str) -> None:
    """Have this process killed just before it changes a file in the folder for the count-th time."""
    seen = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event not in EVENTS or not any(
            isinstance(a, (str, bytes, os.PathLike)) and os.fsdecode(a).startswith(folder) for a in arguments
        ):
            return
        if event == "open" and isinstance(arguments[2], int) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _quietly() -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def train_here(out: str, text: str, resume: bool, count: int, said: str) -> None:
    """A training that notes in the file `said` each step whose checkpoint was saved, and at the end its result."""
    _quietly()
    from twell_lab.training import loop  # loaded before anything is counted

    loop.SAVE_EVERY = loop.SAVE_SHARE = 0  # a checkpoint after each step
    if count:
        _die_before(count, out)
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
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in result.history]
    _note(said, "done " + json.dumps({"rows": rows, "weights": _digest(result.model)}))
    os._exit(0)


def _digest(model) -> str:
    import hashlib

    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole.update(name.encode() + value.numpy().tobytes())
    return whole.hexdigest()


def _note(said: str, line: str) -> None:
    with open(said, "a") as file:
        file.write(line.replace("\n", " ") + "\n")


# ---- trainings ----


@cache
def unbroken() -> dict:
    """The result of a run that nothing disturbs: the rows of its history and a digest of its weights."""
    out, said = _home() / "unbroken", _home() / "unbroken.said"
    _run(train_here, str(out), str(_text()), False, 0, str(said))
    lines = said.read_text().splitlines()
    assert lines[-1].startswith("done "), lines[-1]
    return json.loads(lines[-1].removeprefix("done "))


def _run(
    target, *arguments, after: float | None = None, number: int = signal.SIGKILL, limit: float = 120.0
) -> int | None:
    """The exit code of target(*arguments) in a process of its own, sent a signal after so many seconds."""
    process = forked(target, *arguments)
    if after is not None:
        process.join(after)
        if process.exitcode is None:
            os.kill(process.pid, number)
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"not done within {limit:.0f} s")
    return process.exitcode


def check_training(r: Random, counts: Counter) -> None:
    """One run, killed once or more often, and resumed until it is done."""
    whole = unbroken()
    folder = Path(tempfile.mkdtemp(dir=_home()))
    out, said = folder / "out", folder / "said"
    newest, resume = 0, False
    for attempt in range(8):
        last = attempt >= r.choice((1, 1, 2, 3))
        at = 0 if last or r.random() < 0.3 else r.choice((r.randint(1, 12), r.randint(1, 12), r.randint(1, 150)))
        after = None if last or at else r.uniform(0.0, 0.7)
        before = newest
        code = _run(train_here, str(out), str(_text()), resume, at, str(said), after=after)
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
    assert [{k: v for k, v in row.items() if k not in TIMES} for row in rows] == whole["rows"]
    _nothing_left(out)
    shutil.rmtree(folder)
    counts["checked"] += 1


def _nothing_left(folder: Path) -> None:
    found = (path for path in folder.rglob("*") if not path.name.startswith("."))  # temporary files may stay
    left = [str(path.relative_to(folder)) for path in found if any(mark in path.name for mark in LEFT)]
    assert not left, f"left behind: {left}"


# ---- everything else that is written ----


def _record(seed: int) -> records.Record:
    rows, date = [{"value": seed}] * (seed % 50 + 1), "2026-01-02T03:04:05Z"
    origin = {"date": date, "commit": None, "dirty": None, "kernels": {}, "machine": {"seed": seed}}
    return records.Record(name="attacked", purpose=f"number {seed}", rows=rows, **origin)


def _model(seed: int) -> LanguageModel:
    model = LanguageModel(ModelConfig(vocabulary=16, d_model=8, layers=1, heads=1, d_ff=16, context=8))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(seed)
    return model


def write_here(kind: str, folder: str, seed: int, count: int) -> None:
    """One save of one kind, in a process that may be killed in the middle."""
    _quietly()
    work = _prepared_to(kind, Path(folder), seed)
    if count:
        _die_before(count, folder)
    try:
        work()
    except TwellError as error:
        _note(folder + ".said", f"failed {type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def _prepared_to(kind: str, folder: Path, seed: int):
    """What saves a thing of this kind, another for each seed."""
    if kind == "profile":
        windows = torch.randint(16, (1 + seed % 4, 8), generator=torch.Generator().manual_seed(seed))
        firing = profile(_model(1), [windows])
        return lambda: firing.save(folder / "profile.json")
    return {
        "record": lambda: core.write_atomically(folder / "record.json", _record(seed).to_json()),
        "model": lambda: _model(seed).save(folder),
        "tokenizer": lambda: core.write_atomically(folder / "tokenizer.json", BYTES.content),
        "plan": lambda: Plan([], "cpu", "float32", rates={"a": float(seed)}).save(folder / "plan.json"),
        "text": lambda: source.prepare(str(_text_of(seed)), folder),
    }[kind]


def _text_of(seed: int) -> Path:
    folder = _home() / f"text-{seed % 3}"
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=_home()))
        for i in range(20):
            (part / f"{i:02}.txt").write_text(f"document {i} of text {seed % 3}\n" * 40)
        try:
            part.rename(folder)
        except OSError:
            shutil.rmtree(part)
    return folder


def _read(kind: str, folder: Path):
    """Something that tells apart what was saved there; None where there is nothing of that name."""
    if kind == "text":
        if not source.is_prepared(folder):
            return None
        made = source.load_prepared(folder)
        return made.sha256, bytes(made.tokens.numpy()).decode()[:30]
    files = {"model": ["model.safetensors", "config.json"]}.get(kind, [f"{kind}.json"])
    if not all((folder / name).exists() for name in files):
        return None
    return {
        "record": lambda path: records.load(path).purpose,
        "model": lambda path: float(next(LanguageModel.load(folder).parameters()).detach().flatten()[0]),
        "tokenizer": lambda path: load_tokenizer(path).vocabulary,
        "profile": lambda path: FiringProfile.load(path).tokens,
        "plan": lambda path: Plan.load(path).rates["a"],
    }[kind](folder / files[0])


KINDS = ("record", "model", "tokenizer", "profile", "plan", "text", "text")


def check_writer(r: Random, counts: Counter, kinds: tuple[str, ...] = KINDS) -> None:
    """One thing is saved, saved again by a process that is killed, then saved a third time. What has its name must be
    whole at every time."""
    kind = r.choice(kinds)
    folder = Path(tempfile.mkdtemp(dir=_home())) / "out"
    folder.mkdir()
    first, second = r.sample(range(1, 1000), 2)
    old = None
    if kind != "text" and r.random() < 0.7:
        assert _run(write_here, kind, str(folder), first, 0) == 0
        old = _read(kind, folder)
    elif kind == "text":
        folder.rmdir()
    at = r.randint(1, 8)
    code = _run(write_here, kind, str(folder), second, at)
    assert code in (0, -signal.SIGKILL), f"{kind}: exit status {code}"
    counts.update([kind, "kills"] if code else [kind])
    there = _read(kind, folder)  # raises where something half has the name
    assert _run(write_here, kind, str(folder), second, 0) == 0 or kind == "text" and there, (
        f"{kind}, killed before change {at}: cannot be saved again: {Path(str(folder) + '.said').read_text()}"
    )
    new = _read(kind, folder)
    assert there in (old, new), f"{kind}, killed before change {at}: {there!r} is neither {old!r} nor {new!r}"
    _nothing_left(folder)
    shutil.rmtree(folder.parent)
    counts["checked"] += 1
