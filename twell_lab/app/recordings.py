"""The recordings that `twell-lab record NAME` makes: the course's figures and the project's evidence come from them.

RECORDINGS has them all by name: a Recording, which `make` runs in sections, or a function that returns its Record. Each
checks results before it times anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .. import core
from ..bench import arena, comparison, composing, decoding, fine_tuning, forward, losses, methods, models, training
from ..bench.chip import sections as chip
from ..bench.rows import Sections
from ..core import DeviceError, RecordError, StackError, TwellError
from ..ops import kernels
from ..records import Record
from ..training.sweep import record as sweep_record

SANITIZERS = ("memcheck", "racecheck", "synccheck")
_NOTHING_RUN = 5  # exit status of pytest where every test was left out, as where plotly is missing
_AT_ONCE = 8  # processes of GPU tests at the same time: each waits more for compiler and Python than for the GPU
_ATTACKED = 420  # seconds, on a GPU


class Recording(NamedTuple):
    """A record in sections, which may be cut short. name: of the record. sections: returns them, given a dict that
    takes what does not run, and why, and of `arena` the folder of rivals."""

    name: str
    purpose: str
    sections: Callable[..., Sections]
    seconds: float = 180.0  # no step is begun that would probably end later
    gpu: bool = True  # whether it needs one


def need_gpu() -> None:
    """Raise DeviceError without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("this recording needs an NVIDIA GPU that torch can use; `twell-lab doctor` says what is here")


def make(name: str, folder: Path, *rivals: Path) -> tuple[Record, Path]:
    """Make a recording, save its record in a folder, and return both: the record and its path. After each step of a
    section what there is so far is saved there.

    Raises DeviceError where it needs a GPU, and StackError where nothing could be measured."""
    recording = RECORDINGS[name]
    if not isinstance(recording, Recording):
        return (record := recording()), record.save(folder)
    if recording.gpu:
        need_gpu()
    refused: dict = {}  # what did not run, and why
    path: Path | None = None

    def save(rows: list[dict], notes: dict) -> tuple[Record, Path]:
        nonlocal path
        notes = {key: value for key, value in (notes | {"refused": refused}).items() if value}
        record = Record.new(recording.name, recording.purpose, rows, notes)
        path = path or record.free_path(folder)
        core.write_atomically(path, record.to_json())
        return record, path

    def save_part(rows: list[dict], notes: dict) -> None:
        try:
            save(rows, {"unfinished": "the recording was cut off, or goes on"} | notes)
        except RecordError as error:
            print(f"{name}: what there is so far is not kept: {error}", file=sys.stderr, flush=True)

    try:
        rows, notes = run(recording.sections(refused, *rivals), recording.seconds, save_part)
    except BaseException:
        if path is not None:
            print(f"record: what it has so far is in {path}", file=sys.stderr)
        raise
    if not rows:
        raise StackError(f"{name}: nothing was measured: {notes['left_out']}")
    return save(rows, notes)


def run(
    sections: Sections, limit: float, keep: Callable[[list[dict], dict], None] = lambda rows, notes: None
) -> tuple[list[dict], dict[str, dict]]:
    """Return the rows of all sections, each a list of steps, and notes: the `seconds` that each section took, and in
    `left_out` which of its steps were left out, and why. keep: called after each step with what there is.

    A step is not begun when less of `limit`, in seconds, is left than the step before it in its section took. An error
    of torch (too little memory, say) ends its section, any other error is raised. An interruption (Ctrl-C, or SIGTERM)
    leaves out the rest; without any row it is raised."""
    rows: list[dict] = []
    seconds: dict[str, float] = {}
    why, done = dict.fromkeys(sections, "cut off"), dict.fromkeys(sections, 0)
    begin, interrupted = time.perf_counter(), False

    def notes() -> dict[str, dict]:
        left = {name: (len(steps) - done[name], len(steps)) for name, steps in sections.items()}
        said = {name: f"{some} of {all_} steps: {why[name]}" for name, (some, all_) in left.items() if some}
        return {"seconds": {**seconds}, "left_out": said}

    for name, steps in sections.items():
        start, last = time.perf_counter(), 0.0
        for step in steps:
            before = time.perf_counter()
            if interrupted or before - begin + last >= limit:
                why[name] = "interrupted" if interrupted else f"too little is left of {limit:g} s"
                break
            try:
                rows += step()
                done[name] += 1
                last = time.perf_counter() - before
                print(f"{name}, {done[name]}/{len(steps)}: {last:.1f} s, {len(rows)} rows", file=sys.stderr, flush=True)
                keep(rows, notes())
            except (RuntimeError, KeyboardInterrupt) as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                if isinstance(error, TwellError) or interrupted and not rows:
                    raise
                why[name] = "interrupted" if interrupted else f"{type(error).__name__}: {str(error)[:300]}"
                break
            finally:
                with suppress(RuntimeError):  # of a step that broke the GPU's context
                    torch.cuda.empty_cache()
        seconds[name] = round(time.perf_counter() - start, 1)
        if done[name] < len(steps):
            print(f"{name}: left out {notes()['left_out'][name]}", file=sys.stderr, flush=True)
    return rows, notes()


# ---- tests that are run


