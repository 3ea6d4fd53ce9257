"""What notebook 08 computes: workloads, counts, recorded times beside predictions, and altered copies of kernels.

Data in, data out, nothing drawn. The kernels run by `twell_lab.ops.portable` and `twell_lab.simulator`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import records
from ...analysis.predict import rates_of
from ...bench import forward
from ...core import folders
from ...core.errors import DeviceError, InputError, StackError
from ...formats.twell import TILE, WORDS, TwELL
from ...ops import measure, portable
from ...records import evidence
from ...records.evidence import noise
from ...simulator import Counts, Fault, available, predicted_time, watching
from ...simulator.counts import H100, SECTOR, Gpu, LineCounts
from ..notebook import sixteen_bits
from ..recorded import device_and_day, timed_here

NO_TAIL = (None, None, None)
NEAR = 1.25  # a time up to this many times its bound is explained by it
Times = dict[str, dict]


def pack(gate: Tensor, version: int) -> tuple[Tensor, str]:
    """(packed words, what packed them): kernel pack_v`version` in the simulator where that runs, else the reference.

    gate: [rows, d_ff] on the CPU.
    """
    if not available():
        return TwELL.from_gate(gate).packed, "the reference"
    return portable.pack(gate, TILE, WORDS, version), f"pack_v{version}, in the simulator"


def same_words(words: Tensor, gate: Tensor) -> bool:
    """Whether packed words equal those of TwELL.from_gate(gate), except for words that are never written."""
    want = TwELL.from_gate(gate.cpu())
    used = torch.arange(want.words) <= want.counts[..., None]
    words = words.cpu()
    return words.shape == want.packed.shape and torch.equal(words[used], want.packed[used])


def on_the_gpu(gate: Tensor) -> str:
    """One sentence: whether every pack kernel gives the reference's words on this machine's GPU."""
    if not torch.cuda.is_available():
        return "There is no GPU here: the simulator is all that runs them."
    gate = gate.to("cuda", sixteen_bits("cuda"))
    try:
        words = {f"v{version}": portable.pack(gate, TILE, WORDS, version) for version in (1, 2, 3, 4)}
    except (DeviceError, StackError) as error:
        return f"The GPU here runs none of them: {error}"
    wrong = [name for name, found in words.items() if not same_words(found, gate)]
    return f"On {torch.cuda.get_device_name()}: " + (
        f"{', '.join(wrong)} of pack make other words." if wrong else f"{', '.join(words)} of pack make the same words."
    )


# ---- workloads: the same on every machine ----


def gate(rows: int, d_ff: int = 5632, nnz: int = 29) -> Tensor:
    """A gate before its ReLU, bfloat16 [rows, d_ff]: `nnz` positives a row, most often the columns that fire most.

    Made from whole numbers, so that counts are the same everywhere; columns as in bench's "lognormal" workload.
    """
    rates = np.maximum(measure.firing_rates(d_ff, nnz).numpy(), 1e-12)
    draw = np.log((noise((rows, d_ff), 5) + 1) / 2 + 1e-12) / rates
    fires = np.zeros((rows, d_ff), bool)
    np.put_along_axis(fires, np.argsort(-draw, axis=1)[:, :nnz], True, axis=1)
    size = np.abs(noise((rows, d_ff), 6)) + 0.01
    return torch.from_numpy(np.where(fires, size, -size)).to(torch.bfloat16)


class Layer:
    """A packed gate and the weights of a layer, on which `.gated(version)` and `.down(version)` launch kernels.

    Inputs are made as in `gate`. The counts of a launch depend on which neurons fire, not on the values.
    """

    def __init__(self, tokens: int, d_model: int = 2048, d_ff: int = 5632, nnz: int = 29) -> None:
        self.gate = gate(tokens, d_ff, nnz)
        self.x, self.up, self.down_t = (
            torch.from_numpy(noise(shape, 10 + i)).to(torch.bfloat16)
            for i, shape in enumerate(((tokens, d_model), (d_ff, d_model), (d_ff, d_model)))
        )
        self.packed = TwELL.from_gate(self.gate).packed

    def gated(self, version: int) -> Tensor:
        """y [tokens, d_model] of a gated layer."""
        return portable.gated(self.x, self.packed, self.gate, NO_TAIL, self.up, self.down_t, None, None, TILE, version)

    def down(self, version: int) -> Tensor:
        """y [tokens, d_model] of a plain ReLU layer."""
        return portable.down(self.packed, self.gate, NO_TAIL, self.down_t, None, len(self.down_t), TILE, version)

    def off_by(self, y: Tensor) -> float:
        """The error of y, a result of `gated`, against float64: |y - exact| / |exact|, over all values."""
        g, x, up, down_t = (t.double() for t in (self.gate, self.x, self.up, self.down_t))
        exact = (g.relu() * (x @ up.T)) @ down_t
        return float((y.double() - exact).norm() / exact.norm())


# ---- sources ----


def source(file: str, function: str, at: str | None = None) -> str:
    """The lines of one function of a file of kernels/, each with its number.

    at: the beginning of a line that opens a block; only that block is shown.
    """
    lines = (folders.kernels_dir() / file).read_text(encoding="utf-8").splitlines()
    named = re.compile(rf"\b{re.escape(function)}\(")
    # A definition is not indented; an indented line may use the name.
    first = next((i for i, line in enumerate(lines) if named.search(line) and line[:1] not in (" ", "#", "/")), None)
    if first is None:
        raise InputError(f"{file} has no function {function!r}")
    while lines[first - 1].startswith(("extern", "__device__", "template")):
        first -= 1
    last = lines.index("}", first)
    if at is not None:
        first = next((i for i in range(first, last) if lines[i].strip().startswith(at)), None)
        if first is None:
            raise InputError(f"{function} in {file} has no line that begins with {at!r}")
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        last = next(i for i in range(first, last) if lines[i] == indent + "}")
    shown = lines[first : last + 1]
    margin = min(len(line) - len(line.lstrip()) for line in shown if line)
    return "\n".join(f"{first + 1 + i:>4}  {line[margin:]}".rstrip() for i, line in enumerate(shown))


def altered(file: str, old: str, new: str, to: str | Path, which: int = 1) -> Path:
    """The path of a copy, at `to`, of a file of kernels/ in which the `which`-th occurrence of `old` is `new`.

    Line numbers stay the same. Raises InputError if `old` does not occur so often.
    """
    pieces = (folders.kernels_dir() / file).read_text(encoding="utf-8").split(old)
    if not 1 <= which < len(pieces):
        raise InputError(f"which is {which!r}; {old!r} occurs {len(pieces) - 1} times in {file}")
    new += "\n" * (old.count("\n") - new.count("\n"))
    to = Path(to)
    to.write_text(old.join(pieces[:which]) + new + old.join(pieces[which:]), encoding="utf-8")
    return to


def fault_of(call: Callable[[], object]) -> Fault | None:
    """What the simulator finds wrong with a launch, or None."""
    try:
        call()
    except Fault as fault:
        return fault
    return None


# ---- counted ----


def traffic(counts: Mapping[str, Counts]) -> str:
    """A table of the bytes that each kernel asked for and the sectors it touched. counts: kernel -> Counts."""
    return records.table(
        _counted(counts),
        {
            "kernel": "",
            "loads": "load instructions",
            "asked": "bytes asked for",
            "sectors": "sectors",
            "moved": "bytes in them",
            "lines": "128-byte lines",
            "stored": "sectors written",
        },
    )


def fused_traffic(counts: Mapping[str, Counts]) -> str:
    """The same as `traffic` for kernels that use shared memory too, with the warps that come to barriers."""
    return records.table(
        _counted(counts),
        {
            "kernel": "",
            "loads": "load instructions",
            "sectors": "sectors",
            "moved": "bytes in them",
            "shared_read": "shared: read",
            "shared_written": "written (bytes)",
            "barriers": "warps at barriers",
        },
    )


def _counted(counts: Mapping[str, Counts]) -> list[dict]:
    return [
        {
            "kernel": name,
            "loads": each.global_reads.requests,
            "asked": each.global_reads.bytes,
            "sectors": each.global_reads.sectors,
            "moved": SECTOR * each.global_reads.sectors,
            "lines": each.global_reads.lines,
            "stored": each.global_writes.sectors,
            "shared_read": each.shared_reads.bytes,
            "shared_written": each.shared_writes.bytes,
            "barriers": each.barriers,
        }
        for name, each in counts.items()
    ]


def beside_hardware(kernel: str) -> str:
    """Sectors of every version of a kernel, counted here and by a GPU's own counters, as a table and a sentence.

    kernel: "pack", "down" or "gated". The launches are those of `evidence.counted`, since these were recorded.
    """
    found = [record for record in records.load_all() if record.name == "gpu-counters"]
    if not found:
        return "No hardware counters are recorded in this checkout."
    record, rows, off = found[-1], [], 0.0
    counted = {(row["case"], row["kernel"]): row for row in record.rows}
    for case in evidence.counted():
        for version in case.versions if case.kernel == kernel else ():
            with watching("counts") as runs:
                case.run(case.inputs, version)
            here, there = evidence.counts_of(runs[-1].counts), counted[case.name, f"{kernel}_v{version}"]
            rows.append({"kernel": f"{kernel}_v{version}", "size": case.name.partition(",")[0]})
            for way in ("read", "write"):
                name = f"global_{way}_sectors"
                rows[-1] |= {way: here[name], f"{way}_there": there[name]}
                off = max(off, abs(here[name] - there[name]) / there[name])
    columns = {
        "kernel": "",
        "size": "",
        "read": "sectors read: here",
        "read_there": "hardware",
        "write": "written: here",
        "write_there": "hardware",
    }
    where = device_and_day(record.machine["gpus"][0]["name"], record.date, records.stale(record))
    return f"{records.table(rows, columns)}\nHardware: {where}. The largest difference is {off:.1%}."


def busiest(counts: Counts, sort: str = "global_reads") -> LineCounts:
    """The source line whose accesses of this sort (a field of Counts) touch the most sectors."""
    return max(counts.by_line(), key=lambda line: getattr(line, sort).sectors)


# ---- recorded, measured, predicted ----


def recorded(tokens: int, device: str = "H100") -> Times:
    """kernel -> {ms, device, date, stale, where, l1_hits} at this many tokens; {} if nothing is recorded.

    From the newest record of kernel versions on a GPU with `device` in its name. where: "recorded on <device>, <day>",
    and "stale" if the kernels or their launch code have changed since. l1_hits: the share of sectors that the GPU's
    own counters found in L1, None if that is not recorded.
    """
    loaded = records.load_all()
    hits = {
        row["kernel"]: row["l1_hits_percent"] / 100
        for record in loaded
        if record.name == "gpu-counters" and device in record.machine["gpus"][0]["name"]
        for row in record.rows
        if "l1_hits_percent" in row and row["case"].startswith(f"{tokens:,} tokens,")
    }
    for record in reversed(loaded):
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
                    "l1_hits": hits.get(row["path"]),
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
    """What a prediction needs to know of this machine's GPU: its rates from data/gpus.json, scaled by what an H100
    reaches of its own. None without a GPU, and for one that is not in there."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    try:
        rates = rates_of(found.name)
    except InputError:
        return None
    clock = 1e3 * getattr(found, "clock_rate", 0) or H100.clock_hz  # older versions of torch do not say it
    return Gpu(found.name, found.multi_processor_count, clock, rates.bandwidth, rates.l2, "its datasheet, scaled")


