"""`twell-lab bench` and `twell-lab bench model`: a layer, and a whole model, dense beside sparse. Imports torch only
when one of them runs."""

from __future__ import annotations

import argparse
import os
from statistics import quantiles
from typing import TYPE_CHECKING

from .. import records
from ..core import InputError
from .inputs import model_and_windows, placed
from .terminal import Answer, Ratio, verdict

if TYPE_CHECKING:
    from ..records import Record

TURNS = 5  # of both models, before one is called faster: three quarters of fewer are too often on one side by chance
# What rows of a model may say, dense and sparse, by the heading of the table; its key, and the unit of the table.
_ALSO = {"peak MiB": ("peak_bytes", 2**20), "mJ/token": ("mj_per_token", 1), "error": ("error", 1), "loss": ("loss", 1)}
_COLUMNS = {"what": "what", "head": "LM head", "how": "run", "unit": "in", "dense": "dense", "sparse": "sparse"}
_COLUMNS |= {"times": "x dense", "half": "middle half", **{key: key for key in _ALSO}}
_COLUMNS |= {"layer_error": "a layer's error", "layers": "sparse model's layers"}
_EXPLAINED = (
    "bench: rates are of plain calls, one after another, or of replays of graphs, in the middle of all turns; x dense: "
    "the sparse rate by the dense one; middle half: what it was from turn to turn, both taking turns, the quarters "
    "above and below left out; peak: beyond what was there before the call; mJ: of the whole GPU; both dense to sparse"
)
_LOSSY = {  # of interest where a path is lossy
    "error": "of the results against a float32 run, by its norm",
    "layer_error": "of a layer's output against the dense layer's, on average",
    "loss": "in nats a token",
}


def layer(options: argparse.Namespace) -> Answer:
    """Time a layer of each size in each dtype."""
    import torch

    from ..bench import forward

    dtypes = [getattr(torch, name) for name in options.dtype] if options.dtype else [None]
    sizes = options.d_model, options.d_ff, options.nnz
    how = {key: getattr(options, key) for key in ("device", "compiled", "seconds")}
    how["workload_kind"] = options.workload
    timed = [forward.ffn(tokens, *sizes, dtype=dtype, **how) for dtype in dtypes for tokens in options.tokens]
    saved = [f"bench: saved {record.save(options.out)}" for record in timed] if options.out is not None else []
    rows = records.flat_rows(timed)
    return Answer(rows, "\n".join([records.table(rows, records.COLUMNS), *saved]))


def whole_model(options: argparse.Namespace) -> Answer:
    """Time a saved model on a text, or a drawn one on random tokens."""
    import torch

    from .. import bench
    from ..bench.drawn import NAMES

    keys = ("tokens", "batches", "firing", "plan", "compiled", "graphs", "training", "seconds")
    how = {key: getattr(options, key) for key in keys}
    if options.model in NAMES and not os.path.isdir(options.model):
        if options.text is not None:
            raise InputError(
                f"--text is {options.text!r:.200}, and {options.model} is a size, whose drawn model has no tokenizer; "
                "accepted: --text with a saved model"
            )
        model, read = options.model, "random tokens"
        how |= {"device": options.device, "dtype": getattr(torch, options.dtype) if options.dtype else None}
    else:
        if not os.path.isdir(options.model) and "/" not in options.model:
            names = f"a repository's name such as 'owner/name', or a size: {', '.join(NAMES)}"
            raise InputError(f"there is no folder {options.model!r:.200}; accepted: one, {names}")
        asked = max([*(options.tokens or []), 2048, *(512 * batch for batch in options.batches)])
        model, part, windows, _ = model_and_windows(options, tokens=max(4 * 2048, 2 * asked))
        model.to(*placed(options))
        how["text"], read = windows.flatten(), f"{windows.numel():,} tokens of {part.name}"
    record = bench.model(model, **how)
    saved = [f"bench: saved {record.save(options.out)}"] if options.out is not None else []
    return Answer(record.to_json(), "\n".join([told(record, read), *saved]))


