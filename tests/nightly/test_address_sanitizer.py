"""Every version of every portable kernel once under GCC's AddressSanitizer, in a process of its own.

It knows the limits of what torch and NumPy allocated and of each thread's own arrays, by other means than the
simulator."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twell_lab import simulator
from twell_lab.core import InputError

ROOT = Path(__file__).parents[2]
D_MODEL = 1032  # two warps, three chunks a lane, the last one not full


def libasan() -> str | None:
    """Where GCC keeps the sanitizer's library, or None."""
    if not shutil.which("g++"):
        return None
    told = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return told if os.path.isabs(told) else None


LIBASAN = libasan() if simulator.available() else None
pytestmark = pytest.mark.skipif(LIBASAN is None, reason="needs g++ and its libasan")


def run(*arguments: str) -> subprocess.CompletedProcess:
    # Python leaves memory to the system at its end, and the threads of a block have stacks that the sanitizer never
    # saw.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    environment = {**os.environ, "LD_PRELOAD": LIBASAN, "ASAN_OPTIONS": options, "TWELL_LAB_CXX": "g++"}
    command = [sys.executable, "-m", "tests.nightly.test_address_sanitizer", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_no_version_touches_what_it_was_not_given():
    done = run("kernels")
    assert done.returncode == 0, done.stderr
    launched = set(done.stdout.split())
    assert launched == {f"pack_v{v}" for v in (1, 2, 3, 4)} | {f"down_v{v}" for v in (1, 2, 3)} | {
        f"gated_v{v}" for v in (1, 2, 3, 4)
    }


PLANTED = """extern "C" __global__ void past_the_end(int* out, const int* in) {
    out[threadIdx.x] = in[threadIdx.x + 1];
}
extern "C" __global__ void own_array(int* out, const int* in) {
    int mine[4] = {in[0], in[1], in[2], in[3]};
    out[threadIdx.x] = mine[threadIdx.x % 5];
}
"""


@pytest.mark.parametrize(
    "kernel,line,kind", [("past_the_end", 2, "heap-buffer-overflow"), ("own_array", 6, "stack-buffer-overflow")]
)
def test_it_would_be_seen(kernel, line, kind, tmp_path):
    path = tmp_path / "planted.cu"
    path.write_text(PLANTED)
    done = run(str(path), kernel)
    assert done.returncode and "Traceback" not in done.stderr, done.stderr
    assert f"AddressSanitizer: {kind}" in done.stderr and f"in {kernel} planted.cu:{line}" in done.stderr, done.stderr


def test_a_process_without_its_runtime_is_told(tmp_path):
    path = tmp_path / "planted.cu"
    path.write_text(PLANTED)
    arrays = np.zeros(40, np.int32), np.zeros(40, np.int32)
    with pytest.raises(InputError, match="AddressSanitizer's runtime from the start: LD_PRELOAD"):
        simulator.compile(path).launch("past_the_end", 1, 40, arrays, watch="address")


def kernels() -> None:
    """Launches every version on a small adversarial layer and prints their names."""
    import torch

    from tests.ops.rows.drawn import gate_of
    from tests.simulator import cases

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
    gate = gate_of("some over", 4, 88, torch.bfloat16, 16, 5)
    gate[1], gate[2] = 1.0, -1.0
    layer = cases.Layer.draw(gate, D_MODEL, 16, 5, "ud", "n")
    with simulator.watching("address") as runs:
        for version in (1, 2, 3, 4):
            cases.check_pack(gate, 16, 5, version)
            cases.check_pack(gate[:, :83].contiguous(), 16, 5, min(version, 2))
            for source in layer.sources:
                assert layer.gated_error(layer.gated(version, *source)) <= 1
                if version < 4:
                    assert layer.plain_error(layer.plain(version, *source)) <= 1
    print(*(run.kernel for run in runs))


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        kernels()
    else:
        arrays = np.zeros(40, np.int32), np.zeros(40, np.int32)
        simulator.compile(Path(sys.argv[1])).launch(sys.argv[2], 1, 40, arrays, watch="address")
