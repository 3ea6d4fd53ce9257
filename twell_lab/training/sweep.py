"""The L1 sweep: one model trained again and again with more and more L1, and its twins, trained without.

Three learning rates are tried without L1, and the best one is kept. Then come the runs with every L1 value; then the
twin and a few L1 values once more from another seed, which shows what a difference between two runs is worth; then a
few L1 values with dead gate rows re-initialised. All runs of one seed begin with the same weights and read the same
text in the same order. `twell-lab record sweep` makes the record that the course's notebook 04 draws."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..analysis.profile import profile
from ..core import InputError
from ..records import Record
from .config import TrainConfig
from .loop import autocast, train
from .objective import EVAL_BATCH
from .text.source import load, spread_windows

NOVELS = {
    "what": "95 English novels, 1839 to 1930, as UTF-8 files: all of the folder corpus/ but the five listed in "
    "left_out, joined in the order of their names; the last ten, by Trollope, Ward, Collins and Woolf, are held out",
    "name": "95-english-novels",
    "source": "https://github.com/computationalstylistics/100_english_novels",
    "commit": "143e601875d70e195f2cc5ebd8b034609271194d",
    "licence": "public domain in the United States (all published by 1930) and wherever copyright ends 70 years after "
    "the author's death; the repository states no licence of its own",
    "left_out": "Forster_Angels_1905.txt Forster_Howards_1910.txt Forster_View_1908.txt Galsworthy_River_1933.txt "
    "Woolf_Years_1937.txt".split(),
    "why_left_out": "still under copyright in some countries",
    "size": 75855091,
    "sha256": "b2586cd6b034bf99f5156c8558940516858fc70f0cf4e69b351e63971ac46749",
}

# 57 million parameters; 1200 steps of 32,768 bytes are 39 MB, a little over half of the training text.
_SIZES = {"d_model": 768, "layers": 8, "heads": 12, "d_ff": 2048, "context": 512, "batch": 64}
_STEPS = {"steps": 1200, "lr": 1e-3, "warmup": 100, "log_every": 20, "eval_every": 300, "eval_windows": 2048}
MODEL = TrainConfig(**_SIZES, **_STEPS, dtype="bfloat16", compile=True)

# Which runs a sweep makes. Learning rates tried without L1, and coefficients, each run at the best of these rates.
LRS = (6e-4, 1.2e-3, 2.4e-3)
L1 = (1e-5, 3e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 4e-4, 7e-4, 1e-3, 2e-3)
AGAIN = (1e-4, 2e-4)  # coefficients that run from the next seed, too, as the twin without L1 does
RENEWED = (2e-4, 7e-4)  # coefficients that also run with dead gate rows re-initialised, in this way
RENEW = {"reinit": 0.1, "dead_every": 5, "dead_window": 1_000_000}


def sweep(base: TrainConfig) -> Iterator[dict]:
    """Make the runs of a sweep, the most important first, should time run out, and yield the row of each (see `run`).

    base: what all runs share, the text, sizes and first seed included."""
    rows = []
    for lr in LRS:
        rows.append(run(f"lr {lr:g}", replace(base, lr=lr, l1=0.0)))
        yield rows[-1]
    base = replace(base, lr=twin(rows)["config"]["lr"])
    other = replace(base, seed=base.seed + 1)
    runs = {f"L1 {l1:g}": replace(base, l1=l1) for l1 in L1}
    runs[f"seed {other.seed}"] = replace(other, l1=0.0)
    runs |= {f"L1 {l1:g}, seed {other.seed}": replace(other, l1=l1) for l1 in AGAIN}
    runs |= {f"L1 {l1:g}, dead rows renewed": replace(base, l1=l1, **RENEW) for l1 in RENEWED}
    for label, config in runs.items():
        yield run(label, config)


def run(label: str, config: TrainConfig) -> dict:
    """Train once, and return the row of a record, ready for JSON. config.text: a Text.

    The row: label, config, parameters, tokens, seconds, tokens_per_s (the median over the history, so that compiling
    and validations are left out), history (one list a column, to five digits; see TrainResult),
    validation_bits_per_byte, mean_nnz and zeros (the share of hidden activations that are zero) over all layers. And of
    the held-out text: layers, one dict a layer: nnz (mean over tokens), dead (neurons silent on all of it) and overflow
    (the share of tokens with more values in a TwELL tile than it has slots); positions: where in the window each group
    of positions begins ("start"), and each layer's mean nnz there."""
    if config.compile:
        torch.compiler.reset()  # each run compiles the same functions anew, which torch does a few times and no more
    result = train(config, progress=False)
    summary, names = result.summary(), dict.fromkeys(name for row in result.history for name in row)
    history = {name: [_short(row.get(name)) for row in result.history] for name in names}
    windows = spread_windows(config.text.split()[1].tokens, config.eval_windows, config.context)
    with autocast(config.dtype, next(result.model.parameters()).device):
        firing = profile(result.model, windows[:, :-1].split(EVAL_BATCH))
    places = firing.by_position()
    by_place = [[round(at["layers"][i] * layer.d_ff, 3) for at in places] for i, layer in enumerate(firing.layers)]
    return {
        "label": label,
        "config": {key: value for key, value in summary["config"].items() if key != "device"},
        "parameters": summary["parameters"],
        "tokens": result.tokens,
        "seconds": round(result.seconds, 1),
        "tokens_per_s": round(statistics.median_high(history["tokens_per_s"])),
        "history": history,
        "validation_bits_per_byte": round(result.validation_bits_per_byte, 5),
        "mean_nnz": round(result.mean_nnz, 2),
        "zeros": round(1 - result.mean_nnz / config.d_ff, 5),
        "layers": [
            {"nnz": round(layer.mean_nnz, 3), "dead": layer.dead, "overflow": round(layer.overflow_rows, 5)}
            for layer in firing.layers
        ],
        "positions": {"start": [place["first"] for place in places], "nnz": by_place},
    }


