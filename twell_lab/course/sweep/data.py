"""What notebook 04 says of the recorded L1 sweep, as functions of its rows; and the models of data/checkpoints."""

from __future__ import annotations

import torch
from torch import nn

from ... import core, records
from ...analysis.profile import activations
from ...core import InputError, RecordError, StackError
from ...formats.twell import fires
from ...layers.find import feed_forwards
from ...models.tiny import LanguageModel
from ...training.sweep import best_sparse, cost, pressed, seed_spread, twin
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


def _ordered(rows: list[dict]) -> list[dict]:
    """Rows by L1, those without L1 first; a run with re-initialisation comes after the one without."""
    return sorted(
        rows,
        key=lambda row: (
            row["config"]["l1"],
            bool(row["config"].get("reinit")),
            row["config"]["lr"],
            row["config"]["seed"],
        ),
    )


def verdict(rows: list[dict], zeros: float = ZEROS, more: float = MORE) -> list[str]:
    """Return what the sweep found, in sentences computed from its rows."""
    base, best = twin(rows), best_sparse(pressed(rows), zeros)
    d_ff = base["config"]["d_ff"]
    lines = [
        f"Without L1: {base['mean_nnz']:.0f} of {d_ff} neurons fire for a token ({base['zeros']:.1%} zeros), "
        f"{base['validation_bits_per_byte']:.4f} bits per byte."
    ]
    if best is None:
        return [*lines, f"No run reached {zeros:.0%} zeros."]
    within = [row for row in pressed(rows) if row["zeros"] >= zeros and cost(row, rows) <= more]
    lines.append(
        f"Best sparse point, {best['label']}: {best['mean_nnz']:.1f} fire ({best['zeros']:.1%} zeros), "
        f"{best['validation_bits_per_byte']:.4f} bits per byte, {cost(best, rows):+.2%} against the twin."
    )
    if within and (most := max(within, key=lambda row: row["zeros"])) is not best:
        lines.append(
            f"Most zeros within {more:.0%}, {most['label']}: {most['mean_nnz']:.1f} fire ({most['zeros']:.1%} zeros), "
            f"{cost(most, rows):+.2%}."
        )
    if (spread := seed_spread(rows)) is not None:
        lines.append(f"Another seed alone moves the twin's loss by {spread:.2%}: a smaller difference means nothing.")
    for again in rows:
        if again["label"] in {f"{row['label']}, seed {again['config']['seed']}" for row in within}:
            lines.append(
                f"{again['label']}: {again['zeros']:.1%} zeros, {cost(again, rows):+.2%} against the twin of that seed."
            )
    lines.append(
        f"Asked for: at least {zeros:.0%} zeros at no more than {more:.0%} above the twin. "
        f"{'Reached' if within else 'Not reached'}."
    )
    return lines


def three_lines(rows: list[dict], more: float = MORE) -> list[str]:
    """Return what the sweep comes to: the sparsest run whose loss another seed might explain, the sparsest within
    `more`, and what renewing dead rows changed. Lines that these rows do not carry are left out."""
    base, spread, lines = twin(rows), seed_spread(rows), []
    for limit, said in (
        (
            spread,
            "With a loss no further from the twin's than another seed's ({:.1%}), {} of {:,} fire; without L1, {:.0f}.",
        ),
        (more, "Within {:.1%} of the twin's loss: {} fire."),
    ):
        found = [row for row in pressed(rows) if limit is not None and cost(row, rows) <= limit]
        if found:
            best = min(found, key=lambda row: row["mean_nnz"])
            lines.append(said.format(limit, f"{best['mean_nnz']:.0f}", base["config"]["d_ff"], base["mean_nnz"]))
    if pairs := renewed(rows):
        dead = [[sum(layer["dead"] for layer in row["layers"]) for row in pair] for pair in pairs]
        moved = max(abs(cost(after, rows) - cost(before, rows)) for before, after in pairs)
        again = 1 - max(after / before for before, after in dead)
        lines.append(f"Renewed, at least {again:.0%} of the dead fire again; the loss moves by {moved:.1%} at most.")
    return lines


def renewed(rows: list[dict]) -> list[tuple[dict, dict]]:
    """Pairs (without, with) of runs that differ in re-initialisation alone, by L1."""
    without = {row["config"]["l1"]: row for row in pressed(rows)}
    return [(without[row["config"]["l1"]], row) for row in _ordered(rows) if row["config"].get("reinit")]


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
    """The names of CHECKPOINTS that are here: all in a checkout, "small" alone in an installed package."""
    folder = core.data_dir() / "checkpoints"
    return [name for name in CHECKPOINTS if (folder / name / "model.safetensors").is_file()]


def checkpoint(name: str) -> LanguageModel:
    """A trained model on the CPU; data/checkpoints/README.md says what each of CHECKPOINTS is.

    Raises:
        InputError: name is none of them.
        StackError: it is one that the installed package leaves out for its size.
    """
    if name not in CHECKPOINTS:
        raise InputError(f"name is {name!r}; accepted: {', '.join(CHECKPOINTS)}")
    if name not in checkpoints():
        raise StackError(
            f"the model {name!r} is not in an installed package, which would be twice as large with it; "
            f"it lies in data/checkpoints of the project's repository, and {', '.join(checkpoints())!r} is here"
        )
    return LanguageModel.load(core.data_dir() / "checkpoints" / name).eval()


def awake(model: nn.Module, sentence: str) -> list[tuple[str, float]]:
    """Return how many neurons fire at each byte of a sentence, averaged over layers: (the byte as a character, nnz)."""
    content = sentence.encode()
    if not 1 <= len(content) <= model.config.context:
        raise InputError(f"sentence has {len(content)} bytes; accepted: 1 to {model.config.context}")
    tokens = torch.tensor([list(content)])
    layers = range(len(feed_forwards(model)))
    nnz = sum(fires(activations(model, tokens, layer)[1]).sum(1).double() for layer in layers) / len(layers)
    return [
        (chr(byte) if 32 <= byte < 127 else byte_name(byte), value)
        for byte, value in zip(content, nnz.tolist(), strict=True)
    ]
