"""The recordings that `twell-lab record NAME` makes: the course's figures and the project's evidence come from them.

Each checks results before it times anything, and returns one Record. Most need a GPU, and say so. RECORDINGS, at the
end of this file, has them all by name.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .. import core
from ..bench import evidence, forward
from ..bench.evidence import need_gpu
from ..bench.rows import Sections
from ..bench.sizes import SIZES
from ..core import DeviceError, InputError, RecordError, StackError, TwellError
from ..ops import kernels
from ..records import Record

SANITIZERS = ("memcheck", "racecheck", "synccheck")
SECONDS = 180.0  # that a recording of the large tables may take
_NOTHING_RUN = 5  # exit status of pytest where every test was left out, as where plotly is missing
_AT_ONCE = 8  # processes of GPU tests at the same time: each waits more for compiler and Python than for the GPU

Keep = Callable[[Record], None]  # is given what a recording has, again and again while it goes on


class TestsFailed(TwellError, RuntimeError):
    """Tests that a recording runs did not pass, so there is nothing to record."""


# ---- recordings in sections, which may be cut short ----


def _in_sections(
    name: str,
    purpose: str,
    module: str,
    sections: Callable[[Any, dict[str, str]], Sections] = lambda tables, refused: tables.sections(),
    limit: float = SECONDS,
    gpu: bool = True,
    after: Callable[[Any, Record], None] = lambda tables, record: None,
) -> Callable[..., Record]:
    """Return a function that makes a record of steps in sections.

    Args:
        name, purpose: of the record.
        module: of `bench` that measures it.
        sections: of that module, and of a dict that takes what did not run, and why: the notes' "refused".
        limit: how many seconds it takes unless told otherwise.
        gpu: whether it needs one.
        after: completes the record, given the module and it.
    """

    def recording(seconds: float = limit, keep: Keep | None = None) -> Record:
        """seconds: it is cut short where it would take longer; the notes say what was left out. keep: is given, after
        each step, a record of what there is."""
        if gpu:
            need_gpu()
        tables, refused = import_module(f"..bench.{module}", __package__), dict[str, str]()
        record = _recorded(name, purpose, sections(tables, refused), seconds, keep, lambda: _refused(refused))
        after(tables, record)
        return record

    return recording


def _refused(why: dict[str, str]) -> dict[str, dict]:
    """The note of what did not run, if there is any."""
    return {"refused": {**why}} if why else {}


def _shaped(tables: Any, refused: dict[str, str] | None = None) -> Sections:
    """Its sections, of a larger shape on a GPU than on a CPU, where it takes some minutes."""
    return tables.sections(tables.Shape() if torch.cuda.is_available() else tables.small())


def _recorded(
    name: str, purpose: str, sections: Sections, limit: float, keep: Keep | None, more: Callable[[], dict] = dict
) -> Record:
    """A record of the rows and notes of `_sections`, with the notes of `more`, too. `keep` is given, after each step,
    what there would be of it if it were cut off now."""
    described: dict | None = None

    def keep_rows(rows: list[dict], notes: dict) -> None:
        nonlocal described
        try:
            if keep is not None:
                record = Record.new(name, purpose, [*rows], notes | more(), described=described)
                described = record.machine
                keep(record)
        except RecordError as error:
            print(f"{name}: what there is so far is not kept: {error}", file=sys.stderr, flush=True)

    rows, notes = _sections(sections, limit, keep_rows)
    return Record.new(name, purpose, rows, notes | more())


def _sections(
    sections: Sections, limit: float, keep: Callable[[list[dict], dict], None] = lambda rows, notes: None
) -> tuple[list[dict], dict[str, dict]]:
    """The rows of all sections, each a list of steps, and the record's notes.

    A step is not begun when less of `limit`, in seconds, is left than the step before it in its section took. The notes
    hold the `seconds` that each section took; and `left_out`, where something was, the steps left out of each section,
    and why: no time, or the error of torch that ended the section (too little memory, say). Any other error is raised.
    An interruption (Ctrl-C, or SIGTERM, as `timeout` sends it) ends the recording and leaves out the rest; without any
    row it is raised. `keep` is called after each step with what there would be if the recording were cut off now.
    """
    rows: list[dict] = []
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}
    begin, interrupted = time.perf_counter(), ""

    def notes(missing: dict[str, str]) -> dict[str, dict]:
        cut = left_out | missing
        return {"seconds": {**seconds}, **({"left_out": cut} if cut else {})}

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
                missing = {other: (len(some), len(some)) for other, some in sections.items() if other not in seconds}
                missing[name] = len(steps) - done, len(steps)
                keep(rows, notes({other: f"{n} of {of} steps: cut off" for other, (n, of) in missing.items() if n}))
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
            left_out |= _left_out(name, f"{len(steps) - done} of {len(steps)} steps", why)
        seconds[name] = round(time.perf_counter() - start, 1)
    return rows, notes({})


def _left_out(name: str, what: str, why: str) -> dict[str, str]:
    """The note of what was left out of the part of a recording with this name, which stderr is told, too."""
    print(f"{name}: left out {what}: {why}", file=sys.stderr, flush=True)
    return {name: f"{what}: {why}"}


_FIRST_CALL = """
import time, torch
torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
w = torch.randn(5632, 2048, device="cuda", dtype=torch.bfloat16)
x = w[:{tokens}].clone() - 1
torch.cuda.synchronize()
start = time.perf_counter()
import twell_lab
twell_lab.ffn(x, w, w.t(), w)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def _startup() -> dict:
    """Return seconds from importing twell_lab to the first result, with torch and the GPU ready and the cubins in the
    cache; and seconds for compiling all kernels of this GPU for bfloat16 and d_model 2048."""
    found = {}
    for tokens in (1, 4096):
        command = [sys.executable, "-c", _FIRST_CALL.format(tokens=tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[f"first call, {tokens} tokens"] = round(float(done.stdout.split()[-1]), 3)
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        cubins = kernels.prebuild(Path(folder), [f"sm_{major}{minor}"], [torch.bfloat16], [2048])
        found[f"compiling {len(cubins)} cubins"] = round(time.perf_counter() - start, 2)
    return found


def _compared(tables: Any, refused: dict[str, str]) -> Sections:
    """Products and activations; padding, experts and the map of notebook 10; and layers with weights of few bits."""
    from ..bench import few_bits, methods

    return tables.sections() | methods.sections(methods.sizes_for("cuda")) | few_bits.sections()


inference = _in_sections(
    "inference",
    "each path of a feed-forward layer beside the dense layer, and versions of kernels",
    "forward",
    lambda tables, _: tables.SECTIONS,
    after=lambda _, record: record.notes.update(startup_seconds=_startup()),
)
trained = _in_sections(
    "trained",
    "a model trained with L1 and its dense twin, from the first step to speed, energy and loss",
    "trained",
    lambda tables, refused: tables.sections(refused, tables.Shape() if torch.cuda.is_available() else tables.small()),
    570.0,
    gpu=False,
    after=lambda tables, record: record.notes.update(tables.notes()),
)


# ---- recordings of one piece ----


def cpu() -> Record:
    """The CPU path, float32 and bfloat16, d_model 2048, d_ff 5632, 99.5% zeros, at 1, 8 and 64 tokens."""
    cases = itertools.product((torch.float32, torch.bfloat16), (1, 8, 64))
    made = [forward.ffn(tokens, nnz=0.005 * 5632, dtype=dtype, device="cpu", seconds=5) for dtype, tokens in cases]
    rows = [row for record in made for row in record.rows]
    return Record.new("cpu", "the CPU path beside torch's dense layer", rows, {"threads": torch.get_num_threads()})


def gpu_tests() -> Record:
    """A report of tests/gpu, and of its reduced set under each compute-sanitizer tool where that is installed.

    TWELL_LAB_CUBINS, if set, names a folder of cubins that another machine compiled: the kernel tests then run on those
    too, and the report says so. Raises TestsFailed, with the end of the output, when a test fails.
    """
    need_gpu()
    folder = _gpu_tests_folder()
    environment = dict(os.environ)
    cubins = environment.pop("TWELL_LAB_CUBINS", None)
    tool = shutil.which("compute-sanitizer")
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, (os.cpu_count() or 1) // 2))) as side_by_side:
        # Without torch's caching allocator each tensor is an allocation of its own, and memcheck sees any access beyond
        # its bounds.
        checked, reduced = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, [str(folder / "test_reduced.py")]
        jobs = []
        for name in SANITIZERS if tool else ():
            command = [str(tool), "--tool", name, "--error-exitcode", "99", "--target-processes", "all"]
            jobs.append(side_by_side.submit(_suite, f"reduced set under {name}", reduced, checked, command))
        files = sorted(folder.glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
        jobs += [side_by_side.submit(_suite, f"gpu tests: {path.stem}", [str(path)], environment) for path in files]
        failed = [str(error) for job in jobs if isinstance(error := job.exception(), TestsFailed)]
        if failed:  # all have ended, so that one run on a GPU shows all failures
            raise TestsFailed("\n".join([f"{len(failed)} of {len(jobs)} suites failed", *failed]))
        suites = [job.result() for job in jobs]
    if cubins:
        with tempfile.TemporaryDirectory() as empty:
            elsewhere = {**environment, "TWELL_LAB_CUBINS": cubins, "TWELL_LAB_CACHE": empty}
            suites.append(
                _suite("kernel tests on cubins compiled elsewhere", [str(folder / "test_kernels.py")], elsewhere)
            )
            if compiled := sorted(p.name for p in Path(empty).glob("*.cubin")):
                raise TestsFailed(
                    f"{len(compiled)} kernels were compiled here although cubins were given: {compiled[:3]}"
                )
        compilers = sorted({p.stem.rpartition("-nvrtc")[2] for p in Path(cubins).glob("*.cubin")})
        suites[-1]["compiled_by"] = [f"NVRTC {version}" for version in compilers]
    totals = {key: sum(s[key] for s in suites) for key in ("passed", "failed", "skipped")}
    notes = {"gpu_tests": {**totals, "sanitizers": list(SANITIZERS) if tool else []}}
    return Record.new("gpu-tests", "what tests/gpu said on this GPU", suites, notes, kernels=kernels.sources())


def _gpu_tests_folder() -> Path:
    folder = core.kernels_dir().parent / "tests" / "gpu"
    if not folder.is_dir():
        raise StackError(f"the GPU tests are not here ({folder.name}/ is part of a checkout, not of the package)")
    return folder


def _suite(name: str, targets: list[str], environment: dict | None = None, prefix: Sequence[str] = ()) -> dict:
    """Run pytest on the targets in a process of its own, with this environment (by default this process's) and with
    the words of `prefix` before its command line.

    Returns {suite: the name, passed, failed, skipped: numbers of tests, seconds}. Raises TestsFailed unless all passed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        start = time.perf_counter()
        done = subprocess.run([*command, *targets], env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode not in (0, _NOTHING_RUN) or not report.exists():
            raise TestsFailed(f"{name}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}")
        found = next(ElementTree.parse(report).iter("testsuite")).attrib
    total, skipped = int(found["tests"]), int(found["skipped"])
    failed = int(found["failures"]) + int(found["errors"])
    return {
        "suite": name,
        "passed": total - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(seconds, 1),
    }


def two_gpus() -> Record:
    """A report of the tests for two GPUs, and whole trainings on one of them and on both, dense and on the sparse
    kernels."""
    need_gpu()
    if torch.cuda.device_count() < 2:
        raise DeviceError("this recording needs two GPUs; there is 1")
    from ..bench import runs

    folder = _gpu_tests_folder()
    suites = [_suite("two GPUs", [str(folder), "-k", "two_gpus or second_gpu"])]
    if suites[0]["skipped"]:
        raise TestsFailed(f"{suites[0]['skipped']} of the tests for two GPUs were skipped")
    rows = [*suites, *runs.rows()]
    purpose = "trainings on two GPUs, replicated and sharded over NCCL, beside one"
    return Record.new("two-gpus", purpose, rows, kernels=kernels.sources())


def attack(seed: int = 0, seconds: float | None = None, cases: int | None = None) -> Record:
    """Return how many random and hostile cases of tests/nightly/attack passed: on a GPU layers on every path and
    kernel; without one also formats, packing, the simulator, kills, damaged files and command lines.

    Args:
        seed: which cases are drawn.
        seconds: how long to go on, on a GPU only; 420 where `cases` is not given either.
        cases: how many of each kind.

    Raises:
        TestsFailed: with every case that failed and how to run it alone.
    """
    folder, gpu = _gpu_tests_folder().parent / "nightly" / "attack", torch.cuda.is_available()
    if seconds is not None and not gpu:
        raise InputError(f"seconds is {seconds} and there is no GPU here; cases is accepted: how many of each kind")
    asked = [f"{folder / 'test_layers.py'}::test_layers" if gpu else str(folder), f"--attack-seed={seed}"]
    asked += [] if cases is None else [f"--attack-cases={cases}"]
    if gpu and (seconds is not None or cases is None):
        asked.append(f"--attack-seconds={seconds or 420.0}")
    with tempfile.TemporaryDirectory() as temporary:
        counts = Path(temporary, "counts.json")
        suite = _suite("attack", [*asked, f"--attack-report={counts}"])
        rows = json.loads(counts.read_text())
    notes: dict = {"attack": {"script": "tests/nightly/attack", "seed": seed}}
    notes |= {} if gpu else {"kernels": "off: none ran on a GPU"}
    ran = {kernel for row in rows for kernel in row.pop("kernels", ())}
    purpose = f"random and hostile cases on a {'GPU' if gpu else 'CPU'} against float64"
    return Record.new("attack", purpose, [*rows, suite], notes, kernels=ran)


def sweep() -> Record:
    """The L1 sweep (twell_lab.training.sweep): 19 trainings of a model with 57 million parameters, about 15 minutes on
    an H100.

    TWELL_LAB_SWEEP_TEXT names the text; without it, the error says where the text of the published sweep is from.
    """
    need_gpu()
    from ..training import sweep as runs

    return runs.record(os.environ.get("TWELL_LAB_SWEEP_TEXT"))


def profiling() -> Record:
    """A profile of a random model of the paper's 2B shape beside a plain forward of the same tokens; on a CPU of a
    small one."""
    from ..bench import profiling as tables

    return Record.new("profiling", "what it takes to see who fires, beside a plain forward", tables.profiling_rows())


def course(at_once: int = 1) -> Record:
    """Every notebook of the course, run from its first cell to its last on this machine: how long each takes, with so
    many at once. Raises walk.Stumbled where a cell raises or complains."""
    from .walk import walk

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows = [{"kind": "notebook", "device": device, **row} for row in walk(at_once=at_once)]
    notes = {"notebooks at once": at_once}
    return Record.new("course", "the notebooks of the course, run from first cell to last", rows, notes)


def widgets() -> Record:
    """Each widget of the course moved by keyboard in JupyterLab in a headless Chromium, by
    tests/nightly/test_browser.py: milliseconds from the key to the painted figure, without a GPU to paint it; widths
    of it and of its still figure.

    Raises TestsFailed, also where the tests are left out for want of playwright or a browser.
    """
    file = _gpu_tests_folder().parent / "nightly" / "test_browser.py"
    with tempfile.TemporaryDirectory() as temporary:
        moves = Path(temporary, "moves.json")
        suite = _suite("widgets", [str(file), f"--browser-report={moves}"])
        if suite["skipped"]:
            raise TestsFailed(
                f"{suite['skipped']} of the tests with a browser were skipped; `make test-browser` says why"
            )
        rows = [{"kind": "widget", "device": "CPU", **row} for row in json.loads(moves.read_text())]
    for row in rows:
        row["ms"] = statistics.median(row["samples"])
    purpose = "what a move of each widget takes in a browser, from the key to the painted figure"
    return Record.new("widgets", purpose, rows, {"browser": "headless Chromium, painting on the CPU"})


RECORDINGS: dict[str, Callable[..., Record]] = {
    "inference": inference,
    "training": _in_sections(
        "training",
        "training steps of a feed-forward layer and of a model, beside the dense layer",
        "training",
        lambda tables, _: tables.SECTIONS,
    ),
    **{
        f"bench-{size}": _in_sections(
            "bench-model",
            f"a drawn Llama of the paper's {size}, dense beside sparse",
            "sizes",
            lambda tables, refused, size=size: tables.sections(size, refused),  # type: ignore[misc]
            570.0,
        )
        for size in SIZES
    },
    "model-paths": _in_sections(
        "model-paths",
        "a whole model on each path beside the dense one",
        "paths",
        lambda tables, refused: tables.sections(refused),
        570.0,
    ),
    "thresholds": _in_sections("thresholds", "a SiLU model with thresholds beside the model without", "thresholds"),
    "comparison": _in_sections(
        "comparison",
        "products of a matrix with zeros by many methods beside the dense one",
        "comparison",
        _compared,
    ),
    "pruning": _in_sections(
        "pruning",
        "a small language model, dense and pruned, before and after training on",
        "pruning",
        _shaped,
        600.0,
        gpu=False,
    ),
    "trained": trained,
    "profiling": profiling,
    "predictors": _in_sections(
        "predictors", "decoding with chosen neurons: time beside loss", "predictors", _shaped, gpu=False
    ),
    "experiments": _in_sections(
        "experiments",
        "sparse adapters beside LoRA, dropout as 2:4, and steps of training with 2:4 operands",
        "experiments",
        _shaped,
        600.0,
        gpu=False,
    ),
    "host-time": _in_sections(
        "host-time", "host and wall time of plain calls of one layer", "host", lambda tables, _: tables.SECTIONS
    ),
    "cpu": cpu,
    "matmul-density": _in_sections(
        "density",
        "sparse formats against a dense product across densities, through torch",
        "comparison",
        lambda tables, _: tables.density_sections(),
        gpu=False,
    ),
    "gpu-tests": gpu_tests,
    "two-gpus": two_gpus,
    "sweep": sweep,
    "course": course,
    "widgets": widgets,
    "attack": attack,
    "gpu-outputs": evidence.outputs_record,
    "gpu-counters": evidence.counters_record,
}