def against_time(
    counts: Mapping[str, Counts], times: Times, own: Times | None = None, gpu: Gpu | None = None
) -> list[dict]:
    """Predicted and measured times, a row for each kernel, as figures.predicted_against_measured takes them.

    counts: kernel -> its counts, scaled to the size that was timed. times: `recorded`, on an H100, for which the
    prediction is; own: `yours`, and gpu: `gpu_here`, for which there is a prediction of its own.
    """
    rows = []
    for version, each in counts.items():
        bounds = {name: 1e3 * seconds for name, seconds in predicted_time(each).bounds.items()}
        time, mine = times.get(version, {}), (own or {}).get(version, {})
        rows.append(
            {
                "version": version,
                "predicted_ms": bounds,
                "measured_ms": time.get("ms"),
                "l1_hits": time.get("l1_hits"),
                "recorded": time.get("where", ""),
                "yours_ms": mine.get("ms"),
                "yours": mine.get("where", ""),
                "yours_predicted_ms": 1e3 * predicted_time(each, gpu).seconds if gpu and mine else None,
            }
        )
    return rows


def verdicts(rows: list[dict]) -> str:
    """A line for each row of `against_time`: whether its traffic explains its time; then `summary`."""
    lines = []
    for row in rows:
        limit, predicted = _slowest(row["predicted_ms"])
        line = f"{row['version']}: predicted {predicted:.3f} ms ({limit})"
        times = _times(row)
        if times is None:
            lines.append(f"{line}; no time is recorded")
        elif times < 1:
            lines.append(f"{line}, took {row['measured_ms']:.3f}, {times:.2f} times that: faster than the limit")
        else:
            word = "the traffic explains it" if times <= NEAR else "something else takes the time"
            lines.append(f"{line}, took {row['measured_ms']:.3f}, {times:.1f} times that: {word}")
        if row.get("yours_ms") is not None:
            known = row["yours_predicted_ms"]
            predicted = "nothing is predicted for it" if known is None else f"predicted for it {known:.3f}"
            lines.append(f"  {row['yours']}: {row['yours_ms']:.3f} ms; {predicted}")
    return "\n".join(lines + summary(rows).splitlines())


