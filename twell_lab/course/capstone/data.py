"""A reader's `down` judged: run in the simulator, its faults and mistakes named, its sectors counted against the floor,
its time predicted and, on a GPU, measured; for notebook 12, its exercise and `twell-lab submit`. Medals: bronze for a
right result, silver for sectors within `SILVER` of the floor, gold for a time within `GOLD` of down_v2's. Where nothing
was timed, a predicted time may win "predicted gold", which is no measurement."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import records, simulator
from ...analysis.costs import Rates
from ...analysis.predict import rates_of
from ...core import CompileError, InputError, StackError, TwellError, read_file
from ...cuda.launch import run
from ...formats.twell import TILE, WORDS
from ...layers.paths.cost import CACHE_USED
from ...ops import clock as clocks
from ...ops.down import down
from ...simulator import Counts, Fault, faults
from ...simulator.counts import SECTOR
from ..recorded import newest
from ..verdicts import not_met
from . import cases, gpu
from .cases import COUNTED, D_FF, D_MODEL, NNZ, TIMED

SILVER, GOLD = 1.5, 1.25
LARGEST = 1 << 20  # bytes of a kernel's file
STEPS = 10_000_000  # of a block that are kept, to see whether all threads meet: none of the launches makes as many
SECONDS = 20.0  # a launch in the simulator may take: a loop that never ends is stopped
USUAL_GPU = "H100 SXM"  # whose rates a prediction takes where the GPU here is unknown, or there is none
_THREADS = re.compile(r"^[ \t]*#[ \t]*define[ \t]+THREADS[ \t]+(\d+)[ \t]*(?://.*)?$", re.M)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.M)


@dataclass(frozen=True)
class Judged:
    """What the simulator found. said: what is wrong, or what is right. counts: of the launch that is counted, None
    where the kernel is not right. floor: the fewest sectors that its loads can touch."""

    right: bool
    said: str
    counts: Counts | None = None
    floor: int = 0

    @property
    def sectors(self) -> int | None:
        """That its loads touch."""
        return self.counts and self.counts.global_reads.sectors


def source(file: str | Path) -> str:
    """The text of a kernel file. Raises InputError for what is no text file of at most LARGEST bytes."""
    try:
        return read_file(file, LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(file)!r:.200} cannot be read: {error}; accepted: a CUDA source with the kernel down"
        ) from None


def threads_of(text: str) -> int:
    """The number of threads of a block, which a kernel's source defines. Raises InputError for none, or another than a
    GPU takes."""
    found = _THREADS.search(text)
    if found is None:
        raise InputError("the source defines no THREADS; accepted: a line such as `#define THREADS 256`")
    threads = int(found[1])
    if threads % 32 or not 32 <= threads <= 1024:
        raise InputError(f"THREADS is {threads:,}; accepted: a multiple of 32 from 32 to 1024")
    return threads


def launcher(
    file: str | Path, device: str, counted: list[Counts] | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function of packed, gate, down_t and y that launches the kernel in a file, and returns y.

    device: "cuda" for the GPU here, "cpu" for the simulator. counted: a list that gets the counts of each launch there.
    Raises InputError for what is no kernel file, CompileError and StackError as the compilers do."""
    text = source(file)
    threads = threads_of(text)
    if device == "cuda":
        return gpu.Mine(text, threads, clocks.dtype_for("cuda")).launch
    program = simulator.compile(Path(file).absolute(), {"VALUE_BF16": True})
    watch = None if counted is None else "counts"

    def launch(packed: Tensor, gate: Tensor, down_t: Tensor, y: Tensor) -> Tensor:
        given = packed, gate, down_t, y, down_t.shape[1], gate.shape[1], TILE, WORDS
        run = program.launch("down", len(packed), threads, given, watch=watch, seconds=SECONDS)
        if counted is not None and run.counts:
            counted.append(run.counts)
        return y

    return launch


