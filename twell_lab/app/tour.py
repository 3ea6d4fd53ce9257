"""The walk, end to end: train with and without L1, profile, pack, time; a record, and a page made from it.

`run` does the work and returns a Record whose rows are the timings and whose notes hold everything else as
plain data; `twell_lab.app.page` draws the page from that alone, here or on another machine.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ..analysis.profile import FiringProfile, activations, profile
from ..bench import forward
from ..core.errors import RecordError, TwellError
from ..core.files import check_target, write_atomically
from ..formats import classic, twell
from ..layers.anatomy import feed_forwards
from ..ops import operators, reference
from ..plots.data import layer_names, layer_rows, picked, tile_of
from ..records import record as records
from ..training.config import TrainConfig, TrainResult
from ..training.loop import TOUR, train
from ..training.text.source import Text, load, spread_windows
from .options import TourOptions

WITHOUT, WITH = "without L1", "with L1"
FORMAT = 1  # of notes["tour"]; a page drawn by another version would misread it
_PAGE_BYTES = 8 * 2**20
_PACKED_TOKENS = 8192  # enough for shares to three digits, and seconds on a CPU


def run(options: TourOptions) -> tuple[records.Record, Path, Path | None]:
    """Take the tour. Returns the record, the path of tour.json, and that of index.html (None if record_only).

    Nothing is written before the last step, and each file appears whole or not at all. Raises TextError for
    the text, RecordError for a folder that cannot be written (tried before the work starts), StackError where
    the page needs plotly and it is missing, and TwellError if packing ever failed to give a value back.
    """
    check_folder(options.out)
    written = options.out / "tour.json", options.out / "index.html"
    for path in written[: 1 if options.record_only else 2]:
        check_target(path)
    if not options.record_only:
        from . import page
    say = _Steps(options.progress)
    text = load(options.text)

    say(1, f"training twice on {text.name} ({text.size / 1e6:.1f} MB)")
    config = replace(_quick(TOUR) if options.quick else TOUR, text=text)
    runs = {
        WITHOUT: train(replace(config, l1=0.0), progress=options.progress),
        WITH: train(config, progress=options.progress),
    }
    sparse = runs[WITH]

    say(2, "profiling the sparse model on held-out text")
    windows = held_out(text, config)
    firing = profile(sparse.model, windows.split(32))

    say(3, "packing its activations and checking that they come back")
    packing, tile = pack_layers(sparse, spread(windows, _PACKED_TOKENS))

    say(4, "timing sparse against dense")
    rows = time_layers(sparse, windows, options) + time_llm_layer(sparse, options)

    say(5, f"writing to {options.out}")
    notes = {
        "tour": {
            "format": FORMAT,
            "quick": options.quick,
            "seconds": say.seconds(),
            "text": sparse.text,
            "device": str(next(sparse.model.parameters()).device.type),
            "runs": {label: result.summary() for label, result in runs.items()},
            "profile": firing_notes(firing),
            "packing": packing,
            "tile": tile,
        }
    }
    record = records.Record.new("tour", "the walk end to end: training, firing, packing, timing", rows, notes)
    write_atomically(written[0], record.to_json())  # first: should the page fail, it can be drawn from this
    if options.record_only:
        return record, written[0], None
    write_atomically(written[1], page.render(record, records.flat_rows(records.load_all())))
    return record, *written


def summary(record: records.Record) -> str:
    """What a tour found, as text: its text, the two trainings, the layers, and the timings."""
    tour = record.notes["tour"]
    lines = []
    for label, result in tour["runs"].items():
        d_ff = result["config"]["d_ff"]
        lines.append(
            {
                "run": label,
                "bits": result["validation_bits_per_byte"],
                "nnz": result["mean_nnz"],
                "density": f"{100 * result['mean_nnz'] / d_ff:.1f}%",
                "dead": f"{sum(result['dead'])} of {d_ff * len(result['dead'])}",
            }
        )
    first = records.table(
        lines, {"run": "", "bits": "bits per byte", "nnz": "mean nnz", "density": "density", "dead": "dead neurons"}
    )
    timed = [row for row in record.rows if row["x_dense"] is not None and picked(row["path"])]
    second = records.table(
        [{**row, "layer": row.get("label", "LLM size")} for row in timed if not row["path"].startswith("dense eager")],
        {
            "layer": "layer",
            "tokens": "tokens",
            "dtype": "dtype",
            "path": "path",
            "nnz": "mean nnz",
            "ms": "ms",
            "dense_ms": "dense ms",
            "x_dense": "x dense",
        },
    )
    text = f"text: {tour['text']['name']}, {tour['text']['size']:,} bytes, sha256 {tour['text']['sha256']}"
    layers = (
        records.table(
            layer_rows(tour),
            {
                "layer": "",
                "before": "density",
                "after": "with L1",
                "dead_before": "dead",
                "dead_after": "with L1",
                "used": "slots used",
                "overflow": "rows over",
                "dense": "dense B",
                "CSR": "CSR B",
                "ELL": "ELL B",
                "TwELL": "TwELL B",
            },
        )
        + "\nB: bytes a token. Unpacking gave every value back, bit for bit."
    )
    note = ["A quick tour: its figures say nothing."] if tour["quick"] else []
    return "\n\n".join([text, first, layers, second, *note])


def check_folder(folder: Path) -> None:
    """Raise RecordError naming the folder unless what a tour writes would fit there now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PAGE_BYTES))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot write in the folder {str(folder)!r}: {getattr(error, 'strerror', None) or error}; free "
            f"{_PAGE_BYTES >> 20} MiB there or name another with --out"
        ) from None


