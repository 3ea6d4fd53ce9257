"""The recordings that `twell-lab record NAME` makes: the course's figures and the project's evidence come from them.

RECORDINGS has them all by name: a Recording, which `make` runs in sections, or a function that returns its Record. Each
checks results before it times anything."""

from __future__ import annotations

import copy
import functools
import inspect
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
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import core
from ..bench import evidence, forward
from ..bench.evidence import need_gpu
from ..bench.rows import Sections
from ..bench.whole import SIZES
from ..core import DeviceError, InputError, RecordError, StackError, TwellError
from ..ops import kernels
from ..records import Record

SANITIZERS = ("memcheck", "racecheck", "synccheck")
_NOTHING_RUN = 5  # exit status of pytest where every test was left out, as where plotly is missing
_AT_ONCE = 8  # processes of GPU tests at the same time: each waits more for compiler and Python than for the GPU

Keep = Callable[[Record], None]


class TestsFailed(TwellError, RuntimeError):
    """Tests that a recording runs did not pass, so there is nothing to record."""


class Recording(NamedTuple):
    """A record in sections, which may be cut short. sections: "module:name" in `bench` of these or of a function that
    returns them, given a dict that takes what does not run; or such a function. name: of the record. takes: what else
    the function is given where the command has it as an option."""

    name: str
    purpose: str
    sections: str | Callable[[dict], Sections]
    seconds: float = 180.0  # unless told otherwise
    gpu: bool = True  # whether it needs one
    takes: tuple[str, ...] = ()


def options_of(name: str) -> set[str]:
    """Return the options that a recording takes."""
    recording = RECORDINGS[name]
    if isinstance(recording, Recording):
        return {"seconds", *recording.takes}
    return {*inspect.signature(recording).parameters}


def make(name: str, keep: Keep = lambda record: None, **options: Any) -> Record:
    """Make a recording and return its record. keep: is given, after each step of a section, a record of what there is.

    Raises DeviceError where it needs a GPU, and StackError where nothing could be measured."""
    recording = RECORDINGS[name]
    if not isinstance(recording, Recording):
        return recording(**options)
    if recording.gpu:
        need_gpu()
    limit = options.get("seconds", recording.seconds)
    more: dict[str, Any] = {"refused": {}}  # what did not run, and why
    sections = recording.sections

    def record(rows: list[dict], notes: dict) -> Record:
        notes = {key: value for key, value in copy.deepcopy(notes | more).items() if value != {}}
        return Record.new(recording.name, recording.purpose, [*rows], notes)

    def keep_rows(rows: list[dict], notes: dict) -> None:
        try:
            keep(record(rows, {"unfinished": "the recording was cut off, or goes on"} | notes))
        except RecordError as error:
            print(f"{name}: what there is so far is not kept: {error}", file=sys.stderr, flush=True)

    found = _bench(sections) if isinstance(sections, str) else sections
    own = {name: options[name] for name in recording.takes if name in options}
    found = found(more["refused"], **own) if callable(found) else found
    rows, notes = run(found, limit, keep_rows)
    if not rows:
        raise StackError(f"{name}: nothing was measured: {notes['left_out']}")
    return record(rows, notes)


def run(
    sections: Sections, limit: float, keep: Callable[[list[dict], dict], None] = lambda rows, notes: None
) -> tuple[list[dict], dict[str, dict]]:
    """Return the rows of all sections, each a list of steps, and notes: the `seconds` that each section took, and in
    `left_out` which of its steps were left out, and why.

    A step is not begun when less of `limit`, in seconds, is left than the step before it in its section took. An error
    of torch (too little memory, say) ends its section, any other error is raised. An interruption (Ctrl-C, or SIGTERM)
    leaves out the rest; without any row it is raised. keep: called after each step with what there is.
    """
    rows: list[dict] = []
    notes: dict[str, dict] = {"seconds": {}, "left_out": {}}
    begin, interrupted = time.perf_counter(), ""

    def leave(name: str, done: int, why: str) -> None:
        count = len(sections[name])
        notes["left_out"][name] = f"{count - done} of {count} steps: {why}"

    for name in sections:
        leave(name, 0, "cut off")
    for name, steps in sections.items():
        start, last, done, why = time.perf_counter(), 0.0, 0, interrupted
        while not why and done < len(steps):
            before = time.perf_counter()
            if before - begin + last >= limit:
                why = f"too little is left of {limit:g} s"
                break
            try:
                rows += steps[done]()
                done += 1
                last = time.perf_counter() - before
                print(f"{name}, {done}/{len(steps)}: {last:.1f} s, {len(rows)} rows", file=sys.stderr, flush=True)
                leave(name, done, "cut off")
                keep(rows, notes)
            except RuntimeError as error:
                if isinstance(error, TwellError):
                    raise
                why = f"{type(error).__name__}: {str(error)[:300]}"
            except KeyboardInterrupt:
                if not rows:
                    raise
                why = interrupted = "interrupted"
            with suppress(RuntimeError):  # of a step that broke the GPU's context
                torch.cuda.empty_cache()
        if done < len(steps):
            leave(name, done, why)
            print(f"{name}: left out {notes['left_out'][name]}", file=sys.stderr, flush=True)
        else:
            del notes["left_out"][name]
        notes["seconds"][name] = round(time.perf_counter() - start, 1)
    return rows, notes


