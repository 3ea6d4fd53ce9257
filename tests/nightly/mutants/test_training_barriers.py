"""Every barrier of the kernels of a training step deleted, one at a time: the simulator finds a fault, or a result is
wrong.

The inference kernels have this and their shifted bounds in test_mutants.py.
"""

import re
from contextlib import nullcontext

import pytest

from tests.nightly.mutants.mutant_battery import DEFINES as INFERENCE
from tests.simulator.launches import SIMULATED, launch
from tests.simulator.without_ptx import put_stand_ins
from twell_lab import core, simulator
from twell_lab.core import TwellError

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
BARRIER = "__syncthreads();"
FILES = [f"{name}.cu" for name in SIMULATED if f"{name}.cu" not in INFERENCE]
HEADERS = {"lost_rows.cuh": "smxx_train_lost.cu"}  # and a file that includes it
# (file, what stands before it): why nothing can be noticed.
SPARE = {
    # the next group begins with two barriers before what this one guards is written
    ("smxx_train_lost.cu", "kept[place] = all;\n    }\n    "),
    # list_kept has a barrier of its own before it writes the list
    ("smxx_listed.cu", "for (int c = first; c < end; c += LIST) {\n            "),
}
# Barriers that tell every thread whether something holds in any: without one its value would be missing, and the kernel
# would not compile.
TELLING = {"smxx_listed.cu": 4, "smxx_spread.cu": 1}


def barriers():
    found = []
    for file in [*FILES, *HEADERS]:
        text = (core.kernels_dir() / file).read_text()
        found += [
            pytest.param(file, match.start(), id=f"{file}:{text.count(chr(10), 0, match.start()) + 1}")
            for match in re.finditer(re.escape(BARRIER), text)
        ]
    return found


def test_every_barrier_is_found():
    assert len(barriers()) > 20
    for file in FILES:  # one of another kind, such as __syncthreads_or, needs a rule of its own
        text = (core.kernels_dir() / file).read_text()
        assert text.count("__syncthreads") == text.count(BARRIER) + TELLING.get(file, 0), file


@pytest.mark.parametrize("kernel", FILES)
def test_without_a_deletion_nothing_is_noticed(kernel, tmp_path):
    for name in (kernel, *HEADERS):
        (put_stand_ins(tmp_path) / name).write_text((core.kernels_dir() / name).read_text())
    launch(kernel.removesuffix(".cu"), watch="faults", replace={kernel: tmp_path / kernel})


@pytest.mark.parametrize("file, at", barriers())
def test_a_deleted_barrier_is_noticed(file, at, tmp_path):
    kernel = HEADERS.get(file, file)
    text = (core.kernels_dir() / file).read_text()
    (put_stand_ins(tmp_path) / file).write_text(text[:at] + text[at + len(BARRIER) :])
    if kernel != file:
        (tmp_path / kernel).write_text((core.kernels_dir() / kernel).read_text())
    spare = any(file == name and text[:at].endswith(before) for name, before in SPARE)
    with nullcontext() if spare else pytest.raises((TwellError, AssertionError)):
        launch(kernel.removesuffix(".cu"), watch="faults", replace={kernel: tmp_path / kernel})