def told(record: Record, read: str) -> str:
    """Return a record of `twell_lab.bench.model` as text: what was measured, a table, what is missing and why, and what
    it comes to. read: where the tokens came from."""
    compared, notes = pairs(record.rows), record.notes
    missing = [f"bench: left out: {what}: {why}" for what, why in notes.get("left_out", {}).items()]
    if not compared:
        return "\n".join([*missing, "bench: nothing could be compared"])
    lossy = any("lossy" in (pair["layers"] or "") for pair in compared)
    columns = {key: head for key, head in _COLUMNS.items() if lossy or key not in _LOSSY}
    explained = [_EXPLAINED, *(f"{_COLUMNS[key]}: {what}" for key, what in _LOSSY.items() if lossy)]
    first = record.rows[0]
    about, share = first["workload"].partition(",")[0], first["nnz"] / first["d_ff"]
    lines = [
        f"{about}{', random weights' if about.startswith('drawn') else ''}: {first['parameters']:,} parameters, "
        f"{first['layers']} feed-forward layers of {first['d_model']} x {first['d_ff']}, {first['dtype']}, on "
        f"{first['device']}; {read}",
        f"{first['nnz']:.3g} of {first['d_ff']:,} neurons fire for a token, {share:.2%}; between layers "
        f"{min(first['nnz_layers']):g} to {max(first['nnz_layers']):g}",
        f"\n{records.table(compared, columns)}\n",
        "; ".join(explained),
        *missing,
        *([f"bench: no energy: {notes['energy']}"] if "energy" in notes else []),
        f"bench: {conclusion(compared)}",
    ]
    return "\n".join(lines)


def pairs(rows: list[dict]) -> list[dict]:
    """Return for each row of a sparse model what the table shows of it and of the dense model that was run in the same
    way. The model that is planned for graphs is compared as a graph alone."""
    at = {(row["workload"], row["head"], row["path"]): row for row in rows}
    compared = []
    for (workload, head, path), row in at.items():
        name, compiled, _ = path.removesuffix(" (graph)").partition(" compiled")
        graph, own = path.endswith(" (graph)"), name.endswith("for graphs")
        base = f"dense {'compiled' if compiled else 'eager'}{' (graph)' * graph}"
        dense = at.get((workload, head, base))
        if name.startswith("dense") or (own and not graph) or dense is None:
            continue
        # Dense and sparse took turns: what disturbed one of a turn disturbed the other, too.
        turns = [a / b for a, b in zip(dense["wall_samples"], row["wall_samples"], strict=True)]
        low, _, high = quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else turns * 3
        rate = "tokens_per_s" if "tokens_per_s" in row else "tokens_per_ms"
        what = workload.partition(", ")[2]
        ways = [*["compiled"] * bool(compiled), *["CUDA graph"] * graph, *["planned for it"] * own]
        pair = {
            "what": f"forward, {what}" if row["kind"] == "model_forward" else what,
            "head": "with" if head else "without",
            "how": ", ".join(ways) or "eager",
            "unit": rate.replace("_per_", "/"),
            "dense": dense[rate],
            "sparse": row[rate],
            "times": dense["wall_ms"] / row["wall_ms"],  # as the rates are
            "turns": len(turns),
            "low": low,
            "high": high,
            "half": f"{low:.2f} to {high:.2f}",
            "layer_error": row.get("layer_error"),
            "layers": row.get("choice"),
        }
        for column, (key, unit) in _ALSO.items():
            if key in dense and key in row:
                pair[column] = f"{dense[key] / unit:.4g} to {row[key] / unit:.4g}"
        compared.append(pair)
    return compared


def conclusion(compared: list[dict]) -> str:
    """Return in one sentence what these pairs show. A difference counts where the rates and three quarters of the turns
    show it, and there were as many as TURNS."""
    enough = [pair for pair in compared if pair["turns"] >= TURNS]
    ratios = []
    for pair in enough:
        what = f"{pair['what']}{' without the LM head' * (pair['head'] == 'without')}, {pair['how']}"
        ratios.append(Ratio(pair["times"], pair["low"], pair["high"], what))
    parts = [verdict(ratios)] if ratios else []
    if few := len(compared) - len(enough):
        parts.append(f"not told apart in {few}, which took fewer than {TURNS} turns: give it more --seconds")
    dense = all((pair["layers"] or "").endswith(" dense") and "," not in pair["layers"] for pair in compared)
    why = "; all layers stay dense, as no other path was found to be faster, so any difference is chance" * dense
    return f"of {len(compared)} comparison{'s' * (len(compared) > 1)} the sparse model is {', '.join(parts)}{why}"