# ---- tests that are run


def gpu_tests() -> Record:
    """Return a report of tests/gpu, and of its reduced set under each compute-sanitizer tool where that is installed.

    Raises TestsFailed, with the end of the output, when a test fails."""
    need_gpu()
    folder, tool = _tests("gpu"), shutil.which("compute-sanitizer")
    # Without torch's caching allocator each tensor is an allocation of its own, and memcheck sees any access beyond its
    # bounds.
    checked, reduced = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, [str(folder / "test_reduced.py")]
    files = sorted(folder.glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, (os.cpu_count() or 1) // 2))) as side_by_side:
        jobs = []
        for name in SANITIZERS if tool else ():
            command = [str(tool), "--tool", name, "--error-exitcode", "99", "--target-processes", "all"]
            jobs.append(side_by_side.submit(_suite, f"reduced set under {name}", reduced, checked, command))
        jobs += [side_by_side.submit(_suite, f"gpu tests: {path.stem}", [str(path)]) for path in files]
        failed = [str(error) for job in jobs if isinstance(error := job.exception(), TestsFailed)]
    if failed:  # all have ended, so that one run on a GPU shows all failures
        raise TestsFailed("\n".join([f"{len(failed)} of {len(jobs)} suites failed", *failed]))
    suites = [job.result() for job in jobs]
    totals = {key: sum(suite[key] for suite in suites) for key in ("passed", "failed", "skipped")}
    notes = {"gpu_tests": {**totals, "sanitizers": list(SANITIZERS) if tool else []}}
    return Record.new("gpu-tests", "what tests/gpu said on this GPU", suites, notes, kernels=kernels.sources())


def _tests(name: str) -> Path:
    """Return a folder of tests, or a file there."""
    found = core.kernels_dir().parent / "tests" / name
    if not found.exists():
        raise StackError(f"the tests are not here (tests/{name} is part of a checkout, not of the package)")
    return found


def _suite(name: str, targets: list[str], more: dict | None = None, prefix: Sequence[str] = ()) -> dict:
    """Run pytest on the targets in a process of its own, with `more` in its environment and with the words of `prefix`
    before its command line; return {suite: the name, passed, failed, skipped: numbers of tests, seconds}. Raises
    TestsFailed unless all passed."""
    environment = {key: value for key, value in os.environ.items() if key != "TWELL_LAB_CUBINS"} | (more or {})
    start = time.perf_counter()
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *targets]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    summary = [line for line in done.stdout.splitlines() if re.search(r" in [\d.]+s", line)][-1:]
    if done.returncode not in (0, _NOTHING_RUN) or not summary:
        raise TestsFailed(f"{name}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped)", summary[0])}
    return {"suite": name, "passed": 0, "failed": 0, "skipped": 0, **counts, "seconds": round(seconds, 1)}


def two_gpus() -> Record:
    """Return a report of the tests for two GPUs, and whole trainings on one of them and on both."""
    need_gpu()
    if torch.cuda.device_count() < 2:
        raise DeviceError("this recording needs two GPUs; there is 1")
    suite = _suite("two GPUs", [str(_tests("gpu")), "-k", "two_gpus or second_gpu"])
    if suite["skipped"]:
        raise TestsFailed(f"{suite['skipped']} of the tests for two GPUs were skipped")
    purpose = "trainings on two GPUs, replicated and sharded over NCCL, beside one"
    return Record.new("two-gpus", purpose, [suite, *_bench("whole:training_runs")()], kernels=kernels.sources())