def held_out(text: Text, config: TrainConfig) -> Tensor:
    """Windows of the validation part, as the model takes them: int64 [windows, context]."""
    return spread_windows(text.split()[1].data, config.eval_windows, config.context)[:, :-1]


def spread(windows: Tensor, tokens: int) -> Tensor:
    """Some of the windows [n, context], evenly spread, that hold `tokens` tokens or a little more; or all."""
    return windows[:: max(1, windows.numel() // tokens)]


def firing_notes(firing: FiringProfile) -> dict:
    """A profile as plain data: one dict a layer, the neurons' frequencies to six digits."""
    layers = []
    for layer, row in zip(firing.layers, firing.table(), strict=True):
        layers.append(
            {
                "name": layer.name,
                **{key: row[key] for key in row if key != "layer"},
                "nnz_histogram": layer.nnz_histogram.tolist(),
                "tile_histogram": layer.tile_histogram.tolist(),
                "neuron_frequency": [round(share, 6) for share in layer.neuron_frequency.tolist()],
            }
        )
    return {"tokens": firing.tokens, "layers": layers}


def pack_layers(sparse: TrainResult, windows: Tensor) -> tuple[dict, dict]:
    """Pack what each layer's gate really gave on these windows, check it, and count what the formats take.

    Returns ({tokens, dtype, layers: [...]}, one tile as plain data). Packed in bfloat16, as an LLM would be;
    the check is also made in the model's own dtype.
    """
    layers: list[dict] = []
    nearest, shown = None, {}
    for found in feed_forwards(sparse.model):
        _, gate = activations(sparse.model, windows, found.name)
        check_packing(found.name, gate, operators.pack(gate))
        gate = gate.to(torch.bfloat16)
        packed = operators.pack(gate)
        check_packing(found.name, gate, packed)
        dense = reference.relu(gate)
        counts, slots = packed.counts, packed.slots
        layers.append(
            {
                "layer": found.name,
                "tokens": gate.shape[0],
                "d_ff": gate.shape[1],
                "tile": packed.tile,
                "words": packed.words,
                "nnz": packed.nnz,
                "slots": counts.numel() * slots,
                "slots_used": int(counts.clamp(max=slots).sum()),
                "overflow_rows": packed.overflow_rows.numel(),
                "tail": packed.tail_value.numel(),
                "bytes": {
                    "dense": dense.numel() * dense.element_size(),
                    "CSR": classic.CSR.from_dense(dense).nbytes,
                    "ELL": classic.ELL.from_dense(dense).nbytes,
                    "TwELL": packed.nbytes,
                },
            }
        )
        # A tile worth looking at: about a third of its slots filled, the first such one of all layers.
        distance = (counts - slots // 3).abs().flatten()
        best = int(distance.argmin())
        if nearest is None or int(distance[best]) < nearest:
            row, tile = divmod(best, counts.shape[1])
            nearest, shown = int(distance[best]), {"layer": found.name, **tile_of(packed, row, tile)}
    return {"tokens": layers[0]["tokens"], "dtype": "bfloat16", "layers": layers}, shown


def check_packing(name: str, gate: Tensor, packed: twell.TwELL) -> None:
    """Raise TwellError unless unpacking gives relu(gate) back, bit for bit."""
    bits = {torch.float32: torch.int32}.get(gate.dtype, torch.int16)
    wrong = int((packed.to_dense().view(bits) != reference.relu(gate).view(bits)).sum())
    if wrong:
        raise TwellError(
            f"{name}: {wrong} of {gate.numel()} values did not come back from TwELL as they went in; none may differ"
        )


def time_layers(sparse: TrainResult, windows: Tensor, options: TourOptions) -> list[dict]:
    """Rows of the trained model's own layers on their own inputs: fp32 on a CPU, bf16 on a GPU."""
    found = feed_forwards(sparse.model)
    on_gpu = found[0].up.weight.is_cuda
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes = (1, 8, 64, 1024, 8192) if on_gpu else (1, 8, 64)
    # Tokens are drawn at random: the first ones of a window fire far more than the others.
    few = spread(windows, 2 * sizes[-1])
    drawn = torch.randperm(few.numel(), generator=torch.Generator().manual_seed(0))
    rows = []
    names = layer_names([layer.name for layer in found])
    for layer, name in _bar(list(zip(found, names, strict=True)), "the model's own layers", options):
        inputs, _ = activations(sparse.model, few, layer.name)
        module = copy.deepcopy(layer.module).to(dtype).requires_grad_(False)
        for tokens in sizes:
            x = inputs[drawn[:tokens]].to(dtype)
            record = forward.layer(module, x, label=f"trained, {name}", seconds=_seconds(options))
            rows += [{**row, "label": name} for row in record.rows]
    return rows


def time_llm_layer(sparse: TrainResult, options: TourOptions) -> list[dict]:
    """Rows of a layer of LLM size with 99.5% zeros (and, on a GPU, with mean nnz 8)."""
    device = next(sparse.model.parameters()).device.type
    d_model, d_ff = (128, 512) if options.quick else (2048, 5632)
    if device == "cuda":
        cases = [(tokens, torch.bfloat16, nnz) for nnz in (8, 29) for tokens in (1, 8, 64, 1024, 16384)]
    else:
        cases = [(tokens, dtype, 29) for dtype in (torch.float32, torch.bfloat16) for tokens in (1, 8, 64)]
    rows = []
    for tokens, dtype, nnz in _bar(cases, "a layer of LLM size", options):
        rows += forward.ffn(tokens, d_model, d_ff, nnz, dtype=dtype, device=device, seconds=_seconds(options)).rows
    return rows


def _seconds(options: TourOptions) -> float:
    """How long each timing may take."""
    return 0.02 if options.quick else 1.0


def _quick(config: TrainConfig) -> TrainConfig:
    return replace(
        config, steps=12, batch=4, context=32, layers=2, warmup=2, log_every=2, eval_every=6, eval_windows=16
    )


class _Steps:
    """Says on stderr which of the five steps begins, and keeps how long each took."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.started: list[float] = []

    def __call__(self, number: int, what: str) -> None:
        self.started.append(time.perf_counter())
        if self.shown:
            print(f"[{number}/5] {what}", file=sys.stderr, flush=True)

    def seconds(self) -> dict:
        """Seconds that the steps before the present one took, by name."""
        spans = [end - begin for begin, end in pairwise(self.started)]
        return dict(zip(("train", "profile", "pack", "time"), spans, strict=True))


def _bar(items: list, what: str, options: TourOptions) -> Iterable:
    return tqdm(items, desc=what, disable=not options.progress or None)
