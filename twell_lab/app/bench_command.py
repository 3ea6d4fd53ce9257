"""`twell-lab bench` and `twell-lab bench model`: a layer, and a whole model, dense beside sparse. Imports torch only
when one of them runs."""

from __future__ import annotations

import argparse
import os
from statistics import quantiles
from typing import TYPE_CHECKING

from ..core import InputError, check_folder
from .inputs import model_and_windows
from .terminal import Answer, terminated_like_interrupted

if TYPE_CHECKING:
    from ..records import Record

TURNS = 5  # of both models, before one is called faster: three quarters of fewer are too often on one side by chance
_PAIR_COLUMNS = {"what": "what", "head": "LM head", "how": "run", "unit": "in", "dense": "dense", "sparse": "sparse"}
_PAIR_COLUMNS |= {"times": "x dense", "half": "middle half"}
for _key, _head in (("peak", "peak MiB"), ("mj", "mJ/token"), ("error", "error"), ("loss", "loss")):
    _PAIR_COLUMNS |= {f"{_side}_{_key}": f"{_side} {_head}" for _side in ("dense", "sparse")}
    _PAIR_COLUMNS |= {"sparse_layer_error": "a layer's"} if _key == "error" else {}
_PAIR_COLUMNS["layers"] = "sparse model's layers"


# ---- a layer ----


def layer(options: argparse.Namespace) -> Answer:
    """Time a layer of each size in each dtype."""
    import torch

    from .. import records
    from ..bench import forward

    if options.out is not None:
        check_folder(options.out)
    dtypes = [getattr(torch, name) for name in options.dtype] if options.dtype else [None]
    sizes = options.d_model, options.d_ff, options.nnz
    how = {key: getattr(options, key) for key in ("device", "compiled", "seconds")} | {
        "workload_kind": options.workload
    }
    made = [forward.ffn(tokens, *sizes, dtype=dtype, **how) for dtype in dtypes for tokens in options.tokens]
    saved = [f"bench: saved {record.save(options.out)}" for record in made] if options.out is not None else []
    rows = records.flat_rows(made)
    return Answer(rows, "\n".join([records.table(rows, records.COLUMNS), *saved]))


# ---- a whole model ----


def model(options: argparse.Namespace) -> Answer:
    """Time a saved model on a text, or a drawn one on random tokens."""
    import torch

    from .. import bench
    from ..bench.drawn import NAMES
    from ..ops.clock import dtype_for, present_device

    if options.out is not None:
        check_folder(options.out)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    keys = ("tokens", "batches", "firing", "plan", "paths", "compiled", "graphs", "training", "seconds")
    how = {key: getattr(options, key) for key in keys}
    if options.model in NAMES and not os.path.isdir(options.model):
        if options.text is not None:
            raise InputError(
                f"--text is {options.text!r:.200}, and {options.model} is a size, whose drawn model has no tokenizer; "
                "accepted: --text with a saved model"
            )
        with terminated_like_interrupted():  # what was measured is told and saved
            record = bench.model(options.model, device=options.device, dtype=dtype, **how)
        read = "random tokens"
    else:
        if not os.path.isdir(options.model) and "/" not in options.model:
            raise InputError(
                f"there is no folder {options.model!r:.200}; accepted: one, a repository's name such as 'owner/name', "
                f"or a size: {', '.join(NAMES)}"
            )
        device = present_device(options.device)
        asked = max([*(options.tokens or []), 2048, *(512 * batch for batch in options.batches)])
        found, part, windows, _ = model_and_windows(options, tokens=max(4 * 2048, 2 * asked))
        found = found.to(device, dtype or dtype_for(device)).eval()
        with terminated_like_interrupted():
            record = bench.model(found, text=windows.flatten(), **how)
        read = f"{windows.numel():,} tokens of {part.name}"
    saved = [f"bench: saved {record.save(options.out)}"] if options.out is not None else []
    return Answer(record.to_json(), "\n".join([told(record, read), *saved]))


def told(record: Record, read: str) -> str:
    """A record of `twell_lab.bench.model` as text: what was measured, a table, what is missing and why, and what it
    comes to. read: where the tokens came from."""
    from ..records import table

    compared, notes = pairs(record.rows), record.notes
    missing = [f"bench: left out: {what}: {why}" for what, why in notes.get("left_out", {}).items()]
    if not compared:
        return "\n".join([*missing, "bench: nothing could be compared"])
    # How far off results are, and their loss, is of interest where a path is lossy.
    lossy, off = any("lossy" in (row["layers"] or "") for row in compared), ("error", "loss")
    shown = [{key: each for key, each in row.items() if lossy or not key.endswith(off)} for row in compared]
    first = record.rows[0]
    about, share = first["workload"].partition(",")[0], first["nnz"] / first["d_ff"]
    lines = [
        f"{about}{', random weights' if about.startswith('drawn') else ''}: {first['parameters']:,} parameters, "
        f"{first['layers']} feed-forward layers of {first['d_model']} x {first['d_ff']}, {first['dtype']}, on "
        f"{first['device']}; {read}",
        f"{first['nnz']:.3g} of {first['d_ff']:,} neurons fire for a token, {share:.2%}; between layers "
        f"{min(first['nnz_layers']):g} to {max(first['nnz_layers']):g}; weights take {_weights(record.rows)}",
        "",
        table(compared, {key: head for key, head in _PAIR_COLUMNS.items() if any(row.get(key) for row in shown)}),
        "",
        "bench: rates are of plain calls, one after another, or of replays of graphs, in the middle of all turns; x "
        "dense: the sparse rate by the dense one; middle half: what it was from turn to turn, both taking turns, the "
        "quarters above and below left out"
        + "; peak: beyond what was there before the call; mJ: of the whole GPU, with the spread in brackets"
        * any(each["dense_peak"] for each in compared)
        + "; error: of the results against a float32 run, by its norm; a layer's: of its output against the dense "
        "layer's, on average; loss: in nats a token" * lossy,
        *missing,
        *([f"bench: no energy: {notes['energy']}"] if "energy" in notes else []),
        f"bench: {conclusion(compared)}",
    ]
    return "\n".join(lines)