def attack(seed: int = 0, seconds: float | None = None) -> Record:
    """Return how many random and hostile cases of tests/nightly/attack passed: on a GPU layers on every path and
    kernel, for so many seconds (420 unless told otherwise); without one all of them. The error of a failure says how to
    run it alone."""
    gpu = torch.cuda.is_available()
    if seconds is not None and not gpu:
        raise InputError(f"seconds is {seconds} and there is no GPU here; accepted: with one")
    tests, more = "attack", [f"--attack-seed={seed}"]
    if gpu:
        tests, more = "attack/test_layers.py::test_layers", [*more, f"--attack-seconds={seconds or 420.0}"]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.json")
        suite = _suite("attack", [f"{_tests('nightly')}/{tests}", *more, f"--attack-report={report}"])
        rows = json.loads(report.read_text()) if report.exists() else []
    notes: dict = {"attack": {"script": "tests/nightly/attack", "seed": seed}}
    notes |= {} if gpu else {"kernels": "off: none ran on a GPU"}
    ran = {kernel for row in rows for kernel in row.pop("kernels", ())}
    purpose = f"random and hostile cases on a {'GPU' if gpu else 'CPU'} against float64"
    return Record.new("attack", purpose, [*rows, suite], notes, kernels=ran)


def sweep() -> Record:
    """Return the L1 sweep of the text that TWELL_LAB_SWEEP_TEXT names: 19 trainings, about 15 minutes on an H100."""
    need_gpu()
    return import_module("..training.sweep", __package__).record(os.environ.get("TWELL_LAB_SWEEP_TEXT"))


# ---- measurements in sections


def _bench(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"..bench.{module}", __package__), name)


def _of_size(size: str, left_out: dict) -> Sections:
    return _bench("whole:of_size")(size, left_out)


def _cpu(left_out: dict) -> Sections:
    sizes = [(dtype, tokens) for dtype in (torch.float32, torch.bfloat16) for tokens in (1, 8, 64)]

    def rows(dtype: torch.dtype, tokens: int) -> list[dict]:
        return forward.ffn(tokens, nnz=0.005 * 5632, dtype=dtype, device="cpu", seconds=5).rows

    return {"cpu": [functools.partial(rows, *size) for size in sizes]}


_SECTIONS = [
    Recording("inference", "each path of a layer beside the dense layer, and versions of kernels", "forward:SECTIONS"),
    Recording("training", "training steps of a layer and of a model, beside the dense layer", "training:SECTIONS"),
    Recording("model-paths", "a whole model on each path beside the dense one", "whole:paths", 570.0),
    Recording("thresholds", "a SiLU model with thresholds beside the model without", "losses:thresholds"),
    Recording("comparison", "products of a matrix with zeros by many methods beside the dense one", "methods:sections"),
    Recording(
        "pruning", "a small language model, dense and pruned, and trained on", "losses:pruning", 600.0, gpu=False
    ),
    Recording(
        "trained", "a model trained with L1 and its dense twin: speed, energy, loss", "whole:trained", 570.0, gpu=False
    ),
    Recording("profiling", "what it takes to see who fires, beside a plain forward", "whole:PROFILING", gpu=False),
    Recording("predictors", "decoding with chosen neurons: time beside loss", "losses:predictors", gpu=False),
    Recording(
        "experiments", "sparse adapters, dropout as 2:4, training with 2:4", "experiments:sections", 600.0, gpu=False
    ),
    Recording("host-time", "host and wall time of plain calls of one layer", "training:HOST"),
    Recording("decoding", "whole generations, transformers' own loops beside tl.generate", "decoding:sections", 570.0),
    Recording("decoding-8b", "whole generations, thresholds on a SiLU model beside dense", "decoding:eight", 250.0),
    Recording("arena", "kernels of others beside this project's, one layer", "arena:sections", takes=("rivals",)),
    Recording("cpu", "the CPU path beside torch's dense layer", _cpu, 600.0, gpu=False),
]


RECORDINGS: dict[str, Recording | Callable[..., Record]] = {
    **{recording.name: recording for recording in _SECTIONS},
    **{
        f"bench-{size}": Recording(
            "bench-model",
            f"a drawn Llama of the paper's {size}, dense beside sparse",
            functools.partial(_of_size, size),
            570.0,
        )
        for size in SIZES
    },
    "matmul-density": Recording(
        "density",
        "sparse formats against a dense product across densities",
        "comparison:density_sections",
        gpu=False,
    ),
    "gpu-tests": gpu_tests,
    "two-gpus": two_gpus,
    "sweep": sweep,
    "attack": attack,
    "gpu-outputs": evidence.outputs_record,
    "gpu-counters": evidence.counters_record,
}