# How a kernel can be faster than the time that a part of the GPU seems to need.
WHY_FASTER = {
    "L2 cache": "the model counts each line once for every block that reads it, and blocks that run side by side on a "
    "multiprocessor share lines in its L1",
    "L1 cache": "the model counts each read of the source, and a compiler may keep in a register what is read again",
    "device memory": "the model lets each sector come from memory once, and some may have been in the L2 cache before",
}


def summary(rows: list[dict]) -> str:
    """How many rows of `against_time` are near the prediction; which are faster than their limit, and how that can be.

    "" where no time is recorded.
    """
    timed = [row for row in rows if row["measured_ms"] is not None]
    if not timed:
        return ""
    near = [
        row["version"] for row in timed if 1 / NEAR <= row["measured_ms"] / _slowest(row["predicted_ms"])[1] <= NEAR
    ]
    lines = [f"Within a factor of {NEAR} of the prediction: {', '.join(near) or 'none'} ({len(near)} of {len(timed)})."]
    beaten: dict[str, list[dict]] = {}
    for row in timed:
        if _times(row) < 1:
            beaten.setdefault(_slowest(row["predicted_ms"])[0], []).append(row)
    for limit, faster in beaten.items():
        by = ", ".join(f"{row['version']} by {1 - _times(row):.0%}" for row in faster)
        lines.append(f"Faster than the limit of the {limit}: {by}. How that can be: {WHY_FASTER[limit]}.")
        hits = [row for row in faster if limit == "L2 cache" and row.get("l1_hits") is not None]
        if hits:
            found = ", ".join(f"{row['l1_hits']:.0%} for {row['version']}" for row in hits)
            short = [row["version"] for row in hits if round(row["l1_hits"], 2) < round(1 - _times(row), 2)]
            lines.append(
                f"Of their sectors, a GPU's counters found in L1: {found}. "
                + (
                    f"That is too little for {', '.join(short)}: there the L2 must also have delivered more than the "
                    "model's rate."
                    if short
                    else "That is enough."
                )
            )
    return "\n".join(lines)


def _times(row: dict) -> float | None:
    """Measured over predicted time, rounded to two digits, so that a smaller difference counts as none; or None."""
    if row["measured_ms"] is None:
        return None
    return round(row["measured_ms"] / _slowest(row["predicted_ms"])[1], 2)


def _slowest(parts: Mapping[str, float]) -> tuple[str, float]:
    limit = max(parts, key=parts.__getitem__)
    return limit, parts[limit]
