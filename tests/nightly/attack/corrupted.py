"""Damaged files of every kind that the library writes. Reading one ends in an error of the library's own, or gives what
was written; where no digest covers a file, it may give something else, which all code after it accepts. Runs in
processes of its own (harness.isolated)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock

import torch

from tests.nightly.attack import kills
from tests.nightly.attack.harness import PLACE, damaged
from twell_lab import core, records, simulator
from twell_lab.analysis.plan import Plan
from twell_lab.analysis.profile import FiringProfile, profile
from twell_lab.core import TwellError
from twell_lab.models.thresholds import Thresholds, thresholds
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.simulator import toolchain
from twell_lab.training import checkpoint
from twell_lab.training.text import prepared, source, tokenizer

_HAS_PLOTLY = importlib.util.find_spec("plotly") is not None
# A digest covers these files: damage is always noticed, or makes no difference.
GUARDED = ("simulator",)


@cache
def _home() -> Path:
    return Path(tempfile.mkdtemp(dir=os.environ.get(PLACE)))


@cache
def _model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocabulary=256, d_model=8, layers=1, heads=1, d_ff=16, context=8))


# Each maker fills a folder. Each reader returns something to compare, after it has used what it read.


def _make_checkpoint(folder: Path) -> None:
    from twell_lab.training.loop import train

    train(kills.config(kills._text()), out=folder, progress=False)
    for path in [*folder.iterdir()]:
        if path.name != checkpoint.STATE:
            path.unlink()  # the final model is a kind of its own


def _read_checkpoint(folder: Path):
    state = checkpoint.load(folder)
    plain = {
        name: value
        for name, value in vars(state).items()
        if not isinstance(value, torch.Tensor) and name not in ("weights", "optimizer", "silent")
    }
    tensors = {**state.weights, **state.optimizer, "order": state.order, "noise": state.noise}
    checkpoint.config_of(folder)
    return json.dumps(plain, sort_keys=True), {
        name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items()
    }


def _make_model(folder: Path) -> None:
    _model().save(folder)


def _read_model(folder: Path):
    model = LanguageModel.load(folder)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))


def _make_text(folder: Path) -> None:
    folder.rmdir()
    prepared.prepare(str(kills._text_of(1)), folder, tokenizer="bpe:300")


def _read_text(folder: Path):
    """No digest covers the tokens themselves: reading all of them may take hours."""
    made = prepared.load(folder)
    training, validation = made.split()
    source.spread_windows(validation.tokens, 2, 8), source.spread_windows(training.tokens, 2, 8)
    json.dumps(made.describe(), allow_nan=False)


def _make_tokenizer(folder: Path) -> None:
    tokenizer.train(source.load(kills._text_of(1)), 300).save(folder / "tokenizer.json")


def _read_tokenizer(folder: Path):
    one = tokenizer.load(folder / "tokenizer.json")
    sample = torch.tensor([*b"a text with 31 numbers\xff in it"], dtype=torch.uint8)
    tokens = one.encode(sample, (0,))
    assert one.decode(tokens) == bytes(sample.tolist()), "what it encodes it does not give back"


def _make_record(folder: Path) -> None:
    rows = [
        {
            "kind": "ffn_forward",
            "device": "cpu",
            "path": "twell",
            "ms": 0.5,
            "tokens": 4,
            "nnz": 2.5,
            "dense_ms": 1.0,
            "x_dense": 2.0,
            "spread": 0.05,
        },
        {"suite": "free in form", "passed": 3},
    ]
    records.Record(
        name="attacked",
        purpose="a test's own",
        rows=rows,
        date="2026-01-02T03:04:05Z",
        commit=None,
        dirty=None,
        kernels={},
        machine={"os": "x"},
        notes={"gpu_tests": {"passed": 1, "failed": 0}},
    ).save(folder)
    (folder / records.UNVERIFIED).write_text(
        json.dumps({"kernels": {"smxx_pack": "0" * 64}, "why": "not yet", "date": "2026-01-02"})
    )


def _read_record(folder: Path):
    with mock.patch.object(records, "kernel_hashes", lambda tree=None: {"smxx_pack": "0" * 64}):
        rows = records.flat_rows(records.load_all(folder))
        records.table(rows, dict.fromkeys(records.FLAT_KEYS, "x"))
        json.dumps(rows, allow_nan=False)
        records.verify(folder)


def _make_profile(folder: Path) -> None:
    profile(_model(), [torch.zeros(2, 8, dtype=torch.long)]).save(folder / "profile.json")


def _read_profile(folder: Path):
    found = FiringProfile.load(folder / "profile.json")
    str(found), found.tokens, found.save(folder / "again.json")
    json.dumps(found.table(), allow_nan=False)


def _make_plan(folder: Path) -> None:
    from twell_lab.analysis.planner import plan

    windows = torch.zeros(2, 8, dtype=torch.long)
    plan(profile(_model(), [windows]), _model(), tokens=(1, 8), measure=False).save(folder / "plan.json")


def _read_plan(folder: Path):
    found = Plan.load(folder / "plan.json")
    str(found), found.timed_on, found.save(folder / "again.json")
    json.dumps(found.table(), allow_nan=False)
    for layer in found.layers:
        str(layer), layer.choice(1), layer.choice(10**6)


def _make_thresholds(folder: Path) -> None:
    thresholds(_model(), [torch.zeros(2, 8, dtype=torch.long)]).save(folder / "thresholds.json")


def _read_thresholds(folder: Path):
    found = Thresholds.load(folder / "thresholds.json")
    str(found), found.save(folder / "again.json")
    json.dumps(found.table(), allow_nan=False)
    found.remove(found.apply(_model()))


def _make_tour(folder: Path) -> None:
    newest = sorted(Path(core.records_dir()).glob("tour-*.json"))[-1]
    shutil.copyfile(newest, folder / "tour.json")


def _read_tour(folder: Path):
    from twell_lab.app.page import render_file

    with mock.patch.object(records, "load_all", lambda folder=None: []):  # the project's own, which take long
        if _HAS_PLOTLY:
            render_file(folder / "tour.json", folder / "page")


def _make_metrics(folder: Path) -> None:
    from twell_lab.training.loop import train

    train(kills.config(kills._text()), out=folder, progress=False)


def _read_metrics(folder: Path):
    """A resumed run makes the file anew."""
    from twell_lab.training.loop import train

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(kills.config(kills._text()), resume=folder, progress=False)
    return [sorted(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _make_simulator(folder: Path) -> None:
    if simulator.available():
        _simulator(folder, None)


def _simulator(folder: Path, made) -> object:
    """Kernels, arrays and the content of the library of a build in this folder. Where the cache is not whole, `made` is
    put there in place of a new build."""
    program = simulator.compile("smxx_transpose.cu", {"VALUE_BF16": True})
    real = toolchain._make
    if made is not None:

        def again(cxx, sources, entry, defines, kind, folder, name):
            (folder / f"{name}.so").unlink(missing_ok=True) if (folder / f"{name}.so").is_file() else None
            (folder / f"{name}.so").write_bytes(made[3])
            return made[:3]

        real = again
    with mock.patch.object(toolchain, "_make", real), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = toolchain.build(program.sources, program.file, program.defines, "fast", cache_in=folder)
    return built.kernels, built.shared, tuple(built.dynamic), built.path.read_bytes()


@cache
def _simulated() -> object:
    return _simulator(_pristine("simulator"), None)


def _read_simulator(folder: Path):
    return _simulator(folder, _simulated()) if simulator.available() else None


KINDS = {
    "checkpoint": (_make_checkpoint, _read_checkpoint, 6),
    "model": (_make_model, _read_model, 4),
    "text": (_make_text, _read_text, 4),
    "tokenizer": (_make_tokenizer, _read_tokenizer, 4),
    "record": (_make_record, _read_record, 6),
    "profile": (_make_profile, _read_profile, 6),
    "plan": (_make_plan, _read_plan, 6),
    "thresholds": (_make_thresholds, _read_thresholds, 4),
    "tour": (_make_tour, _read_tour, 3),
    "metrics": (_make_metrics, _read_metrics, 1),
    "simulator": (_make_simulator, _read_simulator, 3),
}


@cache
def _pristine(kind: str) -> Path:
    folder = _home() / kind
    folder.mkdir()
    KINDS[kind][0](folder)
    return folder


@cache
def _right(kind: str):
    copy = _home() / f"{kind}-right"
    shutil.copytree(_pristine(kind), copy)
    return KINDS[kind][1](copy)


def check(r: Random, counts: Counter) -> None:
    """One file of one kind damaged, or gone, or a folder in its place."""
    kind = r.choices(tuple(KINDS), [weight for _, _, weight in KINDS.values()])[0]
    right, folder = _right(kind) if kind in GUARDED else None, Path(tempfile.mkdtemp(dir=_home()))
    shutil.rmtree(folder)
    shutil.copytree(_pristine(kind), folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if kind == "metrics":
        files = [folder / "metrics.jsonl"]
    if not files:
        return
    path, way = r.choice(files), r.random()
    name = path.relative_to(folder)
    if way < 0.03:
        path.unlink()
        done = "gone"
    elif way < 0.05:
        path.unlink()
        path.mkdir()
        done = "a folder"
    else:
        before = path.read_bytes()
        after, done = damaged(before, r)
        if after == before:
            return
        path.write_bytes(after)
    counts.update([kind])
    counts["checked"] += 1
    try:
        got = KINDS[kind][1](folder)
    except (TwellError, OSError) if kind == "metrics" else TwellError as error:  # noqa: B030
        assert len(str(error)) < 3000 and str(error).strip(), (
            f"{kind}: {name} {done}: {type(error).__name__} without a word, or too many"
        )
        counts["refused"] += 1
    except Exception as error:
        raise AssertionError(f"{kind}: {name}, {done}: {type(error).__name__}: {error}") from error
    else:
        assert kind not in GUARDED or got == right, f"{kind}: {name}, {done}: it was read, and is not what was written"
        counts["harmless" if kind in GUARDED else "read"] += 1
    finally:
        shutil.rmtree(folder)
