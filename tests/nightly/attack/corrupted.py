"""Damaged files of every kind that the library writes. Reading one ends in an error of the library's own, or gives
something that all code after it accepts: no digest says whether it is what was written. Runs in processes of its own
(harness.isolated)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock

import torch

from tests.nightly.attack import kills
from tests.nightly.attack.harness import damaged, home
from twell_lab import records
from twell_lab.analysis.planner import Plan, plan
from twell_lab.analysis.profile import FiringProfile, profile
from twell_lab.core import TwellError
from twell_lab.models.thresholds import Thresholds, thresholds
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training import checkpoint
from twell_lab.training.loop import train
from twell_lab.training.text import source, tokenizer

_HAS_PLOTLY = importlib.util.find_spec("plotly") is not None
WINDOWS = [torch.zeros(2, 8, dtype=torch.long)]


@cache
def _model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocabulary=256, d_model=8, layers=1, heads=1, d_ff=16, context=8))


def _profiled() -> FiringProfile:
    return profile(_model(), WINDOWS)


# Each maker fills a folder. Each reader uses what it read.


def _make_run(folder: Path) -> None:
    """A training's checkpoint and metrics, without its final model, which is a kind of its own."""
    train(kills.config(kills.text()), out=folder, progress=False)
    for path in [*folder.iterdir()]:
        if path.name not in (checkpoint.STATE, "metrics.jsonl"):
            path.unlink()


def _read_checkpoint(folder: Path):
    checkpoint.load(folder)
    checkpoint.config_of(folder)


def _read_model(folder: Path):
    model = LanguageModel.load(folder)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))


@cache
def _texts() -> str:
    folder = home() / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"document {i} of a text\n" * 40)
    return str(folder)


def _make_text(folder: Path) -> None:
    folder.rmdir()
    source.prepare(_texts(), folder, tokenizer="bpe:300")


def _read_text(folder: Path):
    """No digest covers the tokens themselves: reading all of them may take hours."""
    made = source.load_prepared(folder)
    training, validation = made.split()
    source.spread_windows(validation.tokens, 2, 8), source.spread_windows(training.tokens, 2, 8)
    json.dumps(made.describe(), allow_nan=False)


def _make_tokenizer(folder: Path) -> None:
    trained = tokenizer.train([bytes(source.load(_texts()).tokens.numpy())], 300, "text")
    (folder / "tokenizer.json").write_text(trained.content)


def _read_tokenizer(folder: Path):
    one = tokenizer.load(folder / "tokenizer.json")
    one.decode(one.encode([b"a text with 31 numbers\xff in it"]))


def _make_record(folder: Path) -> None:
    row = {"kind": "ffn_forward", "device": "cpu", "path": "twell", "ms": 0.5, "tokens": 4, "nnz": 2.5}
    row |= {"dense_ms": 1.0, "x_dense": 2.0, "spread": 0.05}
    origin = {"date": "2026-01-02T03:04:05Z", "commit": None, "dirty": None, "kernels": {}, "machine": {"seed": 1}}
    notes = {"gpu_tests": {"passed": 1, "failed": 0}}
    records.Record("attacked", "damaged", [row, {"value": 1}], **origin, notes=notes).save(folder)
    unverified = {"kernels": {"smxx_pack": "0" * 64}, "why": "not yet", "date": "2026-01-02"}
    (folder / records.UNVERIFIED).write_text(json.dumps(unverified))


def _read_record(folder: Path):
    with mock.patch.object(records, "kernel_hashes", lambda tree=None: {"smxx_pack": "0" * 64}):
        rows = records.flat_rows(records.load_all(folder))
        records.table(rows, dict.fromkeys(records.FLAT_KEYS, "x"))
        json.dumps(rows, allow_nan=False)
        records.verify(folder)


def _read_as(kind: type, then: Callable):
    """Return a reader of a result that is saved as JSON, which uses all that it gives."""

    def read(folder: Path):
        result = kind.load(folder / "it.json")
        str(result), result.save(folder / "again.json")
        then(result)

    return read


def _tabulate(found: FiringProfile | Plan) -> None:
    json.dumps(found.table(), allow_nan=False)


def _choose(found: Plan) -> None:
    _tabulate(found)
    for layer in found.layers:
        str(layer), layer.choice(1), layer.choice(10**6)


def _read_metrics(folder: Path):
    """A resumed run makes the file anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(kills.config(kills.text()), resume=folder, progress=False)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


KINDS = {  # how each is made and read, and how often it is drawn
    "checkpoint": (_make_run, _read_checkpoint, 6),
    "model": (lambda folder: _model().save(folder), _read_model, 4),
    "text": (_make_text, _read_text, 4),
    "tokenizer": (_make_tokenizer, _read_tokenizer, 4),
    "record": (_make_record, _read_record, 6),
    "profile": (lambda folder: _profiled().save(folder / "it.json"), _read_as(FiringProfile, _tabulate), 6),
    "plan": (
        lambda folder: plan(_profiled(), _model(), tokens=(1, 8), measure=False).save(folder / "it.json"),
        _read_as(Plan, _choose),
        6,
    ),
    "thresholds": (
        lambda folder: thresholds(_model(), WINDOWS).save(folder / "it.json"),
        _read_as(Thresholds, lambda found: found.remove(found.apply(_model()))),
        4,
    ),
    "metrics": (_make_run, _read_metrics, 1),
}


@cache
def _pristine(kind: str) -> Path:
    folder = home() / kind
    folder.mkdir()
    KINDS[kind][0](folder)
    return folder


def check(r: Random, counts: Counter) -> None:
    """One file of one kind damaged, or gone, or a folder in its place."""
    kind = r.choices(tuple(KINDS), [weight for _, _, weight in KINDS.values()])[0]
    folder = Path(tempfile.mkdtemp(dir=home()))
    shutil.rmtree(folder)
    shutil.copytree(_pristine(kind), folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if kind == "metrics":
        files = [folder / "metrics.jsonl"]
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
        KINDS[kind][1](folder)
    except (TwellError, OSError) if kind == "metrics" else TwellError as error:  # noqa: B030
        assert len(str(error)) < 3000 and str(error).strip(), (
            f"{kind}: {name} {done}: {type(error).__name__} without a word, or too many"
        )
        counts["refused"] += 1
    except Exception as error:
        raise AssertionError(f"{kind}: {name}, {done}: {type(error).__name__}: {error}") from error
    else:
        counts["read"] += 1
    finally:
        shutil.rmtree(folder)
