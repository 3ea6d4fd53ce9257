"""What notebook 08 computes: workloads, counts, recorded times beside predictions, and altered copies of kernels.

Data in, data out, nothing drawn. The kernels run in `twell_lab.simulator`, or on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import core, records
from ...analysis.predict import rates_of
from ...bench import forward
from ...bench.evidence import noise
from ...core import DeviceError, InputError, StackError
from ...cuda.launch import run
from ...formats.twell import TILE, WORDS, TwELL
from ...layers.paths.cost import CACHE_USED
from ...ops import clock as clocks
from ...ops.down import down
from ...ops.gated import gated
from ...ops.pack import pack as packed_by
from ...simulator import Counts, Fault, available, predicted_time
from ...simulator.counts import H100, Gpu
from ..notebook import sixteen_bits
from ..recorded import device_and_day, short, timed_here

NO_TAIL = (None, None, None)
D_FF, NNZ = 5632, 29  # of the workloads that are timed
NEAR = 1.25  # a time is near its prediction up to this factor, either way
Times = dict[str, dict]


def pack(gate: Tensor, version: int) -> tuple[Tensor, str]:
    """(packed words, what packed them): kernel pack_v`version` in the simulator where that runs, else the reference.

    gate: [rows, d_ff] on the CPU.
    """
    if not available():
        return TwELL.from_gate(gate).packed, "the reference"
    return run(packed_by, gate, TILE, WORDS, version), f"pack_v{version}, in the simulator"


def same_words(words: Tensor, gate: Tensor) -> bool:
    """Return whether packed words equal those of TwELL.from_gate(gate), except for words that are never written."""
    want = TwELL.from_gate(gate.cpu())
    used = torch.arange(want.words) <= want.counts[..., None]
    words = words.cpu()
    return words.shape == want.packed.shape and torch.equal(words[used], want.packed[used])


def on_the_gpu(gate: Tensor) -> str:
    """One sentence: whether every pack kernel gives the reference's words on this machine's GPU."""
    gate = gate.to("cuda", sixteen_bits("cuda"))
    try:
        words = {f"v{version}": run(packed_by, gate, TILE, WORDS, version) for version in (1, 2, 3, 4)}
    except (DeviceError, StackError) as error:
        return f"The GPU here runs none of them: {error}"
    wrong = [name for name, found in words.items() if not same_words(found, gate)]
    return f"On {torch.cuda.get_device_name()}: " + (
        f"{', '.join(wrong)} of pack make other words." if wrong else f"{', '.join(words)} of pack make the same words."
    )


# ---- workloads: the same on every machine ----


def gate(rows: int, d_ff: int = D_FF, nnz: int = NNZ) -> Tensor:
    """A gate before its ReLU, bfloat16 [rows, d_ff]: `nnz` positives a row, most often the columns that fire most.

    Made from whole numbers, so that counts are the same everywhere; columns as in bench's "lognormal" workload.
    """
    rates = np.maximum(clocks.firing_rates(d_ff, nnz).numpy(), 1e-12)
    draw = np.log((noise((rows, d_ff), 5) + 1) / 2 + 1e-12) / rates
    fires = np.zeros((rows, d_ff), bool)
    np.put_along_axis(fires, np.argsort(-draw, axis=1)[:, :nnz], True, axis=1)
    size = np.abs(noise((rows, d_ff), 6)) + 0.01
    return torch.from_numpy(np.where(fires, size, -size)).to(torch.bfloat16)


class Layer:
    """A packed gate and the weights of a layer, on which `.gated(version)` and `.down(version)` launch kernels.

    Inputs are made as in `gate`. The counts of a launch depend on which neurons fire, not on the values.
    """

    def __init__(self, tokens: int, d_model: int = 2048, d_ff: int = D_FF, nnz: int = NNZ) -> None:
        self.gate = gate(tokens, d_ff, nnz)
        self.x, self.up, self.down_t = (
            torch.from_numpy(noise(shape, 10 + i)).to(torch.bfloat16)
            for i, shape in enumerate(((tokens, d_model), (d_ff, d_model), (d_ff, d_model)))
        )
        self.packed, self.weights = TwELL.from_gate(self.gate).packed, (self.up, self.down_t, None, None)

    def gated(self, version: int) -> Tensor:
        """y [tokens, d_model] of a gated layer."""
        return run(gated, self.x, self.packed, self.gate, NO_TAIL, *self.weights, TILE, version)

    def down(self, version: int) -> Tensor:
        """y [tokens, d_model] of a plain ReLU layer."""
        return run(down, self.packed, self.gate, NO_TAIL, self.down_t, None, len(self.down_t), TILE, version)

    def off_by(self, y: Tensor) -> float:
        """The error of y, a result of `gated`, against float64: |y - exact| / |exact|, over all values."""
        g, x, up, down_t = (t.double() for t in (self.gate, self.x, self.up, self.down_t))
        exact = (g.relu() * (x @ up.T)) @ down_t
        return float((y.double() - exact).norm() / exact.norm())


# ---- sources ----


def altered(file: str, old: str, new: str, to: str | Path, which: int = 1) -> Path:
    """The path of a copy, at `to`, of a file of kernels/ in which the `which`-th occurrence of `old` is `new`.

    Line numbers stay the same. Raises InputError if `old` does not occur so often.
    """
    pieces = (core.kernels_dir() / file).read_text(encoding="utf-8").split(old)
    if not 1 <= which < len(pieces):
        raise InputError(f"which is {which!r}; {old!r} occurs {len(pieces) - 1} times in {file}")
    new += "\n" * (old.count("\n") - new.count("\n"))
    to = Path(to)
    to.write_text(old.join(pieces[:which]) + new + old.join(pieces[which:]), encoding="utf-8")
    return to


def fault_of(call: Callable[[], object]) -> Fault | None:
    """Return what the simulator finds wrong with a launch, or None."""
    try:
        call()
    except Fault as fault:
        return fault
    return None


# ---- recorded, measured, predicted ----


def recorded(tokens: int, device: str = "H100") -> Times:
    """kernel -> {ms, device, date, stale, where} at this many tokens; {} if nothing is recorded.

    From the newest record of kernel versions on a GPU with `device` in its name. where: "recorded on <device>, <day>",
    and "stale" if the kernels or their launch code have changed since.
    """
    for record in reversed(records.load_all()):
        rows = [
            row
            for row in record.rows
            if row.get("kind") == "kernel" and row["tokens"] == tokens and device in row["device"]
        ]
        if rows:
            old = records.stale(record)
            where = f"recorded on {device_and_day(rows[0]['device'], record.date, old)}"
            return {
                row["path"]: {
                    "ms": row["ms"],
                    "device": row["device"],
                    "date": record.date[:10],
                    "stale": old,
                    "where": where,
                }
                for row in rows
            }
    return {}


def yours(tokens: int = 16384) -> Times:
    """kernel -> {ms, device, where}, measured now on this machine's GPU; {} where there is none that can do it."""
    return {
        row["path"]: {"ms": row["ms"], "device": row["device"], "where": f"yours, now, on {row['device']}"}
        for row in timed_here(lambda: forward.kernel_versions(tokens, dtype=sixteen_bits("cuda")))
    }