def pairs(rows: list[dict]) -> list[dict]:
    """For each row of a sparse model what the table shows of it and of the dense model that was run in the same way.
    The model that is planned for graphs is compared as a graph alone."""
    known = {(row["workload"], row["head"], row["path"]): row for row in rows}
    found = []
    for (workload, head, name), row in known.items():
        base, graph, _ = name.partition(" (graph")
        base, compiled, _ = base.partition(" compiled")
        if base == "dense" or base.startswith("dense ") or (base.endswith("for graphs") and not graph):
            continue
        beside = f"dense {'compiled' if compiled else 'eager'}{' (graph)' if graph else ''}"
        if (dense := known.get((workload, head, beside))) is None:
            continue
        own = ", planned for it" if base.endswith("for graphs") else ""
        # Dense and sparse took turns: what disturbed one of a turn disturbed the other, too.
        turns = [a / b for a, b in zip(dense["wall_samples"], row["wall_samples"], strict=True)]
        low, _, high = quantiles(turns, n=4, method="inclusive") if len(turns) > 1 else turns * 3
        rate = "tokens_per_s" if "tokens_per_s" in row else "tokens_per_ms"
        what = workload.partition(", ")[2]
        found.append(
            {
                "what": f"forward, {what}" if row["kind"] == "model_forward" else what,
                "head": "with" if head else "without",
                "how": ", ".join(filter(None, ["compiled" * bool(compiled), f"CUDA graph{own}" * bool(graph)]))
                or "eager",
                "unit": rate.replace("_per_", "/"),
                "dense": dense[rate],
                "sparse": row[rate],
                "times": dense["wall_ms"] / row["wall_ms"],  # as the rates are
                "turns": len(turns),
                "low": low,
                "high": high,
                "half": f"{low:.2f} to {high:.2f}",
                **{f"dense_{key}": value for key, value in _also(dense).items() if key != "layer_error"},
                **{f"sparse_{key}": value for key, value in _also(row).items()},
                "layers": row.get("choice"),
            }
        )
    return found


def _weights(rows: list[dict]) -> str:
    held = {row["path"]: row["weight_bytes"] / 2**20 for row in rows if "weight_bytes" in row}
    dense = next(each for path, each in held.items() if path.startswith("dense"))
    sparse = [f"{each:,.4g}" for path, each in held.items() if not path.startswith("dense")]
    low, high = (pick(sparse, key=lambda text: float(text.replace(",", ""))) for pick in (min, max))
    return f"{dense:,.4g} MiB dense, {low if low == high else f'{low} to {high}'} sparse"


def _also(row: dict) -> dict:
    """Its peak in MiB, millijoules a token and in brackets their spread, errors and loss; None where it has none."""
    energy = f"{row['mj_per_token']:.3g} ({row['mj_spread']:.2g})" if "mj_per_token" in row else None
    peak = row["peak_bytes"] / 2**20 if "peak_bytes" in row else None
    return {"peak": peak, "mj": energy} | {key: row.get(key) for key in ("error", "layer_error", "loss")}


def conclusion(compared: list[dict]) -> str:
    """In one sentence, what these pairs show. A difference counts where the rates and three quarters of the turns show
    it, and there were as many as TURNS."""
    enough = [each for each in compared if each["turns"] >= TURNS]
    faster = [each for each in enough if min(each["low"], each["times"]) > 1]
    slower = [each for each in enough if max(each["high"], each["times"]) < 1]
    parts = []
    for name, end, some, pick in (("faster", "best", faster, max), ("slower", "worst", slower, min)):
        if some:
            pair = pick(some, key=lambda each: each["times"])
            head = " without the LM head" * (pair["head"] == "without")
            where = f"{pair['times']:.2f} times as fast in {pair['what']}{head}, {pair['how']}"
            parts.append(f"{name} in {len(some)} (at {end} {where})")
    if rest := len(enough) - len(faster) - len(slower):
        every = not parts and len(enough) == len(compared)
        parts.append("neither faster nor slower in any" if every else f"neither in {rest}")
    if few := len(compared) - len(enough):
        parts.append(f"not told apart in {few}, which took fewer than {TURNS} turns: give it more --seconds")
    dense = all(" ".join((each["layers"] or "").split()[1:]) == "dense" for each in compared)
    why = (
        "; all layers stay on the dense path, as no other was found to be faster, so any difference is chance, or the "
    )
    why = f"{why}host's time for a swapped layer" if dense else ""
    return f"of {len(compared)} comparison{'s' * (len(compared) > 1)} the sparse model is {', '.join(parts)}{why}"
