"""`twell-lab tour`: train with and without L1, profile, pack, time, speak; a record of it all, and a page made of that.

The record's rows are the timings, and its notes hold everything else."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import twell_lab as tl

from .. import records
from ..analysis.profile import activations
from ..bench import forward
from ..core import TwellError, write_atomically
from ..formats import classic, twell
from ..ops import reference
from ..ops.clock import dtype_for, present_device
from ..plots import layer_names, tile_of
from ..training.config import TrainResult
from ..training.loop import TOUR, train
from ..training.text.source import BYTES, load, spread_windows
from . import page
from .model_commands import in_turn, planned, speak
from .page import WITH, WITHOUT
from .terminal import said_fast

_QUICK: dict = dict(d_model=64, d_ff=256, heads=2, layers=2, context=32, steps=12, batch=4, warmup=2)
_QUICK |= dict(log_every=2, eval_every=6, eval_windows=16)
_DURATION = "about three minutes on two CPU cores, one with a GPU; --quick takes half a minute and says nothing"
_STEPS = 8
_TIMED = ("layer", "tokens", "dtype", "path", "nnz", "ms", "spread", "x_dense")
_PACKED_TOKENS = 2048  # enough for three digits of a share, and packed within seconds on a CPU


def run(text: str | None, out: Path, quick: bool) -> records.Record:
    """Take the tour; return its record. The arguments are the command's options; tour.json and index.html are written
    in its last step. Raises TwellError if packing changed a value."""
    words = load(text)
    each = 0.02 if quick else 1.0  # seconds for which a size is measured
    began: dict[str, float] = {}  # when each step did

    def step(name: str, what: str) -> None:
        began[name] = time.perf_counter()
        print(f"[{len(began)}/{_STEPS}] {what}", file=sys.stderr, flush=True)

    print(f"tour: {_DURATION}", file=sys.stderr)
    steps = TOUR.steps if torch.cuda.is_available() else TOUR.steps // 2  # about half a minute on two cores
    config = replace(TOUR, text=words, **(_QUICK if quick else {"steps": steps}))
    step("train without L1", f"training on {words.name} ({words.size / 1e6:.1f} MB)")
    runs = {WITHOUT: train(replace(config, l1=0.0))}
    step("train with L1", f"training the same model with an L1 penalty of {config.l1:g}")
    sparse = runs[WITH] = train(config)
    step("profile", "profiling the sparse model on held-out text")
    windows = spread_windows(words.split()[1].tokens, config.eval_windows, config.context)[:, :-1]
    firing = tl.profile(sparse.model, windows.split(32))
    step("pack", "packing its activations and checking that they come back")
    packing, tile = pack_layers(sparse, spread(windows, _PACKED_TOKENS))
    step("time its layers", "timing its layers, sparse against dense")
    rows = time_layers(sparse, windows, each)
    step("time a large layer", "timing a layer of an LLM's size")
    rows += time_llm_layer((128, 512) if quick else (2048, 5632), each)
    step("speak", "letting both models speak")
    texts = let_speak(runs, windows, firing, 40 if quick else 240, 1 if quick else 3)
    step("write", f"writing to {out}")
    layers = firing.table()
    for row, layer in zip(layers, firing.layers, strict=True):
        row["nnz_histogram"] = layer.nnz_histogram.tolist()
        row["neuron_frequency"] = [round(share, 6) for share in layer.neuron_frequency.tolist()]
    notes = {
        "quick": quick,
        "seconds": {name: end - begin for (name, begin), end in zip(began.items(), [*began.values()][1:])},
        "text": sparse.text,
        "runs": {label: result.summary() for label, result in runs.items()},
        "profile": {"tokens": firing.tokens, "layers": layers},
        "packing": packing,
        "tile": tile,
        "texts": texts,
    }
    purpose = "the walk end to end: training, firing, packing, timing"
    record = records.Record.new("tour", purpose, rows, {"tour": notes})
    write_atomically(out / "tour.json", record.to_json())
    write_atomically(out / "index.html", page.render(record, records.load_all()))
    return record


def summary(record: records.Record) -> str:
    """Return what a tour found, as plain text: the text it read, the two trainings, the timings, and the speech."""
    tour = record.notes["tour"]
    lines = ["text: {name}, {size:,} bytes, sha256 {sha256}".format(**tour["text"])]
    for label, run in tour["runs"].items():
        fire = f"{run['mean_nnz']:.1f} of {run['config']['d_ff']} neurons fire for a token"
        lines.append(f"trained {label}: {run['validation_bits_per_byte']:.3f} bits per byte of held-out text; {fire}")
    timed = [row | {"layer": row.get("label") or "LLM size"} for row in record.rows if page.is_sparse(row)]
    columns = {key: records.COLUMNS.get(key, key) for key in _TIMED}
    lines += [records.table(timed, columns), f"spoken by the model with L1: {said_fast(tour['texts'])}"]
    return "\n\n".join([*lines, *["A quick tour: its figures say nothing."] * tour["quick"]])


def spread(windows: Tensor, tokens: int) -> Tensor:
    """Return some of the windows [n, context], evenly spread, with at least `tokens` tokens; all if they have fewer."""
    return windows[:: max(1, windows.numel() // tokens)]


def pack_layers(sparse: TrainResult, windows: Tensor) -> tuple[dict, dict]:
    """Pack what the gate of each layer gives on these windows in bfloat16, as that of an LLM would be, and check that.
    Returns {tokens, dtype, layers: dicts}, and as `plots.tile_of` one of the fuller tiles of the first layer."""
    layers: list[dict] = []
    shown: dict = {}
    for layer in tl.feed_forwards(sparse.model):
        gate = activations(sparse.model, windows, layer.name)[1].to(torch.bfloat16)
        packed = tl.pack(gate)
        check_packing(layer.name, gate, packed)
        dense, counts, slots = reference.relu(gate), packed.counts, packed.slots
        sizes = {"dense": dense.nbytes, "CSR": classic.CSR.from_dense(dense).nbytes}
        sizes |= {"ELL": classic.ELL.from_dense(dense).nbytes, "TwELL": packed.nbytes}
        said = {"layer": layer.name, "tokens": gate.shape[0], "d_ff": gate.shape[1], "nnz": packed.nnz, "bytes": sizes}
        said |= {"tile": packed.tile, "words": packed.words, "slots": counts.numel() * slots}
        said |= {"slots_used": int(counts.clamp(max=slots).sum()), "tail": packed.tail_value.numel()}
        layers.append(said | {"overflow_rows": packed.overflow_rows.numel()})
        if not shown:
            fuller = int(counts.flatten().argsort()[int(0.9 * counts.numel())])
            shown = {"layer": layer.name, **tile_of(packed, *divmod(fuller, counts.shape[1]))}
    return {"tokens": layers[0]["tokens"], "dtype": "bfloat16", "layers": layers}, shown


def check_packing(name: str, gate: Tensor, packed: twell.TwELL) -> None:
    """Raise TwellError unless unpacking gives relu(gate), of 16 bits, back bit for bit."""
    wrong = int((packed.to_dense().view(torch.int16) != reference.relu(gate).view(torch.int16)).sum())
    if wrong:
        raise TwellError(f"{name}: {wrong} of {gate.numel()} values did not come back from TwELL; none may differ")


def time_layers(sparse: TrainResult, windows: Tensor, seconds: float) -> list[dict]:
    """Return timings of the trained model's own layers on their own inputs, as rows: float32 on a CPU, 16 bits on a
    GPU."""
    layers = tl.feed_forwards(sparse.model)
    device = layers[0].up.weight.device
    sizes, dtype = (1, 8, 64, 1024, 8192) if device.type == "cuda" else (1, 8, 64), dtype_for(device)
    # Tokens are drawn at random, because far more neurons fire for the first ones of a window than for the others.
    few = spread(windows, 2 * sizes[-1])
    drawn = torch.randperm(few.numel(), generator=torch.Generator().manual_seed(0))
    rows, names = [], layer_names([layer.name for layer in layers])
    for layer, name in tqdm([*zip(layers, names, strict=True)], "the model's own layers", disable=None):
        inputs, _ = activations(sparse.model, few, layer.name)
        module = copy.deepcopy(layer.module).to(dtype).requires_grad_(False)
        for tokens in sizes:
            record = forward.layer(module, inputs[drawn[:tokens]].to(dtype), label=f"trained, {name}", seconds=seconds)
            rows += [{**row, "label": name} for row in record.rows]
    return rows


def time_llm_layer(size: tuple[int, int], seconds: float) -> list[dict]:
    """Return timings, as rows, of a drawn layer of this size of whose neurons 29 fire for a token; on a GPU, 8 too."""
    if (device := present_device(None)).type == "cuda":
        cases = [(tokens, dtype_for(device), nnz) for nnz in (8, 29) for tokens in (1, 8, 64, 1024, 16384)]
    else:
        cases = [(tokens, dtype, 29) for dtype in (torch.float32, torch.bfloat16) for tokens in (1, 8, 64)]
    rows = []
    for tokens, dtype, nnz in tqdm(cases, "a layer of LLM size", disable=None):
        rows += forward.ffn(tokens, *size, nnz, dtype=dtype, device=device, seconds=seconds).rows
    return rows


def let_speak(
    runs: dict[str, TrainResult], windows: Tensor, firing: tl.FiringProfile, tokens: int, rounds: int
) -> dict:
    """Return text from both models after the same held-out bytes, and the speed of the sparse one with dense and with
    planned layers: {prompt, said: {label: text}, temperature, seed, layers: a report's, and what `in_turn` returns}."""
    how: dict = {"temperature": 0.7, "seed": 0}
    prompt, model = windows[len(windows) // 2], runs[WITH].model
    prompt = prompt[: len(prompt) // 2]
    said = {label: speak(result.model, prompt, tokens, how)[0] for label, result in runs.items()}
    swapped, rows = planned(model, torch.cat([prompt, said[WITH]]).to(model.head.weight.device), firing)
    start, *shown = (BYTES.decode(ids).decode("utf-8", "replace") for ids in (prompt, *said.values()))
    speeds = in_turn(swapped, model, prompt, tokens, how, rounds)
    return {"prompt": start, "said": dict(zip(said, shown, strict=True)), **how, **speeds, "layers": rows}
