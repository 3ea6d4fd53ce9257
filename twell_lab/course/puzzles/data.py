"""A reader's kernel judged: run in the simulator, its faults put in words, its result compared, its way of working
looked at, and the same launches made on a GPU where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ... import core, simulator
from ...core import CompileError, DeviceError, InputError, StackError
from ...simulator import Fault, Trace, faults
from ..capstone.gpu import Kernel
from ..verdicts import UNWRITTEN, NotYet, coming, not_met
from .cases import PUZZLES, Case, Seen
from .slips import likely

_HEADER = "cuda_on_cpu.h"  # what the simulator puts in the place of CUDA's own
_ANSWER = re.compile(r"```cuda\n(.*?)```", re.DOTALL)
MACROS = {"VALUE_BF16": True}  # for what includes twell.cuh
SECONDS = 20.0  # a launch may take: a loop that never ends is stopped


def judge(name: str, file: str | Path) -> str:
    """Return what is said of the kernel in a file if it solves one of PUZZLES; NotYet, with a reason, if not."""
    puzzle = PUZZLES[name]
    cases = puzzle.cases()
    tensors = [{key: each for key, each in case.arguments.items() if isinstance(each, Tensor)} for case in cases]
    originals = [{key: tensor.clone() for key, tensor in given.items()} for given in tensors]
    try:
        program = simulator.compile(Path(file), MACROS)
        text = program.sources[program.file]
        for case, before in zip(cases, originals, strict=True):
            given = list(case.arguments.values())
            how = {"watch": "counts", "trace": case.look, "seconds": SECONDS}
            run = program.launch(name, case.grid, case.block, given, **how)
            if added := _added(case, before, run.trace):
                raise NotYet(f"{added} does not begin at 0: write it, do not add to it.")
            if empty := _empty(case, before):
                raise NotYet(f"{empty} is empty.")
            if wrong := _wrong(name, case, case.arguments, before, text):
                raise NotYet(f"with {case.said}: {wrong}{coming(run.trace)}")
            if missed := not_met(run.trace) or puzzle.point(case, Seen(run)):
                raise NotYet(f"the result is right. But with {case.said}, {missed}")
    except Fault as fault:
        raise NotYet(f"with {case.said}: {in_words(fault, case, '__syncthreads' in text)}") from None
    except (CompileError, InputError, StackError, simulator.Unsupported) as error:
        raise NotYet(_own_lines(str(error))) from None
    if not torch.cuda.is_available() or puzzle.notebook == "08":  # whose types old GPUs do not have
        return puzzle.right
    for case, before in zip(cases, originals, strict=True):
        case.arguments.update(before)
    return _also_on_the_gpu(name, Path(file).read_text(encoding="utf-8"), cases, puzzle.right)


def on_gpu(text: str, name: str, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Return the outputs of each launch of the kernel `name` on this GPU, on the CPU. Only what the simulator found
    sound is to be launched. Raises as Kernel does."""
    kernel, found = Kernel(text, name), []
    for case in cases:
        there = {key: given.cuda() if isinstance(given, Tensor) else given for key, given in case.arguments.items()}
        kernel(case.grid, case.block, there.values())
        found.append({key: there[key].cpu() for key in case.wanted})
    return found


def _also_on_the_gpu(name: str, text: str, cases: list[Case], right: str) -> str:
    here = torch.cuda.get_device_name()
    try:
        found = on_gpu(text, name, cases)
    except (StackError, DeviceError) as error:
        return f"{right} (Not run on the {here}: {error})"
    except CompileError as error:
        raise NotYet(f"the simulator runs it, but CUDA's own compiler does not take it:\n{error}") from None
    for case, results in zip(cases, found, strict=True):
        if wrong := _wrong(name, case, results, case.arguments, text):
            raise NotYet(f"the simulator finds nothing wrong, but on the {here}, with {case.said}: {wrong}")
    return f"{right} The {here} gives the same."