def _short(value):
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- what the rows say ----


def twin(rows: list[dict], seed: int | None = None) -> dict:
    """Return the run without L1 at the best learning rate, with which every other run is compared; with a seed its
    repetition from that seed, if there is one. InputError where no row is without L1."""
    without = [row for row in rows if row["label"].startswith("lr ")]
    if not without:
        raise InputError("there is no run without L1 in these rows; accepted: the rows of a sweep")
    first = min(without, key=lambda row: row["validation_bits_per_byte"])
    return next((row for row in rows if row["label"] == f"seed {seed}"), first)


def pressed(rows: list[dict]) -> list[dict]:
    """Return the runs of the sweep itself, from L1 0 up: the twin, then every L1 value without re-initialisation."""
    with_l1 = [row for row in rows if row["label"] == f"L1 {row['config']['l1']:g}"]
    return [twin(rows), *sorted(with_l1, key=lambda row: row["config"]["l1"])]


def cost(row: dict, rows: list[dict]) -> float:
    """Return by how much a run's validation loss lies above its twin's, as a share of it. A run with L1 has the twin of
    its own seed, a run without L1 the first one."""
    base = twin(rows, row["config"].get("seed") if row["config"]["l1"] else None)
    return row["validation_bits_per_byte"] / base["validation_bits_per_byte"] - 1


def seed_spread(rows: list[dict]) -> float | None:
    """Return by how much another seed alone changes the twin's loss, as a share of it; None without one."""
    return max((abs(cost(row, rows)) for row in rows if row["label"].startswith("seed ")), default=None)


# ---- the record ----


def record(path: str | None, base: TrainConfig = MODEL) -> Record:
    """Sweep over the text at `path` (for NOVELS, the folder of its files), print the result of each run on stderr, and
    return the record. InputError where no text is named, and TextError for a text that can't be read."""
    if not path:
        raise InputError(
            f"no text is named; accepted: TWELL_LAB_SWEEP_TEXT=the folder corpus/ of {NOVELS['source']} (commit "
            f"{NOVELS['commit'][:12]}) without {', '.join(NOVELS['left_out'])}, or a text of your own"
        )
    text, rows = load(path), []
    training, validation = text.split()
    own = {"what": "a text of one's own", "licence": "not known to this package", **text.describe()}
    notes = {
        "text": NOVELS if text.sha256 == NOVELS["sha256"] else own,
        "training_size": training.size,
        "validation_size": validation.size,
        "kernels": "off: torch's dense path, compiled, bfloat16 autocast; none of this package's kernels ran",
        "convention": "the loss is cross-entropy plus L1 times the sum over neurons of |h|, averaged over tokens and "
        "layers",
        "renewed": dict(zip(("share", "every_steps", "silent_tokens"), RENEW.values())),
    }
    for row in sweep(replace(base, text=text)):
        rows.append(row)
        said = f"{row['label']}: {row['validation_bits_per_byte']:.4f} bits per byte, nnz {row['mean_nnz']:.1f}"
        print(f"{said}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    purpose = "one model trained with more and more L1, beside its twins without: loss, and who fires"
    return Record.new("sweep", purpose, rows, notes)