def judge(file: str | Path, name: str = "down") -> Judged:
    """Return whether the kernel in a file is right, by the simulator, and what its loads touch; what is wrong is said.
    InputError where there is no such file. name: of the kernel; of one of cases.STEPS its launches alone are made, and
    nothing is counted."""
    text = source(file)
    with_what = ""
    try:
        threads = threads_of(text)
        if others := sorted(set(_INCLUDE.findall(text)) - {"twell.cuh"}):
            raise InputError(f"the source includes {others[0]!r:.80}; twell.cuh alone is accepted: the rest is yours")
        program = simulator.compile(Path(file).absolute(), {"VALUE_BF16": True})
        if name in cases.STEPS:
            launches = dict.fromkeys(cases.step(name, threads), "counts")
        else:
            plainest, *others = cases.small(threads)
            launches = {plainest: "counts", **dict.fromkeys(others, "faults"), cases.counted(): "counts"}
        for of, watch in launches.items():
            with_what, y = f"with {of.said}: ", of.y()
            arguments = (of.packed, of.gate, of.down_t, y, of.down_t.shape[1], of.columns, TILE, WORDS)
            rows, how = len(of.packed), {"watch": watch, "steps": STEPS, "seconds": SECONDS}
            if of.columns != D_FF:  # that one makes more steps than are worth keeping
                how["trace"] = rows - 1
            run = program.launch(name, rows, threads, arguments, **how)
            counts = run.counts
            down_t = program.kernels[name][2].name
            if found := cases.wrong(of, y) or counts and _silent_rows(of, counts, down_t):
                return Judged(False, with_what + found)
            if run.trace and (missed := not_met(run.trace)):
                return Judged(False, f"{with_what}the result is right. But {missed}")
    except Fault as fault:
        kind = type(fault).__name__
        named = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}: {fault}"
        return Judged(False, f"{with_what}the simulator found {named}{_crowded(program, name, of, fault)}")
    except (CompileError, InputError, StackError, simulator.Unsupported) as error:
        return Judged(False, str(error))
    if name in cases.STEPS:
        return Judged(True, cases.STEPS[name])
    sectors, least = counts.global_reads.sectors, cases.floor_sectors(of)
    said = f"{sectors:,} sectors read where {least:,} are the floor, {sectors / least:.2f} times as many"
    return Judged(True, f"right on every input, no fault; {said}.", counts, least)


def _crowded(program, name: str, of: cases.Case, fault: Fault) -> str:
    """A line, with its line break, for a read past down_t in a row with tiles that overflow; else nothing."""
    down_t = program.kernels[name][2].name
    over = [str(count) for count in of.packed[fault.block, :, 0].tolist() if count >= WORDS]
    if not isinstance(fault, faults.OutOfBounds) or fault.array != down_t or not over:
        return ""
    narrow = f"; the last is {of.columns % TILE} columns wide" if of.columns % TILE else ""
    return f"\n  of this row's tiles, some count {', '.join(over)}: each has {WORDS - 1} slots, words - 1{narrow}"


def _silent_rows(of: cases.Case, counts: Counts, down_t: str) -> str | None:
    """In words, how many more sectors of down_t were read than the rows of neurons that fire lie in; None if none."""
    read, least, fired = counts.footprints[down_t].read_sectors, cases.needed_sectors(of), int(of.kept.any(0).sum())
    much = f"the result is right. But {read:,} sectors of {down_t} are read, and the rows of the {fired} neurons"
    why = f"that fire lie in {least:,}: too many sectors, of neurons that are silent, as in a dense product."
    return f"{much} {why}" if read > least else None


def floor() -> int:
    """The fewest sectors that the loads of the launch can touch that is counted."""
    return cases.floor_sectors(cases.counted())


@cache
def library_counts() -> dict[str, Counts]:
    """The counts of the library's own versions on the same launch, by name. Needs a C++ compiler."""
    of, found = cases.counted(), {}
    for version in gpu.VERSIONS:
        with simulator.watching("counts") as runs:
            run(down, of.packed, of.gate, (None, None, None), of.down_t, None, D_FF, TILE, version)
        found[f"down_v{version}"] = runs[-1].counts
    return found


# ---- predicted, and measured ----