def answer(name: str) -> str:
    """Return the first folded answer in the notebooks that is a kernel called so; KeyError where there is none."""
    for path in sorted(core.notebooks_dir().glob("*.ipynb")):
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        for text in _ANSWER.findall("\n".join(cell for cell in cells if "<details>" in cell)):
            if re.search(rf"__global__[^{{]*\b{name}\(", text):
                return text
    raise KeyError(f"no notebook has an answer called {name!r}")


def trace_of(name: str, file: str | Path) -> Trace | None:
    """Return the steps of one block of a reader's kernel: of the first of the puzzle's launches that a fault stops, up
    to there, or else of the first of all; None where nothing can be run: no compiler, or a source that it refuses."""
    traces = []
    try:
        program = simulator.compile(Path(file), MACROS)
        for case in PUZZLES[name].cases():
            given = list(case.arguments.values())
            trace = simulator.step(program, name, case.grid, case.block, given, look=case.look, seconds=SECONDS)
            if trace.fault:
                return trace
            traces.append(trace)
    except (CompileError, InputError, StackError, simulator.Unsupported):
        return None
    return traces[0]


def standing(folder: str | Path) -> str:
    """Three lines on the kernels in a folder, judged anew: how many of notebook 06 are solved, which are not, what is
    next."""
    left, every = [], [(name, puzzle) for name, puzzle in PUZZLES.items() if puzzle.notebook == "06"]
    for number, (name, puzzle) in enumerate(every, 1):
        try:
            judge(name, Path(folder) / f"{name}.cu")
        except NotYet:
            left.append((number, puzzle))
    done = f"Right: {len(every) - len(left)} of {len(every)}."
    if not left:
        return f"{done}\nOpen: none.\nNext: notebook 08, where a kernel packs and another multiplies with the words."
    which = "all" if len(left) == len(every) else ", ".join(f"{number}" for number, _ in left)
    minutes, (first, puzzle) = sum(puzzle.minutes for _, puzzle in left), left[0]
    return f"{done}\nOpen: {which}, some {minutes} minutes.\nNext: exercise {first}, {puzzle.title}."


# ---- in words ----


def _own_lines(said: str) -> str:
    """Return what a compiler says of the reader's file, without its notes on the simulator's header."""
    lines = said.splitlines()
    end = next((at for at, line in enumerate(lines) if f"{_HEADER}:" in line), len(lines))
    own = "\n".join(lines[:end])
    return own if "error:" in own else said


def in_words(fault: Fault, case: Case, has_barriers: bool = False) -> str:
    """Return what a kernel did wrong, by which thread and in which line. has_barriers: whether its source has any."""
    line = fault.line
    where = f"\n  {line.file}:{line.number}: {line.text}" if line else ""
    thread, other = _thread(fault.thread, fault.block, case), _thread(fault.other_thread, fault.other_block, case)
    first = str(fault).partition("\n")[0]
    place = f"{fault.array}[{fault.element}]"
    tile = re.search(r"shared \w+ \[\d+, (\d+)\]$", first)  # written with two indices: said with two
    if tile and fault.element is not None:
        place = "{}[{}][{}]".format(fault.array, *divmod(fault.element, int(tile[1])))
    verb = "wrote" if " writes " in first else "read"
    if isinstance(fault, faults.OutOfBounds) and fault.array and fault.element is not None:
        given = case.arguments.get(fault.array)
        if isinstance(given, Tensor):
            return f"{thread} {verb} {place}, out of bounds: there are {given.numel()}.{where}"
    if isinstance(fault, faults.GlobalRace) and fault.array:
        atomics = (fault.kernel, fault.array) in (("neuron_counts", "counts"), ("neuron_lists", "cursor"))
        if verb == "wrote" and " writes it" in str(fault):
            asked = " without an atomic."
            if not atomics:
                asked = "; each place is one thread's."
                if fault.block != fault.other_block and "n" in case.arguments:
                    asked += " Is i the number in the whole grid?"
                if fault.block == fault.other_block:
                    asked += " Is the index each thread's own? Or one alone has to write, within an `if`."
            return f"{thread} and {other} both write {place}{asked}{where}"
        what = f"one of them writes, and {'without an atomic ' if atomics else ''}nothing says which comes first"
        return f"{thread} and {other} use {place}, {what}.{where}"
    if isinstance(fault, faults.SharedRace):
        verb = "writes" if verb == "wrote" else "reads"
        does = "writes" if " writes it" in str(fault) else "reads"
        what = f"{thread} {verb} {place} and {other} {does} it"
        if line == fault.other_line and line and re.search(rf"\b{fault.array}\s*[-+*/|&^]=", line.text):
            return f"{what}: all threads add to one place. Give each its own, and fold these.{where}"
        if case.race:
            return f"{what}, and nothing puts one before the other. {case.race}{where}"
        if has_barriers:
            asked = "Is one missing, or does it stand within an `if` that only one of them takes?"
            return f"{what}, and no barrier that both come to lies in between. {asked}{where}"
        return f"a barrier is missing: {what}, and none that both come to lies in between.{where}"
    if isinstance(fault, faults.UninitialisedRead):
        return f"{thread} read {place} before anybody wrote it: write first, then a barrier, then read.{where}"
    return str(fault)


