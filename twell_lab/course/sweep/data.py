"""What notebook 04 says of the recorded L1 sweep, as functions of its rows; and the models of data/checkpoints."""

from __future__ import annotations

from pathlib import Path

from ... import core, records
from ...core import InputError, RecordError
from ...models.tiny import LanguageModel
from ...training.sweep import pressed, twin
from ..recorded import device_and_day

# What a sparse point must have: this share of zeros, and a loss at most this far above its twin's.
ZEROS, MORE = 0.97, 0.02


def recorded(folder=None) -> records.Record:
    """The newest record of a sweep (twell-lab record sweep). RecordError where there is none."""
    found = [record for record in records.load_all(folder) if record.name == "sweep"]
    if not found:
        raise RecordError("there is no record of a sweep here; accepted: one made by `twell-lab record sweep` on a GPU")
    return found[-1]


def where(record: records.Record) -> str:
    """The device and the day of a record: "recorded on NVIDIA H100 80GB HBM3, 2026-11-21"."""
    gpus = record.machine.get("gpus")
    device = gpus[0]["name"] if gpus else record.machine.get("cpu") or "an unnamed machine"
    return f"recorded on {device_and_day(device, record.date)}"


def name(row: dict, rows: list[dict]) -> str:
    """Return what to call a run in a figure."""
    if row is twin(rows):
        return f"no L1, {row['label']} (the twin)"
    return f"no L1, {row['label']}" if not row["config"]["l1"] else row["label"]


def renewed(rows: list[dict]) -> list[tuple[dict, dict]]:
    """Pairs (without, with) of runs that differ in re-initialisation alone, by L1."""
    without = {row["config"]["l1"]: row for row in pressed(rows)}
    again = sorted((row for row in rows if row["config"].get("reinit")), key=lambda row: row["config"]["l1"])
    return [(without[row["config"]["l1"]], row) for row in again]


def byte_name(value: int) -> str:
    """A byte as a reader would name it."""
    named = {10: "line feed", 13: "carriage return", 32: "space", 9: "tab"}
    return named.get(value) or (repr(chr(value)) if 33 <= value < 127 else f"byte {value}")


def extremes(row: dict, each: int = 8) -> list[tuple[str, float]]:
    """(name, nnz) of the bytes for which the fewest and the most neurons fire, mean over layers, fewest first."""
    seen = row["bytes"]
    mean = [sum(layer[i] for layer in seen["nnz"]) / len(seen["nnz"]) for i in range(len(seen["value"]))]
    order = sorted(range(len(mean)), key=lambda i: mean[i])
    picked = order if len(order) <= 2 * each else order[:each] + order[-each:]
    return [(byte_name(seen["value"][i]), mean[i]) for i in picked]


# ---- the models of data/checkpoints ----

CHECKPOINTS = ("l1-free", "small", "sparse")


def checkpoints() -> list[str]:
    """The names of CHECKPOINTS, which are here also in an installed package."""
    return list(CHECKPOINTS)


def folder(name: str) -> Path:
    """The folder of one of CHECKPOINTS; in an installed package that of a smaller twin for "l1-free" and "sparse".
    InputError for another name."""
    if name not in CHECKPOINTS:
        raise InputError(f"name is {name!r}; accepted: {', '.join(CHECKPOINTS)}")
    whole = core.data_dir() / "checkpoints" / name
    return whole if whole.is_dir() else whole.with_name(f"{name}-small")


def checkpoint(name: str) -> LanguageModel:
    """The trained model in `folder`, on the CPU; data/checkpoints/README.md says what each is. InputError for a name
    that is none of CHECKPOINTS."""
    return LanguageModel.load(folder(name)).eval()
