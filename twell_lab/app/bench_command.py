"""`twell-lab bench` and `twell-lab bench model`: a layer, and a whole model, dense beside sparse. Imports torch only
when one of them runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated

import twell_lab as tl

from .. import records
from ..core import InputError, check_folder
from .model_commands import PATHS, Device, Model, OwnDtype, Text, model_and_windows, placed
from .terminal import Answer, verdict

if TYPE_CHECKING:
    from ..records import Record

TURNS = 5  # of both models, before one is called faster: three quarters of fewer are too often on one side by chance
# What a table may say of dense and sparse beside their times: the heading, the key of a row, the table's unit, digits.
_ALSO = {"peak MiB": ("peak_bytes", 2**20, ",.0f"), "mJ/token": ("mj_per_token", 1, ",.4g")}
_ALSO |= {"error": ("error", 1, ".2g"), "loss": ("loss", 1, ".4f")}
_COLUMNS = {"what": "what", "dense": "dense ms", "sparse": "sparse ms", "times": "x dense", "half": "middle half"}
_COLUMNS |= {key: key for key in _ALSO} | {"layers": "layers"}
_EXPLAINED = (
    "bench: ms: of plain calls, one after another, or of replays of graphs, in the middle of all turns; x dense: how "
    "many times as fast; middle half: what that was from turn to turn, both taking turns, the quarters above and below "
    "left out; peak: beyond what was there before the call; mJ: of the whole GPU; error: of the results against a "
    "float32 run, by its norm; loss: in nats a token; the last four dense to sparse"
)


def bench(
    *,
    tokens: Annotated[Sequence[int], "tokens at once"] = (1, 8, 64),
    d_model: Annotated[int, "the layer's width"] = 2048,
    d_ff: Annotated[int, "its neurons"] = 5632,
    nnz: Annotated[float, "mean number of neurons firing for a token"] = 29.0,
    compiled: Annotated[bool, "time torch.compile's dense layer too"] = False,
    seconds: Annotated[float, "how long to measure each size on a CPU"] = 2.0,
    out: Annotated[Path | None, "save what was measured here"] = None,
    device: Device = None,
    dtype: OwnDtype = None,
) -> Answer:
    """Check and time a sparse feed-forward layer against torch's dense one.

    twell-lab bench model times a whole model: twell-lab bench model --help"""
    import torch

    from ..bench import forward

    if out is not None:
        check_folder(out)
    how: dict = {"dtype": getattr(torch, dtype) if dtype else None, "device": device, "compiled": compiled}
    timed = [forward.ffn(count, d_model, d_ff, nnz, **how, seconds=seconds) for count in tokens]
    saved = [f"bench: saved {record.save(out)}" for record in timed if out is not None]
    rows = records.flat_rows(timed)
    return Answer(rows, "\n".join([records.table(rows, records.COLUMNS), *saved]))


def bench_model(
    model: Annotated[Model, "the folder or repository of a saved model; or a size, 1M to 2B: a drawn Llama"],
    *,
    text: Text = None,
    tokens: Annotated[Sequence[int] | None, "of each forward, up to the context or a multiple of it [2048]"] = None,
    batches: Annotated[Sequence[int], "of the steps of decoding; 0: none [1 8 64]"] = (1, 8, 64),
    plan: Annotated[str | None, f"a plan, a folder of twell-lab sparsify's, or a path: {PATHS} [a new plan]"] = None,
    compiled: Annotated[bool, "time both models under torch.compile too"] = False,
    graphs: Annotated[bool, "on a GPU, time forwards as CUDA graphs too"] = False,
    training: Annotated[bool, "time a training step too"] = False,
    seconds: Annotated[float | None, "how long to measure each row on a CPU; on a GPU its energy [1; 3]"] = None,
    out: Annotated[Path | None, "save what was measured here"] = None,
    device: Device = None,
    dtype: OwnDtype = None,
) -> Answer:
    """Check and time a whole model, dense beside sparse."""
    import torch

    from ..bench.drawn import NAMES

    if out is not None:
        check_folder(out)
    batches = [batch for batch in batches if batch]
    how: dict = {"tokens": tokens, "batches": batches, "plan": plan, "compiled": compiled}
    how |= {"graphs": graphs, "training": training, "seconds": seconds}
    if model in NAMES and not os.path.isdir(model):
        if text is not None:
            raise InputError(f"--text is {text!r:.200}, and {model} has no tokenizer; accepted: a saved model with it")
        read = "random tokens"
        record = tl.bench.model(model, **how, device=device, dtype=getattr(torch, dtype) if dtype else None)
    else:
        longest = max([*(tokens or []), 2048, *(512 * batch for batch in batches)])
        loaded, part, windows = model_and_windows(model, text, tokens=max(4 * 2048, 2 * longest))
        record = tl.bench.model(loaded.to(*placed(device, dtype)), **how, text=windows.flatten())
        read = f"{windows.numel():,} tokens of {part.name}"
    saved = [f"bench: saved {record.save(out)}"] if out is not None else []
    return Answer(record.to_json(), "\n".join([told(record, read), *saved]))


def told(record: Record, read: str) -> str:
    """Return a record of `twell_lab.bench.model` as text. read: where the tokens came from."""
    compared, notes, lines = pairs(record.rows), record.notes, []
    if compared:
        row = record.rows[0]
        about, share = row["workload"].partition(",")[0], row["nnz"] / row["d_ff"]
        about += ", random weights" * about.startswith("drawn")
        sizes = "{parameters:,} parameters, {layers} feed-forward layers of {d_model} x {d_ff}, {dtype}, on {device}"
        nnz = f"{min(row['nnz_layers']):g} to {max(row['nnz_layers']):g}"
        lines.append(f"{about}: {sizes.format(**row)}; {read}")
        lines.append(f"{row['nnz']:.3g} of {row['d_ff']:,} neurons fire for a token, {share:.2%}; between layers {nnz}")
        lines += [f"\n{records.table(compared, _COLUMNS)}\n", _EXPLAINED]
    lines += [f"bench: left out: {what}: {why}" for what, why in notes.get("left_out", {}).items()]
    lines += [f"bench: no energy: {notes['energy']}"] if "energy" in notes else []
    return "\n".join([*lines, f"bench: {conclusion(compared)}"])


def pairs(rows: Sequence[dict]) -> list[dict]:
    """Return for each row of a sparse model what the table shows of it and of the dense model that was run in the same
    way. The model that is planned for graphs is not compared in plain calls."""
    at = {(row["workload"], row["head"], row["path"]): row for row in rows}
    compared = []
    for (workload, head, path), row in at.items():
        compiled, graph, own = (word in path for word in (" compiled", " (graph)", "for graphs"))
        dense = at.get((workload, head, f"dense {'compiled' if compiled else 'eager'}{' (graph)' * graph}"))
        if path.startswith("dense") or (own and not graph and not compiled) or dense is None:
            continue
        # Dense and sparse took turns: what disturbed one of a turn disturbed the other, too.
        turns = [a / b for a, b in zip(dense["wall_samples"], row["wall_samples"], strict=True)]
        low, _, high = quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else turns * 3
        what = "forward, " * (row["kind"] == "model_forward") + workload.partition(", ")[2]
        what += " without the LM head" * (not head) + ", compiled" * compiled
        pair = {
            "what": what + ", CUDA graph" * graph + ", planned for graphs" * own,
            "dense": dense["wall_ms"],
            "sparse": row["wall_ms"],
            "times": dense["wall_ms"] / row["wall_ms"],
            "turns": len(turns),
            "low": low,
            "high": high,
            "half": f"{low:.2f} to {high:.2f}",
            "layers": row.get("choice"),
        }
        for name, (key, unit, digits) in _ALSO.items():
            if key in dense and key in row:
                pair[name] = f"{dense[key] / unit:{digits}} to {row[key] / unit:{digits}}"
        compared.append(pair)
    return compared


def conclusion(compared: list[dict]) -> str:
    """Return in one sentence what these pairs show. A difference counts where the rates and three quarters of the turns
    show it, and there were as many as TURNS."""
    if not compared:
        return "nothing could be compared"
    ratios = [(pair["times"], pair["low"], pair["high"], pair["what"]) for pair in compared if pair["turns"] >= TURNS]
    parts = [verdict(ratios)] if ratios else []
    if few := len(compared) - len(ratios):
        parts.append(f"not told apart in {few}, which took fewer than {TURNS} turns: give it more --seconds")
    dense = all((pair["layers"] or "").endswith(" dense") and "," not in pair["layers"] for pair in compared)
    why = "; all layers stay dense, as no other path was found to be faster, so any difference is chance" * dense
    return f"of {len(compared)} comparison{'s' * (len(compared) > 1)} the sparse model is {', '.join(parts)}{why}"