def _thread(thread: int | None, block: int | None, case: Case) -> str:
    """A thread as "thread 5 of block 1 (number 37)", with its number where the grid is numbered through, or as "thread
    x 1, y 14 of block x 0, y 0" where blocks have two directions."""
    if thread is not None and block is not None and len(case.block) == 2:
        (down, across), (below, beside) = divmod(thread, case.block[0]), divmod(block, case.grid[0])
        return f"thread x {across}, y {down} of block x {beside}, y {below}"
    if max(case.grid) == 1 or thread is None or block is None:
        return f"thread {thread}"
    number = f" (number {block * case.block[0] + thread})" if "n" in case.arguments else ""
    return f"thread {thread} of block {block}{number}"


def _added(case: Case, before: Mapping[str, Tensor], trace: Trace) -> str | None:
    """The first output that holds no zeros before the launch, and of which the kernel uses what it holds; else None."""
    for name in set(case.wanted) & set(trace.arrays):
        written: set[int] = set()
        for step in trace.touching(name) if before[name].ne(0).all() else ():
            if step.kind != "write" and not written.issuperset(step.covered):
                return name
            written.update(step.covered)
    return None


def _empty(case: Case, before: Mapping[str, Tensor]) -> str | None:
    """The first output into which nothing was written; None where all hold something."""
    for name in case.wanted:
        if torch.equal(case.arguments[name].nan_to_num(nan=0.25), before[name].nan_to_num(nan=0.25)):
            return name
    return None


def _wrong(puzzle: str, case: Case, got: Mapping[str, Tensor], before: Mapping[str, Tensor], code: str) -> str | None:
    """The first place of an output that is not what it should be, and the likely mistake; None where all are right."""
    for name, want in case.wanted.items():
        mine, first = got[name], before[name]
        if name in case.read and not torch.equal(mine, first):
            mine = case.read[name](mine)
        used = case.used.get(name, torch.ones_like(want, dtype=torch.bool))
        differs = (mine != want) & used
        if not differs.any():
            continue
        if torch.equal(mine.nan_to_num(nan=0.25), first.nan_to_num(nan=0.25)):
            return f"your kernel writes nothing to {name} yet."
        at = differs.nonzero()[0].tolist()
        place, value, wanted = name + "".join(f"[{i}]" for i in at), mine[tuple(at)].item(), want[tuple(at)].item()
        off = f"{place} should be {_shown(wanted)}; yours is {_shown(value, beside=wanted)}."
        if value != value or value == UNWRITTEN:
            off = f"{place} was never written; it should be {_shown(wanted)}."
        return off + likely(puzzle, case, name, mine, code)
    return None


def _shown(value: float, beside: float = 0) -> str:
    """A number, or a word in hexadecimal where it or the one beside it is so large that it packs a value."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value}" if max(abs(value), abs(beside)) < 2**16 else f"0x{value % 2**32:08x}"
