"""Runs with more and more L1, recorded or trained now, as rows for `figures`; and the models of data/checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ... import core, records
from ...core import InputError
from ...models.tiny import LanguageModel
from ...training.config import TrainResult
from ...training.sweep import pressed
from ..recorded import device_and_day


def rows(results: Iterable[TrainResult]) -> list[dict]:
    """Return runs of one model as rows like those of a recorded sweep. The first seed's run without L1 is the twin."""
    made = []
    for run in results:
        config, names = run.summary()["config"], ("step", "nnz", "val_bits_per_byte")
        history = {name: [row.get(name) for row in run.history] for name in names}
        label = f"L1 {run.config.l1:g}" if run.config.l1 else f"lr {run.config.lr:g}"
        row = {"label": label, "config": config, "history": history, "mean_nnz": run.mean_nnz}
        row |= {"zeros": 1 - run.mean_nnz / run.config.d_ff, "validation_bits_per_byte": run.validation_bits_per_byte}
        made.append(row | {"layers": [{"nnz": share * run.config.d_ff} for share in run.density]})
        if made[0]["config"]["seed"] != run.config.seed:
            made[-1]["label"] = f"seed {run.config.seed}"
    return made


def recorded() -> records.Record:
    """Return the newest record of a sweep (twell-lab record sweep)."""
    return [record for record in records.load_all() if record.name == "sweep"][-1]


def where(record: records.Record) -> str:
    """Return the device and the day of a record: "recorded on NVIDIA H100 80GB HBM3, 2026-11-21"."""
    gpus = record.machine.get("gpus")
    device = gpus[0]["name"] if gpus else record.machine.get("cpu") or "an unnamed machine"
    return f"recorded on {device_and_day(device, record.date)}"


def renewed(rows: list[dict]) -> list[tuple[dict, dict]]:
    """Return pairs (without, with) of runs that differ in re-initialisation alone, by L1."""
    without = {row["config"]["l1"]: row for row in pressed(rows)}
    again = sorted((row for row in rows if row["config"].get("reinit")), key=lambda row: row["config"]["l1"])
    return [(without[row["config"]["l1"]], row) for row in again]


CHECKPOINTS = ("l1-free", "small", "sparse")


def folder(name: str) -> Path:
    """Return the folder of one of CHECKPOINTS; in an installed package that of a smaller twin for "l1-free" and
    "sparse". InputError for another name."""
    if name not in CHECKPOINTS:
        raise InputError(f"name is {name!r}; accepted: {', '.join(CHECKPOINTS)}")
    whole = core.data_dir() / "checkpoints" / name
    return whole if whole.is_dir() else whole.with_name(f"{name}-small")


def checkpoint(name: str) -> LanguageModel:
    """Return the trained model in `folder`, on the CPU; data/checkpoints/README.md says what each is."""
    return LanguageModel.load(folder(name)).eval()