def gpu_tests() -> Record:
    """Return a report of tests/gpu, and of its reduced set under each compute-sanitizer tool where that is installed.

    Raises TwellError, with the end of the output, when a test fails."""
    need_gpu()
    folder, tool = _tests("gpu"), shutil.which("compute-sanitizer")
    # Without torch's caching allocator each tensor is an allocation of its own, whose bounds memcheck sees.
    checked, reduced = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, [str(folder / "test_reduced.py")]
    files = sorted(folder.glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, (os.cpu_count() or 1) // 2))) as side_by_side:
        jobs = []
        for name in SANITIZERS if tool else ():
            command = [str(tool), "--tool", name, "--error-exitcode", "99", "--target-processes", "all"]
            jobs.append(side_by_side.submit(_suite, f"reduced set under {name}", reduced, checked, command))
        jobs += [side_by_side.submit(_suite, f"gpu tests: {path.stem}", [str(path)]) for path in files]
        failed = [str(error) for job in jobs if isinstance(error := job.exception(), TwellError)]
    if failed:  # all have ended, so that one run on a GPU shows all failures
        raise TwellError("\n".join([f"{len(failed)} of {len(jobs)} suites failed", *failed]))
    suites = [job.result() for job in jobs]
    totals = {key: sum(suite[key] for suite in suites) for key in ("passed", "failed", "skipped")}
    notes = {"gpu_tests": {**totals, "sanitizers": list(SANITIZERS) if tool else []}}
    return Record.new("gpu-tests", "what tests/gpu said on this GPU", suites, notes, kernels=kernels.sources())


def _tests(name: str) -> Path:
    found = core.kernels_dir().parent / "tests" / name
    if not found.exists():
        raise StackError(f"the tests are not here (tests/{name} is part of a checkout, not of the package)")
    return found


def _suite(name: str, targets: list[str], more: dict | None = None, prefix: Sequence[str] = ()) -> dict:
    """Run pytest on the targets in a process of its own, with `more` in its environment and `prefix` before its command
    line; return {suite, passed, failed, skipped, seconds}. Raises TwellError unless all passed."""
    environment = {key: value for key, value in os.environ.items() if key != "TWELL_LAB_CUBINS"} | (more or {})
    start = time.perf_counter()
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *targets]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    summary = [line for line in done.stdout.splitlines() if re.search(r" in [\d.]+s", line)][-1:]
    if done.returncode not in (0, _NOTHING_RUN) or not summary:
        raise TwellError(f"{name}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped)", summary[0])}
    return {"suite": name, "passed": 0, "failed": 0, "skipped": 0, **counts, "seconds": round(seconds, 1)}


def attack() -> Record:
    """Return how many random and hostile cases of tests/nightly/attack passed: on a GPU layers on every path and
    kernel, for some minutes; without one all of them. The error of a failure says how to run it alone."""
    gpu, tests, options = torch.cuda.is_available(), "attack", []
    if gpu:
        tests, options = "attack/test_layers.py::test_layers", [f"--attack-seconds={_ATTACKED}"]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.json")
        suite = _suite("attack", [f"{_tests('nightly')}/{tests}", *options, f"--attack-report={report}"])
        rows = json.loads(report.read_text()) if report.exists() else []
    ran = {kernel for row in rows for kernel in row.pop("kernels", ())}
    purpose = f"random and hostile cases on a {'GPU' if gpu else 'CPU'} against float64"
    return Record.new("attack", purpose, [*rows, suite], {"attack": {"script": "tests/nightly/attack"}}, kernels=ran)


def sweep() -> Record:
    """Return the L1 sweep of the text that TWELL_LAB_SWEEP_TEXT names: 19 trainings, about 15 minutes on an H100."""
    need_gpu()
    return sweep_record(os.environ.get("TWELL_LAB_SWEEP_TEXT"))


# ---- measurements in sections


def _cpu(left_out: dict) -> Sections:
    def rows(dtype: torch.dtype, tokens: int) -> list[dict]:
        return forward.ffn(tokens, nnz=0.005 * 5632, dtype=dtype, device="cpu", seconds=5).rows

    return {"cpu": [partial(rows, dtype, tokens) for dtype in (torch.float32, torch.bfloat16) for tokens in (1, 8, 64)]}


_SECTIONS = [
    Recording("inference", "each path of a layer beside the dense layer, and versions of kernels", forward.sections),
    Recording("training", "training steps of a layer and of a model, beside the dense layer", training.sections),
    Recording("thresholds", "a SiLU model with thresholds beside the model without", losses.thresholds),
    Recording("comparison", "products of a matrix with zeros by many methods beside the dense one", methods.sections),
    Recording("composing", "2:4 with INT8, and padding with ReLU zeros, each alone and both", composing.sections),
    Recording("chip", "latencies and rates of a GPU's memories", chip),
    Recording("pruning", "a small language model, dense and pruned, and trained on", losses.pruning, 600.0, False),
    Recording("host-time", "host and wall time of plain calls of one layer", training.host_sections),
    Recording("decoding", "whole generations, transformers' own loops beside tl.generate", decoding.sections, 570.0),
    Recording("decoding-8b", "whole generations, thresholds on a SiLU model beside dense", decoding.eight, 250.0),
    Recording("serving", "a server of many requests, dense beside planned", decoding.serving, 240.0),
    Recording("fine-tuning", "a SiLU model made sparse by relufy and a Trainer", fine_tuning.sections, 300.0),
    Recording("arena", "kernels of others beside this project's, one layer", arena.sections),
    Recording("cpu", "the CPU path beside torch's dense layer", _cpu, 600.0, False),
]
_SIZE = "a drawn Llama of the paper's {}, dense beside sparse"
_DENSITY = "sparse formats against a dense product across densities"
RECORDINGS: dict[str, Recording | Callable[[], Record]] = {recording.name: recording for recording in _SECTIONS}
RECORDINGS |= {
    f"bench-{size}": Recording(models.RECORD, _SIZE.format(size), partial(models.of_size, size), 570.0)
    for size in models.SIZES
}
RECORDINGS["matmul-density"] = Recording("density", _DENSITY, comparison.density_sections, gpu=False)
RECORDINGS |= {"gpu-tests": gpu_tests, "sweep": sweep, "attack": attack}