def gpu_here() -> Gpu | None:
    """Return what a prediction needs to know of this machine's GPU: its rates from data/gpus.json, scaled by what an
    H100 reaches of its own. None without a GPU, and for one that is not in there."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    try:
        rates = rates_of(found.name)
    except InputError:
        return None
    clock = 1e3 * getattr(found, "clock_rate", 0) or H100.clock_hz  # older versions of torch do not say it
    kept = rates.cache * CACHE_USED
    return Gpu(found.name, found.multi_processor_count, clock, rates.bandwidth, rates.l2, "its datasheet, scaled", kept)


def _rows(counts: Counts) -> dict[str, np.ndarray]:
    """Return how often each row of the weights is read that a launch on a `Layer` reads: as its neurons fire."""
    often = clocks.firing_rates(D_FF, NNZ).numpy()
    return {name: often for name in ("up", "down_t") if name in counts.footprints}


def against_time(
    counts: Mapping[str, Counts], times: Times, own: Times | None = None, gpu: Gpu | None = None
) -> list[dict]:
    """Predicted and measured times, a row for each kernel, as figures.predicted_against_measured takes them.

    counts: kernel -> its counts, scaled to the size that was timed. times: `recorded`, on an H100, for which the
    prediction is; own: `yours`, and gpu: `gpu_here`, for which there is a prediction of its own.
    """
    rows = []
    for version, each in counts.items():
        rows_read = _rows(each)
        bounds = {name: 1e3 * s for name, s in predicted_time(each, rows=rows_read).bounds.items()}
        time, mine = times.get(version, {}), (own or {}).get(version, {})
        rows.append(
            {
                "version": version,
                "predicted_ms": bounds,
                "measured_ms": time.get("ms"),
                "recorded": time.get("where", ""),
                "yours_ms": mine.get("ms"),
                "yours": mine.get("where", ""),
                "yours_predicted_ms": 1e3 * predicted_time(each, gpu, rows_read).seconds if gpu and mine else None,
            }
        )
    return rows


def times_predicted(rows: list[dict]) -> str:
    """Measured over predicted time of each row of `against_time`, in one line; on the reader's GPU in a second one."""
    found = _ratios(rows)
    lines = [f"took/predicted: {', '.join(f'{times:.1f}' for times in found)}" if found else "no time is recorded"]
    if own := [row for row in rows if row["yours_ms"] is not None and row["yours_predicted_ms"]]:
        times = ", ".join(f"{row['version']} {row['yours_ms'] / row['yours_predicted_ms']:.1f}" for row in own)
        lines.append(f"{own[0]['yours']}, took/predicted: {times}")
    return "\n".join(lines)


def three_lines(*operations: list[dict]) -> str:
    """Return what the notebook comes to, made of the rows of `against_time` of each operation, the naive version first:
    what the versions gained, how many of them took about as long as predicted, and where."""
    found = [times for rows in operations for times in _ratios(rows)]
    near = sum(1 / NEAR <= times <= NEAR for times in found)
    where = "; ".join(dict.fromkeys(row["recorded"] for rows in operations for row in rows if row["recorded"]))
    last = f"Within {NEAR}x of prediction: {near} of {len(found)}" + (f"; {short(where)}" if where else "")
    return "\n".join([*_gains(operations, "measured_ms"), last])


def own_lines(*operations: list[dict]) -> str:
    """Return what the versions gained on the reader's own GPU, as `three_lines` says it of the recorded one; "" without
    it."""
    where = next((row["yours"] for rows in operations for row in rows if row["yours"]), None)
    return "\n".join([f"{where}:", *_gains(operations, "yours_ms")]) if where else ""


def _gains(operations: Iterable[list[dict]], key: str) -> list[str]:
    """A line for each operation of which all versions were timed, the naive version first."""
    lines = []
    for rows in operations:
        if all(row[key] for row in rows):
            first, last = rows[0][key], min(row[key] for row in rows)
            name = rows[0]["version"].partition("_")[0]
            lines.append(f"{name}: {first:.3f} to {last:.3f} ms ({first / last:.1f}x)")
    return lines


def _ratios(rows: list[dict]) -> list[float]:
    """Measured over predicted time of each row of which a time is recorded."""
    return [row["measured_ms"] / max(row["predicted_ms"].values()) for row in rows if row["measured_ms"] is not None]