def gpu_rates(name: str | None = None) -> Rates:
    """The rates of a GPU, by default of the one here; of USUAL_GPU where there is none, or none in data/gpus.json."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else USUAL_GPU
    try:
        return rates_of(name or here)
    except InputError:
        return rates_of(USUAL_GPU)


def least_us(l2_bytes: float, memory_bytes: float, l2_rate: float, memory_rate: float) -> float:
    """Microseconds that a launch needs at least: the slower of what passes the L2 and what comes from memory."""
    return 1e6 * max(l2_bytes / l2_rate, memory_bytes / memory_rate)


class Predicted(NamedTuple):
    """For TIMED rows on a GPU. l2_bytes: every sector that a block reads, once for each block, and what is written;
    memory_bytes: every different sector once, and rows that the L2 does not keep again for each block. limit: the
    slowest part of the GPU (simulator.predicted_time)."""

    gpu: str
    l2_bytes: int
    memory_bytes: int
    us: float
    limit: str


def predicted(counts: Counts, device: str | None = None) -> Predicted:
    """Return what these counts, of a launch of COUNTED rows, come to for TIMED rows on a GPU (`gpu_rates`)."""
    rates = gpu_rates(device)
    weights = max(counts.footprints, key=lambda name: counts.footprints[name].bytes)  # down_t does not grow
    grown = counts.scaled(TIMED / COUNTED, same_size=[weights])
    touched = grown.footprints.values()
    l2_bytes = SECTOR * (sum(at.block_read_sectors for at in touched) + grown.global_writes.sectors)
    often = clocks.firing_rates(D_FF, NNZ).numpy()
    here = simulated(rates)
    bounds = simulator.predicted_time(grown, here, {weights: often})
    memory_bytes = round(bounds.bounds["device memory"] * here.memory_bytes_per_s)
    return Predicted(rates.device, l2_bytes, memory_bytes, 1e6 * bounds.seconds, bounds.limit)


def simulated(rates: Rates) -> simulator.Gpu:
    """A GPU for `simulator.predicted_time`. Of one that is not USUAL_GPU, multiprocessors and clock are asked of torch;
    where it does not know them, the L1 cache bounds nothing."""
    if rates.device == USUAL_GPU:
        return simulator.H100
    properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    count, kilohertz = getattr(properties, "multi_processor_count", 0), getattr(properties, "clock_rate", 0)
    clock, kept = 1e3 * kilohertz if count and kilohertz else math.inf, rates.cache * CACHE_USED
    return simulator.Gpu(rates.device, count or 1, clock, rates.bandwidth, rates.l2, "its datasheet, scaled", kept)


def compared(judged: Judged, rows: list[dict] | None = None) -> list[dict]:
    """Predicted and measured microseconds of the reader's kernel and of the library's: {version, sectors, floor,
    predicted_us, gpu, measured_us, where}. rows: of `timed_here`; without them, those recorded on an H100."""
    counts = ({gpu.YOURS: judged.counts} if judged.counts else {}) | library_counts()
    size = {"kind": "kernel", "tokens": TIMED, "d_model": D_MODEL, "d_ff": D_FF}
    rows = rows or newest("", "H100", lambda row: row.get("path") in counts and size.items() <= row.items())
    shown = {row["path"]: row for row in rows}
    device = next((row["device"] for row in rows), None)
    found = []
    for version, each in counts.items():
        guess, row = predicted(each, device), shown.get(version)
        made = {"version": version, "sectors": each.global_reads.sectors, "floor": judged.floor or floor()}
        made |= {"predicted_us": guess.us, "gpu": guess.gpu, "measured_us": row and 1e3 * row["ms"]}
        found.append(made | {"where": row and row.get("where", f"yours, now, on {device}")})
    return found


def timed_here(file: str | Path, judged: Judged) -> tuple[str, list[dict]]:
    """(a line about what this machine's GPU made of a kernel, rows of kind "capstone"). The rows are [] without a GPU,
    where it cannot run the kernel, and where the kernel is wrong, there or (`judged`) in the simulator."""
    if not torch.cuda.is_available():
        return "There is no GPU here: the simulator's counts stand alone.", []
    if not judged.right:
        return "Not run on the GPU: the simulator's verdict comes first.", []
    here, text = torch.cuda.get_device_name(), source(file)
    try:
        mine = gpu.Mine(text, threads_of(text), clocks.dtype_for("cuda"))
        if found := gpu.wrong(mine):
            return f"The simulator finds nothing wrong, but on {here}, {found}", []
        rows = gpu.timed(mine)
    except CompileError as error:
        return f"The simulator takes it, but CUDA's own compiler does not:\n{error}", []
    except clocks.WrongResult as error:
        return f"On {here}: {error}", []
    except (TwellError, RuntimeError) as error:  # too little memory is a RuntimeError
        return f"Not run on {here}: {error}", []
    return f"On {here}: right on every input, and as in float64 on {TIMED:,} tokens.", rows


def against_v2(rows: list[dict]) -> float | None:
    """The time of the reader's kernel by that of down_v2; None where nothing was timed."""
    ms = {row["path"]: row["ms"] for row in rows}
    return ms[gpu.YOURS] / ms["down_v2"] if gpu.YOURS in ms else None


def medal(judged: Judged, rows: list[dict] | None = None) -> str | None:
    """Return its medal: None, "bronze", "silver", with times on a GPU "gold", or without them "predicted gold"."""
    if not judged.right:
        return None
    if judged.sectors > SILVER * judged.floor:
        return "bronze"
    times = against_v2(rows or [])
    if times is None:
        return "predicted gold" if predicted(judged.counts).us <= GOLD * floor_us(judged) else "silver"
    return "gold" if times <= GOLD else "silver"


def floor_us(judged: Judged) -> float:
    """Predicted microseconds of a kernel that reads the floor and writes what this one does: about those of down_v2."""
    passed = SECTOR * (judged.floor + judged.counts.global_writes.sectors) * TIMED // COUNTED
    rates = gpu_rates()
    return least_us(passed, predicted(judged.counts).memory_bytes, rates.l2, rates.bandwidth)


def next_step(won: str, judged: Judged, rows: list[dict] | None = None) -> str:
    """A line about what the next medal takes."""
    times = against_v2(rows or [])
    if won == "bronze":
        return f"Silver is for {int(SILVER * judged.floor):,} sectors or fewer."
    if won == "gold":
        return f"{times:.2f} times the time of down_v2: there is no more to win."
    took = "nothing was timed" if times is None else f"yours takes {times:.2f} times as long"
    gold = f"Gold is for {GOLD} times the time of down_v2 on a GPU, or less; {took}."
    if times is not None:
        return gold
    guess = predicted(judged.counts)
    least = f"{guess.us:,.0f} us on {guess.gpu}, and {floor_us(judged):,.0f} us for the floor's sectors"
    if won == "predicted gold":
        return f"The counts predict {least}. That is no measurement: no wait is in it. {gold}"
    return f"The counts predict {least}; predicted gold is for {GOLD} times that, or less. {gold}"


def submit(file: str | Path) -> tuple[str, str, records.Record | None]:
    """Judge a kernel in the simulator and on a GPU, if one is here. Returns a line about it, one about the GPU, and a
    record to share, None without a medal. InputError where there is no such file, StackError without a compiler for the
    simulator."""
    simulator.compiler()
    judged = judge(file)
    if not judged.right:
        return f"Not yet: {judged.said}", "", None
    on_gpu, rows = timed_here(file, judged)
    won, text = medal(judged, rows), source(file)
    what, counts = f"the simulator's counts for {COUNTED} rows of {D_FF:,} columns, d_model {D_MODEL:,}", judged.counts
    counted = {"what": what, "sectors_read": judged.sectors, "floor": judged.floor, "barriers": counts.barriers}
    counted |= {"load_instructions": counts.global_reads.requests, "sectors_written": counts.global_writes.sectors}
    counted["threads"] = threads_of(text)
    guess = predicted(counts, rows[0]["device"] if rows else None)._asdict()
    notes = {
        "medal": won,
        "on_gpu": on_gpu.partition("\n")[0],
        "against_down_v2": against_v2(rows),
        "predicted": {name: guess[name] for name in ("gpu", "l2_bytes", "memory_bytes", "us")},
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "source": text,
    }
    said = f"A reader's kernel for down, from TwELL words: {won}."
    record = records.Record.new("capstone", said, [counted, *rows], notes)
    return f"{won}: {judged.said} {next_step(won, judged, rows)}", on_gpu, record
