"""The named recordings that the course's figures and the project's evidence come from (`twell-lab record NAME`).

Each checks before it times and returns one Record. They say what ran where by themselves: nothing here is specific to
one machine, but "gpu-tests" and "portable" need a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ..bench import forward
from ..core import folders
from ..core.errors import DeviceError, InputError, StackError, TwellError
from ..cuda import registry
from ..records import evidence
from ..records.record import Record

SANITIZERS = ("memcheck", "racecheck", "synccheck")
_AT_ONCE = 6  # processes of GPU tests side by side: they wait for the compiler and for Python more than for the GPU


class TestsFailed(TwellError, RuntimeError):
    """A test suite that a recording runs did not pass: there is nothing to record."""


def portable() -> Record:
    """The portable kernels with torch's gate GEMM, bf16, d_model 2048, d_ff 5632, across nnz and tokens, beside the
    dense layer and what `dispatch` picks for the TwELL path on this GPU; and each version of the portable kernels."""
    _need_gpu()
    rows = []
    for nnz in (8, 29, 60, 120, 300):
        rows += forward.ffn(16384, 2048, 5632, nnz, compiled=True, others=True).rows
    for nnz in (8, 29):
        rows += forward.ffn(16384, 2048, 5632, nnz, workload_kind="uniform", others=True).rows
    for tokens in (1, 8, 64, 256, 1024, 4096):
        rows += forward.ffn(tokens, 2048, 5632, 29, compiled=True, others=True).rows
    for tokens in (1, 8, 64, 256, 16384):
        rows += forward.kernel_versions(tokens)
    return Record.new("portable", "portable kernels with torch's gate GEMM beside the dense layer", rows)


def training() -> Record:
    """Forward and backward of one layer on every path beside torch's, eager and compiled, and whole training steps,
    bf16."""
    _need_gpu()
    from ..bench import training as tables

    rows, seconds = _sections(tables.SECTIONS)
    return Record.new(
        "training",
        "training steps of a feed-forward layer and of a model, beside the dense layer",
        rows,
        {"seconds": seconds},
    )


def _sections(sections: dict) -> tuple[list[dict], dict[str, float]]:
    """The rows of all of them, and how long each took."""
    rows, seconds = [], {}
    for name, section in sections.items():
        start = time.perf_counter()
        rows += section()
        torch.cuda.empty_cache()
        seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name}: {seconds[name]} s, {len(rows)} rows", file=sys.stderr, flush=True)
    return rows, seconds


def inference() -> Record:
    """Every path of a layer beside torch's dense layer, eager and compiled: the tables of the inference kernels, bf16.

    The notes say how long each section took, a first call, and the compilation of every kernel.
    """
    _need_gpu()
    from ..bench import inference as tables

    rows, seconds = _sections(tables.SECTIONS)
    notes = {"seconds": seconds, "startup_seconds": _startup()}
    return Record.new("inference", "each path of a feed-forward layer beside the dense layer", rows, notes)


_FIRST_CALL = """
import time, torch
torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
w = torch.randn(5632, 2048, device="cuda", dtype=torch.bfloat16)
x, down = w[:{tokens}].clone() - 1, w.t().contiguous()
torch.cuda.synchronize()
start = time.perf_counter()
from twell_lab import ops
ops.infer(x, w, w, down, down_t=w)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def _startup() -> dict:
    """Seconds from importing twell_lab to the first result, torch and the GPU being up and the cubins cached; and those
    that it takes to compile every kernel of this GPU for bfloat16 at d_model 2048."""
    from ..cuda import prebuild

    found = {}
    for tokens in (1, 4096):
        command = [sys.executable, "-c", _FIRST_CALL.format(tokens=tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[f"first call, {tokens} tokens"] = round(float(done.stdout.split()[-1]), 3)
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        cubins = prebuild.prebuild(Path(folder), [f"sm_{major}{minor}"], [torch.bfloat16], [2048])
        found[f"compiling {len(cubins)} cubins"] = round(time.perf_counter() - start, 2)
    return found


def host_time() -> Record:
    """What a plain call costs the host, forward and training, on each path at 1 to 16,384 tokens
    (twell_lab.bench.host)."""
    _need_gpu()
    from ..bench import host

    return Record.new("host-time", "host and wall time of plain calls of one layer", host.rows())


def cpu() -> Record:
    """The CPU path, float32 and bfloat16, d_model 2048, d_ff 5632, 99.5% zeros, at 1, 8 and 64 tokens."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 8, 64):
            rows += forward.ffn(tokens, 2048, 5632, 0.005 * 5632, dtype=dtype, device="cpu", seconds=5).rows
    return Record.new("cpu", "the CPU path beside torch's dense layer", rows, {"threads": torch.get_num_threads()})


def matmul_density() -> Record:
    """Dense, COO, CSR and ELL products against density, and dense on zeros: what notebook 01 sets beside its own."""
    from ..bench.density import density_record

    return density_record()


def gpu_tests() -> Record:
    """Run tests/gpu, then its reduced set under each compute-sanitizer tool; a report, not a timing.

    TWELL_LAB_CUBINS, if set, names cubins that another machine compiled: the kernel tests then run on those too,
    and the report says so. Raises TestsFailed, with the end of the output, when anything fails.
    """
    _need_gpu()
    folder = _gpu_tests_folder()
    environment = dict(os.environ)
    cubins = environment.pop("TWELL_LAB_CUBINS", None)
    tool = shutil.which("compute-sanitizer")
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, (os.cpu_count() or 1) // 2))) as side_by_side:
        jobs = []
        for name in SANITIZERS if tool else ():
            # Without torch's caching allocator every tensor has its own bounds, so that memcheck sees them overstepped.
            checked = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            command = [str(tool), "--tool", name, "--error-exitcode", "99", "--target-processes", "all"]
            jobs.append(
                side_by_side.submit(
                    _suite, f"reduced set under {name}", [str(folder / "test_reduced.py")], checked, command
                )
            )
        files = sorted(folder.glob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
        jobs += [side_by_side.submit(_suite, f"gpu tests: {path.stem}", [str(path)], environment) for path in files]
        suites = _all_passed(jobs)
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
    return Record.new("gpu-tests", "what tests/gpu said on this GPU", suites, notes, kernels=registry.KERNELS)


def _gpu_tests_folder() -> Path:
    folder = folders.kernels_dir().parent / "tests" / "gpu"
    if not folder.is_dir():
        raise StackError(f"the GPU tests are not here ({folder.name}/ is part of a checkout, not of the package)")
    return folder


def _all_passed(jobs: list[Future]) -> list[dict]:
    """Their reports; TestsFailed with what every one that failed says, after all have ended: GPU time is dear."""
    failed = [str(error) for job in jobs if isinstance(error := job.exception(), TestsFailed)]
    if failed:
        raise TestsFailed("\n".join([f"{len(failed)} of {len(jobs)} suites failed", *failed]))
    return [job.result() for job in jobs]


def _suite(name: str, targets: list[str], environment: dict, prefix: Sequence[str] = ()) -> dict:
    """Run pytest on the targets in a process of its own: {"suite", "passed", "failed", "skipped", "seconds"}."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        start = time.perf_counter()
        done = subprocess.run([*command, *targets], env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode != 0 or not report.exists():
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
    """What tests/gpu says where there are two GPUs, and whole trainings on one of them and on both, dense and through
    the kernels."""
    _need_gpu()
    if torch.cuda.device_count() < 2:
        raise DeviceError("this recording needs two GPUs; there is 1")
    from ..bench import runs

    folder = _gpu_tests_folder()
    suites = [_suite("two GPUs", [str(folder), "-k", "two_gpus or second_gpu"], dict(os.environ))]
    if suites[0]["skipped"]:
        raise TestsFailed(f"{suites[0]['skipped']} of the tests for two GPUs were skipped")
    rows = [*suites, *runs.rows()]
    purpose = "trainings on two GPUs, replicated and sharded over NCCL, beside one"
    return Record.new("two-gpus", purpose, rows, kernels=registry.KERNELS)


def attack(seed: int = 0, seconds: float | None = None, cases: int | None = None) -> Record:
    """Random and hostile cases, counted: on a GPU, layers on every path and kernel (twell_lab.bench.attack), for 420
    seconds unless told otherwise; without one, the long form of tests/attack: formats, packing, layers, the simulator,
    kills, damaged files and commands.

    seed: of the cases. seconds: how long, on a GPU alone. cases: how many layers, without a GPU of each kind. Raises
    attack.Broken, or TestsFailed, with every case that failed and how to see it again: there is nothing to record then.
    """
    from ..bench import attack as attacked

    if torch.cuda.is_available():
        start = time.perf_counter()
        found = attacked.layers(
            seed, cases=cases, seconds=420.0 if seconds is None and cases is None else seconds, device="cuda"
        )
        took = round(time.perf_counter() - start, 1)
        rows = [{"attack": "layers on a GPU", **found.row(), "seconds": took}]
        return Record.new(
            "attack",
            "random and hostile layers on a GPU against float64",
            rows,
            {"attack": {"script": "twell_lab/bench/attack.py", "seed": seed}},
        )
    if seconds is not None:
        raise InputError(f"seconds is {seconds} and there is no GPU here; cases is accepted: how many of each kind")
    folder = _gpu_tests_folder().parent / "attack"
    with tempfile.TemporaryDirectory() as temporary:
        counts = Path(temporary, "counts.json")
        asked = ["--long"] if cases is None else [f"--attack-cases={cases}"]
        suite = _suite(
            "attack", [str(folder), *asked, f"--attack-seed={seed}", f"--attack-report={counts}"], dict(os.environ)
        )
        rows = json.loads(counts.read_text())
    return Record.new(
        "attack",
        "random and hostile cases on a CPU",
        [*rows, suite],
        {"kernels": "off: none ran on a GPU", "attack": {"script": "tests/attack", "seed": seed}},
    )


def sweep() -> Record:
    """The L1 sweep (twell_lab.training.sweep): 19 trainings of a model of 57 million parameters, about 15 minutes on an
    H100.

    TWELL_LAB_SWEEP_TEXT names the text; without it, the error says where the published sweep's comes from.
    """
    _need_gpu()
    from ..training import sweep as runs

    return runs.record(os.environ.get("TWELL_LAB_SWEEP_TEXT"))


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise DeviceError("this recording needs an NVIDIA GPU that torch can use; `twell-lab doctor` says what is here")


def attack_table(recorded: list[Record]) -> str:
    """The newest recorded attack on a GPU and the newest without one, as a Markdown table; recorded: oldest first."""
    newest = {
        "gpus" in record.machine and bool(record.machine["gpus"]): record
        for record in recorded
        if record.name == "attack"
    }
    lines = [
        "| attacked | cases | rows of results | rows excused | worst error, of what is allowed | recorded on |",
        "|---|---|---|---|---|---|",
    ]
    for gpu, record in sorted(newest.items(), reverse=True):
        where = f"{record.machine['gpus'][0]['name'] if gpu else 'a CPU'}, {record.date[:10]}"
        for row in record.rows:
            if "attack" in row:
                excused = row["excused_rows"] + row["overflowed_rows"] + row["rounded_rows"] if "rows" in row else None
                numbers = [row["cases"], row.get("rows"), excused]
                shown = ["" if number is None else f"{number:,}" for number in numbers]
                lines.append(f"| {row['attack']} | {' | '.join(shown)} | {row.get('worst_ratio', '')} | {where} |")
    return "\n".join(lines if newest else [*lines, "| nothing is recorded yet | | | | | |"])


RECORDINGS = {
    "portable": portable,
    "inference": inference,
    "training": training,
    "host-time": host_time,
    "cpu": cpu,
    "matmul-density": matmul_density,
    "gpu-tests": gpu_tests,
    "two-gpus": two_gpus,
    "sweep": sweep,
    "attack": attack,
    "gpu-outputs": evidence.outputs_record,
    "gpu-counters": evidence.counters_record,
}
